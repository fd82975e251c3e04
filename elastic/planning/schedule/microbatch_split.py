"""Split of micro-batches over pipelines with the earliest finish of the last pipeline.

A pipeline's cost grows with every micro-batch. So the greedy choice is optimal: each micro-batch
goes to the pipeline that would finish it first.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Cost = Callable[[int], float]
"""Finish time of a pipeline by number of micro-batches: non-decreasing, inf above its limit."""


def allot(total: int, costs: Sequence[Cost], least: int = 1) -> tuple[int, ...]:
    """Return the number of micro-batches of each pipeline, at least `least` each.

    Earlier pipelines win ties. Needs total >= least * len(costs).
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
    """Cut `microbatches` into consecutive ranges of the given lengths."""
    dealt, start = [], 0
    for count in counts:
        dealt.append(tuple(microbatches[start : start + count]))
        start += count
    return tuple(dealt)
