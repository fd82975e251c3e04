"""What a group of nodes could do at best: prices that no real pipeline of the group beats.

- The slowest stage takes at least the least limit under which stages of any order cover the layers (`columns`).
- The sum of the stages' times is bounded by Lagrangian relaxation of "the stages cover the layers": at a price a unit
  of work each place of the pipeline takes, of all stages [i, j) that memory, the tail and the limit allow it, the
  one that is cheapest; the order of kinds is the best one. Any price gives a bound, and the best of some is
  kept. Places are where 1F1B's memory differs, so recomputation is counted.

With m micro-batches memory holds at least min(m, stages behind + 1) of them: the figures are for `least` to `most`
micro-batches, with the least.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from elastic.planning.cost.cost_model import CostModel, Floats, Ints
from elastic.planning.schedule.schedule import ONE_F_ONE_B
from elastic.planning.search.columns import columns, compositions, rank

LIMITS = 2500
"""On the slowest stage, at most about."""
COARSE, NEAR = 48, 0.1
"""Limits where nothing is known yet; and how far above the least limits of promising groups all are taken."""
INTERVALS = 72
"""The slowest stage is treated in so many ranges when the sum of stages is bounded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What the groups are for: up to `levels` nodes, their stages' tails within `tail` in a ring of `pipelines`,
    `least` to `most` micro-batches a pipeline."""

    model: CostModel
    levels: int
    least: int
    most: float
    tail: float
    pipelines: int


@dataclass(frozen=True, slots=True)
class Optimistic:
    """Optimistic options of all groups."""

    scope: Scope
    counts: Ints
    fill: Floats
    """[groups, ranges of the slowest stage] least sum of stage times; inf: not possible."""
    slowest: Floats

    def microbatches(self, seconds: float) -> Ints:
        """[groups] no pipeline does more within `seconds`."""
        with np.errstate(invalid="ignore"):
            number = np.floor((seconds - self.fill) / self.slowest * (1 + 1e-9) + 1 + 1e-9)
        number[~np.isfinite(number) | (self.fill > seconds * (1 + 1e-9))] = 0
        best = number.max(axis=1)
        best[best < self.scope.least] = 0
        return np.asarray(np.minimum(best, self.scope.most), dtype=np.int64)


def optimistic(scope: Scope, times: Floats, limits: Floats, prices: int) -> Optimistic:
    """Price all groups with `limits` on the slowest stage, some of all `times` that stages have."""
    priced = columns(
        scope.model, limits, ONE_F_ONE_B, scope.levels, 1, scope.least, scope.tail, scope.pipelines,
        optimistic=True,
    )  # fmt: skip
    able = np.isfinite(priced.fill[:, 0])
    floors = times[np.searchsorted(times, np.concatenate(([0.0], limits[:-1])), side="right")]
    slowest = np.where(able, floors[priced.option[:, 0]], np.inf)
    ends = spread(limits, INTERVALS)
    starts = np.concatenate(([0.0], ends[:-1]))
    fill = _Sums(scope, ends, prices).of()
    fill = np.where(ends >= slowest[:, None] * (1 - 1e-9), fill[: len(priced.counts)], np.inf)
    return Optimistic(scope, priced.counts, fill, np.maximum(slowest[:, None], starts))


def spread(times: Floats, number: int) -> Floats:
    """About so many of these times, evenly spread by ratio."""
    wanted = np.geomspace(times[0], times[-1], number)
    return np.asarray(times[np.unique(np.minimum(np.searchsorted(times, wanted), len(times) - 1))])


def refined(times: Floats, found: Optimistic, kept: NDArray[np.bool_]) -> Floats:
    """Limits among `times`: all near the least limits of the groups `kept`, few elsewhere."""
    least = found.slowest[kept].min(axis=1)
    chosen = times[(times >= least.min() * (1 - 1e-9)) & (times <= least.max() * (1 + NEAR))]
    return np.union1d(chosen[:: -(-max(1, len(chosen)) // LIMITS)], spread(times, COARSE))


class _Sums:
    """Least sums of stage times, none of them above the limits `ends`."""

    def __init__(self, scope: Scope, ends: Floats, prices: int) -> None:
        self.scope, self.ends = scope, ends
        model = self.model = scope.model
        self.work = model.prefix(0).forward + model.prefix(0).backward
        self.pairs = np.triu_indices(model.n_layers + 1, 1)
        self.sizes = self.work[self.pairs[1]] - self.work[self.pairs[0]]
        self.allowed = [
            model.tails(q, scope.pipelines)[self.pairs] <= scope.tail * (1 + 1e-9)
            for q in range(len(model.kinds))
        ]
        rates = [
            (p.forward[-1] + p.backward[-1]) / self.work[-1]
            for p in map(model.prefix, range(len(model.kinds)))
        ]
        self.prices: Floats = np.geomspace(0.8 * min(rates), 4 * max(rates), prices)
        self._known: dict[tuple[int, int, bool, bool], Floats] = {}

    def place(self, kind: int, behind: int, inside: bool) -> Floats:
        """[limits, prices] the least of a stage's seconds less the price of its work; inf: no stage is allowed."""
        ahead = min(behind + 1, self.scope.least) if self.model.limited else 1
        key = kind, ahead, inside, behind == 0
        if key not in self._known:
            tau = self.model.stages(kind, ahead, ONE_F_ONE_B, inside=inside, last=behind == 0).tau[self.pairs]
            tau = np.where(self.allowed[kind], tau, np.inf)
            order = np.argsort(tau, kind="stable")
            reduced = tau[order, None] - self.sizes[order, None] * self.prices
            best = np.minimum.accumulate(reduced, axis=0)
            at = np.searchsorted(tau[order], self.ends * (1 + 1e-9), side="right") - 1
            self._known[key] = np.where(at[:, None] >= 0, best[np.maximum(at, 0)], np.inf)
        return self._known[key]

    def of(self) -> Floats:
        """[groups, limits] of all groups, in the order of `columns`."""
        kinds = len(self.model.kinds)
        units = np.array([min(kind.units, self.model.n_layers) for kind in self.model.kinds])
        below = np.zeros((1, len(self.ends), len(self.prices)))
        found = []
        for level in range(1, self.scope.levels + 1):
            groups = compositions(kinds, level)
            here = np.full((len(groups), len(self.ends), len(self.prices)), np.inf)
            for kind in range(kinds):
                rows = np.flatnonzero(groups[:, kind] > 0)
                before = groups[rows] - (np.arange(kinds) == kind)
                depth, source = before @ units, rank(before, level - 1)
                for behind in np.unique(depth):
                    if behind + units[kind] > self.model.n_layers:
                        continue
                    places = (self.place(kind, int(behind) + n, n > 0) for n in range(units[kind]))
                    part = rows[depth == behind]
                    here[part] = np.minimum(here[part], below[source[depth == behind]] + sum(places))
            found.append((here + self.prices * self.work[-1]).max(axis=2))
            below = here
        return np.concatenate(found)
