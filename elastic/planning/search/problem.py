"""The planning problem, and its solutions, which know nodes only by their kinds."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from elastic.planning.cost.cost_model import CostModel

NodeCounts = tuple[int, ...]
"""Number of nodes of each kind."""
TIME_TOLERANCE = 1e-12
"""Relative difference up to which two times are equal."""


@dataclass(frozen=True, slots=True, order=True)
class NodeGroup:
    """Number of nodes of each kind in a pipeline, and the number of its stages."""

    counts: NodeCounts
    depth: int


@dataclass(frozen=True, slots=True)
class PipelineShape:
    """A pipeline whose nodes are known by kind only."""

    schedule: str
    kinds: tuple[int, ...]
    """Kind of each node, first stage first."""
    stages: tuple[int, ...]
    """Number of stages on each of these nodes."""
    cuts: tuple[int, ...]
    """First layer of each stage, then the number of layers."""
    microbatches: int

    @property
    def depth(self) -> int:
        return len(self.cuts) - 1

    def stage_kinds(self) -> tuple[int, ...]:
        """Return the kind of the node of each stage."""
        pairs = zip(self.kinds, self.stages, strict=True)
        return tuple(kind for kind, n in pairs for _ in range(n))


@dataclass(frozen=True, slots=True)
class Solution:
    """Shapes of all pipelines, and seconds of the step under the cost model."""

    shapes: tuple[PipelineShape, ...]
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Input of the search for the pipelines with the shortest step."""

    model: CostModel
    counts: NodeCounts
    microbatches: int
    schedules: tuple[str, ...] = ("1f1b",)
    depths: NodeCounts = ()
    """Depth of each pipeline; (): free."""
    current: int = 0
    """Number of pipelines in the current plan, preferred among equals; 0: no current plan."""
    thorough: bool = True
    """Whether to search for seconds instead of milliseconds (with a few dozen nodes)."""
    upper_bound_s: float = inf
    """Step time of a known plan; slower plans need not be found."""
