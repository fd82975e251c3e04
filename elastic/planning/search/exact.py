"""Exact search for small clusters: all sets of pipelines, node orders, cuts and shares.

Three nested dynamic programmes.

1. Covers. Going from the last stage to the first, a *group* is the nodes used so far (how many of
   each kind) and the number of their stages. `cover[group]` is, for every first layer i and every
   limit on the slowest stage, the least sum of fills over stages that cover [i, L). The limit is
   kept beside the sum, because the group with the smallest sum may have too slow a stage: one best
   value per sub-problem would be wrong (Jang et al., SOSP 2023, section 4).
2. Sharing. Within a given time each group does a number of micro-batches. A knapsack over groups
   yields the most that k pipelines of the available nodes do. Bisection over all finish times finds
   the least sufficient time.
3. The tail (reduction and update) depends on the largest stage of the whole plan and on k. Limits
   on the tail are tried by branch and bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import product
from math import inf, prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from elastic.planning.cost.cost_model import Floats, in_flight, pipeline_seconds
from elastic.planning.schedule.schedule import ZERO_BUBBLE
from elastic.planning.search.problem import (
    TIME_TOLERANCE,
    NodeGroup,
    PipelineShape,
    Problem,
    Solution,
)

IMPOSSIBLE = -(1 << 40)
LAYERS_PER_TAIL_LIMIT = 8
"""Number of layers per limit on the tail in `work_estimate`, with several kinds of nodes."""


class _CoverKey(NamedTuple):
    """Conditions under which groups cover the layers."""

    schedule: str
    ahead: int
    """Maximum micro-batches in flight; for zero-bubble the exact number."""
    tail: float
    """Limit on a stage's reduction and update, seconds."""
    pipelines: int
    """Number of pipelines in the ring."""


