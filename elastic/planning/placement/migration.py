"""From one plan to the next: which layers move, from where, in which order, and how long that
takes.

What has to move is given by the two plans: a layer that a node's worker shall hold and does not. If
the node's own
vault keeps a whole copy it is loaded from there; else some other living node sends it that holds
the layer or keeps a
whole copy. The bytes over the network are therefore the least possible for these plans (which node
takes which slot
is `elastic.planning.placement.placement`), and what remains to choose are the senders, so that none
is the bottleneck
(`elastic.planning.placement.balance`).

Every node sends and receives at once, over its own link; with tensor parallelism each worker its
part of a layer over
its own. The transfers take

    seconds = max over nodes of max(seconds sending, seconds receiving) + the longest latency

which is a lower bound for any order, and is reached when transfers may be interrupted (Gonzalez and
Sahni 1976, open
shop with preemption).
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from elastic.domain.types import LayerSpec, NodeInfo, Plan
from elastic.planning.backup.peer_assignment import domain_of
from elastic.planning.cost.profile import LinkProfile, Profile
from elastic.planning.placement.balance import balance
from elastic.planning.placement.placement import Holdings
from elastic.planning.plan.schemes import state_of

HELD, KEPT, LOCAL, CHECKPOINT, FRESH = "held", "kept", "local", "checkpoint", "fresh"
"""Kinds of moves: from a node that holds the layer | that keeps a peer's copy | from the target's
own vault | nobody
alive has the layer, and the checkpoint is read | there was no plan before: the layer is
initialised."""

Links = Callable[[str, str], LinkProfile]
"""The link from one node to another."""


@dataclass(frozen=True, slots=True)
class Move:
    """One layer comes to one node."""

    layer: int
    source: str
    """"" where no node sends it."""
    target: str
    nbytes: int
    kind: str
    staged: bool = False
    """The target has to keep what it drops until it was read: for a while it needs room for
    both."""

    @property
    def sent(self) -> bool:
        """It goes over the network between nodes."""
        return self.kind in (HELD, KEPT)


@dataclass(frozen=True, slots=True)
class Transition:
    moves: tuple[Move, ...]
    """In the order in which they should begin."""
    nbytes: int
    """Sent between nodes."""
    seconds: float


def links_of(profile: Profile | None, nodes: Sequence[NodeInfo]) -> Links:
    """Links between nodes: inside and across failure domains, as the profile says."""
    domains = {info.node: domain_of(info) for info in nodes if info.domain}
    link = profile.link if profile else LinkProfile()
    across = profile.across if profile and profile.across != LinkProfile() else link

    def between(source: str, target: str) -> LinkProfile:
        apart = source in domains and target in domains and domains[source] != domains[target]
        return across if apart else link

    return between


def transition(
    old: Plan | None,
    new: Plan,
    layers: Sequence[LayerSpec],
    *,
    dead: Collection[str] = (),
    links: Links | None = None,
    gradients: bool = False,
) -> Transition:
    """Return the moves that lead from `old` to `new`.

    `dead` nodes have nothing any more. `gradients`: accumulated gradients move with parameters and
    optimizer state,
    as in the middle of a step. Without `links` they are taken as infinitely fast.
    """
    between = links or (lambda source, target: LinkProfile())
    held = Holdings.of(old, layers)
    sizes = [
        la.param_bytes + la.state_bytes + (la.gradient_bytes if gradients else 0) for la in layers
    ]
    wanted = {
        (stage.unit.node, layer): None
        for _, _, stage in new.stages()
        for layer in stage.layers
        if stage.unit.node in dead or layer not in held.live.get(stage.unit.node, ())
    }
    holders, keepers = _sources(held, {layer for _, layer in wanted}, dead, old)
    moves: list[Move] = []
    requests: list[tuple[str, int]] = []
    for target, layer in wanted:
        if target in keepers.get(layer, ()):
            moves.append(Move(layer, target, target, sizes[layer], LOCAL))
        elif layer in holders or layer in keepers:
            requests.append((target, layer))
        else:
            moves.append(
                Move(layer, "", target, sizes[layer], FRESH if old is None else CHECKPOINT)
            )
    costs = []
    for target, layer in requests:
        senders = [*holders.get(layer, ()), *keepers.get(layer, ())]
        costs.append(
            {sender: _cost(between(sender, target), sizes[layer] / new.tp) for sender in senders}
        )
    for (target, layer), sender in zip(requests, balance(costs), strict=True):
        kind = HELD if sender in holders.get(layer, ()) else KEPT
        moves.append(Move(layer, sender, target, sizes[layer], kind))
    ordered = tuple(_ordered(moves, held, new))
    seconds = _seconds(ordered, between, new.tp)
    return Transition(ordered, sum(move.nbytes for move in ordered if move.sent), seconds)


def _cost(link: LinkProfile, nbytes: float) -> float:
    return nbytes / link.bytes_per_s if link.bytes_per_s > 0 else nbytes


def _sources(
    held: Holdings, needed: Collection[int], dead: Collection[str], old: Plan | None
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Living nodes that hold, and others that keep, a whole copy of each needed layer."""
    holders: dict[int, list[str]] = {}
    keepers: dict[int, list[str]] = {}
    whole = old is not None and state_of(old.state).away
    for node, live in held.live.items():
        if node not in dead:
            for layer in live.intersection(needed):
                holders.setdefault(layer, []).append(node)
    for node, kept in held.kept.items() if whole else ():
        if node not in dead:
            for layer in sorted(kept.keys() & needed):
                if layer not in held.live.get(node, ()):
                    keepers.setdefault(layer, []).append(node)
    return holders, keepers


