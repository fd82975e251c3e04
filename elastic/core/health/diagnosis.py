"""What is wrong with a node, and what is done about it: observations -> class -> action, with the evidence.

    class     it is                             first action             and if that does not help
    process   a worker crashed, or hangs        restart                  quarantine of the node (class host or device)
    host      computes slowly, flaps            rebalance                replace (a spare is at hand), quarantine
    device    errors, or held down by heat      replace, quarantine      -
    link      carries less than it did          replace or rebalance     quarantine, if the job is quicker without
    storage   a disk is full or refuses         replace (its own disk)   none: training goes on without checkpoints

Here is what is known of one node (`Record`) and what a single observation means; `elastic.core.policy.remediation` puts it into
the job's state and carries it out. A quarantined node stays a member and keeps its vault, but plans do without it: for
`quarantine_s`, twice as long each time, up to `quarantine_most_s`; each `good_s` without an offence takes one doubling
back. Nothing here kills a worker: that needs what the kernel says of the process (`elastic.core.node.node.hung`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from elastic.core.health.link_speed import LinkPace
from elastic.core.protocol.health_report import DeviceSeen, Disk, HealthReport, Mishap, Preflight


class Kind(StrEnum):
    """What is at fault."""

    PROCESS = "process"
    DEVICE = "device"
    LINK = "link"
    STORAGE = "storage"
    HOST = "host"


class Remedy(StrEnum):
    """What is done."""

    NONE = "none"
    """The user is told; training goes on as it is."""
    RESTART = "restart"
    """The workers are started again; layers and plan as `elastic.core.policy.restart_policy` says."""
    REBALANCE = "rebalance"
    """A new plan that gives the node less to do."""
    QUARANTINE = "quarantine"
    """Plans do without the node for a while."""
    REPLACE = "replace"
    """The same, and a spare takes its place."""


AWAY = (Remedy.QUARANTINE, Remedy.REPLACE)
"""After these the node holds nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """From where on something counts. Seconds are of the coordinator's clock."""

    crashes: int = 3
    """Crashes of a node's workers within `window_s`: restarting them does not help."""
    hopeless: int = 4
    """Crashes of one node since the job last finished a step: it ends the job, if it cannot be put aside."""
    hopeless_nodes: int = 3
    """So many nodes with `crashes` each since then end the job: it is not the nodes."""
    departures: int = 3
    """Times that a node was lost within `window_s`: it flaps."""
    window_s: float = 600.0
    quarantine_s: float = 30.0
    """The first quarantine."""
    quarantine_most_s: float = 3600.0
    good_s: float = 1800.0
    """Without an offence for so long, a quarantine is forgiven."""
    retry_s: float = 5.0
    """A node that failed its pre-flight is looked at again after this, then after twice as long, and so on."""
    retry_most_s: float = 300.0
    link_factor: float = 3.0
    """A link is slow from this factor on."""
    link_windows: int = 3
    """Reports in a row that must agree on it."""
    link_least_s: float = 0.1
    """A slow link's copies take so much longer."""
    slowed: float = 1.1
    """Steps must take so much longer before anything is done about a slow link."""
    clock_s: float = 5.0
    """A clock that is further off is told of: event times of that node are wrong. No decision depends on it."""
    memory_share: float = 0.02
    """Memory below this share of all is told of."""
    disk_share: float = 0.01
    disk_bytes: int = 256 << 20
    """A disk with less than both is told of."""
    lame: float = 0.5
    """A node whose pre-flight is slower than this share of the others' median fails it, where that is strict."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is wrong with a node."""

    kind: Kind
    action: Remedy
    reason: str
    evidence: dict[str, Any] = field(default_factory=dict)
    """Figures and words by name: plain values."""
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class Record:
    """What is known of a node by its name, whatever its incarnation."""

    crashes: tuple[float, ...] = ()
    """When its workers crashed or hung, within the window."""
    stuck: int = 0
    """Times that they did since the job last got further than `stuck_at`, whatever was done about it."""
    stuck_at: int = -1
    """The newest step that was finished then; -1: none."""
    departures: tuple[float, ...] = ()
    """When it was lost."""
    quarantines: int = 0
    """Those not forgiven."""
    quarantined: bool = False
    until: float = 0.0
    """End of the newest quarantine."""
    offended: float = 0.0
    """When it was put into quarantine last, or left one."""
    refusals: int = 0
    """Pre-flights that failed in a row."""
    refused_until: float = 0.0
    preflight: Preflight | None = None
    """The newest one that it passed."""
    findings: tuple[Finding, ...] = ()
    """At most one a kind."""
    report: HealthReport | None = None
    """The newest one."""
    errors: int = 0
    """Device errors that were counted."""
    clock: tuple[float, ...] = ()
    """Newest differences of its clock to the coordinator's, travel time of the message included."""
    link: LinkPace = field(default_factory=LinkPace)
    loaded: float = 1.0
    """How much slower the plans take the node because of its link."""

    def finding(self, kind: Kind) -> Finding | None:
        return next((one for one in self.findings if one.kind is kind), None)

    def found(self, finding: Finding) -> Record:
        others = tuple(one for one in self.findings if one.kind is not finding.kind)
        return replace(self, findings=(*others, finding))

    def without(self, kind: Kind) -> Record:
        return replace(self, findings=tuple(one for one in self.findings if one.kind is not kind))


