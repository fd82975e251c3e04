"""Moves of layers from one plan to the next: sources, senders, and the time that they take.

The two plans determine the layers to move: all that a node shall hold and does not hold. A node
whose own vault keeps a whole copy loads it from there. Otherwise another living node that holds the
layer, or keeps a whole copy of it, sends it. So the bytes sent are the least possible for these
plans (`placement` chooses the node of each slot). Senders are chosen so that none is a bottleneck
(`balance`).

Every node sends and receives at once over its own link. With tensor parallelism each worker moves
its part of a layer over its own link. The transfers take

    seconds = max over nodes of max(seconds sending, seconds receiving) + the longest latency

This is a lower bound for any order of transfers. It is reached if transfers may be interrupted
(Gonzalez and Sahni 1976, open shop with preemption).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from elastic.domain.types import LayerSpec, NodeInfo, Plan
from elastic.planning.backup.peer_assignment import domain_of
from elastic.planning.cost.profile import LinkProfile, Profile
from elastic.planning.placement.balance import balance
from elastic.planning.placement.placement import Holdings
from elastic.planning.plan.schemes import state_of

HELD, KEPT, LOCAL, CHECKPOINT, FRESH = "held", "kept", "local", "checkpoint", "fresh"
"""Kinds of moves, by source of the layer.

HELD: a node that holds the layer. KEPT: a node that keeps a peer's copy. LOCAL: the target's own
vault. CHECKPOINT: the checkpoint, because no living node has the layer. FRESH: initialisation,
because there is no old plan.
"""

Links = Callable[[str, str], LinkProfile]
"""Function that returns the link from one node to another."""


@dataclass(frozen=True, slots=True)
class Move:
    """One layer that a node gets, and its source."""

    layer: int
    source: str
    """Name of the sending node; "" for `CHECKPOINT` and `FRESH`."""
    target: str
    nbytes: int
    kind: str

    @property
    def sent(self) -> bool:
        """Whether the layer goes over the network between nodes."""
        return self.kind in (HELD, KEPT)


@dataclass(frozen=True, slots=True)
class Transition:
    """All moves of a change of plan."""

    moves: tuple[Move, ...]
    nbytes: int
    """Bytes sent between nodes."""
    seconds: float


def links_of(profile: Profile | None, nodes: Sequence[NodeInfo]) -> Links:
    """Return a function for the links between nodes, inside and across failure domains."""
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

    `dead` nodes have lost everything. With `gradients` the accumulated gradients move as well, as
    in the middle of a step. Without `links` transfers take no time.
    """
    between = links or (lambda source, target: LinkProfile())
    held = Holdings.of(old, layers)
    sizes = [
        la.param_bytes + la.state_bytes + (la.gradient_bytes if gradients else 0) for la in layers
    ]
    wanted = dict.fromkeys(
        (stage.unit.node, layer)
        for _, _, stage in new.stages()
        for layer in stage.layers
        if stage.unit.node in dead or layer not in held.live.get(stage.unit.node, ())
    )
    holders, keepers = _sources(held, {layer for _, layer in wanted}, dead, old)
    moves: list[Move] = []
    requests: list[tuple[str, int]] = []
    costs: list[dict[str, float]] = []
    for target, layer in wanted:
        if target in keepers[layer]:
            moves.append(Move(layer, target, target, sizes[layer], LOCAL))
        elif senders := holders[layer] + keepers[layer]:
            requests.append((target, layer))
            nbytes = sizes[layer] / new.tp
            costs.append({s: _seconds(between(s, target), nbytes, unknown=nbytes) for s in senders})
        else:
            kind = FRESH if old is None else CHECKPOINT
            moves.append(Move(layer, "", target, sizes[layer], kind))
    for (target, layer), sender in zip(requests, balance(costs), strict=True):
        kind = HELD if sender in holders[layer] else KEPT
        moves.append(Move(layer, sender, target, sizes[layer], kind))
    busy_s, latency_s, nbytes_sent = defaultdict[tuple[str, bool], float](float), 0.0, 0
    for move in moves:
        if move.sent:
            link = between(move.source, move.target)
            seconds = _seconds(link, move.nbytes / new.tp, unknown=0.0)
            busy_s[move.source, True] += seconds
            busy_s[move.target, False] += seconds
            latency_s = max(latency_s, link.latency_s)
            nbytes_sent += move.nbytes
    return Transition(tuple(moves), nbytes_sent, latency_s + max(busy_s.values(), default=0.0))


def _seconds(link: LinkProfile, nbytes: float, *, unknown: float) -> float:
    """Return the seconds of a transfer without latency; `unknown` if its bandwidth is unknown."""
    return nbytes / link.bytes_per_s if link.bytes_per_s > 0 else unknown


def _sources(
    held: Holdings, needed: set[int], dead: Collection[str], old: Plan | None
) -> tuple[dict[int, list[str]], dict[int, list[str]]]:
    """Return, per needed layer, the living holders and other living nodes with a whole copy."""
    holders, keepers = defaultdict[int, list[str]](list), defaultdict[int, list[str]](list)
    for node, live in held.live.items():
        if node not in dead:
            for layer in live.intersection(needed):
                holders[layer].append(node)
    if old is not None and state_of(old.state).away:
        for node, kept in held.kept.items():
            if node not in dead:
                for layer in sorted(kept.keys() & needed - held.live.get(node, frozenset())):
                    keepers[layer].append(node)
    return holders, keepers