def _ordered(moves: Sequence[Move], held: Holdings, new: Plan) -> list[Move]:
    """Moves in a good order: the layers that are needed first come first, but before anything comes
    to a node, what
    it drops has been read from it. Where nodes exchange layers that cannot be: the move is then
    `staged`."""
    keeps: dict[str, set[int]] = {}
    for _, _, stage in new.stages():
        keeps.setdefault(stage.unit.node, set()).update(stage.layers)
    readers = Counter(
        move.source
        for move in moves
        if move.kind == HELD and move.layer not in keeps.get(move.source, ())
    )
    waiting = sorted(moves, key=lambda move: (move.layer, move.target))
    ready = [(i, False) for i, move in enumerate(waiting) if not readers[move.target]]
    blocked: dict[str, list[int]] = {}
    for i, move in enumerate(waiting):
        if readers[move.target]:
            blocked.setdefault(move.target, []).append(i)
    ordered: list[Move] = []
    while ready or blocked:
        if not ready:
            i = min(few[0] for few in blocked.values())
            target = waiting[i].target
            blocked[target].pop(0)
            if not blocked[target]:
                del blocked[target]
            heapq.heappush(ready, (i, True))
        i, staged = heapq.heappop(ready)
        move = waiting[i]
        ordered.append(Move(move.layer, move.source, move.target, move.nbytes, move.kind, staged))
        if move.kind == HELD and move.layer not in keeps.get(move.source, ()):
            readers[move.source] -= 1
            if not readers[move.source]:
                for other in blocked.pop(move.source, ()):
                    heapq.heappush(ready, (other, False))
    return ordered


def _seconds(moves: Sequence[Move], between: Links, tp: int) -> float:
    out: dict[str, float] = defaultdict(float)
    into: dict[str, float] = defaultdict(float)
    latency = 0.0
    for move in moves:
        if move.sent:
            link = between(move.source, move.target)
            seconds = move.nbytes / tp / link.bytes_per_s if link.bytes_per_s > 0 else 0.0
            out[move.source] += seconds
            into[move.target] += seconds
            latency = max(latency, link.latency_s)
    return latency + max([*out.values(), *into.values()], default=0.0)
