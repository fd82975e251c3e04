"""Exchanges nodes among slots where that costs nothing, so that pipelines stay inside failure
domains.

Links between domains are slow, and replicas of a layer should not fail together: so each pipeline
is put into as few
domains as a greedy choice finds, and different pipelines into different domains where there is a
choice.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple


class Slot(NamedTuple):
    """What one node is to hold."""

    kind: int
    layers: Sequence[int]
    """Ascending; a range, or a tuple where chunks of several stages do not touch."""
    pipeline: int


class Host(NamedTuple):
    """A node that can take slots of its kind."""

    name: str
    kind: int
    domain: str
    """Failure domain; "": none is named."""


Pool = tuple[int, tuple[int, ...] | None]
"""What nodes of a pool share: kind, and layers that each of them will hold (None: they hold nothing
yet, and may go
anywhere)."""


def deal(
    slots: Sequence[Slot],
    hosts: Sequence[tuple[Host, int]],
    known: Collection[str],
    team: Mapping[str, int],
) -> list[str]:
    """Return the node of each slot.

    `hosts` are the chosen nodes with the slot that each was chosen for, in order of preference.
    Slots with equal
    layers may exchange their nodes, and so may all nodes that hold nothing (not in `known`).
    Pipeline by pipeline,
    the domain that can fill most of its slots does so, of these the one used least so far; then the
    next for what is
    left. Without named domains, nodes of one `team` (former pipeline) stay together.
    """
    named = any(host.domain for host, _ in hosts)
    dealer = _Dealer(slots, named)
    for host, s in hosts:
        label = host.domain if named else str(team.get(host.name, ""))
        dealer.put(s, label, host.name, blank=host.name not in known)
    return dealer.deal()


@dataclass(slots=True)
class _Dealer:
    slots: Sequence[Slot]
    named: bool
    stock: dict[Pool, dict[str, deque[str]]] = field(default_factory=dict)
    """Pool: label (domain, or former pipeline): nodes."""
    blanks: Counter[Pool] = field(default_factory=Counter)
    """How many slots with these layers are for nodes that hold nothing."""
    used: Counter[str] = field(default_factory=Counter)
    """Label: pipelines in which it leads."""
    own: list[Pool] = field(init=False)
    """Of each slot: the pool of nodes for its layers."""

    def __post_init__(self) -> None:
        self.own = [(slot.kind, tuple(slot.layers)) for slot in self.slots]

    def put(self, s: int, label: str, node: str, *, blank: bool) -> None:
        pool = self.own[s]
        if blank:
            self.blanks[pool] += 1
            pool = (pool[0], None)
        self.stock.setdefault(pool, {}).setdefault(label, deque()).append(node)

    def deal(self) -> list[str]:
        chosen = [""] * len(self.slots)
        pipelines: dict[int, list[int]] = {}
        for s, slot in enumerate(self.slots):
            pipelines.setdefault(slot.pipeline, []).append(s)
        for left in pipelines.values():
            begun = False
            while left:
                label = self._best(left) if self.named else self._mates(left, begun=begun)
                begun = True
                self.used[label] += 1
                for s in left:
                    chosen[s] = self._take(s, label)
                left = [s for s in left if not chosen[s]]
        return chosen

    def _pools(self, s: int) -> list[Pool]:
        """Where slot s may take a node from, those that hold its layers first."""
        own = self.own[s]
        pools: list[Pool] = [own, (own[0], None)] if self.blanks[own] else [own]
        return [pool for pool in pools if self.stock.get(pool)]

    def _mates(self, left: Sequence[int], *, begun: bool) -> str:
        """The former pipeline that leads: the first slot's; for what it cannot fill, new nodes
        before others'."""
        pools = [pool for s in left for pool in self._pools(s)]
        if begun and any("" in self.stock[pool] for pool in pools):
            return ""
        return next((label for pool in pools for label in self.stock[pool] if label), "")

    def _best(self, left: Sequence[int]) -> str:
        """The domain that leads: the one that can fill most."""
        fills: Counter[str] = Counter()
        for s in left:
            fills.update({label for pool in self._pools(s) for label in self.stock[pool]})
        order = sorted(fills, key=lambda label: (label == "", label))
        return max(order, key=lambda label: (label != "", fills[label], -self.used[label]))

    def _take(self, s: int, label: str) -> str:
        """A node with this label for slot s, or "" if there is none."""
        for pool in self._pools(s):
            row = self.stock[pool].get(label)
            if row:
                if pool[1] is None:
                    self.blanks[self.own[s]] -= 1
                node = row.popleft()
                if not row:
                    del self.stock[pool][label]
                return node
        return ""
