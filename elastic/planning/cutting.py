"""The best cut of one pipeline whose order of nodes is given."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from math import inf

import numpy as np

from elastic.planning.model import CostModel, Floats, Stages, in_flight, pipeline_seconds
from elastic.planning.problem import CLOSE, Shape

EVEN = 1e-9
"""Weight of evenness among equal cuts."""


class Cutter:
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
        self.tables: list[Stages] = []
        for s, (kind, inside) in enumerate(owners):
            behind = self.depth - 1 - s
            ahead = in_flight(schedule, behind, self.depth, microbatches)
            self.tables.append(model.stages(kind, ahead, schedule, inside=inside, last=behind == 0))
        self.taus = [table.tau for table in self.tables]
        if tail < inf:
            allowed = {k: model.tails(k, pipelines) <= tail * (1 + CLOSE) for k in set(kinds)}
            self.taus = [
                np.where(allowed[k], tau, inf) for (k, _), tau in zip(owners, self.taus, strict=True)
            ]

        self._rows = np.arange(model.n_layers + 1)

    @cached_property
    def _costs(self) -> list[Floats]:
        """What `cut` minimises the sum of, by stage."""
        unit = min((float(tau[0, -1]) for tau in self.taus if np.isfinite(tau[0, -1])), default=1.0) or 1.0
        costs = {id(t): t.fill + EVEN / unit * t.tau * t.tau for t in self.tables}
        return [costs[id(t)] for t in self.tables]

    def least(self, low: float, high: float) -> float:
        """The least limit in [low, high] under which there is a cut; inf if there is none."""
        if self.cut(high) is None:
            return inf
        values = np.unique(np.concatenate([tau[(tau >= low) & (tau <= high)] for tau in self.taus]))
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
        rest = np.full(self.model.n_layers + 1, inf)
        rest[-1] = 0.0
        ends = []
        for cost, tau in zip(reversed(self._costs), reversed(self.taus), strict=True):
            sums = np.where(tau <= limit * (1 + CLOSE), cost, inf)
            sums += rest
            end = sums.argmin(axis=1)
            ends.append(end)
            rest = sums[self._rows, end]
        if not np.isfinite(rest[0]):
            return None
        cuts = [0]
        for end in reversed(ends):
            cuts.append(int(end[cuts[-1]]))
        return tuple(cuts)

    def seconds(self, cuts: Sequence[int]) -> tuple[float, float]:
        """(sum of fills, slowest stage) of these cuts."""
        pairs = list(pairwise(cuts))
        fill = sum(float(table.fill[a, b]) for table, (a, b) in zip(self.tables, pairs, strict=True))
        return fill, max(float(tau[a, b]) for tau, (a, b) in zip(self.taus, pairs, strict=True))

    def best(self, least: float, factors: Sequence[float]) -> tuple[Shape, float] | None:
        """The fastest shape under limits that are `factors` of the `least` one, with its seconds."""
        found: tuple[Shape, float] | None = None
        for factor in factors:
            cuts = self.cut(least * factor)
            if cuts is None:
                continue
            seconds = float(pipeline_seconds(self.schedule, *self.seconds(cuts), self.microbatches))
            if found is None or seconds < found[1] * (1 - CLOSE):
                found = Shape(self.schedule, self.kinds, self.used, cuts, self.microbatches), seconds
        return found
