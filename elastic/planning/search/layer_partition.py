"""Best partition of the layers into the stages of one pipeline with a given order of nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from elastic.planning.cost.cost_model import (
    CostModel,
    Floats,
    Ints,
    StageCosts,
    in_flight,
    pipeline_seconds,
)
from elastic.planning.search.problem import TIME_TOLERANCE, PipelineShape

EVENNESS_WEIGHT = 1e-9
"""Weight of evenness, for the choice among equally fast cuts."""


@dataclass(frozen=True, slots=True)
class _StageBands:
    """Tables of the stages with 1 to `longest` layers."""

    longest: int
    ends: Ints
    """[first layer, number of layers - 1] end of the stage."""
    seconds: Floats
    """[table, first layer, number of layers - 1]; inf beyond the last layer."""
    costs: Floats
    """Indices as in `seconds`. `LayerPartitioner.cut` minimises the sum of costs."""


class LayerPartitioner:
    """Partitions the layers for one order of nodes, first stage first.

    Args:
        kinds, stages: kind of each node, and number of stages on it.
        microbatches: micro-batches of the pipeline.
        tail: limit on a stage's reduction and update in a ring of `pipelines`, seconds.
        messages: whether a stage's messages are part of its time.
    """

    def __init__(
        self,
        model: CostModel,
        schedule: str,
        kinds: Sequence[int],
        stages: Sequence[int],
        microbatches: int,
        tail: float = inf,
        pipelines: int = 1,
        *,
        messages: bool = True,
    ) -> None:
        self.model, self.schedule = model, schedule
        self.kinds, self.stages, self.microbatches = tuple(kinds), tuple(stages), microbatches
        owners = [
            (kind, r < n - 1) for kind, n in zip(kinds, stages, strict=True) for r in range(n)
        ]
        depth = len(owners)
        self.tables: list[StageCosts] = []
        for s, (kind, inside) in enumerate(owners):
            behind = depth - 1 - s
            ahead = in_flight(schedule, behind, depth, microbatches)
            last = behind == 0 or not messages
            self.tables.append(model.stages(kind, ahead, schedule, inside=inside, last=last))
        numbers: dict[int, int] = {}
        self._numbers = [numbers.setdefault(id(table), len(numbers)) for table in self.tables]
        """Per stage, the index of its table in `_distinct`."""
        self._distinct = {
            number: (table, kind)
            for number, table, (kind, _) in zip(self._numbers, self.tables, owners, strict=True)
        }
        self._tail, self._pipelines = tail, pipelines
        self._bands: _StageBands | None = None
        whole = [float(table.tau[0, -1]) for table in self.tables]
        self._unit = min((seconds for seconds in whole if seconds < inf), default=1.0) or 1.0

    def least_limit(self, low: float, high: float) -> float:
        """Return the least limit on a stage in [low, high] with which `cut` succeeds, or inf."""
        if self.cut(high) is None:
            return inf
        seconds = self._bands_up_to(self._longest(high)).seconds
        values = np.unique(seconds[(seconds >= low) & (seconds <= high)])
        first, last = 0, len(values) - 1
        while first < last:
            middle = (first + last) // 2
            if self.cut(float(values[middle])) is None:
                first = middle + 1
            else:
                last = middle
        return float(values[last]) if len(values) else high

    def cut(self, limit: float) -> tuple[int, ...] | None:
        """Return cuts with the least sum of fills, no stage above `limit`; None: impossible."""
        bands = self._bands_up_to(self._longest(limit))
        costs = np.where(bands.seconds <= limit * (1 + TIME_TOLERANCE), bands.costs, inf)
        rows = np.arange(self.model.n_layers + 1)
        rest = np.full(len(rows), inf)
        rest[-1] = 0.0
        chosen = []
        for number in reversed(self._numbers):
            sums = costs[number] + rest[bands.ends]
            best = sums.argmin(axis=1)
            chosen.append(bands.ends[rows, best])
            rest = sums[rows, best]
        if not np.isfinite(rest[0]):
            return None
        cuts = [0]
        for end in reversed(chosen):
            cuts.append(int(end[cuts[-1]]))
        return tuple(cuts)

    def _longest(self, limit: float) -> int:
        """Return the most layers that a node of some kind computes within `limit`, at least 1."""
        longest, rows = 1, np.arange(self.model.n_layers + 1)
        for kind in set(self.kinds):
            times = self.model.compute(kind, self.schedule)
            ends = np.searchsorted(times, times + limit * (1 + 2 * TIME_TOLERANCE), side="right")
            longest = max(longest, int((ends - 1 - rows).max()))
        return longest

    def _bands_up_to(self, longest: int) -> _StageBands:
        if self._bands is None or self._bands.longest < longest:
            n = self.model.n_layers
            rows = np.arange(n + 1)[:, None]
            ends = rows + 1 + np.arange(longest)
            outside = ends > n
            ends = np.minimum(ends, n)
            distinct = [self._distinct[number] for number in range(len(self._distinct))]
            seconds = np.stack([table.tau[rows, ends] for table, _ in distinct])
            seconds[:, outside] = inf
            if self._tail < inf:
                sums = [self.model.tail_sums(kind, self._pipelines) for _, kind in distinct]
                tails = np.stack([tail[ends] - tail[rows] for tail in sums])
                seconds[tails > self._tail * (1 + TIME_TOLERANCE)] = inf
            costs = np.stack([table.fill[rows, ends] for table, _ in distinct])
            costs += EVENNESS_WEIGHT / self._unit * seconds * seconds
            self._bands = _StageBands(longest, ends, seconds, costs)
        return self._bands

    def fill_and_slowest(self, cuts: Sequence[int]) -> tuple[float, float]:
        """Return (sum of fills, slowest stage) of these cuts, in seconds."""
        pairs = list(zip(self.tables, pairwise(cuts), strict=True))
        fill = sum(float(table.fill[a, b]) for table, (a, b) in pairs)
        return fill, max(float(table.tau[a, b]) for table, (a, b) in pairs)

    def fastest(self, least: float, factors: Sequence[float]) -> PipelineShape | None:
        """Return the fastest shape under limits of `factors` times `least`; None if none fits."""
        found: tuple[PipelineShape, float] | None = None
        for factor in factors:
            cuts = self.cut(least * factor)
            if cuts is None:
                continue
            figures = self.fill_and_slowest(cuts)
            seconds = float(pipeline_seconds(self.schedule, *figures, self.microbatches))
            if found is None or seconds < found[1] * (1 - TIME_TOLERANCE):
                shape = PipelineShape(
                    self.schedule, self.kinds, self.stages, cuts, self.microbatches
                )
                found = shape, seconds
        return found[0] if found else None


def partitioner_of(model: CostModel, shape: PipelineShape) -> LayerPartitioner:
    """Return the partitioner for the nodes of a shape, without a limit on the tail."""
    return LayerPartitioner(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches)
