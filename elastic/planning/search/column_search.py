"""Plans for clusters of any size: near-best, with the distance from a bound that `benchmarks.planner_bound` proves.

For a time T and a limit on the tail each group of nodes (`columns`) does a whole number of micro-batches. The linear
programme says how many all nodes could do at most; the least T at which that reaches M is a target. Just above it
whole pipelines are chosen among the most promising groups (`linear.solve_integer`; with one kind of node a knapsack), and
T is raised by small steps until they do M. They are then cut precisely (`cutting`), and the groups are cut again for
longer and shorter tails than that of the plan found.
"""

from __future__ import annotations

import heapq
from collections import Counter
from dataclasses import replace
from functools import lru_cache
from math import ceil, inf, log

import numpy as np

from elastic.planning.cost.cost_model import CostModel, Ints, pipeline_seconds
from elastic.planning.schedule.microbatch_split import Cost, allot
from elastic.planning.schedule.schedule import ZERO_BUBBLE
from elastic.planning.search.columns import MANY_PIPELINES, LIMIT_FACTORS, ColumnPool, column_pool
from elastic.planning.search.evaluate import step_seconds, fill_and_slowest, largest_tail, shape_seconds, slowest_stage
from elastic.planning.search.layer_partition import LayerPartitioner
from elastic.planning.search.master_problem import Relaxation, solve_integer
from elastic.planning.search.problem import Problem, PipelineShape, Solution

MAX_TAILS_FOLLOWED = 2
"""Limits on the tail that are followed to their end, with several kinds of nodes."""
RATIO, STRIDES, MISSES = 1.07, ((2, 16), (1, 2)), 1
"""Between limits on the tail that are tried around that of a plan; and how many at most on either side."""
SMALL_CLUSTER = 32
"""Nodes up to which all limits on the tail are."""
MAX_TAIL_LOSS = 1.02
"""Limits on the tail whose fractional time is so much worse are not followed."""
NEGLIGIBLE = 0.01
"""Share of the step that a tail must have to be worth cutting for."""
LARGE_CLUSTER = 128
"""Nodes above which pipelines are priced under 1F1B alone, and other schedules are tried on those found."""
MAX_KNAPSACK_STATES = 30_000
"""Most states of the knapsack."""
PROMISING, MOST = 48, 128
STEPS = tuple(0.0004 * 2**i for i in range(11))
"""T is raised by these fractions until a plan is found."""
HALVINGS, CLOSE_ENOUGH = 3, 5e-4
"""Times that the last step is halved, at most; and the precision at which that ends."""


def solve(problem: Problem) -> Solution | None:
    """A near-best plan, or None if nothing fits. Shapes asked for by number or depth are not for this module."""
    return min(candidate_solutions(problem), key=lambda solution: solution.seconds, default=None)


def candidate_solutions(problem: Problem) -> list[Solution]:
    """Near-best plans: for different limits on the tail, and of small clusters for one node less of each kind, lest a
    node more should ever make things worse."""
    found = list(near_best_solutions(problem))
    nodes = sum(problem.counts)
    for kind, n in enumerate(problem.counts if problem.thorough and nodes <= SMALL_CLUSTER else ()):
        if n and nodes > 1:
            less = tuple(m - (q == kind) for q, m in enumerate(problem.counts))
            found += near_best_solutions(replace(problem, counts=less))
    return found


@lru_cache(maxsize=512)
def near_best_solutions(problem: Problem) -> tuple[Solution, ...]:
    found: list[Solution] = []
    for most in _loads(problem):
        priced = price_problem(problem, most)
        if priced is None:
            continue
        attempts = len(priced.tails) if thorough(problem) and _few(problem) else MAX_TAILS_FOLLOWED
        best = inf
        relaxation = Relaxation(priced.counts, problem.counts)
        for total, tail in _promising_tails(problem, priced, relaxation)[:attempts]:
            if total < best * (1 - 1e-6):
                solution = _with_tail(problem, priced, relaxation, tail)
                found += [solution] if solution else []
                best = min([best, *([solution.seconds] if solution else [])])
        if found and not problem.model.has_no_tail:
            found += _sweep_tails(problem, most, priced, relaxation, min(found, key=lambda s: s.seconds))
    return tuple(found)


