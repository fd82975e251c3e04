"""Diagnosis: the fault class of a node's problem, the action against it, and the evidence.

    class    meaning                        first action          if that does not help
    process  a worker crashed or hangs      restart               quarantine (as host or device)
    host     is slow, or lost repeatedly    rebalance             replace (with a spare), quarantine
    device   errors, or throttled           replace, quarantine   -
    path     cannot reach another node      leave one of them out -
    link     carries less than before       replace or rebalance  quarantine, if that is faster
    storage  a disk is full or read-only    replace (own disk)    none: train without checkpoints

This file holds the history of one node (`NodeHealth`) and the meaning of single observations.
`elastic.core.policy.remediation` keeps the history in the job's state and acts.

A quarantined node stays a member and keeps its vault, but plans leave the node out. The first
quarantine lasts `quarantine_s`, each further one twice as long as the one before, up to
`quarantine_most_s`. Each `good_s` without a quarantine cancels one doubling. Hung workers are
found by the agent, which has the kernel's view of the process
(`elastic.core.node.node.hang_reason`).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from elastic.core.health.link_speed import LinkSpeed
from elastic.core.protocol.health_report import (
    DeviceHealth,
    DiskSpace,
    HealthReport,
    Preflight,
)

Evidence = dict[str, Any]
"""Evidence of a finding for logs: plain values by name."""


class FaultClass(StrEnum):
    """The part of a node that is at fault."""

    PROCESS = "process"
    DEVICE = "device"
    LINK = "link"
    PATH = "path"
    """Not the node, but the network between it and another node."""
    STORAGE = "storage"
    HOST = "host"


class HealthAction(StrEnum):
    """The action against a fault."""

    NONE = "none"
    """The user is warned; the plan stays."""
    RESTART = "restart"
    """The workers are restarted; `elastic.core.policy.restart_policy` decides about the plan."""
    REBALANCE = "rebalance"
    """A new plan gives the node less work."""
    QUARANTINE = "quarantine"
    """Plans leave the node out for a while."""
    REPLACE = "replace"
    """The node is quarantined, and a spare takes its place."""


EXCLUDING_ACTIONS = (HealthAction.QUARANTINE, HealthAction.REPLACE)
"""Actions that leave a node without layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthLimits:
    """Thresholds of the diagnosis. Times are on the coordinator's clock."""

    crashes: int = 3
    """After this many crashes of a node's workers within `window_s`, a restart does not help."""
    hopeless: int = 4
    """After this many crashes of one node without a finished step between them, the job ends if
    the node cannot be quarantined."""
    fatal_nodes: int = 3
    """The script is at fault if workers of this many nodes crash, one node after another or on a
    majority, and no step is finished between (`elastic.core.policy.remediation`)."""
    fatal_share: float = 0.25
    """Not used any more; it is removed with the next protocol version."""
    departures: int = 3
    """After this many losses within `window_s`, a node is quarantined."""
    window_s: float = 600.0
    quarantine_s: float = 30.0
    """Length of the first quarantine."""
    quarantine_most_s: float = 3600.0
    good_s: float = 1800.0
    """Time without a quarantine that cancels one earlier quarantine."""
    retry_s: float = 5.0
    """Pause after the first failed pre-flight; it doubles with each further failure."""
    retry_most_s: float = 300.0
    link_factor: float = 3.0
    """A link is slow if its usual rate divided by its present rate exceeds this."""
    link_windows: int = 3
    """Number of newest reports in which a link must be slow."""
    link_least_s: float = 0.1
    """Least time in seconds that a slow link adds to each copy."""
    slowed: float = 1.1
    """Step time now / step time before from which a slow link leads to an action."""
    clock_s: float = 5.0
    """Clock difference above which the user is warned of wrong event times of that node. No
    decision depends on a node's clock."""
    memory_share: float = 0.02
    """Fraction of memory; the user is warned if less is free."""
    disk_share: float = 0.01
    disk_bytes: int = 256 << 20
    """The user is warned if less than this and less than `disk_share` of a disk is free."""
    min_relative_speed: float = 0.5
    """A node fails a strict pre-flight below this fraction of the other nodes' median speed."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem of a node."""

    kind: FaultClass
    action: HealthAction
    reason: str
    evidence: Evidence = field(default_factory=dict)
    at: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeHealth:
    """Health history of a node name, over all its incarnations. Times are in seconds."""

    crashes: tuple[float, ...] = ()
    """Times of crashes and hangs of its workers, within the last `window_s`."""
    link_crashes: tuple[float, ...] = ()
    """Times of crashes that were errors of links; other nodes may have caused them."""
    crash_cause: str = ""
    """Cause of the newest crash."""
    stuck: int = 0
    """Number of crashes and hangs since step `stuck_at` was finished, while training needed the
    node."""
    stuck_at: int = -1
    """Newest finished step at the last crash; -1: no step was finished."""
    link_plans: tuple[int, ...] = ()
    """Epoch of the plan at each crash in `stuck` that was an error of a link."""
    fault_plans: tuple[int, ...] = ()
    """Epochs of the newest plans that had the node when it was lost, or when its workers ended by
    another cause than an error of a link."""
    stuck_moves: int = 0
    """How often the crashes in this step had moved to other nodes when this node's began."""
    departures: tuple[float, ...] = ()
    """Times of the node's losses, within the last `window_s`."""
    quarantines: int = 0
    """Number of quarantines that determine the length of the next quarantine."""
    quarantined: bool = False
    until: float = 0.0
    """End of the newest quarantine."""
    quarantine_changed_at: float = 0.0
    """Time at which a quarantine last began or ended."""
    anew_after: int | None = None
    """Newest finished step when its agent last began anew because its workers crashed too often;
    -1: no step was finished; None: it never did."""
    refusals: int = 0
    """Number of consecutive failed pre-flights."""
    refused_until: float = 0.0
    preflight: Preflight | None = None
    """Newest pre-flight that passed."""
    findings: tuple[Finding, ...] = ()
    """Findings, at most one per fault class."""
    report: HealthReport | None = None
    """Newest health report."""
    errors: int = 0
    """Number of device errors that have led to a finding."""
    divergences: int = 0
    """Number of times that its replicas were proven wrong."""
    clock: tuple[float, ...] = ()
    """Newest values of (coordinator's clock at arrival - node's clock when it sent a report)."""
    link: LinkSpeed = field(default_factory=LinkSpeed)
    loaded: float = 1.0
    """Multiplies the node's slow factor in plans, because of a slow link; 1: the link is normal."""
    slowdowns: int = 0
    """Number of times that it was found to compute slowly, which determine `slow_until`."""
    slow_until: float = 0.0
    """Time at which plans try the node again if it is slow and has no layers."""
    keeper_failures: int = 0
    """Number of times that its vault could store no copies, which determine `keeps_after`."""
    keeps_after: float = 0.0
    """Time at which plans let it keep copies again after its vault could store none."""

    def finding(self, kind: FaultClass) -> Finding | None:
        """Return the finding of this class, or None."""
        return next((one for one in self.findings if one.kind is kind), None)

    def found(self, finding: Finding) -> NodeHealth:
        """Return the history with `finding` in place of any other finding of its class."""
        return replace(self, findings=(*self.without(finding.kind).findings, finding))

    def without(self, kind: FaultClass) -> NodeHealth:
        """Return the history without the finding of this class."""
        return replace(self, findings=tuple(one for one in self.findings if one.kind is not kind))