class _CoverTables:
    """Computes the covers of all groups of a problem's nodes."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.model, self.counts = problem, problem.model, problem.counts
        self.n_layers = self.model.n_layers
        self.units = [min(kind.units, self.n_layers) for kind in self.model.kinds]
        places = sum(n * u for n, u in zip(self.counts, self.units, strict=True))
        self.deepest = min(self.n_layers, places)
        self.limits = {schedule: self._limits(schedule) for schedule in problem.schedules}
        self.schedules = [s for s in problem.schedules if len(self.limits[s])]
        self._covers: dict[_CoverKey, dict[NodeGroup, Floats]] = {}

    def _limits(self, schedule: str) -> Floats:
        """Return every time that the slowest stage can have, ascending."""
        found = [np.zeros(0)]
        for kind, n in enumerate(self.counts):
            if not n:
                continue
            for ahead in range(1, self.deepest + 1) if self.model.limited else (1,):
                for inside, last in ((False, False), (False, True), (True, False)):
                    if inside and self.units[kind] == 1:
                        continue
                    tau = self.model.stages(kind, ahead, schedule, inside=inside, last=last).tau
                    found.append(tau[np.isfinite(tau)])
        values = np.unique(np.concatenate(found))
        return values[values <= self.problem.upper_bound_s * (1 + TIME_TOLERANCE)]

    def cover(self, key: _CoverKey) -> dict[NodeGroup, Floats]:
        """Return the cover of every group, [L + 1, limits]: least sums of fills."""
        key = key if key.tail < inf else key._replace(pipelines=0)
        if key not in self._covers:
            self._covers[key] = self._build(key)
        return self._covers[key]

    def _build(self, key: _CoverKey) -> dict[NodeGroup, Floats]:
        start = np.full((self.n_layers + 1, len(self.limits[key.schedule])), inf)
        start[self.n_layers] = 0.0
        covers = {NodeGroup((0,) * len(self.counts), 0): start}
        for size in range(sum(self.counts)):
            for group in [g for g in covers if sum(g.counts) == size]:
                for kind, n in enumerate(self.counts):
                    if group.counts[kind] < n:
                        self._extend(covers, group, kind, key)
        return {group: cover for group, cover in covers.items() if group.depth}

    def _extend(
        self, covers: dict[NodeGroup, Floats], group: NodeGroup, kind: int, key: _CoverKey
    ) -> None:
        """Add the covers of `group` with a node of `kind` in front, by number of its units."""
        cover = covers[group]
        counts = tuple(n + (q == kind) for q, n in enumerate(group.counts))
        for used in range(1, self.units[kind] + 1):
            depth = group.depth + used
            if depth > self.deepest:
                return
            tau, fill = self.stage(kind, depth - 1, used > 1, key)
            cover = _prepend(cover, tau, fill, self.limits[key.schedule])
            known = covers.get(NodeGroup(counts, depth))
            covers[NodeGroup(counts, depth)] = cover if known is None else np.minimum(known, cover)

    def stage(self, kind: int, behind: int, inside: bool, key: _CoverKey) -> tuple[Floats, Floats]:
        """Return (tau, fill) of every stage of `kind` with `behind` stages after it."""
        ahead = key.ahead if key.schedule == ZERO_BUBBLE else min(behind + 1, key.ahead)
        stages = self.model.stages(kind, ahead, key.schedule, inside=inside, last=behind == 0)
        if key.tail == inf:
            return stages.tau, stages.fill
        allowed = self.model.tails(kind, key.pipelines) <= key.tail * (1 + TIME_TOLERANCE)
        return np.where(allowed, stages.tau, inf), stages.fill

    # ---- nodes and cuts of a cover ----

    def shape_of(
        self, group: NodeGroup, microbatches: int, tail: float, pipelines: int
    ) -> PipelineShape:
        """Return the shape with which `group` finishes first, within a limit on the tail."""
        best: tuple[float, _CoverKey, int] | None = None
        for schedule in self.schedules:
            ahead = 1
            if self.model.limited:
                ahead = in_flight(schedule, self.deepest - 1, group.depth, microbatches)
            key = _CoverKey(schedule, ahead, tail, pipelines)
            cover = self.cover(key).get(group)
            if cover is None:
                continue
            times = pipeline_seconds(schedule, cover[0], self.limits[schedule], microbatches)
            at = int(np.argmin(times))
            if best is None or float(times[at]) < best[0]:
                best = float(times[at]), key, at
        assert best is not None, "a group that was priced has a cover"
        _, key, limit = best
        at, nodes = 0, []
        while at < self.n_layers:
            kind, starts, at, group = self._first_node(key, group, at, limit)
            nodes.append((kind, starts))
        return PipelineShape(
            key.schedule,
            tuple(kind for kind, _ in nodes),
            tuple(len(starts) for _, starts in nodes),
            (*(start for _, starts in nodes for start in starts), self.n_layers),
            microbatches,
        )

    def _first_node(
        self, key: _CoverKey, group: NodeGroup, at: int, limit: int
    ) -> tuple[int, tuple[int, ...], int, NodeGroup]:
        """Return the first node of a best cover from layer `at`: (kind, cuts, end, next group)."""
        found = self.cover(key)
        target, slowest = found[group][at, limit], self.limits[key.schedule][limit]
        for kind, used in product(range(len(self.counts)), range(1, max(self.units) + 1)):
            counts = tuple(n - (q == kind) for q, n in enumerate(group.counts))
            behind = NodeGroup(counts, group.depth - used)
            if used > self.units[kind] or min(behind.counts) < 0 or behind.depth < 0:
                continue
            rest = found.get(behind)
            if rest is None and behind.depth:
                continue
            for starts, end, value in self._runs(key, kind, used, behind.depth, at, slowest):
                if rest is None:
                    after = 0.0 if end == self.n_layers else inf
                else:
                    after = rest[end, limit]
                if value + after <= target * (1 + TIME_TOLERANCE):
                    return kind, starts, end, behind
        raise AssertionError("a cover that was found can be traced back")

    def _runs(
        self, key: _CoverKey, kind: int, used: int, behind: int, at: int, slowest: float
    ) -> Iterator[tuple[tuple[int, ...], int, float]]:
        """Yield (first layers, end, sum of fills) of `used` stages of one node from layer `at`."""
        tau, fill = self.stage(kind, behind + used - 1, used > 1, key)
        ends = range(at + 1, self.n_layers + 1)
        for end in sorted(ends, key=lambda end: abs(tau[at, end] - slowest)):
            if tau[at, end] > slowest:
                continue
            if used == 1:
                yield (at,), end, float(fill[at, end])
                continue
            for starts, last, value in self._runs(key, kind, used - 1, behind, end, slowest):
                yield (at, *starts), last, value + float(fill[at, end])


def _prepend(cover: Floats, tau: Floats, fill: Floats, limits: Floats) -> Floats:
    """Return `cover` with another stage before it: least sums over the ends of that stage."""
    result = np.full_like(cover, inf)
    ends = np.flatnonzero(np.isfinite(cover).any(axis=1))
    for end in ends:
        starts = np.flatnonzero(np.isfinite(tau[:, end]))
        allowed = tau[starts, end][:, None] <= limits[None, :]
        sums = np.where(allowed, fill[starts, end][:, None] + cover[end][None, :], inf)
        result[starts] = np.minimum(result[starts], sums)
    return result


@dataclass
class _FinishTimes:
    """Finish times of all groups, for one limit on the tail."""

    groups: list[NodeGroup]
    times: Floats
    """[group, M + 1] seconds, non-decreasing; inf at 0 micro-batches and where impossible."""
    doable: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.values = np.unique(self.times[np.isfinite(self.times)])


class _Solver(_CoverTables):
    """Divides the micro-batches among groups."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        self.m = problem.microbatches
        most = min(sum(self.counts), self.m)
        current = problem.current
        depths = problem.depths
        self.numbers = (
            [len(depths)] if depths else sorted(range(1, most + 1), key=lambda k: (k != current, k))
        )
        """Numbers of pipelines to try, that of the current plan first."""

    def finish_times(self, tail: float, pipelines: int) -> _FinishTimes:
        """Return finish times per group and number of micro-batches, under the best schedule."""
        rows: dict[NodeGroup, Floats] = {}
        for schedule in self.schedules:
            steps = np.arange(1, self.m + 1)
            caps = np.minimum(steps, self.deepest) if self.model.limited else np.ones_like(steps)
            for cap in np.unique(caps):
                chosen = steps[caps == cap]
                key = _CoverKey(schedule, int(cap), tail, pipelines)
                for group, cover in self._groups(key):
                    fill = cover[0]
                    if not np.isfinite(fill).any():
                        continue
                    row = rows.setdefault(group, np.full(self.m + 1, inf))
                    times = pipeline_seconds(
                        schedule, fill[None, :], self.limits[schedule], chosen[:, None]
                    )
                    row[chosen] = np.minimum(row[chosen], times.min(axis=1))
        groups = sorted(rows)
        times = np.array([rows[g] for g in groups]).reshape(len(groups), self.m + 1)
        times[:, 1:] = np.maximum.accumulate(times[:, 1:], axis=1)
        return _FinishTimes(groups, times)

    def _groups(self, key: _CoverKey) -> Iterator[tuple[NodeGroup, Floats]]:
        """Yield groups with their covers, for numbers of micro-batches with this `key.ahead`.
        Zero-bubble with limited memory: a group of depth d has min(d, `key.ahead`) in flight."""
        if key.schedule != ZERO_BUBBLE or not self.model.limited:
            yield from self.cover(key).items()
            return
        for ahead in range(1, min(key.ahead, self.deepest) + 1):
            covers = self.cover(key._replace(ahead=ahead))
            yield from ((g, c) for g, c in covers.items() if min(g.depth, key.ahead) == ahead)

    def least(self, table: _FinishTimes, pipelines: int) -> float:
        """Return the least time in which so many pipelines do all micro-batches; inf if never."""
        low, high = 0, len(table.values)
        while low < high:
            middle = (low + high) // 2
            if self._doable(table, middle)[pipelines] >= self.m:
                high = middle
            else:
                low = middle + 1
        return float(table.values[low]) if low < len(table.values) else inf

    def _doable(self, table: _FinishTimes, at: int) -> list[int]:
        """Return, by number of pipelines, the most micro-batches within `table.values[at]`."""
        if at not in table.doable:
            filled = self._fill(table, float(table.values[at]))
            table.doable[at] = [int(best.flat[-1]) for best in filled]
        return table.doable[at]

    def _fill(self, table: _FinishTimes, seconds: float) -> list[NDArray[np.int64]]:
        """Return, per number of pipelines, the most micro-batches in time, by nodes per kind."""
        shares = (table.times <= seconds).sum(axis=1)
        layers = [np.zeros(tuple(n + 1 for n in self.counts), dtype=np.int64)]
        for k in range(1, max(self.numbers) + 1):
            following = np.full_like(layers[0], IMPOSSIBLE)
            for group, share in zip(table.groups, shares.tolist(), strict=True):
                if share == 0 or not self._allowed(group, k):
                    continue
                pairs = zip(self.counts, group.counts, strict=True)
                source = layers[-1][tuple(slice(0, n + 1 - c) for n, c in pairs)]
                target = following[tuple(slice(c, None) for c in group.counts)]
                np.maximum(target, source + share, out=target)
            layers.append(following)
        return layers

    def _allowed(self, group: NodeGroup, pipeline: int) -> bool:
        """Return whether `group` may be the pipeline of this number, counted from 1."""
        return not self.problem.depths or group.depth == self.problem.depths[pipeline - 1]

    def trace(
        self, table: _FinishTimes, seconds: float, pipelines: int
    ) -> list[tuple[NodeGroup, int]]:
        """Return (group, micro-batches) of each pipeline of a best division within `seconds`."""
        layers, shares = self._fill(table, seconds), (table.times <= seconds).sum(axis=1)
        left, found = self.counts, []
        for k in range(pipelines, 0, -1):
            for group, share in zip(table.groups, shares.tolist(), strict=True):
                rest = tuple(n - c for n, c in zip(left, group.counts, strict=True))
                if (
                    share
                    and min(rest) >= 0
                    and self._allowed(group, k)
                    and layers[k - 1][rest] + share == layers[k][left]
                ):
                    found.append((group, share))
                    left = rest
                    break
            else:
                raise AssertionError("a sharing that was found can be traced")
        return self._without_surplus(table, found[::-1])

    def _without_surplus(
        self, table: _FinishTimes, shares: list[tuple[NodeGroup, int]]
    ) -> list[tuple[NodeGroup, int]]:
        """Take the surplus over M from the pipelines that end last; each keeps a micro-batch."""
        rows = dict(zip(table.groups, table.times, strict=True))
        for _ in range(sum(share for _, share in shares) - self.m):
            able = [i for i, (_, share) in enumerate(shares) if share > 1]
            last = max(able, key=lambda i: (rows[shares[i][0]][shares[i][1]], i))
            shares[last] = (shares[last][0], shares[last][1] - 1)
        return shares

    def tails(self, pipelines: int) -> Floats:
        """Return every tail that a stage can have, ascending."""
        found = [self.model.tails(q, pipelines) for q, n in enumerate(self.counts) if n]
        upper = np.triu_indices(self.n_layers + 1, 1)
        return np.unique(np.concatenate([t[upper] for t in found]))


