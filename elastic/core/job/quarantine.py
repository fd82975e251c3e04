"""Nodes that plans do without for a while: put in, let out. What led to it: `elastic.core.policy.remediation`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.health import diagnosis as health
from elastic.core.health.diagnosis import AWAY, Finding, Kind, Record, Remedy
from elastic.core.job.join_policy import count_node_seconds
from elastic.core.job.state import JobAction, JobState, JobTransition, LogEntry, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase


def record_of(state: JobState, node: str) -> Record:
    return state.health.get(node, Record())


def with_record(state: JobState, node: str, record: Record) -> JobState:
    return state.of(health={**state.health, node: record})


def is_quarantined(state: JobState, node: str) -> bool:
    """Plans do without this node for now."""
    record = state.health.get(node)
    return record is not None and record.quarantined


def note(node: str, finding: Finding) -> LogEntry:
    """The entry of the event log."""
    told: dict[str, Any] = {"node": node, "class": finding.kind.value, "action": finding.action.value}
    return LogEntry("health", {**told, "evidence": dict(finding.evidence), "reason": finding.reason})


def add_finding(state: JobState, node: str, finding: Finding) -> tuple[JobState, tuple[JobAction, ...]]:
    """Remember a finding, and tell of it if it is new. One whose action is to keep the node out puts it aside."""
    record = record_of(state, node)
    if not health.news(record, finding):
        return with_record(state, node, record.found(finding)), ()
    if finding.action in AWAY and not record.quarantined:
        record, seconds = health.quarantine(record, finding.at, state.policy.health)
        figures = {"quarantine_s": round(seconds, 3), "quarantines": record.quarantines}
        finding = replace(finding, evidence={**finding.evidence, **figures})
    return with_record(state, node, record.found(finding)), (note(node, finding),)


def clear_finding(
    state: JobState, node: str, kind: Kind, reason: str, now: float
) -> tuple[JobState, tuple[JobAction, ...]]:
    """What was wrong is so no more."""
    record = record_of(state, node)
    if record.finding(kind) is None:
        return state, ()
    told = Finding(kind, Remedy.NONE, reason, {"well": True}, now)
    return with_record(state, node, record.without(kind)), (note(node, told),)


def release_expired(state: JobState, now: float) -> JobTransition | None:
    """Quarantines whose time is over: the node may be used again, and is considered as one that came."""
    for node, record in state.health.items():
        if record.quarantined and now >= record.until:
            return _let_out(state, node, record, now, "the quarantine is over")
    return None


def release_all(state: JobState, now: float, why: str) -> JobTransition | None:
    """Let everybody out who could take a stage: a doubtful node is better than none."""
    able = [n for n, mb in state.members.items() if mb.report.able and mb.connected and not mb.draining]
    held = [node for node in able if is_quarantined(state, node)]
    notes: list[JobAction] = []
    for node in held:
        state, actions, _ = _let_out(state, node, record_of(state, node), now, why)
        notes += actions
    return (state, tuple(notes), f"{' '.join(held)} let out of quarantine: {why}") if held else None


def _let_out(state: JobState, node: str, record: Record, now: float, why: str) -> JobTransition:
    away = next((one for one in record.findings if one.action in AWAY), None)
    kind = away.kind if away is not None else Kind.HOST
    after = health.released(record, now)
    state = with_record(state, node, after)
    told = Finding(
        kind, Remedy.NONE, f"{node} may be used again: {why}", {"quarantines": after.quarantines}, now
    )
    member = state.members.get(node)
    if member is None:
        return state, (note(node, told),), told.reason
    mine = member.report.info.incarnation
    state = state.of(considered=tuple(key for key in state.considered if key.partition("/")[0] != mine))
    return state, (note(node, told),), told.reason


def restart_failed_node(state: JobState, now: float) -> JobTransition | None:
    """A node that gave its workers up begins anew once its quarantine is over; nobody needs its vault any more."""
    plan = state.plan
    if plan is None or state.trimmed < state.epoch or state.change is not None:
        return None
    needed = {*plan.nodes(), *(peer for _, peer in plan.peers)}
    for node, member in state.members.items():
        gone = member.report.phase is NodePhase.FAILED and node not in needed and node in state.health
        if gone and not is_quarantined(state, node):
            why = "its workers crashed too often: it begins anew"
            told = Finding(Kind.PROCESS, Remedy.RESTART, why, {"cause": member.report.cause}, now)
            state = count_node_seconds(state, now)
            members = {n: mb for n, mb in state.members.items() if n != node}
            return state.of(members=members), (note(node, told), Send(node, m.Fenced(why))), f"{node}: {why}"
    return None