# ---- history ----


def is_new(health: NodeHealth, finding: Finding) -> bool:
    """Return whether the finding's class is new or its action differs; a restart is always new."""
    known = health.finding(finding.kind)
    return (
        known is None
        or known.action is not finding.action
        or finding.action is HealthAction.RESTART
    )


def record_crash(
    health: NodeHealth,
    now: float,
    limits: HealthLimits,
    count: int = 1,
    step: int = -1,
    link: bool = False,
    epoch: int = -1,
) -> NodeHealth:
    """Record `count` more crashes of the node's workers; `step`: the job's newest finished step;
    `link`: they were errors of links; `epoch`: epoch of the plan."""
    known = health if step <= health.stuck_at else replace(health, stuck=0, link_plans=())
    crashes = (*_recent(health.crashes, now, limits), *(now,) * count)[-64:]
    links = (*health.link_crashes, now) if link and count else health.link_crashes
    return replace(
        health,
        crashes=crashes,
        link_crashes=tuple(at for at in links if at in crashes),
        stuck=known.stuck + count,
        stuck_at=max(step, health.stuck_at),
        link_plans=(*known.link_plans, *(epoch,) * (count if link else 0))[-64:],
    )


def record_fault(health: NodeHealth, epoch: int) -> NodeHealth:
    """Record that the node was lost, or that its workers ended by a cause of their own, under the
    plan of this epoch."""
    if epoch in health.fault_plans:
        return health
    return replace(health, fault_plans=(*health.fault_plans, epoch)[-FAULT_PLANS:])


