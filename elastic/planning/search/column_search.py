"""Near-best plans for clusters of any size.

`benchmarks.planning.planner_bound` proves their quality.

Within a time T and a limit on the tail, each group of nodes (`columns`) does a whole number of
micro-batches. The linear programme yields the most that all nodes could do. The target is the least
T at which they could do all M micro-batches. Just above the target, whole pipelines are chosen
among the most promising groups (`master_problem.solve_integer`, or a knapsack for one kind of
node). T is raised in small steps until these pipelines do M micro-batches. Then they are cut
precisely (`layer_partition`), and the groups are priced again for longer and shorter tails.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from math import ceil, inf, log

import numpy as np

from elastic.planning.cost.cost_model import CostModel, Ints, pipeline_seconds
from elastic.planning.schedule.microbatch_split import Cost, allot
from elastic.planning.schedule.schedule import ZERO_BUBBLE
from elastic.planning.search.columns import LIMIT_FACTORS, MANY_PIPELINES, ColumnPool, column_pool
from elastic.planning.search.evaluate import (
    fill_and_slowest,
    largest_tail,
    shape_seconds,
    step_seconds,
)
from elastic.planning.search.layer_partition import LayerPartitioner
from elastic.planning.search.master_problem import Relaxation, solve_integer
from elastic.planning.search.problem import PipelineShape, Problem, Solution

MAX_TAILS_FOLLOWED = 2
"""Maximum number of limits on the tail with which solutions are searched on larger clusters."""
TAIL_RATIO = 1.07
"""Ratio between neighbouring limits on the tail that are tried around that of a plan."""
TAIL_STRIDES = ((2, 16), (1, 2))
"""(stride, reach) of the search over these limits, in both directions."""
MAX_MISSES = 1
"""Maximum misses in a row before the search in one direction ends, with several kinds of nodes."""
SMALL_CLUSTER = 32
"""Maximum nodes of several kinds for which all limits on the tail are searched."""
MAX_TAIL_LOSS = 1.02
"""A limit on the tail is dropped if its fractional time is worse by this factor."""
NEGLIGIBLE_TAIL = 0.01
"""Fraction of the step from which on a tail is worth a search."""
LARGE_CLUSTER = 128
"""Nodes above which only the first schedule is priced; zero-bubble is tried on the result."""
MAX_KNAPSACK_STATES = 30_000
KNAPSACK_COLUMNS, INTEGER_COLUMNS = 48, 128
"""Maximum promising columns that are given to the knapsack and to the integer programme."""
STEPS = tuple(0.0004 * 2**i for i in range(11))
"""T is raised by these fractions until a plan is found."""
MAX_HALVINGS, SEARCH_TOLERANCE = 3, 5e-4
"""Maximum halvings of the last step, and the precision at which they end."""


def candidate_solutions(problem: Problem) -> list[Solution]:
    """Return near-best plans for several limits on the tail; [] if nothing fits.

    Small clusters are also planned with one node less of each kind, so that another node never
    makes the plan worse. The problem must not fix the shape.
    """
    found = list(near_best_solutions(problem))
    nodes = sum(problem.counts)
    for kind, n in enumerate(problem.counts if problem.thorough and nodes <= SMALL_CLUSTER else ()):
        if n and nodes > 1:
            less = tuple(m - (q == kind) for q, m in enumerate(problem.counts))
            found += near_best_solutions(replace(problem, counts=less))
    return found


@lru_cache(maxsize=512)
def near_best_solutions(problem: Problem) -> tuple[Solution, ...]:
    """Return near-best plans for several limits on the tail; () if nothing fits."""
    found: list[Solution] = []
    one_kind = len(problem.counts) == 1
    all_tails = problem.thorough and (
        sum(problem.counts) <= (LARGE_CLUSTER if one_kind else SMALL_CLUSTER)
    )
    for most in _assumed_microbatches(problem):
        priced = price_problem(problem, most)
        if priced is None:
            continue
        attempts = len(priced.tails) if all_tails else MAX_TAILS_FOLLOWED
        best = inf
        relaxation = Relaxation(priced.counts, problem.counts)
        for total, tail in _promising_tails(problem, priced, relaxation)[:attempts]:
            if total < best * (1 - 1e-6):
                solution = _solve_with_tail(problem, priced, relaxation, tail)
                if solution:
                    found.append(solution)
                    best = min(best, solution.seconds)
        if found and not problem.model.has_no_tail:
            start = min(found, key=lambda solution: solution.seconds)
            found += _TailSweep(problem, most, priced, relaxation, start).run()
    return tuple(found)


def thorough(problem: Problem) -> bool:
    """Return whether all schedules are priced, and solutions simulated."""
    return problem.thorough and sum(problem.counts) <= LARGE_CLUSTER


def price_problem(
    problem: Problem,
    most: float,
    tail: float = inf,
    near: tuple[float, float] = (0.0, inf),
    pipelines: int = MANY_PIPELINES,
    deepest: int = 0,
) -> ColumnPool | None:
    """Return `column_pool` for the problem; `deepest` 0: as deep as layers and nodes allow."""
    nodes = sum(problem.counts)
    schedules = problem.schedules if thorough(problem) else problem.schedules[:1]
    limit = min(problem.model.n_layers, nodes, deepest or nodes)
    return column_pool(problem.model, schedules, limit, most, tail, near, pipelines)


@dataclass
class _TailSweep:
    """Searches for better solutions whose tails are near that of the best one.

    Groups in `free` were cut greedily, without a limit on the tail, so their fractional time bounds
    that of all other groups.
    """

    problem: Problem
    most: float
    free: ColumnPool
    relaxation: Relaxation
    best: Solution
    found: list[Solution] = field(default_factory=list)
    done: set[int] = field(default_factory=set)

    def run(self) -> list[Solution]:
        """Return the solutions found, each better than the one before."""
        problem, model = self.problem, self.problem.model
        several = len(problem.counts) > 1
        seconds = self.best.seconds
        least = self.free.fractional(self.relaxation, problem.microbatches, inf, seconds, 1e-3)
        for stride, reach in TAIL_STRIDES if several else TAIL_STRIDES[:1]:
            first = None
            while True:
                negligible = NEGLIGIBLE_TAIL * self.best.seconds
                if largest_tail(model, self.best.shapes, MANY_PIPELINES) < negligible:
                    return self.found
                tail = max(largest_tail(model, self.best.shapes), negligible)
                at = ceil(log(tail, TAIL_RATIO) - 1e-9)
                if at == first:
                    break
                first = at
                self._try(range(at, at + reach, stride), least)
                self._try(range(at - stride, at - reach, -stride), least)
        return self.found

    def _try(self, exponents: range, least: float) -> None:
        """Try limits on the tail, nearest first, until they no longer gain."""
        missed = 0
        for i in exponents:
            if i in self.done:
                continue
            self.done.add(i)
            hopeless = least * (1 - 1e-3) + TAIL_RATIO ** (i - 1) >= self.best.seconds
            better = None if hopeless else self._solve(TAIL_RATIO**i)
            missed = missed + 1 if better is None else 0
            if better and better.seconds < self.best.seconds * (1 - 1e-9):
                self.best = better
                self.found.append(better)
            if missed > (MAX_MISSES if len(self.problem.counts) > 1 else 0):
                break

    def _solve(self, tail: float) -> Solution | None:
        """Return the best plan within `tail`; None: no plan with such a tail can beat `best`."""
        problem, shapes = self.problem, set(self.best.shapes)
        slowest = [fill_and_slowest(problem.model, shape)[1] for shape in shapes]
        near = min(slowest) / 1.5, max(slowest) * 1.5
        deepest = 2 * max(shape.depth for shape in shapes)
        priced = price_problem(problem, self.most, tail, near, len(self.best.shapes), deepest)
        left = self.best.seconds - tail / TAIL_RATIO
        if priced is None or left <= 0:
            return None
        relaxation = Relaxation(priced.counts, problem.counts)
        limit = priced.tails[0]
        if priced.fractional(relaxation, problem.microbatches, limit, left) == inf:
            return None
        return _solve_with_tail(problem, priced, relaxation, limit, left) or self.best


def _assumed_microbatches(problem: Problem) -> Iterator[float]:
    """Yield micro-batches per pipeline that memory is assumed to hold: few in flight need less."""
    yield inf
    share = problem.microbatches / max(1, sum(problem.counts))
    if problem.model.limited and share < 2:
        yield ceil(4 * share)


def _promising_tails(
    problem: Problem, priced: ColumnPool, relaxation: Relaxation
) -> list[tuple[float, float]]:
    """Return (fractional seconds, limit on the tail), best first, without hopeless limits."""
    if len(priced.tails) == 1:
        return [(0.0, priced.tails[0])]
    totals: list[tuple[float, float]] = []
    best = inf
    middle = len(priced.tails) // 2
    for tail in sorted(priced.tails, key=lambda t: abs(priced.tails.index(t) - middle)):
        slack = MAX_TAIL_LOSS * best - tail
        if slack <= 0:
            continue
        target = priced.fractional(relaxation, problem.microbatches, tail, slack, 2e-3)
        if target < inf:
            totals.append((target + tail, tail))
            best = min(best, target + tail)
    return sorted(totals)


def _solve_with_tail(
    problem: Problem, priced: ColumnPool, relaxation: Relaxation, tail: float, most: float = inf
) -> Solution | None:
    """Return the best whole pipelines within a tail; None if they take more than `most` seconds."""
    target = priced.fractional(relaxation, problem.microbatches, tail, most)
    if target == inf:
        return None
    failed = target * (1 - 2e-4)
    for step in STEPS if most == inf else (most / target - 1,):
        chosen = _whole_pipelines(problem, priced, relaxation, target * (1 + step), tail)
        if chosen is not None:
            break
        failed = target * (1 + step)
    else:
        return None
    high, good = target * (1 + step), chosen
    for _ in range(MAX_HALVINGS):
        if high - failed < SEARCH_TOLERANCE * high:
            break
        middle = (failed + high) / 2
        chosen = _whole_pipelines(problem, priced, relaxation, middle, tail)
        if chosen is None:
            failed = middle
        else:
            high, good = middle, chosen
    return _cut_precisely(problem, priced, good, high, tail)


def _whole_pipelines(
    problem: Problem, priced: ColumnPool, relaxation: Relaxation, seconds: float, tail: float
) -> Counter[int] | None:
    """Return pipelines (number by column) that do M micro-batches within `seconds`, or None."""
    values = priced.values(seconds, tail, problem.counts)
    if not values.any():
        return None
    if len(problem.counts) == 1:
        chosen, done = knapsack(relaxation, values)
    else:
        found = solve_integer(relaxation, values, problem.microbatches, promising=INTEGER_COLUMNS)
        chosen, done = found.chosen, found.value
    return chosen if done >= problem.microbatches else None


def knapsack(relaxation: Relaxation, values: Ints) -> tuple[Counter[int], int]:
    """Return (number by column, micro-batches) of a choice that does most on the available nodes.

    Only the columns that the linear programme finds most promising, and the smallest, are used.
    """
    counts, left = relaxation.counts, relaxation.nodes
    fits = np.flatnonzero((values > 0) & (counts <= np.array(left)).all(axis=1))
    if not len(fits):
        return Counter(), 0
    gaps = relaxation.maximise(values).gaps[fits]
    order = fits[np.lexsort((fits, gaps))][:KNAPSACK_COLUMNS]
    small = fits[np.lexsort((fits, gaps, counts[fits].sum(axis=1)))][: KNAPSACK_COLUMNS // 2]
    kept = list(dict.fromkeys([*order.tolist(), *small.tolist()]))
    table = np.zeros(tuple(n + 1 for n in left), dtype=np.int64)
    for column in kept:
        size = tuple(int(n) for n in counts[column])
        source = tuple(slice(0, n + 1 - c) for n, c in zip(left, size, strict=True))
        target = tuple(slice(c, None) for c in size)
        for _ in range(min(n // c for n, c in zip(left, size, strict=True) if c)):
            better = np.maximum(table[target], table[source] + values[column])
            if np.array_equal(better, table[target]):
                break
            table[target] = better
    chosen: Counter[int] = Counter()
    at = np.array(left)
    while table[tuple(at)] > 0:
        for column in kept:
            before = at - counts[column]
            if (before >= 0).all() and table[tuple(before)] + values[column] == table[tuple(at)]:
                chosen[column] += 1
                at = before
                break
        else:
            raise AssertionError("a knapsack that was filled can be emptied")
    return chosen, int(table[left])


def _cut_precisely(
    problem: Problem, priced: ColumnPool, chosen: Counter[int], seconds: float, tail: float
) -> Solution | None:
    """Return precisely cut pipelines with exactly M micro-batches; None if a cut does not fit."""
    values = priced.values(seconds, tail, problem.counts)
    members = [c for c in sorted(chosen) for _ in range(chosen[c])]
    shares = _without_surplus(problem, priced, members, [int(values[c]) for c in members], tail)
    pipelines = min(len(shares), priced.pipelines)
    cut: dict[tuple[int, int], PipelineShape | None] = {}
    shapes: dict[tuple[int, int], PipelineShape] = {}
    for column, m in sorted(set(shares)):
        part, row = priced.find(column)
        # At most as many micro-batches as stages are in flight, so more do not change the cut.
        key = column, min(m, int(part.depth[row])) if problem.model.limited else 0
        if key not in cut:
            cut[key] = cut_column(problem.model, priced, column, m, tail, pipelines)
        shape = cut[key]
        if shape is None:
            return None
        shapes[column, m] = replace(shape, microbatches=m)
    scheduled = _with_zero_bubble(problem, tuple(shapes[share] for share in shares))
    costs = {shape: _cost(problem.model, shape) for shape in set(scheduled)}
    allotted = allot(problem.microbatches, [costs[shape] for shape in scheduled])
    whole = tuple(
        replace(shape, microbatches=m) for shape, m in zip(scheduled, allotted, strict=True)
    )
    return Solution(whole, step_seconds(problem.model, whole))


def _cost(model: CostModel, shape: PipelineShape) -> Cost:
    """Return the finish time by micro-batches; inf above those that memory was checked for."""
    fill, slowest = fill_and_slowest(model, shape)
    most = shape.microbatches if model.limited and shape.microbatches < shape.depth else inf

    def seconds(microbatches: int) -> float:
        if microbatches > most:
            return inf
        return float(pipeline_seconds(shape.schedule, fill, slowest, microbatches))

    return seconds


def _with_zero_bubble(
    problem: Problem, shapes: tuple[PipelineShape, ...]
) -> tuple[PipelineShape, ...]:
    """Return the shapes, under zero-bubble where this is faster and was not priced before."""
    if ZERO_BUBBLE not in problem.schedules or thorough(problem):
        return shapes
    model = problem.model
    better: dict[PipelineShape, PipelineShape] = {}
    for shape in set(shapes):
        other = replace(shape, schedule=ZERO_BUBBLE)
        faster = shape_seconds(model, other) < shape_seconds(model, shape) * (1 - 1e-9)
        better[shape] = other if faster else shape
    return tuple(better[shape] for shape in shapes)


def _without_surplus(
    problem: Problem, priced: ColumnPool, members: list[int], most: list[int], tail: float
) -> list[tuple[int, int]]:
    """Return (column, micro-batches), less the surplus over M of the pipelines that end last."""

    def end(column: int, m: int) -> float:
        part, row = priced.find(column)
        if m <= 0:
            return -inf
        option = part.fastest_option(row, m, tail)
        return float(part.fill[row, option] + m * part.slowest[row, option])

    heap = [(-end(c, m), i, m) for i, (c, m) in enumerate(zip(members, most, strict=True))]
    heapq.heapify(heap)
    for _ in range(sum(most) - problem.microbatches):
        _, i, m = heap[0]
        heapq.heapreplace(heap, (-end(members[i], m - 1), i, m - 1))
    return [(members[i], m) for _, i, m in sorted(heap, key=lambda item: item[1]) if m > 0]


def cut_column(
    model: CostModel,
    priced: ColumnPool,
    column: int,
    microbatches: int,
    tail: float,
    pipelines: int,
) -> PipelineShape | None:
    """Return the fastest precise cut of a column's best option; None if it does not fit."""
    part, row = priced.find(column)
    option = part.fastest_option(row, microbatches, tail)
    kinds = part.node_order(row, option)
    units = [min(model.kinds[kind].units, model.n_layers) for kind in kinds]
    partitioner = LayerPartitioner(
        model, part.schedule, kinds, units, microbatches, tail, pipelines
    )
    limit = int(part.option[row, option])
    low = float(part.limits[limit - 1]) if limit else 0.0
    high = float(part.limits[limit])
    least = partitioner.least_limit(low, high)
    factors = LIMIT_FACTORS if len(set(kinds)) > 1 else LIMIT_FACTORS[:1]
    return partitioner.fastest(least if least < inf else high * 1.1, factors)
