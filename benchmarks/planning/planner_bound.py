"""Proven lower bound on the step time of any 1F1B plan: how far can the planner be from the best?

The bound does not follow the planner's choices. Every group of nodes that could form a pipeline
gets an optimistic price that no real pipeline of the group beats (`price_optimistically`). For a
time T, an integer programme over all groups bounds the micro-batches of all nodes
(`master_problem.solve_integer`), and the least T that allows M is the bound. Two properties of a
plan do not follow from the groups, so the bound branches over them: the length of the tail, and the
number of pipelines in the ring. All groups are enumerated, which needs few kinds (<= 3) and some
dozens of layers.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field, replace
from functools import partial
from math import comb, inf, isfinite

import numpy as np
from numpy.typing import NDArray

from elastic.domain.errors import FieldError
from elastic.planning.cost.cost_model import CostModel, Floats, Ints
from elastic.planning.schedule.schedule import ONE_F_ONE_B
from elastic.planning.search.columns import (
    composition_index,
    compositions,
    price_columns,
    stage_times,
)
from elastic.planning.search.master_problem import Relaxation, solve_integer
from elastic.planning.search.problem import Problem

MAX_GROUPS = 60_000
RANGE_STARTS = (1, 8, 16, 32)
"""Starts of the ranges of micro-batches per pipeline, used if memory is limited."""
EFFORT, SPLITS = 200_000, (14, 60)
"""Limit for branchings times groups; and the least and most branchings."""
ROUGH_PRICES, FINAL_PRICES = 12, 24
"""Number of prices of work to try, in the rough and in the final pricing."""
NARROW, WIDE = 0.97, 1.2
"""The range of tails is split if its part above `NARROW` times its end reaches the target gap.
Otherwise the number of pipelines is split, if `WIDE` times the ratio of its reductions exceeds the
ratio of the range's ends."""
SHORT_TAIL = 1e-3
"""Fraction of the step below which tails are not distinguished."""
TARGET_GAPS = 0.01, 0.045
"""Gaps of the bound to the known plan at which branching stops, in turn. The wider one yields a
better bound where the first is out of reach."""
SUFFICIENT_GAP = 0.04
"""Gap below which no further gap of `TARGET_GAPS` is tried."""
MAX_LIMITS = 2500
"""Largest number of limits on the slowest stage near the promising groups."""
COARSE_LIMITS, NEARBY = 48, 0.1
"""Number of limits in the rough pricing; fraction above promising groups where all limits count."""
INTERVALS = 72
"""Number of ranges of the slowest stage that bound the sum of stages."""


