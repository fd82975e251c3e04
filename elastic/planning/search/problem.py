"""The planning problem, and its solutions before nodes have names."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from elastic.planning.cost.cost_model import CostModel

NodeCounts = tuple[int, ...]
"""Nodes per kind."""
TIME_TOLERANCE = 1e-12
"""Relative difference up to which two times are equal."""


@dataclass(frozen=True, slots=True, order=True)
class NodeGroup:
    """Nodes of one pipeline, and the number of stages on them."""

    counts: NodeCounts
    depth: int


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline whose nodes are known by kind only."""

    schedule: str
    kinds: tuple[int, ...]
    """Kind of each node, first stage first."""
    stages: tuple[int, ...]
    """Stages on each of these nodes."""
    cuts: tuple[int, ...]
    """First layer of each stage, then L."""
    microbatches: int

    @property
    def depth(self) -> int:
        return len(self.cuts) - 1

    def stage_kinds(self) -> tuple[int, ...]:
        """Kind of each stage."""
        pairs = zip(self.kinds, self.stages, strict=True)
        return tuple(kind for kind, n in pairs for _ in range(n))


@dataclass(frozen=True, slots=True)
class Solution:
    """Shapes of all pipelines, and seconds of the step under the cost model."""

    shapes: tuple[PipelineShape, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Find the pipelines with the shortest step for `microbatches` on `counts` nodes per kind."""

    model: CostModel
    counts: NodeCounts
    microbatches: int
    schedules: tuple[str, ...] = ("1f1b",)
    depths: NodeCounts = ()
    """Depth of each pipeline; (): free."""
    current: int = 0
    """Present number of pipelines, preferred among equals."""
    thorough: bool = True
    """Search longer: seconds instead of milliseconds for a few dozen nodes."""
    upper_bound_s: float = inf
    """Seconds of a known plan; slower ones need not be found."""
