"""What shapes cost: seconds of pipelines and of whole plans, by the closed forms."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise

from elastic.planning.cost.cost_model import CostModel, pipeline_seconds
from elastic.planning.search.layer_partition import Cutter
from elastic.planning.search.problem import Shape


def cost(model: CostModel, shapes: tuple[Shape, ...]) -> float:
    """Seconds of a step under the cost model."""
    return max(shape_seconds(model, shape) for shape in set(shapes)) + largest_tail(model, shapes)


def largest_tail(model: CostModel, shapes: Sequence[Shape], pipelines: int = 0) -> float:
    """Seconds of reduction and update of the slowest stage, in a ring of these or of so many `pipelines`."""
    tails = [model.tails(kind, pipelines or len(shapes)) for kind in range(len(model.kinds))]
    return max(
        float(tails[kind][a, b])
        for kinds, cuts in {(shape.stage_kinds(), shape.cuts) for shape in shapes}
        for kind, (a, b) in zip(kinds, pairwise(cuts), strict=True)
    )


def shape_seconds(model: CostModel, shape: Shape) -> float:
    """Seconds of one pipeline."""
    return float(pipeline_seconds(shape.schedule, *figures(model, shape), shape.microbatches))


def slowest_stage(model: CostModel, shape: Shape) -> float:
    """Seconds of its slowest stage."""
    return figures(model, shape)[1]


def figures(model: CostModel, shape: Shape) -> tuple[float, float]:
    """(sum of fills, slowest stage) of a shape."""
    ahead = min(shape.microbatches, shape.depth) if model.limited else 1
    return worked_out(model, replace(shape, microbatches=ahead))


@lru_cache(maxsize=1024)
def worked_out(model: CostModel, shape: Shape) -> tuple[float, float]:
    """`figures` of a shape whose micro-batches are those in flight at most."""
    cutter = Cutter(model, shape.schedule, shape.kinds, shape.stages, shape.microbatches)
    return cutter.seconds(shape.cuts)
