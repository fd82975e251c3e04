"""What the planner solves, and what a solution looks like before nodes have names."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from elastic.planning.cost.cost_model import CostModel

NodeCounts = tuple[int, ...]
"""Nodes of each kind."""
TIME_TOLERANCE = 1e-12
"""Relative difference below which two times are equal."""


@dataclass(frozen=True, slots=True, order=True)
class NodeGroup:
    """What a pipeline is made of."""

    counts: NodeCounts
    depth: int


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline before its nodes are known."""

    schedule: str
    kinds: tuple[int, ...]
    """Kind of each node, first stage first."""
    stages: tuple[int, ...]
    """Stages on each of these nodes."""
    cuts: tuple[int, ...]
    """First layer of each stage, and L."""
    microbatches: int

    @property
    def depth(self) -> int:
        return len(self.cuts) - 1

    def stage_kinds(self) -> tuple[int, ...]:
        """Kind of each stage."""
        return tuple(kind for kind, n in zip(self.kinds, self.stages, strict=True) for _ in range(n))


@dataclass(frozen=True, slots=True)
class Solution:
    """Pipelines, and the step's seconds under the cost model."""

    shapes: tuple[PipelineShape, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What is to be solved. `counts[q]` nodes of kind q may be used."""

    model: CostModel
    counts: NodeCounts
    microbatches: int
    schedules: tuple[str, ...] = ("1f1b",)
    depths: NodeCounts = ()
    """Depth of each pipeline; (): free."""
    current: int = 0
    """Pipelines now: preferred among equals."""
    thorough: bool = True
    """Take the time to try more: seconds instead of milliseconds, where nodes are a few dozen."""
    above: float = inf
    """Seconds of a plan that is known: slower ones need not be found."""
