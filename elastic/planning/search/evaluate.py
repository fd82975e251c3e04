"""Seconds of shapes and of whole solutions: by closed forms, and simulated action by action.

Closed forms only bound or approximate some schedules: 1F1B if forward takes another part of the
time on some stages, and zero-bubble on uneven stages. The simulation is exact for the engine's
actions. It chooses among solutions that are about equally good by the closed forms.
"""

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
from elastic.planning.search.layer_partition import partitioner_of
from elastic.planning.search.problem import PipelineShape, Solution

MAX_PIPELINES_TO_IMPROVE = 8
MAX_ACTIONS_TO_IMPROVE = 3000
"""Maximum micro-batches times stages of a solution whose cuts are improved."""
MAX_IMPROVEMENTS = 6


def step_seconds(model: CostModel, shapes: tuple[PipelineShape, ...]) -> float:
    """Return the seconds of a step by the closed forms."""
    slowest = max(shape_seconds(model, shape) for shape in set(shapes))
    return slowest + largest_tail(model, shapes)


def largest_tail(model: CostModel, shapes: Sequence[PipelineShape], pipelines: int = 0) -> float:
    """Return the seconds of reduction and update of the slowest stage.

    `pipelines`: number of pipelines that reduce in one ring; 0: as many as shapes.
    """
    tails = [model.tails(kind, pipelines or len(shapes)) for kind in range(len(model.kinds))]
    return max(
        float(tails[kind][a, b])
        for kinds, cuts in {(shape.stage_kinds(), shape.cuts) for shape in shapes}
        for kind, (a, b) in zip(kinds, pairwise(cuts), strict=True)
    )


def shape_seconds(model: CostModel, shape: PipelineShape) -> float:
    """Return the seconds of one pipeline by the closed form."""
    figures = fill_and_slowest(model, shape)
    return float(pipeline_seconds(shape.schedule, *figures, shape.microbatches))


def fill_and_slowest(model: CostModel, shape: PipelineShape) -> tuple[float, float]:
    """Return (sum of fills, slowest stage) of a shape, in seconds."""
    ahead = min(shape.microbatches, shape.depth) if model.limited else 1
    return cached_figures(model, replace(shape, microbatches=ahead))


@lru_cache(maxsize=1024)
def cached_figures(model: CostModel, shape: PipelineShape) -> tuple[float, float]:
    """Return `fill_and_slowest` of a shape that has only the micro-batches in flight."""
    return partitioner_of(model, shape).fill_and_slowest(shape.cuts)


def simulated_step_seconds(model: CostModel, solution: Solution) -> float:
    """Return the seconds of a step with simulated pipelines."""
    slowest = max(simulated_seconds(model, shape) for shape in set(solution.shapes))
    return slowest + (0.0 if model.has_no_tail else largest_tail(model, solution.shapes))


@lru_cache(maxsize=4096)
def simulated_seconds(model: CostModel, shape: PipelineShape) -> float:
    """Return a pipeline's seconds, simulated unless it is long or the closed form is exact."""
    if shape.depth * shape.microbatches > MAX_SIMULATED_ACTIONS:
        return shape_seconds(model, shape)
    if shape.depth > 1:
        times = _stage_times(model, shape)
        return makespan(shape.schedule, shape.depth, shape.microbatches, times)
    if shape.schedule == ONE_F_ONE_B:
        return shape_seconds(model, shape)
    only = _stage_times(model, shape)[0]
    whole = only.forward_s + only.backward_s
    return float(pipeline_seconds(ONE_F_ONE_B, whole, whole, shape.microbatches))


def _stage_times(model: CostModel, shape: PipelineShape) -> tuple[StageTimes, ...]:
    tables = partitioner_of(model, shape).tables
    hosts = zip(shape.kinds, shape.stages, strict=True)
    owners = [(kind, r < n - 1) for kind, n in hosts for r in range(n)]
    found = []
    for s, (kind, inside) in enumerate(owners):
        a, b = shape.cuts[s], shape.cuts[s + 1]
        p = model.prefix[kind]
        forward = float(p.forward[b] - p.forward[a])
        again = forward if tables[s].recompute[a, b] else 0.0
        backward = float(p.backward[b] - p.backward[a]) + again
        backward_input = weight = 0.0
        if p.split is not None and p.weight is not None:
            weight = float(p.weight[b] - p.weight[a])
            backward_input = float(p.split[b] - p.split[a]) - weight + again
        stream = float(p.stream[b] - p.stream[a])
        more = max(float(p.exposed[b] - p.exposed[a]), stream - forward - backward)
        hops = model.hops(inside=inside, last=s + 1 == shape.depth)
        found.append(
            StageTimes(
                forward_s=forward,
                backward_s=backward + more,
                backward_input_s=backward_input,
                backward_weight_s=weight + more,
                hop_s=float(hops[b]) / 2,
            )
        )
    return tuple(found)


def improve_cuts(model: CostModel, solution: Solution) -> Solution:
    """Return `solution` with cuts of its slowest pipeline moved by one layer while that gains time.

    Closed forms ignore the order of equally slow stages. Large solutions are returned unchanged.
    """
    shapes = solution.shapes
    actions = sum(shape.depth * shape.microbatches for shape in shapes)
    if len(shapes) > MAX_PIPELINES_TO_IMPROVE or actions > MAX_ACTIONS_TO_IMPROVE:
        return solution
    best = simulated_step_seconds(model, solution)
    for _ in range(MAX_IMPROVEMENTS):
        shapes = solution.shapes
        slowest = max(range(len(shapes)), key=lambda i: simulated_seconds(model, shapes[i]))
        tries = [
            replace(solution, shapes=(*shapes[:slowest], other, *shapes[slowest + 1 :]))
            for other in _neighbours(model, shapes[slowest])
        ]
        priced = [simulated_step_seconds(model, other) for other in tries]
        if min(priced, default=inf) >= best * (1 - 1e-9):
            break
        best = min(priced)
        solution = tries[priced.index(best)]
    return solution


def _neighbours(model: CostModel, shape: PipelineShape) -> Iterator[PipelineShape]:
    """Yield the shapes that differ from `shape` by one layer at one cut and fit in memory."""
    partitioner = partitioner_of(model, shape)
    for at, step in product(range(1, shape.depth), (-1, 1)):
        cuts = (*shape.cuts[:at], shape.cuts[at] + step, *shape.cuts[at + 1 :])
        if cuts[at - 1] < cuts[at] < cuts[at + 1] and partitioner.fill_and_slowest(cuts)[1] < inf:
            yield replace(shape, cuts=cuts)
