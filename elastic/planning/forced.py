"""Plans whose shape was fixed by hand, on clusters too large to search exactly: all nodes count as the worst
of them."""

from __future__ import annotations

from functools import cache
from math import inf

from elastic.planning import batches
from elastic.planning.cutting import Cutter
from elastic.planning.model import ONE_F_ONE_B
from elastic.planning.problem import Problem, Shape, Solution
from elastic.planning.scale import cost


def solve(problem: Problem, per_node: int) -> Solution | None:
    """The best cuts and shares for `problem.depths`; its model has one kind of node, with `per_node` units."""
    schedule = problem.schedules[0] if problem.schedules else ONE_F_ONE_B

    @cache
    def cutter(depth: int, ahead: int) -> Cutter:
        hosts = [min(per_node, depth - first) for first in range(0, depth, per_node)]
        return Cutter(problem.model, schedule, [0] * len(hosts), hosts, ahead)

    @cache
    def slowest(depth: int, ahead: int) -> tuple[float, tuple[int, ...]]:
        found = cutter(depth, ahead)
        least = found.least(0.0, inf)
        cuts = found.cut(least) if least < inf else None
        return (least, cuts) if cuts else (inf, ())

    def finish(depth: int, microbatches: int) -> float:
        cuts = slowest(depth, min(depth, microbatches))[1]
        if not cuts:
            return inf
        fill, longest = cutter(depth, min(depth, microbatches)).seconds(cuts)
        return fill + (microbatches - 1) * longest

    if len(problem.depths) > problem.microbatches:
        return None
    costs = [lambda m, depth=depth: finish(depth, m) for depth in problem.depths]
    shares = batches.allot(problem.microbatches, costs)
    shapes = []
    for depth, m in zip(problem.depths, shares, strict=True):
        found = cutter(depth, min(depth, m))
        cuts = slowest(depth, min(depth, m))[1]
        if not cuts:
            return None
        shapes.append(Shape(schedule, found.kinds, found.used, cuts, m))
    return Solution(tuple(shapes), cost(problem.model, tuple(shapes)))
