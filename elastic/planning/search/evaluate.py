"""What shapes cost: seconds of pipelines and of whole plans, by the closed forms."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise, product
from math import inf

from elastic.planning.cost.cost_model import CostModel, pipeline_seconds
from elastic.planning.cost.predict import MAX_SIMULATED_ACTIONS
from elastic.planning.schedule.schedule import ONE_F_ONE_B
from elastic.planning.schedule.timeline import StageTimes, makespan
from elastic.planning.search.layer_partition import LayerPartitioner
from elastic.planning.search.problem import PipelineShape, Solution


def step_seconds(model: CostModel, shapes: tuple[PipelineShape, ...]) -> float:
    """Seconds of a step under the cost model."""
    return max(shape_seconds(model, shape) for shape in set(shapes)) + largest_tail(model, shapes)


def largest_tail(model: CostModel, shapes: Sequence[PipelineShape], pipelines: int = 0) -> float:
    """Seconds of reduction and update of the slowest stage, in a ring of these or of so many `pipelines`."""
    tails = [model.tails(kind, pipelines or len(shapes)) for kind in range(len(model.kinds))]
    return max(
        float(tails[kind][a, b])
        for kinds, cuts in {(shape.stage_kinds(), shape.cuts) for shape in shapes}
        for kind, (a, b) in zip(kinds, pairwise(cuts), strict=True)
    )


def shape_seconds(model: CostModel, shape: PipelineShape) -> float:
    """Seconds of one pipeline."""
    return float(pipeline_seconds(shape.schedule, *fill_and_slowest(model, shape), shape.microbatches))


def slowest_stage(model: CostModel, shape: PipelineShape) -> float:
    """Seconds of its slowest stage."""
    return fill_and_slowest(model, shape)[1]


def fill_and_slowest(model: CostModel, shape: PipelineShape) -> tuple[float, float]:
    """(sum of fills, slowest stage) of a shape."""
    ahead = min(shape.microbatches, shape.depth) if model.limited else 1
    return priced_shape(model, replace(shape, microbatches=ahead))


@lru_cache(maxsize=1024)
def priced_shape(model: CostModel, shape: PipelineShape) -> tuple[float, float]:
    """`fill_and_slowest` of a shape whose micro-batches are those in flight at most."""
    cutter = LayerPartitioner(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches)
    return cutter.seconds(shape.cuts)


FEW, QUICK_ACTIONS, ROUNDS = 8, 3000, 6
"""Pipelines, micro-batches times stages, and rounds up to which cuts are polished."""


def simulated_step_seconds(model: CostModel, solution: Solution) -> float:
    """Seconds of a step."""
    slowest = max(simulated_seconds(model, shape) for shape in set(solution.shapes))
    return slowest + (0.0 if model.has_no_tail else largest_tail(model, solution.shapes))


@lru_cache(maxsize=4096)
def simulated_seconds(model: CostModel, shape: PipelineShape) -> float:
    """Seconds of one pipeline."""
    if shape.depth * shape.microbatches > MAX_SIMULATED_ACTIONS:
        return shape_seconds(model, shape)
    if shape.depth == 1:
        return shape_seconds(model, shape) if shape.schedule == ONE_F_ONE_B else _alone(model, shape)
    return makespan(shape.schedule, shape.depth, shape.microbatches, _times(model, shape))


def _alone(model: CostModel, shape: PipelineShape) -> float:
    times = _times(model, shape)[0]
    whole = times.forward_s + times.backward_s
    return float(pipeline_seconds(ONE_F_ONE_B, whole, whole, shape.microbatches))


def _times(model: CostModel, shape: PipelineShape) -> tuple[StageTimes, ...]:
    cutter = LayerPartitioner(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches)
    found = []
    owners = [(kind, r < n - 1) for kind, n in zip(shape.kinds, shape.stages, strict=True) for r in range(n)]
    for s, (kind, inside) in enumerate(owners):
        a, b = shape.cuts[s], shape.cuts[s + 1]
        p = model.prefix(kind)
        forward = float(p.forward[b] - p.forward[a])
        again = forward if cutter.tables[s].recompute[a, b] else 0.0
        backward = float(p.backward[b] - p.backward[a]) + again
        entry = weight = 0.0
        if p.split is not None and p.weight is not None:
            weight = float(p.weight[b] - p.weight[a])
            entry = float(p.split[b] - p.split[a]) - weight + again
        stream = float(p.stream[b] - p.stream[a])
        more = max(float(p.exposed[b] - p.exposed[a]), stream - forward - backward)
        hop = float(model.hops(inside=inside, last=s + 1 == shape.depth)[b]) / 2
        found.append(
            StageTimes(
                forward_s=forward,
                backward_s=backward + more,
                backward_input_s=entry,
                backward_weight_s=weight + more,
                hop_s=hop,
            )
        )
    return tuple(found)


def improve_cuts(model: CostModel, solution: Solution) -> Solution:
    """Move cuts of the slowest pipeline by a layer as long as that makes it faster. Only where that is quick to try.

    Closed forms do not see which of two equally slow stages comes first.
    """
    if len(solution.shapes) > FEW or sum(s.depth * s.microbatches for s in solution.shapes) > QUICK_ACTIONS:
        return solution
    best = simulated_step_seconds(model, solution)
    for _ in range(ROUNDS):
        slowest = max(range(len(solution.shapes)), key=lambda i: simulated_seconds(model, solution.shapes[i]))
        tries = [
            replace(solution, shapes=(*solution.shapes[:slowest], other, *solution.shapes[slowest + 1 :]))
            for other in _neighbours(model, solution.shapes[slowest])
        ]
        found = min(tries, key=lambda other: simulated_step_seconds(model, other), default=None)
        if found is None or simulated_step_seconds(model, found) >= best * (1 - 1e-9):
            break
        solution, best = found, simulated_step_seconds(model, found)
    return solution


def _neighbours(model: CostModel, shape: PipelineShape) -> Iterator[PipelineShape]:
    """Shapes with one cut moved by one layer, as far as they fit."""
    cutter = LayerPartitioner(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches)
    for at, step in product(range(1, shape.depth), (-1, 1)):
        cuts = (*shape.cuts[:at], shape.cuts[at] + step, *shape.cuts[at + 1 :])
        if cuts[at - 1] < cuts[at] < cuts[at + 1] and cutter.seconds(cuts)[1] < inf:
            yield replace(shape, cuts=cuts)
