"""Path faults: pairs of nodes that cannot reach each other, and the fewest nodes to leave out.

Agents ask each other's vaults for an answer, over the network that the workers use
(`elastic.core.node.path_watch`). A pair is bad as long as one of the two nodes reports the other.
All workers of a plan connect to each other, so a plan never has both nodes of a bad pair.

    bad --no report--> on hold --well for `hold_s`--> usable --a report--> bad, for a longer hold

The hold is a preference: it ends at once if no plan fits otherwise.
`elastic.core.job.reachability` keeps the pairs in the job's state.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations

from elastic.core.protocol.health_report import UnreachablePeer

Pair = tuple[str, str]
"""Two nodes, in ascending order."""
MAX_EXACT = 12
"""Maximum number of nodes in bad pairs for which the smallest covers are searched exactly."""
LONGEST_HOLD_S = 300.0


@dataclass(frozen=True, slots=True)
class PathFault:
    """The path between two nodes, which was bad at least once. Times are the coordinator's."""

    nodes: Pair
    directions: tuple[Pair, ...]
    """(node that asked, node that did not answer), for each direction that failed."""
    detail: str
    """Errors of these directions, for people."""
    since: float
    """Time at which the path became bad."""
    well_since: float = 0.0
    """Time at which the path became well again; 0: it is bad."""
    usable: bool = False
    """Whether plans may have both nodes again."""
    times: int = 1
    """How often the path became bad."""

    @property
    def text(self) -> str:
        """Description for people: both nodes, and each direction with its error."""
        first, second = self.nodes
        return f"{first} and {second} cannot reach each other ({self.detail})"

    def hold_s(self, first_s: float) -> float:
        """Return how long the path must be well before it is used. It doubles with each fault."""
        return min(first_s * 2.0 ** min(self.times - 1, 30), max(first_s, LONGEST_HOLD_S))


def pair_of(one: str, other: str) -> Pair:
    return (one, other) if one < other else (other, one)


def judge(
    known: PathFault | None,
    nodes: Pair,
    reports: tuple[tuple[str, UnreachablePeer], ...],
    now: float,
    hold_s: float,
) -> PathFault | None:
    """Return the fault after `reports`; the same object if nothing changed, None if all is well.

    Args:
        reports: (node that asked, its report) of each node of the pair that reports the other now.
        hold_s: time for which the path must be well after its first fault.
    """
    if reports:
        directions = tuple((node, one.peer) for node, one in reports)
        texts = (f"{n} -> {one.peer}: {one.detail or 'no answer'}" for n, one in reports)
        fault = PathFault(nodes, directions, "; ".join(texts), now)
        if known is None:
            return fault
        if known.well_since:
            return replace(fault, times=known.times + 1)
        more = not set(directions) <= set(known.directions)
        return replace(fault, since=known.since, times=known.times) if more else known
    if known is None or known.usable:
        return known
    if not known.well_since:
        return replace(known, well_since=now)
    return replace(known, usable=True) if now - known.well_since >= known.hold_s(hold_s) else known


@lru_cache(maxsize=256)
def minimum_covers(pairs: frozenset[Pair]) -> tuple[frozenset[str], ...]:
    """Return the smallest sets of nodes that have a node of each pair; in sorted order.

    With more than `MAX_EXACT` nodes: one set, found greedily, from which no node can be left out.
    """
    nodes = sorted({node for pair in pairs for node in pair})
    if len(nodes) > MAX_EXACT:
        return (_greedy_cover(pairs),)
    for size in range(len(nodes) + 1):
        sets = (frozenset(chosen) for chosen in combinations(nodes, size))
        covers = tuple(chosen for chosen in sets if _covers(chosen, pairs))
        if covers:
            return covers
    raise AssertionError("all nodes together cover all pairs")


def _greedy_cover(pairs: frozenset[Pair]) -> frozenset[str]:
    left, cover = set(pairs), set[str]()
    while left:
        counts = Counter(node for pair in left for node in pair)
        worst = min(counts, key=lambda node: (-counts[node], node))
        cover.add(worst)
        left = {pair for pair in left if worst not in pair}
    for node in sorted(cover):
        if _covers(frozenset(cover - {node}), pairs):
            cover.discard(node)
    return frozenset(cover)


def _covers(chosen: frozenset[str], pairs: frozenset[Pair]) -> bool:
    return all(one in chosen or other in chosen for one, other in pairs)