def own_crashes(health: NodeHealth) -> int:
    """Return the number of counted crashes that were no errors of links."""
    return sum(at not in health.link_crashes for at in health.crashes)


def record_departure(health: NodeHealth, now: float, limits: HealthLimits) -> NodeHealth:
    """Record that the node was lost, or came back as another incarnation."""
    return replace(health, departures=(*_recent(health.departures, now, limits), now)[-64:])


def quarantine(health: NodeHealth, now: float, limits: HealthLimits) -> tuple[NodeHealth, float]:
    """Return the history with a new quarantine, and its length in seconds. Earlier crashes and
    losses no longer count."""
    known = 0
    if limits.good_s > 0:
        good = int((now - health.quarantine_changed_at) / limits.good_s)
        known = max(0, health.quarantines - good)
    seconds = _growing_pause_s(known, limits)
    health = replace(
        health,
        quarantines=known + 1,
        quarantined=True,
        until=now + seconds,
        quarantine_changed_at=now,
        crashes=(),
        departures=(),
    )
    return health, seconds


def _growing_pause_s(times: int, limits: HealthLimits) -> float:
    """Return the length of a quarantine after this many others."""
    return min(limits.quarantine_s * 2.0 ** min(times, 30), limits.quarantine_most_s)


def record_slowdown(health: NodeHealth, now: float, limits: HealthLimits) -> NodeHealth:
    """Record that the node was found to be slow. If it gets no layers, it is tried again after a
    pause as long as a quarantine; slowdowns are counted, and forgiven, as quarantines are."""
    known = _not_forgiven(health.slowdowns, health.slow_until, now, limits)
    until = now + _growing_pause_s(known, limits)
    return replace(health, slowdowns=known + 1, slow_until=until)


def record_keeper_failure(health: NodeHealth, now: float, limits: HealthLimits) -> NodeHealth:
    """Record that the vault of the node could store no copies. It is tried again after a pause, as
    a slow node is."""
    known = _not_forgiven(health.keeper_failures, health.keeps_after, now, limits)
    after = now + _growing_pause_s(known, limits)
    return replace(health, keeper_failures=known + 1, keeps_after=after)


def _not_forgiven(count: int, until: float, now: float, limits: HealthLimits) -> int:
    """Return how many of `count` events are not forgiven yet. The newest pause ended at `until`;
    since then, one event is forgiven every `good_s`."""
    if limits.good_s <= 0:
        return count
    return max(0, count - int(max(0.0, now - until) / limits.good_s))


def release(health: NodeHealth, now: float) -> NodeHealth:
    """End the quarantine; the number of quarantines stays."""
    return replace(
        health,
        quarantined=False,
        quarantine_changed_at=now,
        findings=tuple(one for one in health.findings if one.action not in EXCLUDING_ACTIONS),
        link=LinkSpeed(),
        loaded=1.0,
    )


def record_refusal(
    health: NodeHealth, now: float, limits: HealthLimits
) -> tuple[NodeHealth, float]:
    """Record a failed pre-flight; return also the seconds until the node may try again."""
    if now < health.refused_until:
        return health, health.refused_until - now
    seconds = min(limits.retry_s * 2.0 ** min(health.refusals, 30), limits.retry_most_s)
    return replace(health, refusals=health.refusals + 1, refused_until=now + seconds), seconds


def is_forgettable(health: NodeHealth, now: float, limits: HealthLimits) -> bool:
    """Return whether the history of an absent node can no longer influence a decision."""
    last = max(
        health.quarantine_changed_at, health.refused_until, *health.crashes, *health.departures
    )
    return not health.quarantined and now - last > limits.good_s * max(1, health.quarantines)