def thorough(problem: Problem) -> bool:
    """Whether schedules are priced side by side, and results action by action."""
    return problem.thorough and sum(problem.counts) <= LARGE_CLUSTER


def _few(problem: Problem) -> bool:
    return len(problem.counts) == 1 or sum(problem.counts) <= SMALL_CLUSTER


def price_problem(
    problem: Problem,
    most: float,
    tail: float = inf,
    near: tuple[float, float] = (0.0, inf),
    pipelines: int = MANY_PIPELINES,
    deepest: int = 0,
) -> ColumnPool | None:
    """Groups for this problem (`column_pool`); 0: as deep as there are layers and nodes."""
    nodes = sum(problem.counts)
    schedules = problem.schedules if thorough(problem) else problem.schedules[:1]
    limit = min(problem.model.n_layers, nodes, deepest or nodes)
    return column_pool(problem.model, schedules, limit, most, tail, near, pipelines)


def _sweep_tails(
    problem: Problem, most: float, free: ColumnPool, relaxation: Relaxation, best: Solution
) -> list[Solution]:
    """Groups are cut greedily, without a look at the tail: cut them again for tails shorter and longer than that of the
    best plan, as far as that promises more. `free`: groups cut without a limit, which nothing can beat."""
    found: list[Solution] = []
    model = problem.model
    least = free.fractional(relaxation, problem.microbatches, inf, best.seconds, 1e-3)
    done: set[int] = set()
    for stride, reach in STRIDES if len(problem.counts) > 1 else STRIDES[:1]:
        first = None
        while True:
            if largest_tail(model, best.shapes, MANY_PIPELINES) < NEGLIGIBLE * best.seconds:
                return found  # nor was it as priced
            tail = max(largest_tail(model, best.shapes), NEGLIGIBLE * best.seconds)
            at = ceil(log(tail, RATIO) - 1e-9)
            if at == first:
                break
            first = at
            for direction in (1, -1):
                missed = 0
                start = at if direction > 0 else at - stride
                for i in range(start, at + direction * reach, direction * stride):
                    if i in done:
                        continue
                    done.add(i)
                    hopeless = least * (1 - 1e-3) + RATIO ** (i - 1) >= best.seconds
                    better = None if hopeless else _recut(problem, most, best, RATIO**i)
                    missed = missed + 1 if better is None else 0
                    if better and better.seconds < best.seconds * (1 - 1e-9):
                        best = better
                        found.append(better)
                    if missed > (MISSES if len(problem.counts) > 1 else 0):
                        break
    return found


def _recut(problem: Problem, most: float, best: Solution, tail: float) -> Solution | None:
    """The best plan with tails within `tail`; None: no plan with tails near it can be better than `best`."""
    shapes = set(best.shapes)
    slowest = [slowest_stage(problem.model, shape) for shape in shapes]
    near = min(slowest) / 1.5, max(slowest) * 1.5
    priced = price_problem(problem, most, tail, near, len(best.shapes), 2 * max(shape.depth for shape in shapes))
    left = best.seconds - tail / RATIO
    if priced is None or left <= 0:
        return None
    relaxation = Relaxation(priced.counts, problem.counts)
    if priced.fractional(relaxation, problem.microbatches, priced.tails[0], left) == inf:
        return None
    return _with_tail(problem, priced, relaxation, priced.tails[0], left) or best


def _loads(problem: Problem) -> list[float]:
    """Micro-batches of a pipeline that memory is reckoned with: few in flight need less of it."""
    if not problem.model.limited:
        return [inf]
    share = problem.microbatches / max(1, sum(problem.counts))
    return [inf, *([ceil(4 * share)] if share < 2 else [])]


