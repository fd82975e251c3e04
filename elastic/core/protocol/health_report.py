"""Reports of an agent about its node: `HealthReport`, `Preflight` and `Notice`.

They hold figures only; `elastic.core.health.diagnosis` judges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_ENTRIES = 8
"""Entries of one kind in a report, at most."""
MAX_TEXT_LENGTH = 200
"""Characters of a text in a report, at most."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space of one directory that a node writes to."""

    role: str
    """checkpoints | run | memory"""
    path: str
    free_bytes: int
    total_bytes: int
    volume: str = ""
    """Identifies the file system; equal on all nodes that share it."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """State of one accelerator as its driver reports it."""

    index: int
    name: str
    temperature_c: float = 0.0
    throttled: str = ""
    """Reason for a reduced clock (thermal, power); "": not reduced, or idle."""
    errors: int = 0
    """Uncorrected memory errors since the agent started."""
    fault: str = ""
    """Fault that the driver reports (XID 79, device lost); "": none."""


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Copies sent to one peer since the last report, without those too small to measure a link."""

    peer: str
    sends: int
    nbytes: int
    """Sum over the copies."""
    seconds: float
    """Sum over the copies."""
    best_bytes_per_s: float
    """Rate of the fastest copy; the machine may slow a single one."""


@dataclass(frozen=True, slots=True)
class FailedOperation:
    """An operation that failed on the node; the node goes on."""

    what: str
    """checkpoint"""
    path: str
    detail: str
    """The system's error message."""
    count: int = 1
    """Failures since the last report."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Health of a node, sent on changes and at intervals.

    It has at most MAX_ENTRIES entries of a kind, with texts of at most MAX_TEXT_LENGTH.
    """

    node: str
    incarnation: str
    at: float
    """time.time() on the node."""
    epoch: int = 0
    load: float = 0.0
    """Runnable processes per core."""
    memory_free_bytes: int = 0
    memory_total_bytes: int = 0
    disks: tuple[DiskSpace, ...] = ()
    devices: tuple[DeviceHealth, ...] = ()
    links: tuple[LinkTraffic, ...] = ()
    failed_operations: tuple[FailedOperation, ...] = ()


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """Result of one pre-flight check."""

    name: str
    """compute | memory | disk:ROLE | clock | coordinator | peer | device"""
    value: float
    unit: str
    ok: bool
    fatal: bool = True
    """Whether a failure refuses the node; otherwise it warns, and refuses only in strict mode."""
    remedy: str = ""
    """The problem and the remedy; "": no problem."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Checks that a node made of itself before it asked to join."""

    mode: str
    """on | strict"""
    seconds: float
    checks: tuple[PreflightCheck, ...] = ()
    score: float = 0.0
    """Speed of its devices, comparable between nodes of a job; higher is faster, 0 is unknown."""

    @property
    def failed(self) -> tuple[PreflightCheck, ...]:
        """Checks for which the node is refused."""
        return tuple(c for c in self.checks if not c.ok and (c.fatal or self.mode == "strict"))

    def value(self, name: str) -> float | None:
        """Value of the check `name`, if it was made."""
        return next((c.value for c in self.checks if c.name == name), None)


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """The coordinator refuses the node; it may repeat its pre-flight and ask after `retry_s`."""

    reason: str
    retry_s: float


class NoticeKind(StrEnum):
    """Content of a notice about a node's future."""

    LEAVE = "leave"
    """The node will go."""
    HINT = "hint"
    """The node will probably go soon."""
    NONE = "none"
    """The node stays; an earlier notice no longer holds."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Notice about a node's future from all its sources; sent again after every reconnect."""

    node: str
    incarnation: str
    kind: NoticeKind
    provider: str = ""
    deadline_s: float = 0.0
    """Seconds from now, because clocks differ."""
    detail: str = ""
    final: bool = False
    """Whether the agent exits once the node is drained; else it waits, and joins again if the node
    outlives the notice."""