class _Candidate(NamedTuple):
    """A plan of `pipelines` pipelines."""

    seconds: float
    tail: float
    """Limit on the tail."""
    table: _FinishTimes
    end: float
    """Finish time of the slowest pipeline."""
    pipelines: int


def solve(problem: Problem) -> tuple[Solution | None, dict[int, float]]:
    """Return the best solution (None: nothing fits) and the best seconds by number of pipelines.

    The seconds of numbers that cannot win may be inf, because their search is not completed.
    """
    solver = _Solver(problem)
    if not solver.numbers or solver.deepest < 1:
        return None, {}
    free = solver.finish_times(inf, 0)
    least = {k: solver.least(free, k) for k in solver.numbers}
    best: _Candidate | None = None
    seconds: dict[int, float] = {}
    for k in sorted(solver.numbers, key=lambda k: least[k]):
        seconds[k] = inf
        limit = best.seconds if best else problem.upper_bound_s
        for found in _candidates(solver, free, least[k], k, limit):
            seconds[k] = min(seconds[k], found.seconds)
            if best is None or _better(found, best, problem.current):
                best = found
    if best is None:
        return None, seconds
    shares = solver.trace(best.table, best.end, best.pipelines)
    shapes = [solver.shape_of(group, m, best.tail, best.pipelines) for group, m in shares]
    return Solution(tuple(shapes), best.seconds), seconds


