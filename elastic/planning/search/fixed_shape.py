"""Plans whose depths are given: shapes fixed by hand on clusters too large to search exactly, and even shapes.

One kind of node. Each depth is cut so that its slowest stage is fastest, and micro-batches are shared out.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from math import inf

from elastic.domain.errors import FieldError
from elastic.planning.cost.cost_model import CostModel, pipeline_seconds
from elastic.planning.schedule import microbatch_split as batches
from elastic.planning.search.evaluate import step_seconds, largest_tail
from elastic.planning.search.layer_partition import LayerPartitioner
from elastic.planning.search.problem import Problem, PipelineShape, Solution

Depths = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeLimits:
    """What pipelines have to be made of."""

    nodes: int
    per_node: int
    """Units of a node."""
    n_layers: int
    n_microbatches: int

    @property
    def most(self) -> int:
        """The most pipelines that can be kept busy."""
        return min(self.nodes, self.n_microbatches)

    def hosts(self, depth: int) -> int:
        """Nodes that a pipeline of `depth` stages takes."""
        return -(-depth // self.per_node)

    def even_solutions(self, pipelines: int) -> Depths:
        """Spread all nodes as evenly as possible; never deeper than there are layers."""
        base, more = divmod(self.nodes, pipelines)
        return tuple(min((base + (i < more)) * self.per_node, self.n_layers) for i in range(pipelines))


def parse_shape(text: str) -> Depths | int | None:
    """Return None for auto, a number of pipelines, or depths. Raises FieldError."""
    if text == "auto":
        return None
    if not re.fullmatch(r"[1-9]\d{0,5}(\+[1-9]\d{0,5})*", text):
        raise FieldError("pipelines", text, "auto, a number of pipelines (2), or the depth of each (3+1)")
    parts = tuple(int(part) for part in text.split("+"))
    return parts if len(parts) > 1 else parts[0]


def format_depths(depths: Depths) -> str:
    return "+".join(map(str, depths))


def candidate_depths(shape: str, room: ShapeLimits) -> Iterator[tuple[tuple[Depths, ...], str]]:
    """Yield groups of shapes, each with why it is not quite what was asked ("" if it is): a later group is
    for when
    nothing in the earlier ones is feasible."""
    wanted = parse_shape(shape)
    if wanted is None:
        yield tuple(room.even(k) for k in range(1, room.most + 1)), ""
        return
    pipelines = wanted if isinstance(wanted, int) else len(wanted)
    for k in range(min(pipelines, room.most), 0, -1):
        depths = room.even(k) if isinstance(wanted, int) else fit_depths(wanted[:k], room)
        asked = k == wanted if isinstance(wanted, int) else depths == wanted
        yield (
            (depths,),
            "" if asked else f"shape {shape} does not fit {room.nodes} nodes; {format_depths(depths)} does",
        )


def fit_depths(wanted: Depths, room: ShapeLimits) -> Depths:
    """Bring depths to what the nodes allow: shorten the deepest pipelines or deepen the shallowest ones."""
    depths = [min(depth, room.n_layers) for depth in wanted]
    while sum(map(room.hosts, depths)) > room.nodes:
        deepest = max(range(len(depths)), key=lambda i: (depths[i], i))
        depths[deepest] -= 1
    while sum(map(room.hosts, depths)) < room.nodes and min(depths) < room.n_layers:
        shallowest = min(range(len(depths)), key=lambda i: (depths[i], i))
        depths[shallowest] = min(
            room.hosts(depths[shallowest]) * room.per_node + room.per_node, room.n_layers
        )
    return tuple(depths)


MAX_EVEN_SHAPES = 3
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
        found = cut_uniform(model, schedule, depth, per_node, min(depth, m))
        if found is None:
            return None
        kinds, stages, cuts, _, _ = found
        shapes.append(PipelineShape(schedule, kinds, stages, cuts, m))
    return Solution(tuple(shapes), step_seconds(model, tuple(shapes)))


def even_solutions(problem: Problem) -> list[Solution]:
    """The best plans with nodes spread as evenly as can be over 1, 2, ... pipelines.

    A ring of fewer pipelines reduces a little faster, which `scale` does not see: it reckons with a ring of many.
    """
    model = problem.model
    if len(problem.counts) > 1 or model.has_no_tail:
        return []
    units = min(model.kinds[0].units, model.n_layers)
    room = ShapeLimits(
        nodes=problem.counts[0], per_node=units, n_layers=model.n_layers, n_microbatches=problem.microbatches
    )
    priced = []
    for schedule in problem.schedules:
        for depths in dict.fromkeys(room.even(k) for k in range(1, room.most + 1)):
            priced.append((_estimate(model, schedule, depths, units, problem.microbatches), schedule, depths))
    found = []
    for seconds, schedule, depths in sorted(priced)[:MAX_EVEN_SHAPES]:
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
        found = cut_uniform(model, schedule, depth, per_node, depth)
        if found is None:
            return inf
        kinds, stages, cuts, _, _ = found
        shapes.append(PipelineShape(schedule, kinds, stages, cuts, depth))
    low, high = 0.0, max(_seconds(model, schedule, depth, per_node, microbatches) for depth in numbers)
    for _ in range(40):
        middle = (low + high) / 2
        done = sum(n * _share(model, schedule, depth, per_node, middle) for depth, n in numbers.items())
        low, high = (low, middle) if done >= microbatches else (middle, high)
    ring = [shape for shape in shapes for _ in range(len(depths))][: len(depths)]
    return high + largest_tail(model, [*shapes, *ring][: max(len(depths), len(shapes))])


def _share(model: CostModel, schedule: str, depth: int, per_node: int, seconds: float) -> int:
    found = cut_uniform(model, schedule, depth, per_node, depth)
    if found is None:
        return 0
    first = float(pipeline_seconds(schedule, found[3], found[4], 1))
    return int((seconds - first) / found[4]) + 1 if seconds >= first else 0


def _seconds(model: CostModel, schedule: str, depth: int, per_node: int, microbatches: int) -> float:
    found = cut_uniform(model, schedule, depth, per_node, depth)
    if found is None and microbatches < depth:  # fewer in flight may fit
        found = cut_uniform(model, schedule, depth, per_node, microbatches)
    return float(pipeline_seconds(schedule, found[3], found[4], microbatches)) if found else inf


@lru_cache(maxsize=1024)
def cut_uniform(
    model: CostModel, schedule: str, depth: int, per_node: int, ahead: int
) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], float, float] | None:
    """(kinds, stages a node, cuts, sum of fills, slowest stage), or None if memory forbids it."""
    hosts = tuple(min(per_node, depth - first) for first in range(0, depth, per_node))
    cutter = LayerPartitioner(model, schedule, [0] * len(hosts), hosts, ahead)
    least = cutter.least(0.0, inf)
    cuts = cutter.cut(least) if least < inf else None
    return ((0,) * len(hosts), hosts, cuts, *cutter.seconds(cuts)) if cuts else None
