"""Cutting layers into the stages of one pipeline: exact, not heuristic.

A set of layers that fits a stage still fits when layers are taken away. So reaching as far as possible with
every stage, under a limit on its ticks, finds cuts whenever some exist (by induction no other choice gets
further), and a search for the least such limit is exact. Stage s of D keeps the activations of min(D - s,
m) micro-batches, as 1F1B does. Among all cuts with the least bottleneck, `cut` then moves the fewest bytes,
and of those is the most even.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from elastic.planning.costs import TOTAL_TICKS, UNLIMITED, Costs


def in_flight(depth: int, stage: int, microbatches: int) -> int:
    """Micro-batches whose activations a stage keeps at once under 1F1B."""
    return max(1, min(depth - stage, microbatches))


def furthest(costs: Costs, depth: int, microbatches: int, limit: int) -> list[int] | None:
    """Return cuts (depth + 1 layer numbers) where each stage ends as late as it can, or None if none
    exist."""
    n_layers, ends = costs.n_layers, [0]
    for stage in range(depth):
        room = n_layers - (depth - stage - 1)
        last = min(costs.reach(ends[-1], limit, in_flight(depth, stage, microbatches)), room)
        if last <= ends[-1]:
            return None
        ends.append(last)
    return ends if ends[-1] == n_layers else None


def bottleneck(costs: Costs, depth: int, microbatches: int) -> int | None:
    """Return the least possible ticks of the slowest of `depth` stages, or None if memory (or depth)
    forbids all."""
    if not 1 <= depth <= costs.n_layers:
        return None
    high = max(TOTAL_TICKS * 2, costs.ticks(0, costs.n_layers))
    if furthest(costs, depth, microbatches, high) is None:
        return None
    low = -(-costs.ticks(0, costs.n_layers) // depth)
    slowest = max(costs.ticks(i, i + 1) for i in range(costs.n_layers))
    low = max(low, slowest)
    if furthest(costs, depth, microbatches, low + slowest) is not None:
        high = low + slowest
    while low < high:
        middle = (low + high) // 2
        if furthest(costs, depth, microbatches, middle) is None:
            low = middle + 1
        else:
            high = middle
    return low


def cut(
    costs: Costs, depth: int, microbatches: int, limit: int, moved: Sequence[Sequence[int]] | None = None
) -> tuple[int, ...]:
    """Return the best cuts under `limit` ticks a stage; some must exist.

    `moved[s][i]` is the number of bytes that stage s would have to fetch for the layers before i (a prefix
    sum).
    """
    late = furthest(costs, depth, microbatches, limit)
    assert late is not None, "no cuts under this limit"
    early = _earliest(costs, depth, microbatches, limit)
    none = [0] * (costs.n_layers + 1)
    # best[i]: (bytes moved, unevenness, cuts) of the stages so far, ending before layer i.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for stage in range(depth):
        bytes_before = moved[stage] if moved else none
        following: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for first, (fetched, uneven, cuts) in best.items():
            reach = min(costs.reach(first, limit, in_flight(depth, stage, microbatches)), late[stage + 1])
            for last in range(max(first + 1, early[stage + 1]), reach + 1):
                time = costs.ticks(first, last)
                option = fetched + bytes_before[last] - bytes_before[first], uneven + time * time
                known = following.get(last)
                if known is None or option < known[:2]:
                    following[last] = (*option, (*cuts, last))
        best = following
    return best[costs.n_layers][2]


def _earliest(costs: Costs, depth: int, microbatches: int, limit: int) -> list[int]:
    """Return cuts where each stage begins as early as it can; the mirror of `furthest`."""
    starts = [costs.n_layers]
    for stage in reversed(range(depth)):
        last = first = starts[-1]
        flying = in_flight(depth, stage, microbatches)
        while first > stage and costs.reach(first - 1, limit, flying) >= last:
            first -= 1
        starts.append(first)
    return starts[::-1]


def memory_needed(costs: Costs, depth: int, microbatches: int) -> tuple[int, int, tuple[int, int]]:
    """Return (bytes, stage, its layers [first, last)) of the fullest stage when cut for least memory."""
    low, high = 0, costs.needs(0, costs.n_layers, depth)
    while low < high:
        middle = (low + high) // 2
        if _fits(costs, depth, microbatches, middle) is None:
            low = middle + 1
        else:
            high = middle
    ends = _fits(costs, depth, microbatches, low)
    assert ends is not None
    stages = list(pairwise(ends))
    needs = [costs.needs(a, b, in_flight(depth, s, microbatches)) for s, (a, b) in enumerate(stages)]
    fullest = needs.index(max(needs))
    return needs[fullest], fullest, stages[fullest]


def _fits(costs: Costs, depth: int, microbatches: int, memory: int) -> list[int] | None:
    return furthest(replace(costs, memory=memory, loads={}), depth, microbatches, UNLIMITED)