def lower_bound(problem: Problem, known_s: float, splits: int | None = None) -> float:
    """Return seconds that no 1F1B plan can beat, at most `known_s`.

    `known_s`: seconds of a known plan. `splits`: number of branchings; None: as `EFFORT` allows.

    Raises FieldError for a problem outside the bound's scope or with too many groups.
    """
    if problem.schedules != (ONE_F_ONE_B,):
        raise FieldError("schedules", problem.schedules, "the bound is for 1F1B alone")
    if not isfinite(known_s):
        raise FieldError("known_s", known_s, "the seconds of a known plan")
    if any(kind.units > 1 for kind in problem.model.kinds):
        raise FieldError(
            "units",
            max(kind.units for kind in problem.model.kinds),
            "the bound is for nodes of one unit",
        )
    nodes, limit = sum(problem.counts), problem.model.n_layers
    kinds = len(problem.counts)
    groups = comb(min(nodes, limit) + kinds, kinds)
    if groups > MAX_GROUPS:
        raise FieldError("groups", groups, f"at most {MAX_GROUPS} can be enumerated")
    if splits is None:
        splits = min(SPLITS[1], max(SPLITS[0], EFFORT // groups))
    best = 0.0
    for near in TARGET_GAPS:
        if best < known_s * (1 - SUFFICIENT_GAP):
            best = max(best, _branch_and_bound(problem, known_s, splits, near))
    return best


def _branch_and_bound(problem: Problem, known_s: float, splits: int, near: float) -> float:
    """Return the bound after `splits` branchings, or once the gap to `known_s` is `near`."""
    nodes = sum(problem.counts)
    whole = _GroupBounds(problem, known_s, known_s, 1)
    value = whole.values(known_s)
    if not value.any():
        return known_s
    fewest = -(-problem.microbatches // int(value.max()))
    most = nodes // int(whole.counts[value > 0].sum(axis=1).min())
    branches = [_branch(problem, known_s, 0.0, known_s, (fewest, max(fewest, most)))]
    for _ in range(splits):
        if branches[0].bound >= known_s * (1 - near):
            break
        worst = heapq.heappop(branches)
        parts = _split(problem, known_s, worst, near)
        for part in parts:
            heapq.heappush(branches, part)
        if parts == [worst]:
            break
    return min(known_s, branches[0].bound)


@dataclass(frozen=True, slots=True, order=True)
class _Branch:
    """Part of all plans: `number[0]` to `number[1]` pipelines, tails in [low, high] seconds.

    None of these plans is faster than `bound`.
    """

    bound: float
    low: float
    high: float
    number: tuple[int, int]
    rest: float
    """Least seconds of the pipelines without the tail."""
    groups: _GroupBounds | None = field(compare=False)


def _branch(
    problem: Problem,
    known_s: float,
    low: float,
    high: float,
    number: tuple[int, int],
    parent: _Branch | None = None,
) -> _Branch:
    """Return a branch with its bound. `parent` contains the branch: its bound holds here."""
    low = max(low, _least_tail(problem, number[0]))
    known = parent.bound if parent else 0.0
    if low > high or low >= known_s:
        return _Branch(known_s, low, high, number, known_s, None)
    groups, rest = None, known_s - low
    if parent and parent.number == number and parent.high == high:
        groups, rest = parent.groups, parent.rest
    else:
        same = parent and parent.number[0] == number[0] and parent.high == high
        groups = (
            parent.groups
            if parent and same
            else _GroupBounds(
                problem, high, known_s - low, number[0], parent.groups if parent else None
            )
        )
        if groups is not None:
            rest = groups.least(parent.rest if parent else 0.0, known_s - low, number)
    return _Branch(min(known_s, max(low + rest, known)), low, high, number, rest, groups)


def _split(problem: Problem, known_s: float, branch: _Branch, near: float) -> list[_Branch]:
    """Return the parts of a branch; the branch itself if it cannot be split.

    The range of tails is split if its upper part then reaches the target gap `near`. Otherwise the
    cause of the looser bound is split: that range, or the number of pipelines.
    """
    low, high, (fewest, most) = branch.low, branch.high, branch.number
    enough = known_s * (1 - near) - branch.rest
    rings = problem.model.reduction(fewest), problem.model.reduction(most)
    least = known_s * SHORT_TAIL
    if problem.model.has_no_tail:
        cut = inf
    elif low < least < high:
        cut = max(least, min(enough, high * NARROW))
    elif high <= least:
        cut = inf
    else:
        cut = enough if enough <= high * NARROW else (low * high) ** 0.5
    narrow = enough > high * NARROW and rings[0] * high < rings[1] * low * WIDE
    if fewest < most and (narrow or cut == inf):
        middle = min(most - 1, int(fewest + 1 if fewest < 8 else (fewest * most) ** 0.5))
        parts = [(low, high, (fewest, middle)), (low, high, (middle + 1, most))]
    elif cut == inf:
        return [branch]
    else:
        parts = [(low, cut, branch.number), (cut, high, branch.number)]
    return [_branch(problem, known_s, *part, parent=branch) for part in parts]


def _least_tail(problem: Problem, pipelines: int) -> float:
    """Return the least tail: of the largest layer, or of a share in the shallowest pipeline."""
    model = problem.model
    places = sum(n * kind.units for n, kind in zip(problem.counts, model.kinds, strict=True))
    depth = max(1, min(model.n_layers, places // pipelines))
    largest = max(float(np.diff(model.gradient).max()), float(model.gradient[-1]) / depth)
    return largest * model.reduction(pipelines)


class _GroupBounds:
    """Optimistic prices of all groups, for at least `fewest` pipelines and tails up to `tail`.

    First prices are rough, or those of `parent`, whose tail is longer or whose pipelines are fewer.
    Groups that may be needed within `seconds`, by the linear programme, are then priced again.
    """

    def __init__(
        self,
        problem: Problem,
        tail: float,
        seconds: float,
        fewest: int,
        parent: _GroupBounds | None = None,
    ) -> None:
        self.problem = problem
        model = problem.model
        tail = inf if model.has_no_tail else tail
        self.times = stage_times(model, ONE_F_ONE_B, model.n_layers)
        self._take(parent.parts if parent else self._rough(tail, seconds, fewest))
        parts = []
        for part, kept in zip(self.parts, self._kept(seconds), strict=True):
            if kept.any():
                levels = int(part.counts[kept].sum(axis=1).max())
                scope = replace(part.scope, levels=levels, tail=tail, pipelines=fewest)
                times = self._up_to(seconds / scope.least)
                parts.append(
                    price_optimistically(
                        scope, times, refine_limits(times, part, kept), FINAL_PRICES
                    )
                )
        self._take(parts)

    def _rough(self, tail: float, seconds: float, fewest: int) -> list[OptimisticColumns]:
        problem = self.problem
        starts = (
            [n for n in RANGE_STARTS if n <= problem.microbatches] if problem.model.limited else [1]
        )
        levels = min(sum(problem.counts), problem.model.n_layers)
        found = []
        for least, after in zip(starts, (*starts[1:], inf), strict=True):
            times = self._up_to(seconds / least)
            scope = PricingScope(
                model=problem.model,
                levels=levels,
                least=least,
                most=after - 1,
                tail=tail,
                pipelines=fewest,
            )
            found.append(
                price_optimistically(
                    scope, times, spread_by_ratio(times, COARSE_LIMITS), ROUGH_PRICES
                )
            )
        return found

    def _take(self, parts: list[OptimisticColumns]) -> None:
        self.parts = parts
        none = np.zeros((0, len(self.problem.counts)), dtype=np.int64)
        self.counts = max((part.counts for part in parts), key=len, default=none)
        self.free = np.asarray(
            (self.counts <= np.array(self.problem.counts)).all(axis=1), dtype=bool
        )

    def _up_to(self, most: float) -> Floats:
        some = self.times[self.times <= most]
        return some if len(some) else self.times[:1]

    def _kept(self, seconds: float) -> list[NDArray[np.bool_]]:
        """Return per part: [groups] whether a plan that ends within `seconds` may use the group.

        The other groups fall short by more than the slack of the linear programme (reduced-cost
        fixing).
        """
        value = self.values(seconds)
        if not value.any():
            return [np.zeros(len(part.counts), dtype=bool) for part in self.parts]
        optimum = Relaxation(self.counts, self.problem.counts).maximise(value)
        spare = optimum.bound * (1 + 1e-9) - self.problem.microbatches
        found = []
        for part in self.parts:
            done = part.microbatches(seconds)
            free = self.free[: len(part.counts)] & (done > 0)
            found.append(free & (part.counts @ optimum.prices - done <= spare))
        return found

    def values(self, seconds: float) -> Ints:
        """Return [groups]: most micro-batches; 0 if a group has more nodes than there are."""
        found = np.zeros(len(self.counts), dtype=np.int64)
        for part in self.parts:
            found[: len(part.counts)] = np.maximum(
                found[: len(part.counts)], part.microbatches(seconds)
            )
        return np.where(self.free, found, 0)

    def least(self, low: float, most: float, number: tuple[int, int]) -> float:
        """Return the least time, up to `most`, at which the bound on micro-batches reaches M."""
        relaxation = Relaxation(self.counts, self.problem.counts)
        for able in (
            partial(self._able, relaxation),
            partial(self._able_whole, relaxation, number),
        ):
            if not able(most):
                return most
            high = most
            while high - low > 3e-4 * high:
                middle = (low + high) / 2
                low, high = (low, middle) if able(middle) else (middle, high)
        return low

    def _able(self, relaxation: Relaxation, seconds: float) -> bool:
        value = self.values(seconds)
        enough = self.problem.microbatches * (1 - 1e-9)
        return bool(value.any()) and relaxation.maximise(value).bound >= enough

    def _able_whole(self, relaxation: Relaxation, number: tuple[int, int], seconds: float) -> bool:
        value, enough = self.values(seconds), self.problem.microbatches
        if not value.any():
            return False
        found = solve_integer(relaxation, value, enough, number)
        return found.bound >= enough * (1 - 1e-6)


@dataclass(frozen=True, slots=True, kw_only=True)
class PricingScope:
    """Conditions of a pricing of groups.

    Groups of up to `levels` nodes, tails up to `tail` in a ring of `pipelines`, and `least` to
    `most` micro-batches per pipeline.
    """

    model: CostModel
    levels: int
    least: int
    most: float
    tail: float
    pipelines: int


@dataclass(frozen=True, slots=True)
class OptimisticColumns:
    """Optimistic prices of all groups under one `PricingScope`."""

    scope: PricingScope
    counts: Ints
    fill: Floats
    """[groups, ranges of the slowest stage]: least sum of stage times; inf: impossible."""
    slowest: Floats

    def microbatches(self, seconds: float) -> Ints:
        """Return [groups]: upper bound on the micro-batches within `seconds`."""
        with np.errstate(invalid="ignore"):
            number = np.floor((seconds - self.fill) / self.slowest * (1 + 1e-9) + 1 + 1e-9)
        number[~np.isfinite(number) | (self.fill > seconds * (1 + 1e-9))] = 0
        best = number.max(axis=1)
        best[best < self.scope.least] = 0
        return np.asarray(np.minimum(best, self.scope.most), dtype=np.int64)


def price_optimistically(
    scope: PricingScope, times: Floats, limits: Floats, prices: int
) -> OptimisticColumns:
    """Return optimistic prices of all groups, with `limits` on the slowest stage.

    `limits` is a subset of `times`, all stage times. The slowest stage takes at least the least
    limit under which stages in some order cover the layers. The sum of stages is bounded by
    Lagrangian relaxation of that cover: at a price per unit of work, each place of the pipeline
    takes the cheapest stage that memory, tail and limit allow, in the best order of kinds. Any
    price yields a bound; the best of `prices` is kept. With m micro-batches, memory holds at least
    min(m, stages behind + 1) of them.
    """
    priced = price_columns(
        scope.model, limits, ONE_F_ONE_B, scope.levels, 1, scope.least, scope.tail, scope.pipelines,
        optimistic=True,
    )  # fmt: skip
    able = np.isfinite(priced.fill[:, 0])
    floors = times[np.searchsorted(times, np.concatenate(([0.0], limits[:-1])), side="right")]
    slowest = np.where(able, floors[priced.option[:, 0]], np.inf)
    ends = spread_by_ratio(limits, INTERVALS)
    starts = np.concatenate(([0.0], ends[:-1]))
    fill = _StageSumBounds(scope, ends, prices).all_groups()
    fill = np.where(ends >= slowest[:, None] * (1 - 1e-9), fill[: len(priced.counts)], np.inf)
    return OptimisticColumns(scope, priced.counts, fill, np.maximum(slowest[:, None], starts))


def spread_by_ratio(times: Floats, number: int) -> Floats:
    """Return about `number` of these times, evenly spaced by ratio."""
    wanted = np.geomspace(times[0], times[-1], number)
    return np.asarray(times[np.unique(np.minimum(np.searchsorted(times, wanted), len(times) - 1))])


def refine_limits(times: Floats, found: OptimisticColumns, kept: NDArray[np.bool_]) -> Floats:
    """Return limits from `times`: all near the least limits of `kept` groups, few elsewhere."""
    least = found.slowest[kept].min(axis=1)
    chosen = times[(times >= least.min() * (1 - 1e-9)) & (times <= least.max() * (1 + NEARBY))]
    return np.union1d(
        chosen[:: -(-max(1, len(chosen)) // MAX_LIMITS)], spread_by_ratio(times, COARSE_LIMITS)
    )


class _StageSumBounds:
    """Least sums of stage times, with all stages below each of the limits `ends`."""

    def __init__(self, scope: PricingScope, ends: Floats, prices: int) -> None:
        self.scope, self.ends = scope, ends
        model = self.model = scope.model
        self.work = model.prefix[0].forward + model.prefix[0].backward
        self.pairs = np.triu_indices(model.n_layers + 1, 1)
        self.sizes = self.work[self.pairs[1]] - self.work[self.pairs[0]]
        self.allowed = [
            model.tails(q, scope.pipelines)[self.pairs] <= scope.tail * (1 + 1e-9)
            for q in range(len(model.kinds))
        ]
        rates = [(p.forward[-1] + p.backward[-1]) / self.work[-1] for p in model.prefix]
        self.prices: Floats = np.geomspace(0.8 * min(rates), 4 * max(rates), prices)
        self._known: dict[tuple[int, int, bool, bool], Floats] = {}

    def place(self, kind: int, behind: int, inside: bool) -> Floats:
        """Return [limits, prices]: least seconds of a stage minus its work's price; inf: none."""
        ahead = min(behind + 1, self.scope.least) if self.model.limited else 1
        key = kind, ahead, inside, behind == 0
        if key not in self._known:
            tau = self.model.stages(kind, ahead, ONE_F_ONE_B, inside=inside, last=behind == 0).tau[
                self.pairs
            ]
            tau = np.where(self.allowed[kind], tau, np.inf)
            order = np.argsort(tau, kind="stable")
            reduced = tau[order, None] - self.sizes[order, None] * self.prices
            best = np.minimum.accumulate(reduced, axis=0)
            at = np.searchsorted(tau[order], self.ends * (1 + 1e-9), side="right") - 1
            self._known[key] = np.where(at[:, None] >= 0, best[np.maximum(at, 0)], np.inf)
        return self._known[key]

    def all_groups(self) -> Floats:
        """Return [groups, limits]: least sums of all groups, in the order of `price_columns`."""
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
                depth, source = before @ units, composition_index(before, level - 1)
                for behind in np.unique(depth):
                    if behind + units[kind] > self.model.n_layers:
                        continue
                    places = (self.place(kind, int(behind) + n, n > 0) for n in range(units[kind]))
                    part = rows[depth == behind]
                    here[part] = np.minimum(
                        here[part], below[source[depth == behind]] + sum(places)
                    )
            found.append((here + self.prices * self.work[-1]).max(axis=2))
            below = here
        return np.concatenate(found)
