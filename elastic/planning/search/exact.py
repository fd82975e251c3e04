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
from dataclasses import dataclass
from math import inf, prod

import numpy as np
from numpy.typing import NDArray

from elastic.planning.cost.cost_model import Floats, pipeline_seconds
from elastic.planning.schedule.schedule import ZERO_BUBBLE
from elastic.planning.search.exact_cover import Covers
from elastic.planning.search.problem import CLOSE, Group, Problem, Solution
from elastic.planning.search.unwinding import shape_of

IMPOSSIBLE = -(1 << 40)
FEW_LAYERS = 8
"""With so many, limits on the tail cost little; with several kinds of nodes their number grows with the layers."""


@dataclass
class _Table:
    """Finishing times of all groups, for one limit on the tail."""

    groups: list[Group]
    times: Floats
    """[group, M + 1]; never falls with micro-batches; inf at 0 of them and where it cannot be done."""

    def __post_init__(self) -> None:
        self.values = np.unique(self.times[np.isfinite(self.times)])
        self.doable: dict[int, list[int]] = {}


@dataclass
class _Solver(Covers):
    def table(self, tail: float, pipelines: int) -> _Table:
        """Finishing times of every group for every number of micro-batches; the best schedule counts."""
        rows: dict[Group, Floats] = {}
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
        return _Table(groups, times)

    def _groups(self, schedule: str, cap: int, tail: float, pipelines: int) -> Iterator[tuple[Group, Floats]]:
        """Groups with their covers when pipelines run `cap` micro-batches, or at least so many."""
        if schedule != ZERO_BUBBLE or not self.model.limited:
            yield from self.cover(schedule, cap, tail, pipelines).items()
            return
        for ahead in range(1, min(cap, self.deepest) + 1):
            covers = self.cover(schedule, ahead, tail, pipelines)
            yield from ((g, c) for g, c in covers.items() if min(g.depth, cap) == ahead)

    # ---- sharing ----

    def least(self, table: _Table, pipelines: int) -> float:
        """The least time within which so many pipelines, of at most the nodes there are, do all micro-batches."""
        low, high = 0, len(table.values)
        while low < high:
            middle = (low + high) // 2
            if self.doable(table, middle)[pipelines] >= self.m:
                high = middle
            else:
                low = middle + 1
        return float(table.values[low]) if low < len(table.values) else inf

    def doable(self, table: _Table, at: int) -> list[int]:
        """By number of pipelines, the most micro-batches that are done within `table.values[at]`."""
        if at not in table.doable:
            table.doable[at] = [int(best.flat[-1]) for best in self._fill(table, float(table.values[at]))]
        return table.doable[at]

    def _fill(self, table: _Table, seconds: float) -> list[NDArray[np.int64]]:
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

    def _allowed(self, group: Group, pipeline: int) -> bool:
        """Whether `group` may be the pipeline of this number, counted from 1."""
        return not self.problem.depths or group.depth == self.problem.depths[pipeline - 1]

    def trace(self, table: _Table, seconds: float, pipelines: int) -> list[tuple[Group, int]]:
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

    def _exactly(self, table: _Table, shares: list[tuple[Group, int]]) -> list[tuple[Group, int]]:
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
    best: tuple[float, _Table, float, int, float] | None = None
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
    if abs(total - best) > CLOSE * best:
        return total < best
    return (k != current, k) < (best_k != current, best_k)


def _tailed(
    solver: _Solver, free: _Table, least: float, k: int, best: float
) -> Iterator[tuple[float, float, _Table, float]]:
    """Plans of k pipelines, the best among them, as (seconds, limit on the tail, table, end of the pipelines).

    Pipelines end the earlier the wider the limit. So between two limits no plan is faster than the smaller limit and
    the end under the wider one, and most ranges need not be looked into.
    """
    if least == inf:
        return
    if solver.model.tailless:
        yield least, inf, free, least
        return
    limits = solver.tails(k)
    ranges = [(0, len(limits), least)]
    while ranges:
        low, high, ending = ranges.pop()
        high = int(np.searchsorted(limits[:high], (best - ending) * (1 + CLOSE), side="right"))
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


def size(problem: Problem) -> int:
    """How much work `solve` is, roughly: elementary array operations."""
    layers = problem.model.n_layers
    states = prod(n + 1 for n in problem.counts)
    units = max(min(kind.units, layers) for kind in problem.model.kinds)
    alike = problem.model.tailless or len(problem.counts) == 1
    limits = 1 if alike else max(1, layers // FEW_LAYERS)
    return states * sum(problem.counts) * units * layers * layers * limits
