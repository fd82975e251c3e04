"""Placement: the node of each slot of a plan, so that the fewest bytes move.

A slot is the layers that one node is to hold in one pipeline. Only nodes of the slot's kind (device
type, slow factor, memory, units) may take it. Layers that the node's worker holds cost nothing.
Copies that its vault keeps for a peer need no network. All other bytes come from other nodes.
`assign` finds the assignment with

1. the fewest bytes over the network,
2. among these the fewest layers that a worker has to load,
3. among these, as far as a greedy choice finds it, pipelines that stay inside failure domains and
   replicas that lie in different domains, because links between domains are slow and replicas
   should not fail together,
4. otherwise the given order of slots and nodes.

Criteria 1 and 2 are met exactly (`assignment`). To be fast when little changes, most pairs are
fixed before the search:

  Nodes with equal holdings are one sort, and so are slots with equal layers. First, slots are
  paired with nodes that hold exactly their layers. These pairs cost nothing, so they are a cheapest
  matching of their slots. One shortest augmenting path for each of the R remaining slots turns it
  into a cheapest matching of all slots. A shortest path need not meet two nodes of one sort: it
  could go to the second at once, because the part between them is a cycle, which is never negative.
  So each path breaks at most one pair of each sort, and R paths break at most R. All further pairs
  of a sort belong to a cheapest matching and can be fixed. For the same reason at most R free nodes
  of each sort are needed.

Without vaults all these pairs could be fixed. With vaults they cannot: a node may hold a slot's
layers and keep another slot's layers for a lost peer, while a second node also holds the first
slot's layers.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple, TypeVar

from elastic.domain.types import LayerSpec, Plan
from elastic.planning.placement.assignment import Sort, cheapest
from elastic.planning.plan.schemes import state_of

T = TypeVar("T")


class Slot(NamedTuple):
    """Layers that one node is to hold in one pipeline."""

    kind: int
    layers: range
    pipeline: int


class Host(NamedTuple):
    """A node that can take slots of its kind."""

    name: str
    kind: int
    domain: str
    """Failure domain; "": unknown."""


@dataclass(frozen=True, slots=True)
class Holdings:
    """Layers that each node has before the change. Nodes without state are absent."""

    live: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """Per node, the layers that its worker holds."""
    kept: Mapping[str, Mapping[int, int]] = field(default_factory=dict)
    """Per node, the bytes of each layer that its vault keeps for peers."""
    team: Mapping[str, int] = field(default_factory=dict)
    """Per node, the index of its pipeline."""

    @classmethod
    def of(
        cls, current: Plan | None, layers: Sequence[LayerSpec], *, gradients: bool = True
    ) -> Holdings:
        """Return the holdings under the current plan; none if the number of layers differs.

        With `gradients` the vaults also keep accumulated gradients, as in the middle of a step.
        """
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

    def __contains__(self, node: str) -> bool:
        return node in self.live or node in self.kept

    def holds(self, node: str, layers: range) -> bool:
        """Return whether the node's worker holds all these layers."""
        return self.live.get(node, frozenset()).issuperset(layers)

    def fetched(self, node: str, full_bytes: Sequence[int]) -> list[int]:
        """Return the bytes of each layer that `node` would get from other nodes."""
        kept, live = self.kept.get(node, {}), self.live.get(node, frozenset())
        return [
            0 if layer in live else max(0, nbytes - kept.get(layer, 0))
            for layer, nbytes in enumerate(full_bytes)
        ]

    def missing(self, node: str, full_bytes: Sequence[int]) -> list[int]:
        """Return prefix sums over layers of the cost for `node` to hold them.

        The cost counts bytes over the network first, then layers to load.
        """
        live, weight = self.live.get(node, frozenset()), len(full_bytes) + 1
        costs = (b * weight + (i not in live) for i, b in enumerate(self.fetched(node, full_bytes)))
        return list(accumulate(costs, initial=0))


def assign(
    slots: Sequence[Slot], nodes: Sequence[Host], holdings: Holdings, full_bytes: Sequence[int]
) -> list[str]:
    """Return the node of each slot. There must be enough nodes of each kind.

    `full_bytes[i]` is the number of bytes of layer i for a node that has nothing of this layer.
    """
    chosen: dict[str, int] = {}
    for kind in dict.fromkeys(slot.kind for slot in slots):
        at = [s for s, slot in enumerate(slots) if slot.kind == kind]
        able = [node.name for node in nodes if node.kind == kind]
        assert len(able) >= len(at), f"{len(at)} slots of kind {kind}, but {len(able)} nodes"
        found = {s: s for s in range(len(at))}
        if any(name in holdings for name in able):
            found = _match([slots[s].layers for s in at], able, holdings, full_bytes)
        chosen.update((able[n], at[s]) for s, n in found.items())
    hosts = [(host, chosen[host.name]) for host in nodes if host.name in chosen]
    return _Dealer(slots, hosts, holdings).deal()


# ---- fewest bytes ----


