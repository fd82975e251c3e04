"""Assignment of backup peers: the node that keeps each node's backups.

Criteria by importance: another failure domain, an even load, other layers than the node's own
(losing both copies would cost more), a spare, and the next node in the ring. The ring alternates
between domains. Nodes choose one after the other. Augmenting chains then even the load.

N nodes take about N log N time. The search follows the ring and skips full nodes. After many
unsuitable nodes in a row it looks at one node per sort (domain, layers) instead.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cache, lru_cache

from elastic.domain.types import NodeInfo

SCAN = 32
"""Maximum nodes examined one by one; after them, one node per sort is examined."""
Sort = tuple[str, int]
"""Failure domain ("": a domain of its own), and the layers held as a bit mask."""


@lru_cache(maxsize=1 << 15)
def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Return a sort key under which node10 comes after node9."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def domain_of(info: NodeInfo) -> str:
    """Return the failure domain; a node that names none has a domain of its own."""
    return info.domain or f"\0{info.node}"


def choose_peers(
    nodes: Sequence[NodeInfo], layers: Mapping[str, frozenset[int]], spares: Sequence[str] = ()
) -> tuple[tuple[str, str], ...]:
    """Return (node, peer) for every node in `layers`, in that order; () for a single node.

    `layers` maps nodes to the layers that they hold. `nodes` has all nodes at hand, also spares.
    Nodes whose vaults cannot keep copies are no peers, unless fewer than two others are left.
    """
    known = {*layers, *spares}
    infos = {info.node: info for info in nodes if info.node in known}
    ring = _ring(list(infos.values()))
    if len(ring) < 2:
        return ()
    keepers = [info for info in infos.values() if info.keeps]
    keepers = keepers if len(keepers) > 1 else list(infos.values())
    keeping = {info.node for info in keepers}
    apart = len({domain_of(info) for info in keepers}) > 1
    mask = cache(lambda held: sum(1 << layer for layer in held))
    sorts = [(infos[n].domain if apart else "", mask(layers.get(n, frozenset()))) for n in ring]
    table = _Table(sorts, [n in layers for n in ring], [n in keeping for n in ring])
    chosen = table.settle()
    peer_of = {ring[node]: ring[peer] for node, peer in chosen.items()}
    return tuple((node, peer_of[node]) for node in layers)


def _ring(infos: list[NodeInfo]) -> list[str]:
    """Return the nodes as a ring, neighbours in different domains if possible."""
    domains: dict[str, list[str]] = {}
    for info in sorted(infos, key=lambda i: natural(i.node)):
        domains.setdefault(domain_of(info), []).append(info.node)
    if all(len(members) == 1 for members in domains.values()):
        return [members[0] for members in domains.values()]
    queues = sorted(domains.values(), key=lambda members: (-len(members), natural(members[0])))
    ordered = [node for members in queues for node in members]
    ring: list[str] = [""] * len(ordered)
    slots = [*range(0, len(ordered), 2), *range(1, len(ordered), 2)]
    for slot, node in zip(slots, ordered, strict=True):
        ring[slot] = node
    return ring


class _Table:
    """Peers chosen so far. Nodes are indices in the ring."""

    def __init__(self, sorts: Sequence[Sort], holds: Sequence[bool], keeps: Sequence[bool]) -> None:
        self.sorts, self.holds, self.keeps, self.size = sorts, holds, keeps, len(sorts)
        self.chosen: dict[int, int] = {}
        self.kept: dict[int, list[int]] = {}
        """Per peer, the nodes whose copies it keeps."""
        self.limit = 1

    def settle(self) -> dict[int, int]:
        """Return {node: peer} of all holders, with the smallest possible maximum load."""
        self._open()
        for node in range(self.size):
            if self.holds[node]:
                while not (
                    self._choose(node) or self._exchange(node, True) or self._exchange(node, False)
                ):
                    self.limit += 1
                    self._open()
        return self.chosen

    def _open(self) -> None:
        """Mark every node as free again, because the limit was raised."""
        places = [p for p in range(self.size) if self.keeps[p]]
        self.spares = _Free([p for p in places if not self.holds[p]], self.sorts)
        self.holders = _Free([p for p in places if self.holds[p]], self.sorts)

    def _choose(self, node: int) -> bool:
        """Give `node` the best peer that has room; return whether there is such a peer."""
        peer = self._best(node, False)
        if peer is not None:
            self._give(node, peer)
            if len(self.kept[peer]) == self.limit:
                (self.holders if self.holds[peer] else self.spares).take(peer)
        return peer is not None

    def _best(self, node: int, other_layers: bool) -> int | None:
        """Return the best free peer, or None; `other_layers`: none with layers of the node."""
        peer = self.spares.next(node, False)
        if peer is None:
            peer = self.holders.next(node, True)
        return self.holders.next(node, False) if peer is None and not other_layers else peer

    def _give(self, node: int, peer: int) -> None:
        former = self.chosen.get(node)
        if former is not None:
            self.kept[former].remove(node)
        self.chosen[node] = peer
        self.kept.setdefault(peer, []).append(node)

    def _exchange(self, node: int, other_layers: bool) -> bool:
        """Give `node` a full peer by the shortest chain of reassignments; False: there is no chain.

        With `other_layers` no node of the chain gets a peer that holds the same layers.
        """
        unseen = {p for p in range(self.size) if self.keeps[p]}
        came: dict[int, int] = {}
        queue = deque([node])
        while queue and unseen:
            asking = queue.popleft()
            suitable = (p for p in unseen if self._suits(asking, p, other_layers))
            for peer in sorted(suitable, key=self._rank(asking)):
                unseen.discard(peer)
                came[peer] = asking
                for other in tuple(self.kept.get(peer, ())):
                    if self._best(other, other_layers) is not None:
                        self._choose(other)
                        self._pass_on(peer, node, came)
                        return True
                    queue.append(other)
        return False

    def _pass_on(self, peer: int, node: int, came: Mapping[int, int]) -> None:
        """Apply the chain of reassignments from `peer`, which now has room, back to `node`."""
        while True:
            asking = came[peer]
            former = self.chosen.get(asking)
            self._give(asking, peer)
            if asking == node or former is None:
                return
            peer = former

    def _suits(self, node: int, peer: int, other_layers: bool) -> bool:
        (domain, held), other = self.sorts[node], self.sorts[peer]
        apart = peer != node and (not domain or domain != other[0])
        return apart and not (other_layers and other[1] & held)

    def _rank(self, node: int) -> Callable[[int], tuple[bool, bool, int]]:
        held = self.sorts[node][1]
        return lambda p: (bool(held & self.sorts[p][1]), self.holds[p], (p - node) % self.size)


class _Free:
    """Places of the ring that have room."""

    def __init__(self, places: Sequence[int], sorts: Sequence[Sort]) -> None:
        self.sorts = sorts
        self.skip = list(range(len(sorts) + 1))
        """Per place, the next place at or after it that may have room; the ring's size if none."""
        self.by_sort: dict[Sort, list[int]] = {}
        """Per sort, the places that have room, ascending."""
        free = set(places)
        for place, sort in enumerate(sorts):
            if place in free:
                self.by_sort.setdefault(sort, []).append(place)
            else:
                self.skip[place] = place + 1
        self.none: set[tuple[Sort, bool]] = set()
        """Searches without result; none succeeds later, because nodes never regain room."""

    def take(self, place: int) -> None:
        """Mark `place` as full."""
        self.skip[place] = place + 1
        row = self.by_sort[self.sorts[place]]
        del row[bisect_left(row, place)]
        if not row:
            del self.by_sort[self.sorts[place]]

    def next(self, node: int, other_layers: bool) -> int | None:
        """Return the next place after `node` with room and in another domain; None: no such place.

        With `other_layers` the place holds none of the node's layers.
        """
        domain, held = self.sorts[node]
        question = self.sorts[node], other_layers
        if not self.by_sort or question in self.none:
            return None
        place, last = self._at(node + 1), len(self.sorts)
        for _ in range(SCAN):
            if place == last:
                place = self._at(0)
            if place == node:
                place = self._at(node + 1)
                if place in (last, node):
                    break
            if place == last:
                break
            other = self.sorts[place]
            if (not domain or other[0] != domain) and not (other_layers and other[1] & held):
                return place
            place = self._at(place + 1)
        return self._by_sort(node, other_layers)

    def _at(self, place: int) -> int:
        """Return the first place from `place` on that may have room; shorten `skip` on the way."""
        end = place
        while end < len(self.sorts) and self.skip[end] != end:
            end = self.skip[end]
        while place != end:
            self.skip[place], place = end, self.skip[place]
        return end

    def _by_sort(self, node: int, other_layers: bool) -> int | None:
        (domain, held), size = self.sorts[node], len(self.sorts)
        nearest, suited = None, False
        for other, row in self.by_sort.items():
            if (domain and other[0] == domain) or (other_layers and other[1] & held):
                continue
            suited = True
            at = bisect_left(row, node + 1)
            for place in (row[at % len(row)], row[(at + 1) % len(row)]):
                if place != node and (
                    nearest is None or (place - node) % size < (nearest - node) % size
                ):
                    nearest = place
        if not suited:
            self.none.add((self.sorts[node], other_layers))
        return nearest
