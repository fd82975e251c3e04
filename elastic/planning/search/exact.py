"""The best plan for a small cluster, exactly: every set of pipelines, order of nodes, cut and share of micro-batches.

Three nested dynamic programmes.

1. Pipelines. Going from the last stage to the first, a *group* is the nodes used so far (how many of each
   kind) and the stages that they make. `cover[group]` is, for every first layer i and every limit on the
   slowest stage, the least sum of fills over stages that cover [i, L). The limit is kept beside the sum,
   because a group with the smallest sum may have too slow a stage: one best value a sub-problem would be
   wrong (Jang et al., SOSP 2023, section 4).
2. Sharing. Within a time each group does a number of micro-batches; a knapsack over groups says how many k
   pipelines of the nodes at hand do at most, and bisection over all finishing times finds the least time that
   suffices.
3. The tail (reduction and update) depends on the largest stage of the whole plan and on k. Limits on it are tried
   from the smallest; a limit that cannot beat the best plan found ends the search.
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
from elastic.planning.search.problem import TIME_TOLERANCE, NodeGroup, Problem, PipelineShape, Solution


@dataclass
class _CoverTables:
    """How the groups of nodes of a problem cover the layers."""

    problem: Problem
    _covers: dict[tuple[str, int, float, int], dict[NodeGroup, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        p = self.problem
        self.model, self.counts, self.m = p.model, p.counts, p.microbatches
        self.n_layers = p.model.n_layers
        units = [min(kind.units, self.n_layers) for kind in p.model.kinds]
        self.units, self.most = units, 1
        self.deepest = min(self.n_layers, sum(n * u for n, u in zip(self.counts, units, strict=True)))
        self.limits = {schedule: self._limits(schedule) for schedule in p.schedules}
        self.schedules = [schedule for schedule in p.schedules if len(self.limits[schedule])]

    # ---- pipelines ----

    def _limits(self, schedule: str) -> Floats:
        """Every time that the slowest stage can have."""
        found = [np.zeros(0)]
        for kind, n in enumerate(self.counts):
            for ahead in range(1, self.deepest + 1) if self.model.limited and n else [1] * bool(n):
                for inside, last in ((False, False), (False, True), (True, False)):
                    if inside and self.units[kind] == 1:
                        continue
                    tau = self.model.stages(kind, ahead, schedule, inside=inside, last=last).tau
                    found.append(tau[np.isfinite(tau)])
        values = np.unique(np.concatenate(found))
        return values[values <= self.problem.above * (1 + TIME_TOLERANCE)]

    def cover(self, schedule: str, ahead: int, tail: float, pipelines: int) -> dict[NodeGroup, Floats]:
        """`cover` of every group: [L + 1, limits]. `ahead`: most micro-batches in flight (zero-bubble: exactly)."""
        key = (schedule, ahead, tail, 0 if tail == inf else pipelines)
        if key not in self._covers:
            self._covers[key] = self._build(schedule, ahead, tail, pipelines)
        return self._covers[key]

    def _build(self, schedule: str, ahead: int, tail: float, pipelines: int) -> dict[NodeGroup, Floats]:
        start = np.full((self.n_layers + 1, len(self.limits[schedule])), inf)
        start[self.n_layers] = 0.0
        covers = {NodeGroup((0,) * len(self.counts), 0): start}
        for work_estimate in range(sum(self.counts)):
            for group in [g for g in covers if sum(g.counts) == work_estimate]:
                for kind, n in enumerate(self.counts):
                    if group.counts[kind] < n:
                        self._extend(covers, group, kind, schedule, ahead, tail, pipelines)
        return {group: cover for group, cover in covers.items() if group.depth}

    def _extend(
        self, covers: dict[NodeGroup, Floats], group: NodeGroup, kind: int,
        schedule: str, ahead: int, tail: float, pipelines: int,
    ) -> None:  # fmt: skip
        """Put a node of `kind` before `group`, with any number of its units."""
        cover = covers[group]
        counts = tuple(n + (q == kind) for q, n in enumerate(group.counts))
        for used in range(1, self.units[kind] + 1):
            depth = group.depth + used
            if depth > self.deepest:
                return
            table, fill = self.stage(kind, depth - 1, used > 1, schedule, ahead, tail, pipelines)
            cover = _prepend(cover, table, fill, self.limits[schedule])
            known = covers.get(NodeGroup(counts, depth))
            covers[NodeGroup(counts, depth)] = cover if known is None else np.minimum(known, cover)

    def stage(
        self, kind: int, behind: int, inside: bool, schedule: str, ahead: int, tail: float, pipelines: int
    ) -> tuple[Floats, Floats]:
        flying = ahead if schedule == ZERO_BUBBLE else min(behind + 1, ahead)
        stages = self.model.stages(kind, flying, schedule, inside=inside, last=behind == 0)
        if tail == inf:
            return stages.tau, stages.fill
        tau = np.where(self.model.tails(kind, pipelines) <= tail * (1 + TIME_TOLERANCE), stages.tau, inf)
        return tau, stages.fill


def _prepend(cover: Floats, tau: Floats, fill: Floats, limits: Floats) -> Floats:
    """Put one stage before what `cover` covers: [L + 1, limits], the least sum over where the stage ends."""
    result = np.full_like(cover, inf)
    ends = np.flatnonzero(np.isfinite(cover).any(axis=1))
    for end in ends:
        starts = np.flatnonzero(np.isfinite(tau[:, end]))
        allowed = tau[starts, end][:, None] <= limits[None, :]
        sums = np.where(allowed, fill[starts, end][:, None] + cover[end][None, :], inf)
        result[starts] = np.minimum(result[starts], sums)
    return result


IMPOSSIBLE = -(1 << 40)
FEW_LAYERS = 8
"""With so many, limits on the tail cost little; with several kinds of nodes their number grows with the layers."""


@dataclass
class _FinishTimes:
    """Finishing times of all groups, for one limit on the tail."""

    groups: list[NodeGroup]
    times: Floats
    """[group, M + 1]; never falls with micro-batches; inf at 0 of them and where it cannot be done."""

    def __post_init__(self) -> None:
        self.values = np.unique(self.times[np.isfinite(self.times)])
        self.doable: dict[int, list[int]] = {}


@dataclass
class _Solver(_CoverTables):
    def table(self, tail: float, pipelines: int) -> _FinishTimes:
        """Finishing times of every group for every number of micro-batches; the best schedule counts."""
        rows: dict[NodeGroup, Floats] = {}
        for schedule in self.schedules:
            steps = np.arange(1, self.m + 1)
            caps = np.minimum(steps, self.deepest) if self.model.limited else np.ones_like(steps)
            for cap in np.unique(caps):
                chosen = steps[caps == cap]
                for group, cover in self._groups(schedule, int(cap), tail, pipelines):
                    fill = cover[0]
                    if not np.isfinite(fill).any():
                        continue
                    row = rows.setdefault(group, np.full(self.m + 1, inf))
                    times = pipeline_seconds(schedule, fill[None, :], self.limits[schedule], chosen[:, None])
                    row[chosen] = np.minimum(row[chosen], times.min(axis=1))
        groups = sorted(rows)
        times = np.array([rows[g] for g in groups]).reshape(len(groups), self.m + 1)
        times[:, 1:] = np.maximum.accumulate(times[:, 1:], axis=1)
        return _FinishTimes(groups, times)

    def _groups(self, schedule: str, cap: int, tail: float, pipelines: int) -> Iterator[tuple[NodeGroup, Floats]]:
        """Groups with their covers when pipelines run `cap` micro-batches, or at least so many."""
        if schedule != ZERO_BUBBLE or not self.model.limited:
            yield from self.cover(schedule, cap, tail, pipelines).items()
            return
        for ahead in range(1, min(cap, self.deepest) + 1):
            covers = self.cover(schedule, ahead, tail, pipelines)
            yield from ((g, c) for g, c in covers.items() if min(g.depth, cap) == ahead)

    # ---- sharing ----

    def least(self, table: _FinishTimes, pipelines: int) -> float:
        """The least time within which so many pipelines, of at most the nodes there are, do all micro-batches."""
        low, high = 0, len(table.values)
        while low < high:
            middle = (low + high) // 2
            if self.doable(table, middle)[pipelines] >= self.m:
                high = middle
            else:
                low = middle + 1
        return float(table.values[low]) if low < len(table.values) else inf

    def doable(self, table: _FinishTimes, at: int) -> list[int]:
        """By number of pipelines, the most micro-batches that are done within `table.values[at]`."""
        if at not in table.doable:
            table.doable[at] = [int(best.flat[-1]) for best in self._fill(table, float(table.values[at]))]
        return table.doable[at]

    def _fill(self, table: _FinishTimes, seconds: float) -> list[NDArray[np.int64]]:
        """For 0, 1, ... pipelines: [counts + 1 ...] the most micro-batches that parts of the nodes do in time."""
        shares = (table.times <= seconds).sum(axis=1)
        layers = [np.zeros(tuple(n + 1 for n in self.counts), dtype=np.int64)]
        for k in range(1, self.most + 1):
            following = np.full_like(layers[0], IMPOSSIBLE)
            for group, share in zip(table.groups, shares.tolist(), strict=True):
                if share == 0 or not self._allowed(group, k):
                    continue
                source = layers[-1][
                    tuple(slice(0, n + 1 - c) for n, c in zip(self.counts, group.counts, strict=True))
                ]
                target = following[tuple(slice(c, None) for c in group.counts)]
                np.maximum(target, source + share, out=target)
            layers.append(following)
        return layers

    def _allowed(self, group: NodeGroup, pipeline: int) -> bool:
        """Whether `group` may be the pipeline of this number, counted from 1."""
        return not self.problem.depths or group.depth == self.problem.depths[pipeline - 1]

    def trace(self, table: _FinishTimes, seconds: float, pipelines: int) -> list[tuple[NodeGroup, int]]:
        """(group, micro-batches) of each pipeline of a best sharing within `seconds`."""
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
        return self._exactly(table, found[::-1])

    def _exactly(self, table: _FinishTimes, shares: list[tuple[NodeGroup, int]]) -> list[tuple[NodeGroup, int]]:
        """Take what is more than M from the pipelines that end last, one micro-batch at a time; one stays with each."""
        rows = dict(zip(table.groups, table.times, strict=True))
        for _ in range(sum(share for _, share in shares) - self.m):
            able = [i for i, (_, share) in enumerate(shares) if share > 1]
            last = max(able, key=lambda i: (rows[shares[i][0]][shares[i][1]], i))
            shares[last] = (shares[last][0], shares[last][1] - 1)
        return shares

    # ---- the whole ----

    def numbers(self) -> list[int]:
        """Numbers of pipelines to try, the present one first."""
        if self.problem.depths:
            return [len(self.problem.depths)]
        most = min(sum(self.counts), self.m)
        return sorted(range(1, most + 1), key=lambda k: (k != self.problem.current, k))

    def tails(self, pipelines: int) -> Floats:
        """Every tail that a stage can have, ascending."""
        found = [self.model.tails(q, pipelines) for q, n in enumerate(self.counts) if n]
        upper = np.triu_indices(self.n_layers + 1, 1)
        return np.unique(np.concatenate([t[upper] for t in found]))


def solve(problem: Problem) -> tuple[Solution | None, dict[int, float]]:
    """Return the best solution (None: nothing fits) and, by number of pipelines, the best seconds found (some are only
    bounds from below: numbers that cannot win are not followed to their end)."""
    solver = _Solver(problem)
    numbers = solver.numbers()
    if not numbers or solver.deepest < 1:
        return None, {}
    solver.most = max(numbers)
    free = solver.table(inf, 0)
    least = {k: solver.least(free, k) for k in numbers}
    best: tuple[float, _FinishTimes, float, int, float] | None = None
    seconds: dict[int, float] = {}
    for k in sorted(numbers, key=lambda k: least[k]):
        seconds[k] = inf
        for total, tail, table, ending in _tailed(
            solver, free, least[k], k, best[0] if best else problem.above
        ):
            seconds[k] = min(seconds[k], total)
            if best is None or _better(total, k, best[0], best[3], problem.current):
                best = (total, table, ending, k, tail)
    if best is None:
        return None, seconds
    total, table, ending, k, tail = best
    shapes = [shape_of(solver, group, share, tail, k) for group, share in solver.trace(table, ending, k)]
    return Solution(tuple(shapes), total), seconds


def _better(total: float, k: int, best: float, best_k: int, current: int) -> bool:
    if abs(total - best) > TIME_TOLERANCE * best:
        return total < best
    return (k != current, k) < (best_k != current, best_k)


def _tailed(
    solver: _Solver, free: _FinishTimes, least: float, k: int, best: float
) -> Iterator[tuple[float, float, _FinishTimes, float]]:
    """Plans of k pipelines, the best among them, as (seconds, limit on the tail, table, end of the pipelines).

    Pipelines end the earlier the wider the limit. So between two limits no plan is faster than the smaller limit and
    the end under the wider one, and most ranges need not be looked into.
    """
    if least == inf:
        return
    if solver.model.has_no_tail:
        yield least, inf, free, least
        return
    limits = solver.tails(k)
    ranges = [(0, len(limits), least)]
    while ranges:
        low, high, ending = ranges.pop()
        high = int(np.searchsorted(limits[:high], (best - ending) * (1 + TIME_TOLERANCE), side="right"))
        if low >= high:
            continue
        at = high - 1 if ending == least else (low + high) // 2
        table = solver.table(float(limits[at]), k)
        here = solver.least(table, k)
        if here < inf:
            best = min(best, here + float(limits[at]))
            yield here + float(limits[at]), float(limits[at]), table, here
            ranges.append((low, at, here))
        ranges.append((at + 1, high, ending))


def work_estimate(problem: Problem) -> int:
    """How much work `solve` is, roughly: elementary array operations."""
    layers = problem.model.n_layers
    states = prod(n + 1 for n in problem.counts)
    units = max(min(kind.units, layers) for kind in problem.model.kinds)
    alike = problem.model.has_no_tail or len(problem.counts) == 1
    limits = 1 if alike else max(1, layers // FEW_LAYERS)
    return states * sum(problem.counts) * units * layers * layers * limits


class _CoverKey(NamedTuple):
    """Under what a pipeline is covered."""

    covers: _CoverTables
    schedule: str
    ahead: int
    tail: float
    pipelines: int


def shape_of(covers: _CoverTables, group: NodeGroup, microbatches: int, tail: float, pipelines: int) -> PipelineShape:
    """How `group` covers the layers best, for so many micro-batches and a limit on the tail."""
    best: tuple[float, _CoverKey, int] | None = None
    for schedule in covers.schedules:
        ahead = 1
        if covers.model.limited:
            ahead = in_flight(schedule, covers.deepest - 1, group.depth, microbatches)
        way = _CoverKey(covers, schedule, ahead, tail, pipelines)
        cover = covers.cover(schedule, ahead, tail, pipelines).get(group)
        if cover is None:
            continue
        times = pipeline_seconds(schedule, cover[0], covers.limits[schedule], microbatches)
        at = int(np.argmin(times))
        if best is None or float(times[at]) < best[0]:
            best = float(times[at]), way, at
    assert best is not None, "a group that was priced has a cover"
    _, way, limit = best
    nodes = _unwind(way, group, limit)
    return PipelineShape(
        way.schedule,
        tuple(kind for kind, _ in nodes),
        tuple(len(starts) for _, starts in nodes),
        (*(start for _, starts in nodes for start in starts), covers.n_layers),
        microbatches,
    )


def _unwind(way: _CoverKey, group: NodeGroup, limit: int) -> list[tuple[int, tuple[int, ...]]]:
    """Nodes of the best cover under a limit: (kind, first layer of each of its stages), first stage first."""
    at, nodes = 0, []
    while at < way.covers.n_layers:
        kind, starts, at, group = _first_node(way, group, at, limit)
        nodes.append((kind, starts))
    return nodes


def _first_node(way: _CoverKey, group: NodeGroup, at: int, limit: int) -> tuple[int, tuple[int, ...], int, NodeGroup]:
    """The first node of a best cover from layer `at`: (kind, its cuts, where it ends, the group behind it)."""
    covers = way.covers
    found = covers.cover(way.schedule, way.ahead, way.tail, way.pipelines)
    target, slowest = found[group][at, limit], covers.limits[way.schedule][limit]
    for kind, used in product(range(len(covers.counts)), range(1, max(covers.units) + 1)):
        behind = NodeGroup(tuple(n - (q == kind) for q, n in enumerate(group.counts)), group.depth - used)
        if used > covers.units[kind] or min(behind.counts) < 0 or behind.depth < 0:
            continue
        rest = found.get(behind)
        if rest is None and behind.depth:
            continue
        for starts, end, value in _blocks(way, kind, used, behind.depth, at, slowest):
            after = (0.0 if end == covers.n_layers else inf) if rest is None else rest[end, limit]
            if value + after <= target * (1 + TIME_TOLERANCE):
                return kind, starts, end, behind
    raise AssertionError("a cover that was found can be unwound")


def _blocks(
    way: _CoverKey, kind: int, used: int, behind: int, at: int, slowest: float
) -> Iterator[tuple[tuple[int, ...], int, float]]:
    """Ways to put `used` stages of one node from layer `at` on: (first layers, end, sum of fills)."""
    covers = way.covers
    tau, fill = covers.stage(
        kind, behind + used - 1, used > 1, way.schedule, way.ahead, way.tail, way.pipelines
    )
    ends = range(at + 1, covers.n_layers + 1)
    for end in sorted(ends, key=lambda end: abs(tau[at, end] - slowest)):
        if tau[at, end] > slowest:
            continue
        if used == 1:
            yield (at,), end, float(fill[at, end])
            continue
        for starts, last, value in _blocks(way, kind, used - 1, behind, end, slowest):
            yield (at, *starts), last, value + float(fill[at, end])