def _promising_tails(problem: Problem, priced: ColumnPool, relaxation: Relaxation) -> list[tuple[float, float]]:
    """(fractional seconds, limit on the tail), best first; some limits that cannot be best are left out."""
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


def _with_tail(
    problem: Problem, priced: ColumnPool, relaxation: Relaxation, tail: float, most: float = inf
) -> Solution | None:
    """The best whole pipelines within a tail, if they end within `most`."""
    target = priced.fractional(relaxation, problem.microbatches, tail, most)
    if target == inf:
        return None
    failed = target * (1 - 2e-4)
    for step in STEPS if most == inf else (most / target - 1,):
        chosen = _whole(problem, priced, relaxation, target * (1 + step), tail)
        if chosen is not None:
            break
        failed = target * (1 + step)
    else:
        return None
    high, good = target * (1 + step), chosen
    for _ in range(HALVINGS):
        if high - failed < CLOSE_ENOUGH * high:
            break
        middle = (failed + high) / 2
        chosen = _whole(problem, priced, relaxation, middle, tail)
        if chosen is None:
            failed = middle
        else:
            high, good = middle, chosen
    return _finish(problem, priced, good, high, tail)


def _whole(
    problem: Problem, priced: ColumnPool, relaxation: Relaxation, seconds: float, tail: float
) -> Counter[int] | None:
    """Whole pipelines (column: how many) that do M micro-batches within `seconds`, or None."""
    values = priced.values(seconds, tail, problem.counts)
    if not values.any():
        return None
    if len(problem.counts) == 1:
        chosen, done = knapsack(relaxation, values)
    else:
        found = solve_integer(relaxation, values, problem.microbatches, promising=MOST)
        chosen, done = found.chosen, found.value
    return chosen if done >= problem.microbatches else None


