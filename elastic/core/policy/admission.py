"""Admission policy: accept or refuse a node that asks to join, by its pre-flight checks."""

from __future__ import annotations

from dataclasses import replace
from statistics import median_high
from typing import Any

from elastic.core.health import diagnosis
from elastic.core.job.quarantine import record_of, with_record
from elastic.core.job.state import JobAction, JobState, LogEntry, Send
from elastic.core.protocol.health_report import JoinRefused, PreflightCheck
from elastic.core.protocol.messages import NodeReport
from elastic.core.protocol.version import ProtocolVersion, incompatibility
from elastic.domain.types import NodeInfo


def admit(
    state: JobState, report: NodeReport, now: float
) -> tuple[JobState, tuple[JobAction, ...], bool]:
    """Return (state, actions, whether the node is accepted)."""
    flight, node = report.preflight, report.info.node
    if other := _other_version(state, report.info):
        return _refuse(state, {"node": node, "ok": False}, other, now)
    if flight is None:
        return state, (), True
    failed = flight.failed
    if flight.mode == "strict":
        failed += _slow_device(state, node, flight.score)
    data = {
        "node": node,
        "ok": not failed,
        "seconds": round(flight.seconds, 3),
        "score": round(flight.score, 2),
        "figures": {check.name: round(check.value, 6) for check in flight.checks},
    }
    record = record_of(state, node)
    if not failed:
        warnings = [check.remedy for check in flight.checks if not check.ok]
        record = replace(record, refusals=0, refused_until=0.0, preflight=flight)
        entry = LogEntry("preflight", {**data, "warnings": warnings})
        return with_record(state, node, record), (entry,), True
    reason = "; ".join(f"{check.name}: {check.remedy}" for check in failed)
    return _refuse(state, data, reason, now)


def _refuse(
    state: JobState, data: dict[str, Any], reason: str, now: float
) -> tuple[JobState, tuple[JobAction, ...], bool]:
    """Refuse the node `data["node"]` with a growing pause. `data`: fields of the log entry."""
    node, limits = str(data["node"]), state.policy.health
    record = record_of(state, node)
    repeated = now < record.refused_until
    record, retry_s = diagnosis.record_refusal(record, now, limits)
    retry_s = round(retry_s, 3)
    refusal = Send(node, JoinRefused(reason, retry_s))
    entry = LogEntry("preflight", {**data, "reason": reason, "retry_s": retry_s})
    return with_record(state, node, record), (refusal,) if repeated else (entry, refusal), False


def _other_version(state: JobState, mine: NodeInfo) -> str:
    """Return why the node and a member do not understand each other; "": they do. Vaults and
    workers of all members exchange data."""
    for member in state.members.values():
        theirs = member.report.info
        if theirs.node != mine.node and mine.protocol and theirs.protocol:
            known = ProtocolVersion(theirs.protocol, theirs.release)
            new = ProtocolVersion(mine.protocol, mine.release)
            if text := incompatibility(known, new, theirs.node, mine.node):
                return text
    return ""


def _slow_device(state: JobState, node: str, score: float) -> tuple[PreflightCheck, ...]:
    """Return a failed check if the node is much slower than the other members, else (). Speeds are
    compared only if all members have the same device type."""
    kinds = {mb.report.info.device for mb in state.members.values()}
    flights = (record_of(state, name).preflight for name in state.members if name != node)
    known = [flight.score for flight in flights if flight is not None and flight.score > 0]
    usual = median_high(known) if known else 0.0
    if score <= 0 or len(kinds) > 1 or score >= state.policy.health.min_relative_speed * usual:
        return ()
    text = f"{score:.3g}, but the median of the others is {usual:.3g}: "
    text += "look for a busy or throttled device"
    return (PreflightCheck("score", score, "", False, True, text),)
