"""Shapes with given depths: fitting to the nodes, and plans on one kind of node.

A shape is a number of pipelines or their depths (`elastic.planning.plan.shape`). A node with
several units takes that many neighbouring stages of one pipeline, because a node never holds a
layer twice.

`solve` makes plans of given depths on clusters that are too large for the exact search. It cuts
each depth so that the slowest stage is as fast as possible, and divides the micro-batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from elastic.planning.cost.cost_model import CostModel, pipeline_seconds
from elastic.planning.plan.shape import Depths, format_depths, nodes_for, parse_shape
from elastic.planning.schedule import microbatch_split as batches
from elastic.planning.search.evaluate import step_seconds
from elastic.planning.search.layer_partition import LayerPartitioner
from elastic.planning.search.problem import PipelineShape, Problem, Solution


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeLimits:
    """Nodes, layers and micro-batches that limit the shapes."""

    nodes: int
    per_node: int
    """Units per node."""
    n_layers: int
    n_microbatches: int

    @property
    def max_pipelines(self) -> int:
        """Maximum number of pipelines that all have a node and a micro-batch."""
        return min(self.nodes, self.n_microbatches)

    def nodes_for(self, depth: int) -> int:
        """Return the number of nodes that a pipeline of `depth` stages takes."""
        return nodes_for(depth, self.per_node)

    def even(self, pipelines: int) -> Depths:
        """Return depths that use all nodes as evenly as possible, none deeper than the layers."""
        base, more = divmod(self.nodes, pipelines)
        return tuple(
            min((base + (i < more)) * self.per_node, self.n_layers) for i in range(pipelines)
        )


def candidate_depths(shape: str, limits: ShapeLimits) -> Iterator[tuple[Depths, str]]:
    """Yield (depths, note) for a requested number or depths of pipelines, best first.

    The note says how the depths differ from the request; "": they do not.
    """
    wanted = parse_shape(shape)
    assert wanted is not None, "a shape is requested"
    pipelines = wanted if isinstance(wanted, int) else len(wanted)
    for k in range(min(pipelines, limits.max_pipelines), 0, -1):
        if isinstance(wanted, int):
            depths, as_requested = limits.even(k), k == wanted
        else:
            depths = fit_depths(wanted[:k], limits)
            as_requested = depths == wanted
        note = f"shape {shape} does not fit {limits.nodes} nodes; {format_depths(depths)} does"
        yield depths, "" if as_requested else note


def fit_depths(wanted: Depths, limits: ShapeLimits) -> Depths:
    """Return `wanted` with deep pipelines shortened or shallow ones deepened to use all nodes."""
    depths = [min(depth, limits.n_layers) for depth in wanted]
    while sum(map(limits.nodes_for, depths)) > limits.nodes:
        deepest = max(range(len(depths)), key=lambda i: (depths[i], i))
        depths[deepest] -= 1
    while sum(map(limits.nodes_for, depths)) < limits.nodes and min(depths) < limits.n_layers:
        shallowest = min(range(len(depths)), key=lambda i: (depths[i], i))
        more = (limits.nodes_for(depths[shallowest]) + 1) * limits.per_node
        depths[shallowest] = min(more, limits.n_layers)
    return tuple(depths)


def solve(problem: Problem, per_node: int) -> Solution | None:
    """Return the best cuts and micro-batches for `problem.depths` on one kind of node.

    None: there are more pipelines than micro-batches, or memory is short.
    """
    schedule, model = problem.schedules[0], problem.model
    if len(problem.depths) > problem.microbatches:
        return None

    def finish(depth: int) -> batches.Cost:
        return lambda m: _seconds(model, schedule, depth, per_node, m)

    shares = batches.allot(problem.microbatches, [finish(depth) for depth in problem.depths])
    shapes = []
    for depth, m in zip(problem.depths, shares, strict=True):
        found = cut_uniform(model, schedule, depth, per_node, min(depth, m))
        if found is None:
            return None
        shapes.append(replace(found[0], microbatches=m))
    return Solution(tuple(shapes), step_seconds(model, tuple(shapes)))


def _seconds(
    model: CostModel, schedule: str, depth: int, per_node: int, microbatches: int
) -> float:
    found = cut_uniform(model, schedule, depth, per_node, depth)
    if found is None and microbatches < depth:  # fewer in flight may fit
        found = cut_uniform(model, schedule, depth, per_node, microbatches)
    return float(pipeline_seconds(schedule, *found[1:], microbatches)) if found else inf


@lru_cache(maxsize=1024)
def cut_uniform(
    model: CostModel, schedule: str, depth: int, per_node: int, ahead: int, *, messages: bool = True
) -> tuple[PipelineShape, float, float] | None:
    """Cut the layers for a pipeline on one kind of node.

    Return (shape, seconds to fill and drain the pipeline, seconds of the slowest stage); None if
    memory is short.

    `ahead`: maximum micro-batches in flight; the shape has as many micro-batches. `messages`:
    whether messages are part of a stage's time.
    """
    stages = tuple(min(per_node, depth - first) for first in range(0, depth, per_node))
    kinds = (0,) * len(stages)
    partitioner = LayerPartitioner(model, schedule, kinds, stages, ahead, messages=messages)
    least = partitioner.least_limit(0.0, inf)
    cuts = partitioner.cut(least) if least < inf else None
    if cuts is None:
        return None
    shape = PipelineShape(schedule, kinds, stages, cuts, ahead)
    return (shape, *partitioner.fill_and_slowest(cuts))
