"""Plans for clusters of any size: near-best, with the distance from a bound that `elastic.planning.bound` proves.

For a time T and a limit on the tail each group of nodes (`columns`) does a whole number of micro-batches. The linear
programme says how many all nodes could do at most; the least T at which that reaches M is a target. Just above it
the programme's solution is rounded down, the nodes left over are shared out by a knapsack
over the most promising groups, and T is raised by small steps until M is reached. With one kind of node and few
enough of them the knapsack takes all, and is exact. The pipelines found are then cut precisely (`cutting`).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import ceil, inf, prod

import numpy as np

from elastic.planning.columns import WIDER, Columns, Ints, columns, grid
from elastic.planning.cutting import Cutter
from elastic.planning.exact import Problem, Shape, Solution
from elastic.planning.linear import Optimum, maximise
from elastic.planning.model import CostModel, pipeline_seconds

LEVELS = {1: (128, 64, 64), 2: (64, 40, 40), 3: (26, 20, 17), 4: (13, 11, 9)}
"""Most blocks of a group, by number of kinds, for growing blocks: a few thousand groups."""
LIMITS = 192
"""Limits on the slowest stage that groups are priced with."""
TAILS = 20
ATTEMPTS = 3
"""Limits on the tail that are followed to their end, with several kinds of nodes."""
TIGHTER = (0.9, 0.75, 0.75, 0.75, 0.75, 0.75)
"""Factors by which the tail is made smaller."""
SLACK = 1.03
"""Limits on the tail whose fractional time is so much worse are not followed."""
NEGLIGIBLE = 0.01
"""Share of the step that a tail must have to be worth cutting for."""
CELLS = 6000
"""Most states of the knapsack."""
PROMISING = 48
STEPS = tuple(0.0004 * 2**i for i in range(11))
"""T is raised by these fractions until a plan is found."""


@dataclass(frozen=True, slots=True)
class _Pool:
    """Columns of all schedules together."""

    parts: tuple[Columns, ...]
    counts: Ints
    tails: tuple[float, ...]

    def values(self, seconds: float, tail: float) -> Ints:
        return np.concatenate([part.microbatches(seconds, tail) for part in self.parts])

    def find(self, column: int) -> tuple[Columns, int]:
        for part in self.parts:
            if column < len(part.counts):
                return part, column
            column -= len(part.counts)
        raise AssertionError("no such column")


def solve(problem: Problem) -> Solution | None:
    """A near-best plan, or None if nothing fits. Shapes asked for by number or depth are not for this module."""
    found: Solution | None = None
    for most in _loads(problem):
        pool = _pool(problem, most)
        if pool is None:
            continue
        attempts = ATTEMPTS if sum(n > 0 for n in problem.counts) > 1 else len(pool.tails)
        for total, tail in _promising_tails(problem, pool)[:attempts]:
            if found is None or total < found.seconds * (1 - 1e-6):
                found = _faster(found, _with_tail(problem, pool, tail))
        found = _narrowed(problem, most, found)
    return found


def _faster(found: Solution | None, other: Solution | None) -> Solution | None:
    if found is None or (other is not None and other.seconds < found.seconds * (1 - 1e-9)):
        return other
    return found


def _narrowed(problem: Problem, most: float, found: Solution | None) -> Solution | None:
    """Groups are cut greedily, without a look at the tail: cut them again for smaller and smaller tails."""
    if problem.model.tailless or found is None:
        return found
    model, failures, best = problem.model, 0, found
    largest = max(float(np.diff(model.gradient).max()) * model.reduction(len(best.shapes)), 1e-12)
    for factor in TIGHTER:
        shapes = set(best.shapes)
        slowest = [slowest_stage(model, shape) for shape in shapes]
        tail = (best.seconds - max(shape_seconds(model, shape) for shape in shapes)) * factor
        if tail < largest or tail < NEGLIGIBLE * best.seconds or failures > 1:
            break
        narrow = _pool(problem, most, tail, (min(slowest) / 1.5, max(slowest) * 1.5))
        other = _with_tail(problem, narrow, tail, best.seconds - tail) if narrow else None
        if other is not None and other.seconds < best.seconds * (1 - 1e-9):
            best, failures = other, 0
        else:
            failures += 1
    return best


def _loads(problem: Problem) -> list[float]:
    """Micro-batches of a pipeline that memory is reckoned with: few in flight need less of it."""
    if not problem.model.limited:
        return [inf]
    share = problem.microbatches / max(1, sum(problem.counts))
    return [inf, *([ceil(4 * share)] if share < 2 else [])]


def _pool(
    problem: Problem, most: float, tail: float = inf, near: tuple[float, float] = (0.0, inf)
) -> _Pool | None:
    """Price groups, in blocks large enough that those that memory or M ask for are among them."""
    model, counts = problem.model, problem.counts
    deepest = min(model.n_layers, sum(counts))
    parts = [
        columns(model, counts, grid(model, s, deepest, LIMITS, near)[0], s, levels, block, most, tail)
        for s in problem.schedules
        for levels, block in _blocks(sum(n > 0 for n in counts), deepest)
    ]
    if not any(np.isfinite(part.fill).any() for part in parts):
        return None
    tails = np.concatenate([part.tail[np.isfinite(part.tail)] for part in parts])
    limits = _spread(tails, model) if tail == inf else (tail,)
    return _Pool(tuple(parts), np.concatenate([part.counts for part in parts]), limits)


def _blocks(kinds: int, deepest: int) -> list[tuple[int, int]]:
    """(levels, nodes a block): shallow groups one by one, deeper ones in coarser and coarser steps."""
    found: list[tuple[int, int]] = []
    block = 1
    for levels in LEVELS.get(kinds, (8, 8, 8)):
        reached = found[-1][0] * found[-1][1] if found else 0
        if reached >= deepest:
            break
        block = max(block, ceil(deepest / levels)) if len(found) == 2 else block
        found.append((min(levels, ceil(deepest / block)), block))
        block *= 2
    return found


def _spread(tails: np.ndarray[tuple[int], np.dtype[np.float64]], model: CostModel) -> tuple[float, ...]:
    if model.tailless:
        return (inf,)
    values = np.unique(tails)
    steps = np.geomspace(max(values[0], 1e-12), max(values[-1], 1e-12), TAILS)
    return tuple(np.unique(values[np.minimum(np.searchsorted(values, steps), len(values) - 1)]).tolist())


def _promising_tails(problem: Problem, pool: _Pool) -> list[tuple[float, float]]:
    """(fractional seconds, limit on the tail), best first; some limits that cannot be best are left out."""
    if len(pool.tails) == 1:
        return [(0.0, pool.tails[0])]
    totals: list[tuple[float, float]] = []
    best = inf
    middle = len(pool.tails) // 2
    for tail in sorted(pool.tails, key=lambda t: abs(pool.tails.index(t) - middle)):
        slack = SLACK * best - tail
        if slack <= 0:
            continue
        target = fractional(pool.values, pool.counts, problem.counts, problem.microbatches, tail, slack)
        if target < inf:
            totals.append((target + tail, tail))
            best = min(best, target + tail)
    return sorted(totals)


def fractional(
    values: object, counts: Ints, nodes: tuple[int, ...], microbatches: int, tail: float, most: float = inf
) -> float:
    """The least time at which the linear programme reaches `microbatches`; inf if it is above `most` or never."""
    assert callable(values)

    def able(seconds: float) -> bool:
        value = values(seconds, tail)
        return bool(value.any()) and maximise(value, counts, nodes).value >= microbatches * (1 - 1e-9)

    if most < inf and not able(most):
        return inf
    low, high = 0.0, most
    if most == inf:
        high = 1e-9
        while not able(high):
            low, high = high, high * 4
            if high > 1e15:
                return inf
    while high - low > 2e-4 * high:
        middle = (low + high) / 2 if low else high / 2
        low, high = (low, middle) if able(middle) else (middle, high)
    return high


def _with_tail(problem: Problem, pool: _Pool, tail: float, most: float = inf) -> Solution | None:
    target = fractional(pool.values, pool.counts, problem.counts, problem.microbatches, tail, most)
    if target == inf:
        return None
    failed = target * (1 - 2e-4)
    for step in STEPS:
        chosen = _round(problem, pool, target * (1 + step), tail)
        if chosen is not None:
            break
        failed = target * (1 + step)
    else:
        return None
    high, good = target * (1 + step), chosen
    for _ in range(4):
        middle = (failed + high) / 2
        chosen = _round(problem, pool, middle, tail)
        if chosen is None:
            failed = middle
        else:
            high, good = middle, chosen
    return _finish(problem, pool, good, high, tail)


def _round(problem: Problem, pool: _Pool, seconds: float, tail: float) -> Counter[int] | None:
    """Whole pipelines (column: how many) that do M micro-batches within `seconds`, or None."""
    values = pool.values(seconds, tail)
    optimum = maximise(values, pool.counts, problem.counts)
    if optimum.value < problem.microbatches * (1 - 1e-9):
        return None
    chosen, left = _floor(optimum, pool.counts, problem.counts)
    missing = problem.microbatches - sum(int(values[c]) * n for c, n in chosen.items())
    if missing > 0:
        extra, done = _knapsack(values, optimum, pool.counts, left)
        if done < missing:
            return None
        chosen += extra
    return chosen


def _floor(optimum: Optimum, counts: Ints, nodes: tuple[int, ...]) -> tuple[Counter[int], tuple[int, ...]]:
    """Round down, and give back more pipelines as long as the knapsack can take their nodes."""
    chosen = Counter({c: int(a + 1e-9) for c, a in zip(optimum.chosen, optimum.amounts, strict=True)})

    def left() -> tuple[int, ...]:
        used = sum((counts[c] * n for c, n in chosen.items()), np.zeros(len(nodes), dtype=np.int64))
        return tuple(int(n - u) for n, u in zip(nodes, used, strict=True))

    while chosen.total():
        column = max(chosen, key=lambda c: (chosen[c], -c))
        chosen[column] -= 1
        if prod(n + 1 for n in left()) > CELLS:
            chosen[column] += 1
            break
    return +chosen, left()


def _knapsack(
    values: Ints, optimum: Optimum, counts: Ints, left: tuple[int, ...]
) -> tuple[Counter[int], int]:
    """The most micro-batches that the nodes left over can do, and by which pipelines."""
    fits = np.flatnonzero((values > 0) & (counts <= np.array(left)).all(axis=1))
    order = fits[np.lexsort((fits, optimum.gaps[fits]))]
    small = fits[np.lexsort((fits, optimum.gaps[fits], counts[fits].sum(axis=1)))]
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
    problem: Problem, pool: _Pool, chosen: Counter[int], seconds: float, tail: float
) -> Solution | None:
    """Share out exactly M micro-batches and cut every pipeline precisely."""
    values = pool.values(seconds, tail)
    members = [c for c in sorted(chosen) for _ in range(chosen[c])]
    shares = _shares(problem, pool, members, [int(values[c]) for c in members], tail)
    pipelines = len(shares)
    cut: dict[tuple[int, int], Shape | None] = {}
    for column, m in sorted(set(shares)):
        cut[column, m] = _cut(problem.model, pool, column, m, tail, pipelines)
    shapes = [cut[share] for share in shares]
    if any(shape is None for shape in shapes):
        return None
    whole = tuple(shape for shape in shapes if shape is not None)
    return Solution(whole, cost(problem.model, whole))


def _shares(
    problem: Problem, pool: _Pool, members: list[int], most: list[int], tail: float
) -> list[tuple[int, int]]:
    """(column, micro-batches): take what is too much from those that end last."""

    def ending(column: int, m: int) -> float:
        part, row = pool.find(column)
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


def _cut(
    model: CostModel, pool: _Pool, column: int, microbatches: int, tail: float, pipelines: int
) -> Shape | None:
    part, row = pool.find(column)
    option = part.fastest(row, microbatches, tail)
    kinds = part.order(row, option)
    units = [min(model.kinds[kind].units, model.n_layers) for kind in kinds]
    cutter = Cutter(model, part.schedule, kinds, units, microbatches, tail, pipelines)
    limit = int(part.option[row, option])
    low = float(part.limits[limit - 1]) if limit else 0.0
    least = cutter.least(low, float(part.limits[limit]))
    factors = WIDER if len(set(kinds)) > 1 else WIDER[:1]
    found = cutter.best(least if least < inf else float(part.limits[limit]) * 1.1, factors)
    return found[0] if found else None


def cost(model: CostModel, shapes: tuple[Shape, ...]) -> float:
    """Seconds of a step under the cost model."""
    pipelines = len(shapes)
    slowest, tail = 0.0, 0.0
    seen: set[Shape] = set()
    tails = [model.tails(kind, pipelines) for kind in range(len(model.kinds))]
    for shape in shapes:
        if shape in seen:
            continue
        seen.add(shape)
        slowest = max(slowest, shape_seconds(model, shape))
        pairs = zip(shape.stage_kinds(), shape.cuts, shape.cuts[1:], strict=False)
        tail = max(tail, *(float(tails[kind][a, b]) for kind, a, b in pairs))
    return slowest + tail


def shape_seconds(model: CostModel, shape: Shape) -> float:
    """Seconds of one pipeline."""
    cutter = Cutter(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches)
    return float(pipeline_seconds(shape.schedule, *cutter.seconds(shape.cuts), shape.microbatches))


def slowest_stage(model: CostModel, shape: Shape) -> float:
    """Seconds of its slowest stage."""
    return Cutter(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches).seconds(shape.cuts)[1]


def distinct(shapes: tuple[Shape, ...]) -> Iterator[tuple[Shape, int]]:
    """Shapes that are alike but for their micro-batches, with how often they occur."""
    yield from Counter(replace(shape, microbatches=0) for shape in shapes).items()