# ---- single observations ----


def faulty_device(
    health: NodeHealth, devices: tuple[DeviceHealth, ...]
) -> tuple[str, Evidence] | None:
    """Return (reason, evidence) of a device fault or of new memory errors, or None."""
    for device in devices:
        if device.fault:
            shown = {
                "device": device.index,
                "name": device.name,
                "temperature_c": device.temperature_c,
                "fault": device.fault,
            }
            return f"device {device.index}: {device.fault}", shown
    errors = sum(device.errors for device in devices)
    if errors <= health.errors:
        return None
    worst = max(devices, key=lambda device: device.errors)
    shown = {
        "device": worst.index,
        "name": worst.name,
        "errors": errors,
        "before": health.errors,
    }
    new = errors - health.errors
    return f"device {worst.index}: {new} uncorrected memory errors", shown


def throttled_device(devices: tuple[DeviceHealth, ...]) -> tuple[str, Evidence] | None:
    """Return (reason, evidence) of the first device with a reduced clock, or None."""
    for device in devices:
        if device.throttled:
            shown = {
                "device": device.index,
                "temperature_c": device.temperature_c,
                "throttled": device.throttled,
            }
            return f"device {device.index} is throttled: {device.throttled}", shown
    return None


def full_disk(report: HealthReport, limits: HealthLimits) -> tuple[str, Evidence, bool] | None:
    """Return (reason, evidence, whether a write failed) of a full or failing disk, or None."""
    for failed in report.failed_operations:
        disk = _disk_of(report, failed.path)
        shown = {"path": failed.path, "error": failed.detail, "failed": failed.count}
        room = ""
        if disk is not None:
            shown |= {"free_bytes": disk.free_bytes, "total_bytes": disk.total_bytes}
            room = f"; {disk.free_bytes} bytes are free"
        text = f"cannot write {failed.what} to {failed.path}: {failed.detail}{room}"
        return text, shown, True
    for disk in report.disks:
        if disk.free_bytes < min(limits.disk_bytes, limits.disk_share * disk.total_bytes):
            shown = {
                "path": disk.path,
                "free_bytes": disk.free_bytes,
                "total_bytes": disk.total_bytes,
            }
            return f"{disk.path} ({disk.role}): {disk.free_bytes} bytes are free", shown, False
    return None


def has_own_disk(path: str, report: HealthReport, others: tuple[HealthReport, ...]) -> bool:
    """Return whether no other node writes to the file system of `path`; False if unknown."""
    disk = _disk_of(report, path)
    volumes = {one.volume for other in others for one in other.disks}
    return disk is not None and bool(disk.volume) and disk.volume not in volumes


def low_memory(report: HealthReport, limits: HealthLimits) -> tuple[str, Evidence] | None:
    """Return (reason, evidence) if too little memory is free, else None."""
    free, total = report.memory_free_bytes, report.memory_total_bytes
    if total <= 0 or free >= limits.memory_share * total:
        return None
    shown = {"free_bytes": free, "total_bytes": total}
    return f"{free} of {total} bytes of memory are free", shown


def clock_skew(health: NodeHealth, limits: HealthLimits) -> tuple[str, Evidence] | None:
    """Return (reason, evidence) if the node's clock is wrong, else None.

    The smallest of the newest differences counts, because the delay of a message adds to it.
    """
    if len(health.clock) < CLOCK_SAMPLES:
        return None
    skew = min(health.clock, key=abs)
    if abs(skew) <= limits.clock_s:
        return None
    direction = "behind" if skew > 0 else "ahead"
    return f"its clock is {abs(skew):.1f} s {direction}", {"clock_s": round(skew, 3)}


FAULT_PLANS = 8
"""Number of plans in `NodeHealth.fault_plans`."""
CLOCK_SAMPLES = 5
"""Number of clock differences kept per node."""


def _recent(times: tuple[float, ...], now: float, limits: HealthLimits) -> tuple[float, ...]:
    return tuple(at for at in times if now - at <= limits.window_s)


def _disk_of(report: HealthReport, path: str) -> DiskSpace | None:
    inside = [disk for disk in report.disks if path.startswith(disk.path)]
    return max(inside, key=lambda disk: len(disk.path), default=None)
