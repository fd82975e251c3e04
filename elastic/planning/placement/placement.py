"""Which node takes which slot of a plan, so that as few bytes as possible move.

A slot is what one node is to hold: the layers of its stages in one pipeline. Only nodes of the
slot's kind (device
type, units, memory) may take it. What a node's worker holds already is free; what its vault keeps
for a peer is free
of network; the rest has to come from other nodes. `assign` finds, among all assignments, one

1. with the fewest bytes over the network,
2. of these with the fewest layers that a worker has to load at all,
3. of these one that keeps pipelines inside failure domains and spreads pipelines over them, as far
as a greedy
   choice does, for links between domains are slow and replicas should not fail together,
4. and else in the order in which slots and nodes are given.

1 and 2 are exact (`elastic.planning.placement.assignment`). To be quick where nearly everything
stays, most is settled before:

  Nodes with equal holdings are alike, and so are slots with equal layers. Join first nodes that
  hold exactly a slot's
  layers: these pairs cost nothing, so they are a cheapest matching of their slots, and a cheapest
  matching of all
  slots follows by one shortest augmenting path for each of the R slots that are left. A shortest
  path need not
  meet two nodes that are alike, for one could go to the second at once, and the way between them, a
  cycle, is never
  negative. So each path breaks at most one pair of each sort, R paths at most R: whatever more
  pairs there are of
  one sort is in a cheapest matching. Likewise no path needs more than one free node of each sort.

Where nothing lies in vaults, even all such pairs may be fixed, by the triangle inequality: let node
a hold exactly
slot s, but take t while node b takes s. With |X| the bytes of a set of layers, exchanging them
costs
|t \\ b| <= |t \\ a| + |a \\ b| = |t \\ a| + |s \\ b|, which is what both cost before. With vaults
that is wrong: a may
hold s and keep t for a peer that was lost, when b holds s too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TypeVar

from elastic.domain.types import LayerSpec, Plan
from elastic.planning.placement.assignment import Sort, cheapest
from elastic.planning.placement.exchange import Host, Slot, deal
from elastic.planning.plan.schemes import state_of

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Holdings:
    """What each node has before the change; nodes that have nothing are absent."""

    live: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Layers that the node's worker holds."""
    kept: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Bytes, per layer, of what its vault keeps for peers."""
    team: Mapping[str, int] = field(default_factory=dict)
    """Number of the pipeline that it is in."""

    @classmethod
    def of(
        cls, current: Plan | None, layers: Sequence[LayerSpec], *, gradients: bool = True
    ) -> Holdings:
        """Read them off the current plan; none if the number of layers differs. `gradients`: what a
        node lacks is
        counted with accumulated gradients, as in the middle of a step."""
        if current is None or current.n_layers != len(layers):
            return cls()
        live: dict[str, frozenset[int]] = {}
        team: dict[str, int] = {}
        for p, _, stage in current.stages():
            team[stage.unit.node] = p
            live[stage.unit.node] = live.get(stage.unit.node, frozenset()) | frozenset(stage.layers)
        state = state_of(current.state).away
        saved = [
            (la.param_bytes + la.state_bytes if state else 0)
            + (la.gradient_bytes if gradients else 0)
            for la in layers
        ]
        kept: dict[str, dict[int, int]] = {}
        for node, peer in current.peers if state or gradients else ():
            kept.setdefault(peer, {}).update((layer, saved[layer]) for layer in live.get(node, ()))
        return cls(live, kept, team)

    def holds(self, node: str, layers: range) -> bool:
        """Whether the node's worker has all these layers."""
        return self.live.get(node, frozenset()).issuperset(layers)

    def fetched(self, node: str, full_bytes: Sequence[int]) -> list[int]:
        """Bytes of each layer that `node` would have to get from other nodes."""
        kept, live = self.kept.get(node, {}), self.live.get(node, frozenset())
        return [
            0 if layer in live else max(0, nbytes - kept.get(layer, 0))
            for layer, nbytes in enumerate(full_bytes)
        ]

    def missing(self, node: str, full_bytes: Sequence[int]) -> list[int]:
        """Prefix sums over layers of the cost for `node` to have them: first bytes over the
        network, then layers
        to load, as one number."""
        live, weight = self.live.get(node, frozenset()), len(full_bytes) + 1
        costs = (b * weight + (i not in live) for i, b in enumerate(self.fetched(node, full_bytes)))
        return list(accumulate(costs, initial=0))