def _match(
    wanted: Sequence[range],
    names: Sequence[str],
    holdings: Holdings,
    full_bytes: Sequence[int],
) -> dict[int, int]:
    """Return {slot: node} as indices into `wanted` (the layers of each slot) and `names`."""
    sorts: list[Sort] = [
        (holdings.live.get(name, frozenset()), frozenset(holdings.kept.get(name, {}).items()))
        for name in names
    ]
    waiting: dict[frozenset[int], list[int]] = {}
    for s in reversed(range(len(wanted))):
        waiting.setdefault(frozenset(wanted[s]), []).append(s)
    pairs, others = [], []
    for n, (live, _) in enumerate(sorts):
        if waiting.get(live):
            pairs.append((waiting[live].pop(), n))
        else:
            others.append(n)
    rest = [s for left in waiting.values() for s in left]
    if not rest:
        return dict(pairs)
    broken = _few(pairs, lambda pair: sorts[pair[1]], len(rest))
    free = _few(others, lambda n: sorts[n], len(rest))
    rows = sorted([*rest, *(s for s, _ in broken)])
    columns = sorted([*free, *(n for _, n in broken)])
    chosen = cheapest([wanted[s] for s in rows], [sorts[n] for n in columns], full_bytes)
    return dict(pairs) | {rows[i]: columns[j] for i, j in chosen}


def _few(items: Iterable[T], sort: Callable[[T], Sort], most: int) -> list[T]:
    """Return the first `most` items of each sort."""
    counts: Counter[Sort] = Counter()
    chosen = []
    for item in items:
        of_sort = sort(item)
        counts[of_sort] += 1
        if counts[of_sort] <= most:
            chosen.append(item)
    return chosen


# ---- failure domains ----


_Pool = tuple[int, range | None]
"""Kind and layers of nodes that may be exchanged; layers None: nodes without state."""


class _Dealer:
    """Exchanges nodes among slots where no more bytes have to move.

    Slots with equal layers may exchange their nodes, and so may all nodes without state. Each
    pipeline first takes nodes from the domain that can fill most of its slots; among such domains,
    from the one used least so far. Then it goes on with the slots left. Without domains, nodes of
    one former pipeline (`Holdings.team`) stay together.
    """

    def __init__(
        self, slots: Sequence[Slot], hosts: Sequence[tuple[Host, int]], holdings: Holdings
    ) -> None:
        """`hosts`: the chosen nodes in order of preference, each with its slot."""
        self.slots = slots
        self.named = any(host.domain for host, _ in hosts)
        self.stock = defaultdict[_Pool, dict[str, deque[str]]](dict)
        """Per pool and label (domain, or former pipeline), the nodes left."""
        self.empty: Counter[_Pool] = Counter()
        """Per pool, the number of its slots that are for nodes without state."""
        self.used: Counter[str] = Counter()
        """Per label, how often a pipeline took nodes from it."""
        for host, s in hosts:
            pool: _Pool = slots[s].kind, slots[s].layers
            label = host.domain if self.named else str(holdings.team.get(host.name, ""))
            if host.name not in holdings:
                self.empty[pool] += 1
                pool = slots[s].kind, None
            self.stock[pool].setdefault(label, deque()).append(host.name)

    def deal(self) -> list[str]:
        """Return the node of each slot."""
        chosen = [""] * len(self.slots)
        pipelines = defaultdict[int, list[int]](list)
        for s, slot in enumerate(self.slots):
            pipelines[slot.pipeline].append(s)
        for left in pipelines.values():
            begun = False
            while left:
                label = self._best_domain(left) if self.named else self._former(left, begun)
                begun = True
                self.used[label] += 1
                for s in left:
                    chosen[s] = self._take(s, label)
                left = [s for s in left if not chosen[s]]
        return chosen

    def _pools(self, s: int) -> list[_Pool]:
        """Return the pools from which slot s may take a node, first the one with its layers."""
        own: _Pool = self.slots[s].kind, self.slots[s].layers
        pools: list[_Pool] = [own, (own[0], None)] if self.empty[own] else [own]
        return [pool for pool in pools if self.stock.get(pool)]

    def _former(self, left: Collection[int], begun: bool) -> str:
        """Return the former pipeline of the first slot that has nodes of one; "": there is none.

        Once the pipeline has `begun`, nodes without a former pipeline come first.
        """
        labels = [label for s in left for pool in self._pools(s) for label in self.stock[pool]]
        if begun and "" in labels:
            return ""
        return next(filter(None, labels), "")

    def _best_domain(self, left: Collection[int]) -> str:
        fills: Counter[str] = Counter()
        for s in left:
            fills.update({label for pool in self._pools(s) for label in self.stock[pool]})
        return min(fills, key=lambda label: (not label, -fills[label], self.used[label], label))

    def _take(self, s: int, label: str) -> str:
        """Return a node with this label for slot s, or "" if there is none."""
        for pool in self._pools(s):
            nodes = self.stock[pool].get(label)
            if nodes:
                if pool[1] is None:
                    self.empty[self.slots[s].kind, self.slots[s].layers] -= 1
                if len(nodes) == 1:
                    del self.stock[pool][label]
                return nodes.popleft()
        return ""


# ---- cuts that move less ----


def recut(
    reach: Sequence[Sequence[int]], moved: Sequence[Sequence[int]], cuts: Sequence[int]
) -> tuple[int, ...]:
    """Return cuts with which the pipeline's nodes fetch least; among equals, nearest to `cuts`.

    Args:
        reach: `reach[s][i]` is the largest end of stage s if it begins at layer i, within its
            limits of time and memory. All smaller ends are within these limits too.
        moved: per stage, prefix sums over layers of the cost to fetch them (`Holdings.missing`).
            If a node has several stages, each stage counts its own layers.
        cuts: the present cuts, within `reach`.
    """
    n_layers, depth = cuts[-1], len(cuts) - 1
    if all(moved[s][cuts[s + 1]] == moved[s][cuts[s]] for s in range(depth)):
        return tuple(cuts)
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    """Per end of the stages so far: (cost, distance from `cuts`, cuts so far)."""
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
