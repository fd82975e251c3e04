"""Sharing micro-batches over pipelines so that the last one to finish finishes earliest.

A pipeline's cost grows with every micro-batch that it is given, so handing out one at a time, each to the
pipeline that would finish it first, is optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from math import inf

Cost = Callable[[int], float]
"""Finishing time of a pipeline as a function of its micro-batches; never falls; inf when it cannot take so
many."""


def capacity(cost: Cost, limit: float, most: int) -> int:
    """Return the largest m <= most with cost(m) <= limit, or 0."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        if cost(middle) <= limit:
            low = middle
        else:
            high = middle - 1
    return low


def makespan(total: int, classes: Sequence[tuple[Cost, int]]) -> float:
    """Return the least finishing time of `total` micro-batches over classes of (cost, number of like
    pipelines).

    Every pipeline takes at least one. inf when the pipelines cannot take them all. O(log^2 total) a class.
    """
    pipelines = sum(count for _, count in classes)
    most = total - pipelines + 1
    if most < 1:
        return inf
    floor = max(cost(1) for cost, _ in classes)
    best = inf
    for cost, _ in classes:
        low, high = 1, most + 1
        while low < high:
            middle = (low + high) // 2
            limit = max(cost(middle), floor)
            taken = total if limit == inf else sum(capacity(c, limit, most) * n for c, n in classes)
            low, high = (low, middle) if taken >= total else (middle + 1, high)
        if low <= most:
            best = min(best, max(cost(low), floor))
    return best


def allot(total: int, costs: Sequence[Cost], least: int = 1) -> tuple[int, ...]:
    """Return how many of `total` micro-batches each pipeline gets, at least `least` each; earlier ones win
    ties.

    Needs total >= least * len(costs).
    """
    counts = [least] * len(costs)
    heap = [(cost(least + 1), i) for i, cost in enumerate(costs)]
    heapq.heapify(heap)
    for _ in range(total - sum(counts)):
        _, i = heap[0]
        counts[i] += 1
        heapq.heapreplace(heap, (costs[i](counts[i] + 1), i))
    return tuple(counts)


def deal(microbatches: Sequence[int], counts: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """Cut `microbatches` into consecutive runs of the given lengths."""
    dealt, start = [], 0
    for count in counts:
        dealt.append(tuple(microbatches[start : start + count]))
        start += count
    return tuple(dealt)
