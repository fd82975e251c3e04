"""Reports of an agent about its node: `HealthReport`, `Preflight` and `Notice`.

Reports hold only measurements; `elastic.core.health.diagnosis` judges them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

MAX_ENTRIES = 8
"""Maximum number of entries of one kind in a report."""
MAX_TEXT_LENGTH = 200
"""Maximum number of characters of a text in a report."""


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space of one directory that a node writes to."""

    role: str
    """Use of the directory: checkpoints | run | memory."""
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
    """Reason for a reduced clock (thermal, power); "": not reduced, or the device is idle."""
    errors: int = 0
    """Uncorrected memory errors since the agent started."""
    fault: str = ""
    """Fault that the driver reports (XID 79, device lost); "": no fault."""


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """Copies sent to one peer since the last report, except those too small to measure a link."""

    peer: str
    sends: int
    nbytes: int
    """Bytes of all these copies."""
    seconds: float
    """Time to send them, summed over the copies."""
    best_bytes_per_s: float
    """Rate of the fastest copy, because a busy machine may slow single copies."""


@dataclass(frozen=True, slots=True)
class FailedOperation:
    """An operation that failed on the node without ending it."""

    what: str
    """Object that could not be written: checkpoint."""
    path: str
    detail: str
    """Error message of the operating system."""
    count: int = 1
    """Number of failures since the last report."""


@dataclass(frozen=True, slots=True)
class UnreachablePeer:
    """A node whose vault gives no answer to this node, over the network that the workers use."""

    peer: str
    vault: str
    """host:port at which the peer was asked; a former incarnation of the peer has another one."""
    silent_s: float
    """Seconds since its last answer, or since it was first asked."""
    detail: str
    """Error of the last attempt."""


@dataclass(frozen=True, slots=True)
class CertificateEnd:
    """End of validity of one certificate of a process."""

    file: str
    """tls.crt: the process's own certificate; ca.crt: the authority that issued it."""
    subject: str
    ends_at: float
    """Seconds since 1970."""
    ends: str
    """The same time for people, with the time zone."""


@dataclass(frozen=True, slots=True)
class HealthReport:
    """Health of a node, sent on changes and at intervals.

    A report has at most MAX_ENTRIES entries of a kind, with texts of at most MAX_TEXT_LENGTH.
    """

    node: str
    incarnation: str
    at: float
    """Time of the report on the node's clock (time.time())."""
    epoch: int = 0
    load: float = 0.0
    """Runnable processes per core."""
    memory_free_bytes: int = 0
    memory_total_bytes: int = 0
    disks: tuple[DiskSpace, ...] = ()
    devices: tuple[DeviceHealth, ...] = ()
    links: tuple[LinkTraffic, ...] = ()
    failed_operations: tuple[FailedOperation, ...] = ()
    unreachable: tuple[UnreachablePeer, ...] = ()
    """All peers that this node cannot reach now."""
    certificates: tuple[CertificateEnd, ...] = ()


@dataclass(frozen=True, slots=True)
class PreflightCheck:
    """Result of one pre-flight check."""

    name: str
    """Name: compute | memory | disk:ROLE | clock | coordinator | peer | device."""
    value: float
    unit: str
    ok: bool
    fatal: bool = True
    """Whether a node that fails is refused; else it is refused in strict mode only, and warned."""
    remedy: str = ""
    """Problem and remedy for the user; "": no problem."""


@dataclass(frozen=True, slots=True)
class Preflight:
    """Results of the checks that an agent makes of its node before it asks to join."""

    mode: str
    """Mode of the checks: on | strict."""
    seconds: float
    checks: tuple[PreflightCheck, ...] = ()
    score: float = 0.0
    """Speed of the node's devices, to compare nodes of a job; higher is faster; 0: unknown."""

    @property
    def failed(self) -> tuple[PreflightCheck, ...]:
        """Failed checks because of which the node is refused."""
        return tuple(c for c in self.checks if not c.ok and (c.fatal or self.mode == "strict"))

    def value(self, name: str) -> float | None:
        """Return the value of the check `name`; None if it was not made."""
        return next((c.value for c in self.checks if c.name == name), None)


@dataclass(frozen=True, slots=True)
class JoinRefused:
    """The coordinator refuses the node, which may check itself and ask again after `retry_s`."""

    reason: str
    retry_s: float


class NoticeKind(StrEnum):
    """Content of a notice about a node's future."""

    LEAVE = "leave"
    """The node will leave before a deadline."""
    HINT = "hint"
    """The node will probably be lost soon."""
    NONE = "none"
    """The node stays; the earlier notice is withdrawn."""


@dataclass(frozen=True, slots=True)
class Notice:
    """Effective notice of a node, sent when it changes and after every reconnect."""

    node: str
    incarnation: str
    kind: NoticeKind
    provider: str = ""
    deadline_s: float = 0.0
    """Seconds from the sending of the message, because clocks differ."""
    detail: str = ""
    final: bool = False
    """Whether the agent exits once the node is drained; else the node is parked."""
