"""Plans whose depths are given: shapes fixed by hand on clusters too large to search exactly, and even shapes.

One kind of node. Each depth is cut so that its slowest stage is fastest, and micro-batches are shared out.
"""

from __future__ import annotations

from collections import Counter
from functools import lru_cache
from math import inf

from elastic.planning.cost.cost_model import CostModel, pipeline_seconds
from elastic.planning.schedule import microbatch_split as batches
from elastic.planning.search.evaluate import cost, largest_tail
from elastic.planning.search.layer_partition import Cutter
from elastic.planning.search.problem import Problem, Shape, Solution
from elastic.planning.search.shapes import Depths, Room

BEST = 3
"""Even shapes that are worked out."""


def solve(problem: Problem, per_node: int) -> Solution | None:
    """The best cuts and shares for `problem.depths`; its model has one kind of node, with `per_node` units."""
    schedule, model = problem.schedules[0], problem.model
    if len(problem.depths) > problem.microbatches:
        return None

    def finish(depth: int) -> batches.Cost:
        return lambda m: _seconds(model, schedule, depth, per_node, m)

    shares = batches.allot(problem.microbatches, [finish(depth) for depth in problem.depths])
    shapes = []
    for depth, m in zip(problem.depths, shares, strict=True):
        found = cut(model, schedule, depth, per_node, min(depth, m))
        if found is None:
            return None
        kinds, stages, cuts, _, _ = found
        shapes.append(Shape(schedule, kinds, stages, cuts, m))
    return Solution(tuple(shapes), cost(model, tuple(shapes)))


def even(problem: Problem) -> list[Solution]:
    """The best plans with nodes spread as evenly as can be over 1, 2, ... pipelines.

    A ring of fewer pipelines reduces a little faster, which `scale` does not see: it reckons with a ring of many.
    """
    model = problem.model
    if len(problem.counts) > 1 or model.tailless:
        return []
    units = min(model.kinds[0].units, model.n_layers)
    room = Room(
        nodes=problem.counts[0], per_node=units, n_layers=model.n_layers, n_microbatches=problem.microbatches
    )
    priced = []
    for schedule in problem.schedules:
        for depths in dict.fromkeys(room.even(k) for k in range(1, room.most + 1)):
            priced.append((_estimate(model, schedule, depths, units, problem.microbatches), schedule, depths))
    found = []
    for seconds, schedule, depths in sorted(priced)[:BEST]:
        asked = Problem(
            model=model,
            counts=problem.counts,
            microbatches=problem.microbatches,
            schedules=(schedule,),
            depths=depths,
        )
        solution = solve(asked, units) if seconds < inf else None
        found += [solution] if solution else []
    return found


def _estimate(model: CostModel, schedule: str, depths: Depths, per_node: int, microbatches: int) -> float:
    """Seconds of a step with so deep pipelines; micro-batches in flight as if every pipeline were full."""
    numbers = Counter(depths)
    shapes = []
    for depth in numbers:
        found = cut(model, schedule, depth, per_node, depth)
        if found is None:
            return inf
        kinds, stages, cuts, _, _ = found
        shapes.append(Shape(schedule, kinds, stages, cuts, depth))
    low, high = 0.0, max(_seconds(model, schedule, depth, per_node, microbatches) for depth in numbers)
    for _ in range(40):
        middle = (low + high) / 2
        done = sum(n * _share(model, schedule, depth, per_node, middle) for depth, n in numbers.items())
        low, high = (low, middle) if done >= microbatches else (middle, high)
    ring = [shape for shape in shapes for _ in range(len(depths))][: len(depths)]
    return high + largest_tail(model, [*shapes, *ring][: max(len(depths), len(shapes))])


def _share(model: CostModel, schedule: str, depth: int, per_node: int, seconds: float) -> int:
    found = cut(model, schedule, depth, per_node, depth)
    if found is None:
        return 0
    first = float(pipeline_seconds(schedule, found[3], found[4], 1))
    return int((seconds - first) / found[4]) + 1 if seconds >= first else 0


def _seconds(model: CostModel, schedule: str, depth: int, per_node: int, microbatches: int) -> float:
    found = cut(model, schedule, depth, per_node, depth)
    if found is None and microbatches < depth:  # fewer in flight may fit
        found = cut(model, schedule, depth, per_node, microbatches)
    return float(pipeline_seconds(schedule, found[3], found[4], microbatches)) if found else inf


@lru_cache(maxsize=1024)
def cut(
    model: CostModel, schedule: str, depth: int, per_node: int, ahead: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float, float] | None:
    """(kinds, stages a node, cuts, sum of fills, slowest stage), or None if memory forbids it."""
    hosts = tuple(min(per_node, depth - first) for first in range(0, depth, per_node))
    cutter = Cutter(model, schedule, [0] * len(hosts), hosts, ahead)
    least = cutter.least(0.0, inf)
    cuts = cutter.cut(least) if least < inf else None
    return ((0,) * len(hosts), hosts, cuts, *cutter.seconds(cuts)) if cuts else None
