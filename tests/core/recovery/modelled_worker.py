"""A worker of the modelled job (`tests.core.recovery.job_model`)."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from elastic.domain.types import Copy, StepRecord


@dataclass
class Worker:
    """One TP rank of one stage in one epoch."""

    node: str
    pipeline: int
    stage: int
    shard: int
    version: dict[int, int]
    gradient: dict[int, Counter[int]]
    started: set[int] = field(default_factory=set)
    backward: set[int] = field(default_factory=set)
    published: int = 0
    """Micro-batches after whose backward pass it has published."""
    queue: list[list[tuple[Copy, Any]]] = field(default_factory=list)
    """Bundles on their way to the peer; each is acknowledged when empty."""
    entered: bool = False
    unprotected: int = -1
    """Bundles still to be acknowledged before what the epoch began with is protected; -1: not entered."""
    passed: bool = False
    unwritten: list[tuple[Copy, Any]] = field(default_factory=list)
    """Messages that were sent and are not logged yet."""
    updated: int = -1
    """Step whose update it has begun."""
    record: StepRecord | None = None

    @property
    def step(self) -> int:
        return min(self.version.values())