def knapsack(relaxation: Relaxation, values: Ints) -> tuple[Counter[int], int]:
    """The most micro-batches that the nodes left over can do, and by which pipelines: of those that the
    linear programme for these nodes finds most promising, and of the smallest."""
    counts, left = relaxation.counts, relaxation.nodes
    able = (values > 0) & (counts <= np.array(left)).all(axis=1)
    fits = np.flatnonzero(able)
    if not len(fits):
        return Counter(), 0
    gaps = relaxation.maximise(values).gaps[fits]
    order = fits[np.lexsort((fits, gaps))]
    small = fits[np.lexsort((fits, gaps, counts[fits].sum(axis=1)))]
    kept = list(dict.fromkeys([*order[:PROMISING].tolist(), *small[: PROMISING // 2].tolist()]))
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
    return _taken(values, counts, kept, left, table), int(table[left])


def _taken(
    values: Ints,
    counts: Ints,
    kept: list[int],
    left: tuple[int, ...],
    table: np.ndarray[tuple[int, ...], np.dtype[np.int64]],
) -> Counter[int]:
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
    return chosen


def _finish(
    problem: Problem, priced: ColumnPool, chosen: Counter[int], seconds: float, tail: float
) -> Solution | None:
    """Share out exactly M micro-batches and cut every pipeline precisely."""
    values = priced.values(seconds, tail, problem.counts)
    members = [c for c in sorted(chosen) for _ in range(chosen[c])]
    shares = _shares(problem, priced, members, [int(values[c]) for c in members], tail)
    pipelines = min(len(shares), priced.pipelines)
    cut: dict[tuple[int, int], PipelineShape | None] = {}
    for column, m in sorted(set(shares)):
        key = column, _load(problem.model, priced, column, m)
        if key not in cut:
            cut[key] = cut_column(problem.model, priced, column, m, tail, pipelines)
    shapes = []
    for column, m in shares:
        shape = cut[column, _load(problem.model, priced, column, m)]
        if shape is None:
            return None
        shapes.append(replace(shape, microbatches=m))
    whole = _reshared(problem, _scheduled(problem, tuple(shapes)))
    return Solution(whole, step_seconds(problem.model, whole))


def _load(model: CostModel, priced: ColumnPool, column: int, microbatches: int) -> int:
    """Micro-batches as far as they matter for the cut: memory holds no more than the pipeline is deep."""
    part, row = priced.find(column)
    return min(microbatches, int(part.depth[row])) if model.limited else 0


def _reshared(problem: Problem, shapes: tuple[PipelineShape, ...]) -> tuple[PipelineShape, ...]:
    """Share out the micro-batches again now that the cuts are known: groups are priced on a grid."""
    costs = {shape: _cost(problem.model, shape) for shape in set(shapes)}
    shares = allot(problem.microbatches, [costs[shape] for shape in shapes])
    return tuple(replace(shape, microbatches=m) for shape, m in zip(shapes, shares, strict=True))


def _cost(model: CostModel, shape: PipelineShape) -> Cost:
    """Finishing time by micro-batches; where fewer than the depth were reckoned with, memory allows no more."""
    fill, slowest = fill_and_slowest(model, shape)
    most = shape.microbatches if model.limited and shape.microbatches < shape.depth else inf

    def seconds(microbatches: int) -> float:
        if microbatches > most:
            return inf
        return float(pipeline_seconds(shape.schedule, fill, slowest, microbatches))

    return seconds


def _scheduled(problem: Problem, shapes: tuple[PipelineShape, ...]) -> tuple[PipelineShape, ...]:
    """Zero-bubble on the pipelines that it makes faster as they are, where it was not priced from the start."""
    if ZERO_BUBBLE not in problem.schedules or thorough(problem):
        return shapes
    model = problem.model
    better: dict[PipelineShape, PipelineShape] = {}
    for shape in set(shapes):
        other = replace(shape, schedule=ZERO_BUBBLE)
        faster = shape_seconds(model, other) < shape_seconds(model, shape) * (1 - 1e-9)
        better[shape] = other if faster else shape
    return tuple(better[shape] for shape in shapes)


def _shares(
    problem: Problem, priced: ColumnPool, members: list[int], most: list[int], tail: float
) -> list[tuple[int, int]]:
    """(column, micro-batches): take what is too much from those that end last."""

    def ending(column: int, m: int) -> float:
        part, row = priced.find(column)
        if m <= 0:
            return -inf
        option = part.fastest(row, m, tail)
        return float(part.fill[row, option] + m * part.slowest[row, option])

    heap = [(-ending(c, m), i, m) for i, (c, m) in enumerate(zip(members, most, strict=True))]
    heapq.heapify(heap)
    for _ in range(sum(most) - problem.microbatches):
        _, i, m = heap[0]
        heapq.heapreplace(heap, (-ending(members[i], m - 1), i, m - 1))
    return [(members[i], m) for _, i, m in sorted(heap, key=lambda item: item[1]) if m > 0]


def cut_column(
    model: CostModel, priced: ColumnPool, column: int, microbatches: int, tail: float, pipelines: int
) -> PipelineShape | None:
    part, row = priced.find(column)
    option = part.fastest(row, microbatches, tail)
    kinds = part.order(row, option)
    units = [min(model.kinds[kind].units, model.n_layers) for kind in kinds]
    cutter = LayerPartitioner(model, part.schedule, kinds, units, microbatches, tail, pipelines)
    limit = int(part.option[row, option])
    low = float(part.limits[limit - 1]) if limit else 0.0
    least = cutter.least(low, float(part.limits[limit]))
    factors = LIMIT_FACTORS if len(set(kinds)) > 1 else LIMIT_FACTORS[:1]
    found = cutter.best(least if least < inf else float(part.limits[limit]) * 1.1, factors)
    return found[0] if found else None
