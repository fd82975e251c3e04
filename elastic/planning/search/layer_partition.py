"""The best cut of one pipeline whose order of nodes is given."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from elastic.planning.cost.cost_model import CostModel, Floats, Ints, StageCosts, in_flight, pipeline_seconds
from elastic.planning.search.problem import TIME_TOLERANCE, PipelineShape

EVENNESS_WEIGHT = 1e-9
"""Weight of evenness among equal cuts."""


@dataclass(frozen=True, slots=True)
class _StageBands:
    """Stages of up to `longest` layers, by first layer and number of layers."""

    longest: int
    ends: Ints
    """[first layer, number]"""
    seconds: Floats
    """[table, first layer, number]; inf: beyond the last layer."""
    costs: Floats
    """What `LayerPartitioner.cut` minimises the sum of."""


class LayerPartitioner:
    """Cuts for one order of nodes, first stage first.

    Args:
        kinds, stages: kind of each node, and stages on it.
        microbatches: of the pipeline.
        tail: limit on a stage's reduction and update, seconds; `pipelines` takes part in the reduction.
    """

    def __init__(
        self, model: CostModel, schedule: str, kinds: Sequence[int], stages: Sequence[int], microbatches: int,
        tail: float = inf, pipelines: int = 1,
    ) -> None:  # fmt: skip
        self.model, self.schedule = model, schedule
        self.kinds, self.used, self.microbatches = tuple(kinds), tuple(stages), microbatches
        owners = [(kind, r < n - 1) for kind, n in zip(kinds, stages, strict=True) for r in range(n)]
        self.depth = len(owners)
        self.tables: list[StageCosts] = []
        for s, (kind, inside) in enumerate(owners):
            behind = self.depth - 1 - s
            ahead = in_flight(schedule, behind, self.depth, microbatches)
            self.tables.append(model.stages(kind, ahead, schedule, inside=inside, last=behind == 0))
        numbers: dict[int, int] = {}
        self._numbers = [numbers.setdefault(id(table), len(numbers)) for table in self.tables]
        """Of the different tables, by stage."""
        self.taus = [table.tau for table in self.tables]
        self._owners = {number: kind for number, (kind, _) in zip(self._numbers, owners, strict=True)}
        self._tail, self._pipelines = tail, pipelines
        self._known: _StageBands | None = None
        self._unit = (
            min((float(tau[0, -1]) for tau in self.taus if np.isfinite(tau[0, -1])), default=1.0) or 1.0
        )

    def least(self, low: float, high: float) -> float:
        """The least limit in [low, high] under which there is a cut; inf if there is none."""
        if self.cut(high) is None:
            return inf
        seconds = self._bands(self._longest(high)).seconds
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
        """Cuts with the least sum of fills when no stage takes longer than `limit`; the most even of these."""
        bands = self._bands(self._longest(limit))
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
        """No stage that keeps within `limit` has more layers, by the compute of the fastest kind."""
        longest, rows = 1, np.arange(self.model.n_layers + 1)
        for kind in set(self.kinds):
            times = self.model.compute(kind, self.schedule)
            ends = np.searchsorted(times, times + limit * (1 + 2 * TIME_TOLERANCE), side="right") - 1
            longest = max(longest, int((ends - rows).max()))
        return longest

    def _bands(self, longest: int) -> _StageBands:
        if self._known is None or self._known.longest < longest:
            n = self.model.n_layers
            rows = np.arange(n + 1)[:, None]
            ends = rows + 1 + np.arange(longest)
            outside = ends > n
            ends = np.minimum(ends, n)
            distinct = dict(zip(self._numbers, zip(self.taus, self.tables, strict=True), strict=True))
            pairs = [distinct[number] for number in range(len(distinct))]
            seconds = np.stack([tau[rows, ends] for tau, _ in pairs])
            seconds[:, outside] = inf
            if self._tail < inf:
                sums = [self.model.tail_sums(k, self._pipelines) for k in range(len(self.model.kinds))]
                tails = np.stack([sums[k][ends] - sums[k][rows] for _, k in sorted(self._owners.items())])
                seconds[tails > self._tail * (1 + TIME_TOLERANCE)] = inf
            costs = np.stack([table.fill[rows, ends] for _, table in pairs])
            costs += EVENNESS_WEIGHT / self._unit * seconds * seconds
            self._known = _StageBands(longest, ends, seconds, costs)
        return self._known

    def seconds(self, cuts: Sequence[int]) -> tuple[float, float]:
        """(sum of fills, slowest stage) of these cuts."""
        pairs = list(pairwise(cuts))
        fill = sum(float(table.fill[a, b]) for table, (a, b) in zip(self.tables, pairs, strict=True))
        return fill, max(float(tau[a, b]) for tau, (a, b) in zip(self.taus, pairs, strict=True))

    def best(self, least: float, factors: Sequence[float]) -> tuple[PipelineShape, float] | None:
        """The fastest shape under limits that are `factors` of the `least` one, with its seconds."""
        found: tuple[PipelineShape, float] | None = None
        for factor in factors:
            cuts = self.cut(least * factor)
            if cuts is None:
                continue
            seconds = float(pipeline_seconds(self.schedule, *self.seconds(cuts), self.microbatches))
            if found is None or seconds < found[1] * (1 - TIME_TOLERANCE):
                found = PipelineShape(self.schedule, self.kinds, self.used, cuts, self.microbatches), seconds
        return found
