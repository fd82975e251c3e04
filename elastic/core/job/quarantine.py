"""Quarantine: nodes that plans leave out for a while, and the findings about nodes.

`elastic.core.policy.remediation` decides about quarantines. Functions here return a new state and
the entries of the event log; they change nothing in place.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.health import diagnosis
from elastic.core.health.diagnosis import (
    EXCLUDING_ACTIONS,
    FaultClass,
    Finding,
    HealthAction,
    NodeHealth,
)
from elastic.core.job.join_policy import without_member
from elastic.core.job.state import JobAction, JobState, JobTransition, LogEntry, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase

Findings = tuple[JobState, tuple[JobAction, ...]]
"""(state, entries of the event log)"""


def record_of(state: JobState, node: str) -> NodeHealth:
    """Health record of the node; an empty one if there is none."""
    return state.health.get(node, NodeHealth())


def with_record(state: JobState, node: str, record: NodeHealth) -> JobState:
    """The state with this health record."""
    return state.of(health={**state.health, node: record})


def is_quarantined(state: JobState, node: str) -> bool:
    """Return whether the planner leaves this node out now."""
    return record_of(state, node).quarantined


def _entry(node: str, finding: Finding) -> LogEntry:
    data = {
        "node": node,
        "class": finding.kind.value,
        "action": finding.action.value,
        "evidence": dict(finding.evidence),
        "reason": finding.reason,
    }
    return LogEntry("health", data)


def add_finding(state: JobState, node: str, finding: Finding) -> Findings:
    """Record a finding, and log it if it is new. Quarantine the node if the action says so."""
    record = record_of(state, node)
    if not diagnosis.is_new(record, finding):
        return with_record(state, node, record.found(finding)), ()
    if finding.action in EXCLUDING_ACTIONS and not record.quarantined:
        record, seconds = diagnosis.quarantine(record, finding.at, state.policy.health)
        figures = {"quarantine_s": round(seconds, 3), "quarantines": record.quarantines}
        finding = replace(finding, evidence={**finding.evidence, **figures})
    return with_record(state, node, record.found(finding)), (_entry(node, finding),)


def clear_finding(
    state: JobState, node: str, kind: FaultClass, reason: str, now: float
) -> Findings:
    """Remove the finding of this kind, and log that the node is well again."""
    record = record_of(state, node)
    if record.finding(kind) is None:
        return state, ()
    well = Finding(kind, HealthAction.NONE, reason, {"well": True}, now)
    return with_record(state, node, record.without(kind)), (_entry(node, well),)


def release_expired(state: JobState, now: float) -> JobTransition | None:
    """End the first quarantine whose time is over. The node is considered like one that joined."""
    for node, record in state.health.items():
        if record.quarantined and now >= record.until:
            return _release(state, node, now, "the quarantine is over")
    return None


def release_all(state: JobState, now: float, why: str) -> JobTransition | None:
    """End all quarantines of nodes that can take a stage: a doubtful node is better than none."""
    held = [
        node
        for node, mb in state.members.items()
        if mb.report.able and mb.connected and not mb.draining and is_quarantined(state, node)
    ]
    entries: list[JobAction] = []
    for node in held:
        state, actions, _ = _release(state, node, now, why)
        entries += actions
    reason = f"{' '.join(held)} let out of quarantine: {why}"
    return (state, tuple(entries), reason) if held else None


def _release(state: JobState, node: str, now: float, why: str) -> JobTransition:
    record = record_of(state, node)
    kind = next(
        (one.kind for one in record.findings if one.action in EXCLUDING_ACTIONS), FaultClass.HOST
    )
    after = diagnosis.release(record, now)
    state = with_record(state, node, after)
    reason, evidence = f"{node} may be used again: {why}", {"quarantines": after.quarantines}
    entry = _entry(node, Finding(kind, HealthAction.NONE, reason, evidence, now))
    if node in state.members:
        mine = state.members[node].report.info.incarnation
        keys = tuple(key for key in state.considered if key.partition("/")[0] != mine)
        state = state.of(considered=keys)
    return state, (entry,), reason


def restart_failed_node(state: JobState, now: float) -> JobTransition | None:
    """Let a node whose workers crashed too often join anew, after its quarantine.

    This loses its vault, so the plan must not use the node, and the copies of the present epoch
    must be whole.
    """
    plan = state.plan
    if plan is None or state.trimmed < state.epoch or state.change is not None:
        return None
    needed = {*plan.nodes(), *(peer for _, peer in plan.peers)}
    for node, member in state.members.items():
        gone = member.report.phase is NodePhase.FAILED and node not in needed
        if gone and node in state.health and not is_quarantined(state, node):
            why = "its workers crashed too often: it begins anew"
            cause = {"cause": member.report.cause}
            entry = _entry(node, Finding(FaultClass.PROCESS, HealthAction.RESTART, why, cause, now))
            state = without_member(state, node, now)
            return state, (entry, Send(node, m.Fenced(why))), f"{node}: {why}"
    return None