def assign(
    slots: Sequence[Slot], nodes: Sequence[Host], holdings: Holdings, full_bytes: Sequence[int]
) -> list[str]:
    """Return the node of each slot. There must be enough nodes of each kind; `full_bytes[i]` is
    what a node has to
    get for layer i if it has nothing of it."""
    taken: dict[int, Host] = {}
    for kind in dict.fromkeys(slot.kind for slot in slots):
        at = [s for s, slot in enumerate(slots) if slot.kind == kind]
        able = [node for node in nodes if node.kind == kind]
        assert len(able) >= len(at), f"{len(at)} slots of kind {kind}, but {len(able)} nodes"
        if any(node.name in holdings.live or node.name in holdings.kept for node in able):
            found = _match(
                [slots[s].layers for s in at], [node.name for node in able], holdings, full_bytes
            )
        else:
            found = {s: s for s in range(len(at))}
        taken.update((at[s], able[n]) for s, n in found.items())
    chosen = {host.name: s for s, host in taken.items()}
    known = {name for name in chosen if name in holdings.live or name in holdings.kept}
    hosts = [(host, chosen[host.name]) for host in nodes if host.name in chosen]
    return deal(slots, hosts, known, holdings.team)


# ---- least bytes ----


def _match(
    wanted: Sequence[Sequence[int]],
    names: Sequence[str],
    holdings: Holdings,
    full_bytes: Sequence[int],
) -> dict[int, int]:
    """Return {slot: node}, indices into `wanted` (the layers of each slot) and `names`."""
    waiting: dict[frozenset[int], list[int]] = {}
    for s in reversed(range(len(wanted))):
        waiting.setdefault(frozenset(wanted[s]), []).append(s)
    nothing: frozenset[int] = frozenset()
    pairs, others = [], []
    for n, name in enumerate(names):
        fitting = waiting.get(holdings.live.get(name, nothing))
        if fitting:
            pairs.append((fitting.pop(), n))
        else:
            others.append(n)
    rest = [s for left in waiting.values() for s in left]
    if not rest:
        return dict(pairs)
    sorts: list[Sort] = [
        (holdings.live.get(name, nothing), frozenset(holdings.kept.get(name, {}).items()))
        for name in names
    ]
    exact = _few(pairs, lambda pair: sorts[pair[1]], len(rest))
    free = _few(others, lambda n: sorts[n], len(rest))
    settled = dict(set(pairs).difference(exact))
    rows = sorted([*rest, *(s for s, _ in exact)])
    columns = sorted([*free, *(n for _, n in exact)])
    chosen = cheapest([wanted[s] for s in rows], [sorts[n] for n in columns], full_bytes)
    return settled | {rows[i]: columns[j] for i, j in chosen}


def _few(items: Iterable[T], sort: Callable[[T], Sort], most: int) -> list[T]:
    """The first `most` items of each sort."""
    counts: Counter[Sort] = Counter()
    chosen = []
    for item in items:
        of_sort = sort(item)
        counts[of_sort] += 1
        if counts[of_sort] <= most:
            chosen.append(item)
    return chosen


# ---- cuts that move less ----


def recut(
    reach: Sequence[Sequence[int]], moved: Sequence[Sequence[int]], cuts: Sequence[int]
) -> tuple[int, ...]:
    """Cut one pipeline again so that its nodes, already chosen, fetch least; `cuts` are its cuts
    now.

    `reach[s][i]` is the last layer + 1 that stage s may hold when it begins with layer i (within
    its limits of time
    and memory; whatever ends earlier must be within them too), `moved[s]` prefix sums over layers
    of what stage s
    would have to fetch (`Holdings.missing`; for a node with several stages, each stage counts its
    own). Of equals the
    cuts nearest to `cuts` are taken. `cuts` themselves must be within `reach`.
    """
    n_layers, depth = cuts[-1], len(cuts) - 1
    if all(moved[s][cuts[s + 1]] == moved[s][cuts[s]] for s in range(depth)):
        return tuple(cuts)
    # best[i]: (cost, distance from `cuts`, cuts so far) with the stages so far ending before layer
    # i.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for s in range(depth):
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for first, (cost, away, done) in best.items():
            least = n_layers if s == depth - 1 else first + 1
            for last in range(least, min(reach[s][first], n_layers - (depth - 1 - s)) + 1):
                option = cost + moved[s][last] - moved[s][first], away + abs(last - cuts[s + 1])
                if last not in following or option < following[last][:2]:
                    following[last] = (*option, (*done, last))
        best = following
    return best[n_layers][2]
