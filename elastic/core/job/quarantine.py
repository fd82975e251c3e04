"""Quarantine: nodes that plans leave out for a while, and the findings about nodes.

`elastic.core.policy.remediation` decides about quarantines. The functions of this module return a
new state and entries of the event log.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import replace

from elastic.core.health import diagnosis
from elastic.core.health.diagnosis import (
    EXCLUDING_ACTIONS,
    FaultClass,
    Finding,
    HealthAction,
    NodeHealth,
)
from elastic.core.job.absent_nodes import with_absent
from elastic.core.job.join_policy import without_member
from elastic.core.job.state import JobAction, JobState, JobTransition, LogEntry, Send
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase

UNKNOWN = NodeHealth()
"""Health record of a node that nothing is known about."""
Findings = tuple[JobState, tuple[JobAction, ...]]
"""(state, entries of the event log)"""
SUSPECTED = "suspected"
"""Evidence of a quarantine that rests on a suspicion: epochs failed, or nothing made progress."""


def record_of(state: JobState, node: str) -> NodeHealth:
    """Return the health record of the node; an empty record for an unknown node."""
    return state.health.get(node, UNKNOWN)


def with_record(state: JobState, node: str, record: NodeHealth) -> JobState:
    """Set the health record of the node."""
    return state.of(health={**state.health, node: record})


def is_quarantined(state: JobState, node: str) -> bool:
    """Return whether plans must leave this node out now."""
    return record_of(state, node).quarantined


def quarantined_nodes(state: JobState) -> frozenset[str]:
    """Return all nodes that plans must leave out now."""
    return frozenset(node for node, record in state.health.items() if record.quarantined)


def crashes_in_step(state: JobState, nodes: Iterable[str]) -> dict[str, int]:
    """Return the number of crashes of each of `nodes` that training needed, since the newest step
    was finished: those that were errors of links or the others, whichever are more. Nodes without
    such crashes are left out.

    An error of a link does not count if another node of the same plan had a fault of its own: the
    error follows from it. The report of the error may come first.
    """
    known = ((node, record_of(state, node)) for node in nodes)
    records = {node: one for node, one in known if one.stuck and one.stuck_at >= state.newest_step}
    faults = Counter[int]()
    if any(record.link_plans for record in records.values()):
        faults.update(epoch for one in state.health.values() for epoch in one.fault_plans)
    crashes: dict[str, int] = {}
    for node, record in records.items():
        mine = record.fault_plans
        links = sum(faults[epoch] == (epoch in mine) for epoch in record.link_plans)
        crashes[node] = max(record.stuck - len(record.link_plans), links)
    return {node: count for node, count in crashes.items() if count}


def crash_looping_nodes(state: JobState, nodes: Iterable[str]) -> list[str]:
    """Return the nodes whose workers crashed repeatedly since the newest step was finished, while
    training needed them."""
    crashes = crashes_in_step(state, nodes).items()
    return [node for node, count in crashes if count >= state.policy.health.crashes]


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
    """Record a finding, log it if it is new, and quarantine the node for EXCLUDING_ACTIONS."""
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
    """Remove the finding of this class, and log that the node is well again."""
    record = record_of(state, node)
    if record.finding(kind) is None:
        return state, ()
    well = Finding(kind, HealthAction.NONE, reason, {"well": True}, now)
    return with_record(state, node, record.without(kind)), (_entry(node, well),)


def release_expired(state: JobState, now: float) -> JobTransition | None:
    """End a quarantine whose time is over. The node is then considered like a new member.

    A node whose workers crashed repeatedly in one step stays out until that step is finished. If
    another node crashes in the step, the first one was not the cause.
    """
    for node, record in state.health.items():
        if record.quarantined and now >= record.until and not crash_looping_nodes(state, [node]):
            return _release(state, node, now, "the quarantine is over")
    return None


def release_all(state: JobState, now: float, why: str) -> JobTransition | None:
    """End the quarantines of all nodes that can take a stage, because no plan fits without them."""
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


def pardon(state: JobState, node: str, now: float, since: float, why: str) -> JobTransition | None:
    """End a quarantine that a suspicion has caused after the time `since`. It does not count. None:
    there is none."""
    record = record_of(state, node)
    suspected = any(one.evidence.get(SUSPECTED) and one.at >= since for one in record.findings)
    if not record.quarantined or not suspected:
        return None
    uncounted = replace(record, quarantines=max(0, record.quarantines - 1))
    return _release(with_record(state, node, uncounted), node, now, why)


def _release(state: JobState, node: str, now: float, why: str) -> JobTransition:
    record = record_of(state, node)
    kind = next(
        (one.kind for one in record.findings if one.action in EXCLUDING_ACTIONS), FaultClass.HOST
    )
    after = diagnosis.release(record, now)
    state = with_record(state, node, after)
    reason, evidence = f"{node} may be used again: {why}", {"quarantines": after.quarantines}
    entry = _entry(node, Finding(kind, HealthAction.NONE, reason, evidence, now))
    return without_considered(state, node), (entry,), reason


def without_considered(state: JobState, node: str) -> JobState:
    """Let the next decision about new nodes consider this node again."""
    if node not in state.members:
        return state
    mine = state.members[node].report.info.incarnation
    return state.of(considered=tuple(k for k in state.considered if k.partition("/")[0] != mine))


def restart_failed_node(
    state: JobState, now: float, needed: Collection[str] = ()
) -> JobTransition | None:
    """Let a node whose workers crashed too often join anew after a quarantine, unless the present
    plan needs the node. The node keeps its vault, and is absent until it is back."""
    for node in _failed_nodes(state):
        record = record_of(state, node)
        if node in needed or record.quarantined:
            continue
        if max(record.crashes, default=0.0) <= record.quarantine_changed_at:
            return _begin_anew(state, node, now)
        # Its crashes led to no quarantine, because other nodes had them at the same time.
        why = f"its workers crashed too often: {state.members[node].report.cause}"
        finding = Finding(FaultClass.HOST, HealthAction.QUARANTINE, why, {}, now)
        state, entries = add_finding(state, node, finding)
        return state, entries, f"{node}: {why}"
    return None


def restart_needed_node(state: JobState, now: float) -> JobTransition | None:
    """Let such a node join anew during its quarantine, because the job is paused and no plan fits
    the other nodes: at once; if no step was finished since it last did, `quarantine_s` after its
    last crash."""
    for node in _failed_nodes(state):
        record = record_of(state, node)
        since = max((record.quarantine_changed_at, *record.crashes))
        repeated = record.anew_after is not None and record.anew_after >= state.newest_step
        waits = repeated and now - since < state.policy.health.quarantine_s
        if record.quarantined and not waits:
            return _begin_anew(state, node, now)
    return None


def _failed_nodes(state: JobState) -> list[str]:
    """Return the members whose workers crashed too often."""
    return [node for node, mb in state.members.items() if mb.report.phase is NodePhase.FAILED]


def _begin_anew(state: JobState, node: str, now: float) -> JobTransition:
    why = "its workers crashed too often: it begins anew"
    cause = {"cause": state.members[node].report.cause}
    entry = _entry(node, Finding(FaultClass.PROCESS, HealthAction.RESTART, why, cause, now))
    record = replace(record_of(state, node), anew_after=state.newest_step)
    state = with_record(state, node, record)
    state = with_absent(without_member(state, node, now), node, now)
    return state, (entry, Send(node, m.Fenced(why))), f"{node}: {why}"
