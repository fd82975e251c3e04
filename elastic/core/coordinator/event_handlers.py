"""Event handlers: the first half of `elastic.core.coordinator.transitions.transition`.

A handler records an event in the state, and repeats orders that a node has missed. The rules of
the job's phase decide afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from elastic.core.job import checkpoints, scope
from elastic.core.job.absent_nodes import with_returned, with_unknown
from elastic.core.job.epoch_change import missed_prefetch, repeat_halt
from elastic.core.job.goodput import nonfinite_entries
from elastic.core.job.join_policy import count_node_seconds, with_expected_end
from elastic.core.job.liveness import (
    all_heard,
    excuse_common_silence,
    with_crowd,
    without_doubt,
)
from elastic.core.job.measured_conditions import observe_backup
from elastic.core.job.membership import end_job, launch_nodes, name_conflict, with_member
from elastic.core.job.state import (
    CertificatesRead,
    CheckpointCommitted,
    CheckpointFailed,
    ConnectionClosed,
    CoordinatorFailover,
    DrainRequested,
    Heartbeat,
    Heartbeats,
    JobAction,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    LossKind,
    Member,
    PortRefused,
    Send,
    Tick,
)
from elastic.core.job.stragglers import observe_speed
from elastic.core.policy import drain, progress_watchdog, remediation
from elastic.core.policy.admission import admit
from elastic.core.policy.certificate_warnings import certificates_read
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import HealthReport
from elastic.core.protocol.messages import NodePhase
from elastic.core.protocol.timeouts import LEAST_RTT_S, MAX_HEARTBEATS_PER_S, MOST_RTT_S
from elastic.core.recovery import lineage
from elastic.domain.errors import EXIT_USAGE

RETIRED = 256
"""Number of replaced incarnations that are kept in the state."""
DURATIONS = 32
"""Number of steps whose durations are kept."""


def _node_reported(state: JobState, report: m.NodeReport, now: float) -> JobTransition:
    node = report.info.node
    member = state.members.get(node)
    if member is None or member.report.info.incarnation != report.info.incarnation:
        return _new_incarnation(state, report, now)
    if member.connected:  # one that returns has sent a heartbeat before
        state = excuse_common_silence(state, now)
        member = state.members[node]
    was, returns = member.report, not member.connected
    if report.epoch < was.epoch:
        return state, (), f"{node}: stale report of epoch {report.epoch}"
    if state.spec is None and report.elastic and report.spec is not None:
        state = state.of(spec=report.spec)
        if problem := checkpoints.mismatch(state.resumed, report.spec):
            state, actions = end_job(state, JobPhase.FAILED, EXIT_USAGE, problem)
            return state, actions, problem
        state = state.of(resumed=None)
    if state.spec is not None and report.spec is not None:
        joined = state.spec.joined(report.spec)
        state = state.of(spec=joined or state.spec)
        if joined is None:
            text = f"{node} runs another model or configuration than the rest of the job"
            report = replace(report, failed=m.Failed(text, 2))
        else:  # the state keeps the spec once, because it is the largest part of a report
            report = replace(report, spec=None)
    member = replace(member, report=report, seen=now, excused_s=0.0, connected=True, refused=False)
    if report.info.lifetime_s != was.info.lifetime_s:
        member = with_expected_end(member, now)
    state = progress_watchdog.report_seen(with_member(state, member), was, report, now)
    accuses = bool(report.suspects or report.failures)
    if accuses and not state.suspected_since and report.epoch == state.epoch:
        state = state.of(suspected_since=now)
    records = lineage.committed(report.halted, state.starts)
    halting = state.phase is JobPhase.HALTING
    if halting and records and records[-1].step > state.newest_step:
        state = state.of(record=records[-1])
    state, findings = remediation.workers_failed(state, was, report, now)
    reason = f"{node}: {report.phase}" if report.phase is not was.phase else ""
    orders = _missed_orders(state, node)
    if returns:
        restart = progress_watchdog.missed_restart(state, state.members[node])
        orders = (*orders, *restart, *missed_prefetch(state, node))
    return state, (*orders, *findings), reason


def _new_incarnation(state: JobState, report: m.NodeReport, now: float) -> JobTransition:
    """Add the node as a member. Refuse it if it was released, if its report shows state of a former
    membership, if its name is in use, or if its pre-flight failed."""
    node = report.info.node
    release = drain.missed_release(state, node, report.info.incarnation)
    if release:
        return state, release, f"{node}: released before"
    if report.epoch > 0 or report.restart >= 0 or report.phase is not NodePhase.EMPTY:
        fenced = m.Fenced(f"{node} ({report.info.incarnation}) is not a member (any more)")
        state = with_unknown(state, node, now)
        return state, (Send(node, fenced),), f"{node}: a former member is refused"
    conflict = name_conflict(state, report, now)
    if conflict is not None:
        return state, (Send(node, conflict),), conflict.reason
    known = node in state.members or node in state.health
    state, admission, accepted = admit(state, report, now)
    if not accepted:
        return state, admission, f"{node} is refused"
    state, actions = _join(state, report, now, known=known)
    return state, (*admission, *actions), f"{node} joined"


def _join(
    state: JobState, report: m.NodeReport, now: float, *, known: bool
) -> tuple[JobState, tuple[JobAction, ...]]:
    node = report.info.node
    joined = LogEntry("joined", {"node": node, "domain": report.info.domain})
    actions: list[JobAction] = [joined]
    former = state.members.get(node)
    state = with_returned(state, node)
    if former is not None:
        why = "came back as a new incarnation"
        retired = (*state.retired, (node, former.report.info.incarnation))[-RETIRED:]
        state = state.of(retired=retired)
        state, findings = remediation.node_lost(state, node, why, now)
        data = {"node": node, "loss": LossKind.REPLACED.value, "why": why}
        actions = [LogEntry("lost", data), *findings, joined]
    state = count_node_seconds(state, now, left=former is not None)
    state = with_member(state, with_expected_end(Member(report=report, seen=now), now))
    state = progress_watchdog.member_joined(state, node, now, known=known)
    over = state.ending is not None or state.failure is not None
    if not over and state.phase not in (JobPhase.WAITING, JobPhase.LAUNCHED):
        state, launch = launch_nodes(state, (node,))
        actions += launch
    if report.inventory and state.phase is JobPhase.RUNNING and state.trimmed >= state.epoch:
        step = state.assignment.step if state.assignment is not None else -1
        actions.append(Send(node, m.Trim(state.epoch, step)))
    actions += [order for order in _missed_orders(state, node) if order not in actions]
    return state, tuple(actions)


def _missed_orders(state: JobState, node: str) -> tuple[JobAction, ...]:
    """Return the orders that the member has missed, as its report shows. An order that the member
    already has changes nothing."""
    member = state.members[node]
    report = member.report
    if state.ending is not None:
        return (Send(node, m.Stop(state.ending.code, state.ending.reason)),)
    orders: tuple[JobAction, ...] = ()
    if member.launch is not None and report.restart < member.launch.restart:
        orders = (Send(node, member.launch),)
    if state.phase is JobPhase.HALTING and report.epoch < state.epoch and state.change is not None:
        return (*orders, Send(node, scope.halt_order(state)))
    installed = state.phase in (JobPhase.INSTALLING, JobPhase.RUNNING)
    halted = report.epoch == state.epoch and report.phase is NodePhase.HALTED
    if installed and halted and state.assignment:
        return (*orders, Send(node, m.Install(state.epoch, state.assignment)))
    return orders


def _heartbeats(state: JobState, event: Heartbeats, now: float) -> JobTransition:
    """Record heartbeats together, so that the dict of members is copied only once."""
    state = excuse_common_silence(state, now)
    members, accepted = dict(state.members), []
    fenced: list[JobAction] = []
    for beat in event.beats:
        member = members.get(beat.node)
        if member is None or member.report.info.incarnation != beat.incarnation:
            text = f"{beat.node} is not a member (any more)"
            # A released node that has missed its order reports after it has reconnected.
            if not drain.missed_release(state, beat.node, beat.incarnation):
                fenced.append(Send(beat.node, m.Fenced(text)))
            continue
        report = member.report
        if (report.step, report.microbatch) != (beat.step, beat.microbatch):
            report = replace(report, step=beat.step, microbatch=beat.microbatch)
        # An excuse may have moved this time to now or later; the message is newer.
        closed_at = member.closed_at if member.closed_at < now else member.seen
        members[beat.node] = replace(
            member, seen=now, excused_s=0.0, closed_at=closed_at, report=report, refused=False
        )
        accepted.append(beat)
    if accepted:
        state = progress_watchdog.heartbeats_seen(state.of(members=members), accepted, now)
    for beat in accepted:
        state = observe_backup(observe_speed(state, beat), beat)
    times = (one.forward_s + one.backward_s for beat in accepted for one in beat.measured)
    rtt_s = min(MOST_RTT_S, max((beat.rtt_s for beat in accepted), default=0.0))
    seen = state.seen.grown(
        microbatch_s=max(times, default=0.0), rtt_s=rtt_s if rtt_s >= LEAST_RTT_S else 0.0
    )
    state = state if seen is state.seen else state.of(seen=seen)
    return state, tuple(fenced), "former member" if fenced else ""


def _connection_closed(state: JobState, event: ConnectionClosed, now: float) -> JobTransition:
    member = state.members.get(event.node)
    if member is None or member.report.info.incarnation != event.incarnation:
        return state, (), ""
    state = with_member(state, replace(member, connected=False, closed_at=now))
    return state, (), f"{event.node}: connection closed"


def _port_refused(state: JobState, event: PortRefused, now: float) -> JobTransition:
    member = state.members.get(event.node)
    if member is None or member.connected or member.report.info.incarnation != event.incarnation:
        return state, (), ""
    state = with_member(state, replace(member, refused=True))
    return state, (), f"{event.node}: its port refuses connections"


def _agent_failed(state: JobState, event: m.AgentFailed, now: float) -> JobTransition:
    member = state.members.get(event.node)
    if member is None or member.report.info.incarnation != event.incarnation:
        return state, (), ""
    state = with_member(state, replace(member, agent_error=event.error))
    entry = LogEntry("agent-failed", {"node": event.node, "error": event.error})
    return state, (entry,), f"{event.node}: its agent failed: {event.error}"


def _step_finished(state: JobState, event: m.StepDone, now: float) -> JobTransition:
    step, present = event.record.step, state.assignment
    if event.epoch > state.epoch:
        return state, (), ""
    undone = present and event.epoch < present.plan.epoch and step >= present.step
    if undone or step <= state.logged_step or step < state.newest_step:
        return state, (), ""
    # The time of a step with a local recovery includes waits for other pipelines.
    recovered = present is not None and bool(present.promised) and step == present.step
    if state.plan is not None and not recovered:
        epoch = state.plan.epoch
        known = (one for one in state.durations if one[0] == epoch)
        durations = (*known, (epoch, round(event.seconds, 5)))[-DURATIONS:]
        state = state.of(durations=durations)
    if not recovered:
        state = state.of(seen=state.seen.grown(step_s=event.seconds))
    state = state.of(record=event.record, step_finished_at=now, logged_step=step)
    state = state.of(evaluation=event.record.evaluation or state.evaluation)
    return state, nonfinite_entries(event.record), ""


def _backup_note(state: JobState, event: m.BackupNote, now: float) -> JobTransition:
    data = {"owner": event.owner, "keeper": event.keeper, "detail": event.detail}
    reason = f"{event.kind}: copies of {event.owner} at {event.keeper}"
    failed = event.kind == m.KEEPER_FAILED
    state, findings = remediation.keeper_failed(state, event, now) if failed else (state, ())
    return state, (LogEntry(event.kind, data), *findings), reason


def _checkpoint_committed(state: JobState, event: CheckpointCommitted, now: float) -> JobTransition:
    state, entries, reason = checkpoints.committed(state, event)
    state, findings = remediation.checkpoint_written(state, now) if entries else (state, ())
    return state, (*entries, *findings), reason


def _failover(state: JobState, event: CoordinatorFailover, now: float) -> JobTransition:
    # All members reconnect at once, so more members get more time.
    late = now + state.limits.adopt_s + len(state.members) / MAX_HEARTBEATS_PER_S
    # A member that is not back by then is silent.
    silent_at = late - state.limits.lease_s
    seen, excused_s = min(silent_at, now), max(0.0, silent_at - now)
    members = {
        node: replace(
            member, connected=False, closed_at=late, seen=seen, excused_s=excused_s, refused=False
        )
        for node, member in state.members.items()
    }
    actions: list[JobAction] = [LogEntry("adopted", {"epoch": state.epoch})]
    actions += checkpoints.removals_to_repeat(state)
    actions += checkpoints.commits_to_repeat(state)
    if state.ending is not None:  # it waits for the orders before it
        actions += [*checkpoints.unfinished(state), state.ending]
    state = state.of(members=members, adopted_until=late + state.limits.lease_s)
    state = progress_watchdog.restarted(without_doubt(state), late)
    if state.phase is not JobPhase.HALTING:
        return state, tuple(actions), "took the job over"
    # The store may have lost the write of an assignment of this epoch that some node has.
    state, halts, reason = repeat_halt(state, now)
    return state, (*actions, *halts), f"took the job over; {reason}"


def _ticked(state: JobState, tick: Tick, now: float) -> JobTransition:
    state = with_crowd(state.of(late_s=tick.late_s))
    late = tick.late_s > state.limits.starved_s or now < state.adopted_until
    # After a cut, the messages of one node come before those of another, which is not heard yet.
    waits = late or not all_heard(state, now)
    state, actions = (state, ()) if waits else checkpoints.without_stragglers(state)
    return progress_watchdog.orders_held(state, now) if tick.held else state, actions, ""


EVENT_HANDLERS: dict[type, Callable[[JobState, Any, float], JobTransition]] = {
    m.NodeReport: _node_reported,
    Heartbeat: lambda state, beat, now: _heartbeats(state, Heartbeats((beat,)), now),
    Heartbeats: _heartbeats,
    ConnectionClosed: _connection_closed,
    PortRefused: _port_refused,
    DrainRequested: drain.drain_requested,
    m.Notice: drain.notice_received,
    m.StepDone: _step_finished,
    m.CheckpointPart: checkpoints.part_reported,
    m.BackupNote: _backup_note,
    HealthReport: remediation.health_reported,
    m.AgentFailed: _agent_failed,
    CertificatesRead: certificates_read,
    CheckpointCommitted: _checkpoint_committed,
    CheckpointFailed: lambda state, event, now: checkpoints.commit_failed(state, event),
    Tick: _ticked,
    CoordinatorFailover: _failover,
}
