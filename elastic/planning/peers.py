"""Which node keeps whose backups.

In order of importance: another failure domain, an even load, a node that does not hold the same layers
(losing both would cost more), a spare (it has nothing else to do), and the next one in the ring. The ring
alternates between domains, so that neighbours differ where possible. If an even load cannot be had
greedily, chains of changes repair it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from elastic.core.types import NodeInfo


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """Sort key under which node10 comes after node9."""
    parts = re.split(r"(\d+)", name)
    return tuple((0, int(part)) if part.isdigit() else (1, part) for part in parts if part)


def domain_of(info: NodeInfo) -> str:
    """Failure domain; a node that names none is one of its own."""
    return info.domain or f"\0{info.node}"


def choose_peers(
    nodes: Sequence[NodeInfo], layers: Mapping[str, frozenset[int]], spares: Sequence[str] = ()
) -> tuple[tuple[str, str], ...]:
    """Return (node, peer) for every node in `layers` (node: layers it holds), in that order; () for a lone
    node.

    `nodes` describes all nodes at hand, spares included.
    """
    infos = {info.node: info for info in nodes if info.node in layers or info.node in spares}
    ring = _ring(list(infos.values()))
    place = {node: i for i, node in enumerate(ring)}
    if len(ring) < 2:
        return ()

    def rank(node: str) -> list[str]:
        """Candidates, best first, load aside."""
        others = [n for n in ring if n != node]
        apart = [n for n in others if domain_of(infos[n]) != domain_of(infos[node])] or others
        return sorted(
            apart,
            key=lambda n: (
                not layers[node].isdisjoint(layers.get(n, ())),
                n in layers,
                (place[n] - place[node]) % len(ring),
            ),
        )

    holders = [node for node in ring if node in layers]
    chosen = _spread(holders, {node: rank(node) for node in holders})
    return tuple((node, chosen[node]) for node in layers)


def _ring(infos: list[NodeInfo]) -> list[str]:
    """Order nodes so that consecutive ones lie in different domains as far as possible; names settle the
    rest."""
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


def _spread(holders: list[str], ranked: Mapping[str, list[str]]) -> dict[str, str]:
    """Give every holder one candidate such that the greatest load is least; better-ranked candidates
    first."""
    chosen: dict[str, str] = {}
    load: dict[str, list[str]] = {}
    limit = 1

    def place(node: str, seen: set[str]) -> bool:
        for candidate in ranked[node]:
            if candidate not in seen and len(load.setdefault(candidate, [])) < limit:
                load[candidate].append(node)
                chosen[node] = candidate
                return True
        for candidate in ranked[node]:
            if candidate in seen:
                continue
            seen.add(candidate)
            for other in list(load[candidate]):
                if place(other, seen):
                    load[candidate].remove(other)
                    load[candidate].append(node)
                    chosen[node] = candidate
                    return True
        return False

    for node in holders:
        while not place(node, set()):
            limit += 1
    return chosen