def news(record: Record, finding: Finding) -> bool:
    """Whether it is another class or another action than is known already."""
    known = record.finding(finding.kind)
    return known is None or known.action is not finding.action or finding.action is Remedy.RESTART


def crashed(record: Record, now: float, limits: Limits, count: int = 1, step: int = -1) -> Record:
    """Its workers went down `count` more times; `step` was the newest one that the job finished."""
    stuck = count if step > record.stuck_at else record.stuck + count
    crashes = (*_recent(record.crashes, now, limits), *(now,) * count)[-64:]
    return replace(record, crashes=crashes, stuck=stuck, stuck_at=max(step, record.stuck_at))


def departed(record: Record, now: float, limits: Limits) -> Record:
    """It was lost, or came back as another incarnation before that was known."""
    return replace(record, departures=(*_recent(record.departures, now, limits), now)[-64:])


def crash_loops(record: Record, limits: Limits) -> bool:
    return len(record.crashes) >= limits.crashes


def flaps(record: Record, limits: Limits) -> bool:
    return len(record.departures) >= limits.departures


def quarantine(record: Record, now: float, limits: Limits) -> tuple[Record, float]:
    """Put the node aside; return also for how many seconds. What led to it is weighed anew afterwards."""
    known = (
        max(0, record.quarantines - int((now - record.offended) / limits.good_s)) if limits.good_s > 0 else 0
    )
    seconds = min(limits.quarantine_s * 2.0 ** min(known, 30), limits.quarantine_most_s)
    record = replace(
        record,
        quarantines=known + 1,
        quarantined=True,
        until=now + seconds,
        offended=now,
        crashes=(),
        departures=(),
    )
    return record, seconds


def released(record: Record, now: float) -> Record:
    """The quarantine is over. How often there was one is not forgotten by that."""
    kept = tuple(one for one in record.findings if one.action not in AWAY)
    return replace(record, quarantined=False, offended=now, findings=kept, link=LinkPace(), loaded=1.0)


def refused(record: Record, now: float, limits: Limits) -> tuple[Record, float]:
    """Its pre-flight failed: return also after how many seconds it may try again."""
    if now < record.refused_until:
        return record, record.refused_until - now
    seconds = min(limits.retry_s * 2.0 ** min(record.refusals, 30), limits.retry_most_s)
    return replace(record, refusals=record.refusals + 1, refused_until=now + seconds), seconds