def _better(found: _Candidate, best: _Candidate, current: int) -> bool:
    if abs(found.seconds - best.seconds) > TIME_TOLERANCE * best.seconds:
        return found.seconds < best.seconds
    a, b = found.pipelines, best.pipelines
    return (a != current, a) < (b != current, b)


def _candidates(
    solver: _Solver, free: _FinishTimes, least: float, k: int, best: float
) -> Iterator[_Candidate]:
    """Yield plans of k pipelines, the best plan among them.

    Pipelines end earlier under a wider limit on the tail. So between two limits no plan is faster
    than the smaller limit plus the end under the wider one, and most ranges need not be searched.
    """
    if least == inf:
        return
    if solver.model.has_no_tail:
        yield _Candidate(least, inf, free, least, k)
        return
    limits = solver.tails(k)
    ranges = [(0, len(limits), least)]
    while ranges:
        low, high, end = ranges.pop()
        reach = (best - end) * (1 + TIME_TOLERANCE)
        high = int(np.searchsorted(limits[:high], reach, side="right"))
        if low >= high:
            continue
        at = high - 1 if end == least else (low + high) // 2
        tail = float(limits[at])
        table = solver.finish_times(tail, k)
        here = solver.least(table, k)
        if here < inf:
            best = min(best, here + tail)
            yield _Candidate(here + tail, tail, table, here, k)
            ranges.append((low, at, here))
        ranges.append((at + 1, high, end))


def work_estimate(problem: Problem) -> int:
    """Return the rough number of elementary array operations of `solve`."""
    layers = problem.model.n_layers
    states = prod(n + 1 for n in problem.counts)
    units = max(min(kind.units, layers) for kind in problem.model.kinds)
    cheap = problem.model.has_no_tail or len(problem.counts) == 1
    limits = 1 if cheap else max(1, layers // LAYERS_PER_TAIL_LIMIT)
    return states * sum(problem.counts) * units * layers * layers * limits
