"""Split of micro-batches over pipelines that lets the last pipeline finish earliest.

Each micro-batch goes to the pipeline that would finish it first. This greedy choice is optimal,
because a pipeline's finish time grows with every micro-batch.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence

Cost = Callable[[int], float]
"""Finish time by number of micro-batches: never decreasing; inf above the pipeline's limit."""


def allot(total: int, costs: Sequence[Cost], least: int = 1) -> tuple[int, ...]:
    """Return the number of micro-batches of each pipeline, at least `least` each.

    Earlier pipelines win ties. `total` must be at least `least` * len(costs).
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
    """Return `microbatches` cut into consecutive parts of the lengths `counts`."""
    dealt, start = [], 0
    for count in counts:
        dealt.append(tuple(microbatches[start : start + count]))
        start += count
    return tuple(dealt)