def forgettable(record: Record, now: float, limits: Limits) -> bool:
    """Of a node that is not there: nothing that happens now would be judged by it."""
    last = max((record.offended, record.refused_until, *record.crashes, *record.departures))
    return not record.quarantined and now - last > limits.good_s * max(1, record.quarantines)


# ---- what single observations mean ----


def sick_device(record: Record, devices: tuple[DeviceSeen, ...]) -> tuple[str, dict[str, Any]] | None:
    """Errors that were not there before, or a fault of a device: (reason, evidence)."""
    for device in devices:
        shown = {"device": device.index, "name": device.name, "temperature_c": device.temperature_c}
        if device.fault:
            return f"device {device.index}: {device.fault}", {**shown, "fault": device.fault}
    errors = sum(device.errors for device in devices)
    if errors > record.errors:
        worst = max(devices, key=lambda device: device.errors)
        shown = {"device": worst.index, "name": worst.name, "errors": errors, "before": record.errors}
        return f"device {worst.index}: {errors - record.errors} uncorrected memory errors", shown
    return None


def hot_device(devices: tuple[DeviceSeen, ...]) -> tuple[str, dict[str, Any]] | None:
    for device in devices:
        if device.throttled:
            shown = {
                "device": device.index,
                "temperature_c": device.temperature_c,
                "throttled": device.throttled,
            }
            return f"device {device.index} is held down: {device.throttled}", shown
    return None


def full_disk(report: HealthReport, limits: Limits) -> tuple[str, dict[str, Any], bool] | None:
    """(reason, evidence, whether something failed already): a write that was refused, or hardly any room."""
    for mishap in report.mishaps:
        disk = _disk_of(report, mishap)
        shown = {"path": mishap.path, "error": mishap.detail, "failed": mishap.count}
        room = ""
        if disk is not None:
            shown |= {"free_bytes": disk.free_bytes, "total_bytes": disk.total_bytes}
            room = f", {disk.free_bytes} bytes are free"
        return f"{mishap.what} cannot be written to {mishap.path}: {mishap.detail}{room}", shown, True
    for disk in report.disks:
        if disk.free_bytes < min(limits.disk_bytes, limits.disk_share * disk.total_bytes):
            shown = {"path": disk.path, "free_bytes": disk.free_bytes, "total_bytes": disk.total_bytes}
            return f"{disk.path} ({disk.role}): {disk.free_bytes} bytes are free", shown, False
    return None


def own_disk(path: str, report: HealthReport, others: tuple[HealthReport, ...]) -> bool:
    """Nobody else writes to the file system that `path` lies on."""
    disk = next((one for one in report.disks if one.path == path), None)
    volumes = {one.volume for other in others for one in other.disks}
    return disk is not None and bool(disk.volume) and disk.volume not in volumes


def short_of_memory(report: HealthReport, limits: Limits) -> tuple[str, dict[str, Any]] | None:
    free, total = report.memory_free_bytes, report.memory_total_bytes
    if total <= 0 or free >= limits.memory_share * total:
        return None
    return f"{free} of {total} bytes of memory are left", {"free_bytes": free, "total_bytes": total}


def clock_off(record: Record, limits: Limits) -> tuple[str, dict[str, Any]] | None:
    """The least of the newest differences counts: messages may be late, never early."""
    if len(record.clock) < CLOCKS:
        return None
    off = min(record.clock, key=abs)
    if abs(off) <= limits.clock_s:
        return None
    return f"its clock is {abs(off):.1f} s {'behind' if off > 0 else 'ahead'}", {"clock_s": round(off, 3)}


CLOCKS = 5
"""Differences of the clock that are kept."""


def _recent(times: tuple[float, ...], now: float, limits: Limits) -> tuple[float, ...]:
    return tuple(at for at in times if now - at <= limits.window_s)


def _disk_of(report: HealthReport, mishap: Mishap) -> Disk | None:
    inside = [disk for disk in report.disks if mishap.path.startswith(disk.path)]
    return max(inside, key=lambda disk: len(disk.path), default=None)
