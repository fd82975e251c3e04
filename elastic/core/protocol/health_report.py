"""What an agent sees of its node, as it tells the coordinator: `HealthReport` beside the heartbeats, `Preflight` with
the first report. Figures alone; what they mean is decided in `elastic.core.health.diagnosis`.
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
    """Room in one of the directories that a node writes to."""

    role: str
    """checkpoints | run | memory"""
    path: str
    free_bytes: int
    total_bytes: int
    volume: str = ""
    """Names the file system; the same from every node that shares it."""


@dataclass(frozen=True, slots=True)
class DeviceHealth:
    """One accelerator, as its driver sees it."""

    index: int
    name: str
    temperature_c: float = 0.0
    throttled: str = ""
    """Why its clock is held down (thermal, power); "": it is not, or it is idle."""
    errors: int = 0
    """Uncorrected memory errors since the agent started."""
    fault: str = ""
    """What the driver says is broken: XID 79, device lost; "": nothing."""


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Copies sent to one peer since the last report: those large enough to tell of the link."""

    peer: str
    sends: int
    nbytes: int
    """Of all of them."""
    seconds: float
    """Of all of them."""
    best_bytes_per_s: float
    """Of the quickest: what slows a single one may be the machine."""


@dataclass(frozen=True, slots=True)
class FailedOperation:
    """Something that the node could not do; it goes on."""

    what: str
    """checkpoint"""
    path: str
    detail: str
    """The system's own words."""
    count: int = 1
    """How often since the last report."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Sent when something changed, and every so often otherwise. Bounded: MANY entries of a kind, LONG texts."""

    node: str
    incarnation: str
    at: float
    """time.time() on the node."""
    epoch: int = 0
    load: float = 0.0
    """Processes that want to run, for each core."""
    memory_free_bytes: int = 0
    memory_total_bytes: int = 0
    disks: tuple[DiskSpace, ...] = ()
    devices: tuple[DeviceHealth, ...] = ()
    links: tuple[LinkTraffic, ...] = ()
    failed_operations: tuple[FailedOperation, ...] = ()


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """One figure of a pre-flight."""

    name: str
    """compute | memory | disk:ROLE | clock | coordinator | peer | device"""
    value: float
    unit: str
    ok: bool
    fatal: bool = True
    """A node that fails it is refused; else it is only told of (and refused where pre-flight is strict)."""
    remedy: str = ""
    """What is wrong and what to do; "": nothing is."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """What a node found about itself before it asked to join."""

    mode: str
    """on | strict"""
    seconds: float
    checks: tuple[PreflightCheck, ...] = ()
    score: float = 0.0
    """Speed of its devices: a figure to compare nodes of a job by, higher is quicker; 0: unknown."""

    @property
    def failed(self) -> tuple[PreflightCheck, ...]:
        """What a node is refused for."""
        return tuple(c for c in self.checks if not c.ok and (c.fatal or self.mode == "strict"))

    def value(self, name: str) -> float | None:
        return next((c.value for c in self.checks if c.name == name), None)


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """The coordinator does not take the node: it may look at itself again, and ask, after `retry_s`."""

    reason: str
    retry_s: float


class NoticeKind(StrEnum):
    """What a node was told about its future."""

    LEAVE = "leave"
    """It goes."""
    HINT = "hint"
    """It will probably go before long."""
    NONE = "none"
    """Nothing (any more): it stays."""


@dataclass(frozen=True, slots=True)
class Notice:
    """What a node was told about its own future, all providers together; said again after every reconnection."""

    node: str
    incarnation: str
    kind: NoticeKind
    provider: str = ""
    deadline_s: float = 0.0
    """Seconds from now; clocks differ."""
    detail: str = ""
    final: bool = False
    """The agent ends once the node is drained; else it waits, and joins anew if the node outlives its notice."""
