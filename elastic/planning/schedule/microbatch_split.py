"""Sharing micro-batches over pipelines so that the last one to finish finishes earliest.

A pipeline's cost grows with every micro-batch that it is given, so handing out one at a time, each to the
pipeline that would finish it first, is optimal.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Cost = Callable[[int], float]
"""Finishing time of a pipeline as a function of its micro-batches; never falls; inf when it cannot take so
many."""


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
