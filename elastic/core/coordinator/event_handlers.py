"""What each event tells the coordinator: the first half of `elastic.core.coordinator.transitions.transition`.

These functions only take note; what follows from it is decided by the rules of the job's phase.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

from elastic.core.job import measured_conditions as conditions
from elastic.core.job.join_policy import count_node_seconds, with_expected_end
from elastic.core.job.membership import launch_nodes as launch_nodes
from elastic.core.job.membership import name_conflict, with_member
from elastic.core.job.state import (
    BackupReported,
    CheckpointCommitted,
    CheckpointPartWritten,
    CommitCheckpoint,
    ConnectionClosed,
    CoordinatorFailover,
    DrainRequested,
    HealthReported,
    Heartbeat,
    Heartbeats,
    JobAction,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    LossKind,
    Member,
    NodeReported,
    Send,
    StepFinished,
    Tick,
)
from elastic.core.job.stragglers import observe_speed
from elastic.core.policy import drain as notices
from elastic.core.policy import remediation as remedies
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.core.protocol.timeouts import BEATS
from elastic.domain.types import Slot, whole_slots

RETIRED = 256
"""Incarnations that were replaced, of which it is remembered."""


def _reported(state: JobState, event: NodeReported, now: float) -> JobTransition:
    report, node = event.report, event.report.info.node
    member = state.members.get(node)
    if member is None or member.report.info.incarnation != report.info.incarnation:
        if report.epoch > 0 or report.restart >= 0 or report.phase is not NodePhase.EMPTY:
            fenced = m.Fenced(f"{node} ({report.info.incarnation}) is not a member (any more)")
            return state, (Send(node, fenced),), f"{node}: a former member is refused"
        waits = name_conflict(state, report, now)
        if waits is not None:
            return state, (Send(node, waits),), waits.reason
        state, told, taken = remedies.admit(state, report, now)
        if not taken:
            return state, told, f"{node} is refused"
        state, actions, reason = _joined(state, event, now)
        return state, (*told, *actions), reason
    was = member.report
    if report.epoch < was.epoch:
        return state, (), f"{node}: stale report of epoch {report.epoch}"
    member = replace(member, report=report, seen=now, connected=True)
    state = with_member(
        state, with_expected_end(member, now) if report.info.lifetime_s != was.info.lifetime_s else member
    )
    if report.elastic and state.spec is None and report.spec is not None:
        state = state.of(spec=report.spec)
    if report.spec is not None and state.spec is not None and report.spec != state.spec:
        failed = m.Failed(f"{node} runs another model or configuration than the rest of the job", 2)
        state = with_member(state, replace(state.members[node], report=replace(report, failed=failed)))
    elif (
        report.spec is not None and state.spec is not None
    ):  # once is enough: it is the largest part of a report
        state = with_member(state, replace(state.members[node], report=replace(report, spec=None)))
    if report.suspects and not state.suspected_since and report.epoch == state.epoch:
        state = state.of(suspected_since=now)
    records = [h.record for h in report.halted if h.record and state.phase is JobPhase.HALTING]
    if records and (state.record is None or records[-1].step > state.record.step):
        state = state.of(record=records[-1])
    state, told = remedies.workers_failed(state, was, report, now)
    reason = f"{node}: {report.phase}" if report.phase is not was.phase else ""
    return state, (*_resync(state, node), *told), reason


def _joined(state: JobState, event: NodeReported, now: float) -> JobTransition:
    report = event.report
    actions: list[JobAction] = [LogEntry("joined", {"node": report.info.node, "domain": report.info.domain})]
    former = state.members.get(report.info.node)
    if former is not None:
        why = "came back as a new incarnation"
        over = (report.info.node, former.report.info.incarnation)
        state = state.of(retired=(*state.retired, over)[-RETIRED:])
        state, told = remedies.node_lost(state, report.info.node, why, now)
        note = LogEntry("lost", {"node": report.info.node, "loss": LossKind.REPLACED.value, "why": why})
        actions = [note, *told, *actions]
    state = count_node_seconds(state, now, left=report.info.node in state.members)
    state = with_member(state, with_expected_end(Member(report=report, seen=now), now))
    if state.ending is None and state.phase not in (JobPhase.WAITING, JobPhase.LAUNCHED):
        state, launch_nodes = launch_nodes(state, (report.info.node,))
        actions += launch_nodes
    actions += [a for a in _resync(state, report.info.node) if a not in actions]
    return state, tuple(actions), f"{report.info.node} joined"


def _resync(state: JobState, node: str) -> tuple[JobAction, ...]:
    """Say again what a member's report shows that it has not heard; an order that it has heard changes nothing."""
    member = state.members[node]
    report = member.report
    if state.ending is not None:
        return (Send(node, m.Stop(state.ending.code, state.ending.reason)),)
    orders: tuple[JobAction, ...] = ()
    if member.launch is not None and report.restart < member.launch.restart:
        orders = (Send(node, member.launch),)
    if state.phase is JobPhase.HALTING and report.epoch < state.epoch and state.change is not None:
        return (*orders, Send(node, m.Halt(state.epoch, state.change.boundary)))
    installed = state.phase in (JobPhase.INSTALLING, JobPhase.RUNNING)
    if installed and report.epoch == state.epoch and report.phase is NodePhase.HALTED and state.assignment:
        return (*orders, Send(node, m.Install(state.epoch, state.assignment)))
    return orders


def _beat(state: JobState, event: Heartbeat, now: float) -> JobTransition:
    return _beats(state, Heartbeats((event,)), now)


def _beats(state: JobState, event: Heartbeats, now: float) -> JobTransition:
    """All at once: each one alone would copy the members."""
    members, taken = dict(state.members), []
    strangers: list[JobAction] = []
    for beat in event.beats:
        member = members.get(beat.node)
        if member is None or member.report.info.incarnation != beat.incarnation:
            fenced = m.Fenced(f"{beat.node} is not a member (any more)")
            strangers.append(Send(beat.node, fenced))
            continue
        report = member.report
        if (report.step, report.microbatch) != (beat.step, beat.microbatch):
            report = replace(report, step=beat.step, microbatch=beat.microbatch)
        members[beat.node] = replace(member, seen=now, report=report)
        taken.append(beat)
    if taken:
        state = state.of(members=members)
    for beat in taken:
        state = conditions.observe_backup(observe_speed(state, beat), beat)
    times = (one.forward_s + one.backward_s for beat in taken for one in beat.measured)
    seen = state.seen.grown(microbatch_s=max(times, default=0.0))
    state = state if seen is state.seen else state.of(seen=seen)
    return state, tuple(strangers), "former member" if strangers else ""


def _closed(state: JobState, event: ConnectionClosed, now: float) -> JobTransition:
    member = state.members.get(event.node)
    if member is None or member.report.info.incarnation != event.incarnation:
        return state, (), ""
    state = with_member(state, replace(member, connected=False, closed_at=now))
    return state, (), f"{event.node}: connection closed"


def _drain_asked(state: JobState, event: DrainRequested, now: float) -> JobTransition:
    member = state.members.get(event.node)
    if member is None or (member.draining and member.notice is None):
        return state, (), f"drain of {event.node}: {'already draining' if member else 'no such node'}"
    deadline = now + event.deadline_s
    if member.draining:
        deadline = min(deadline, member.drain_deadline)
    state = with_member(state, replace(member, draining=True, drain_deadline=deadline, notice=None))
    note = LogEntry("drain", {"node": event.node, "deadline_s": event.deadline_s})
    return state, (note,), f"drain of {event.node} asked"


def _stepped(state: JobState, event: StepFinished, now: float) -> JobTransition:
    step = event.record.step
    if step <= state.told or (state.record is not None and step < state.record.step):
        return state, (), ""
    state = remedies.record_step_time(state, event.seconds)
    seen = state.seen.grown(step_s=event.seconds)
    return state.of(record=event.record, step_finished_at=now, told=step, seen=seen), (), ""


def _part_written(state: JobState, event: CheckpointPartWritten, now: float) -> JobTransition:
    before = {pair for step, pairs in state.parts if step == event.step for pair in pairs}
    layers = before | set(event.layers)
    newest = max((step for step, _ in state.parts), default=-1)
    if state.spec is None or event.step < newest or (state.checkpoint and event.step <= state.checkpoint[1]):
        return state, (), ""
    state = state.of(parts=((event.step, tuple(sorted(layers))),))
    begun = _whole(state, layers) and not _whole(state, before)  # parts are said again after a break
    return state, ((CommitCheckpoint(event.step),) if begun else ()), ""


def _whole(state: JobState, slots: Collection[Slot]) -> bool:
    """Whether files of these make a complete checkpoint."""
    return state.spec is not None and len(whole_slots(slots)) == state.spec.n_layers * state.spec.tp


def _backup_noted(state: JobState, event: BackupReported, now: float) -> JobTransition:
    told = {"owner": event.owner, "keeper": event.keeper, "detail": event.detail}
    return state, (LogEntry(event.kind, told),), f"{event.kind}: copies of {event.owner} at {event.keeper}"


def _checkpoint_committed(state: JobState, event: CheckpointCommitted, now: float) -> JobTransition:
    if state.checkpoint == (event.path, event.step):
        return state, (), ""
    note = LogEntry("checkpoint", {"step": event.step, "path": event.path})
    state, told = remedies.checkpoint_written(state, now)
    later = tuple(part for part in state.parts if part[0] > event.step)  # came while the disk was waited for
    return (
        state.of(checkpoint=(event.path, event.step), parts=later),
        (note, *told),
        f"checkpoint of step {event.step}",
    )


def _adopted(state: JobState, event: CoordinatorFailover, now: float) -> JobTransition:
    late = now + state.policy.adopt_s + len(state.members) / BEATS  # they all come at once
    members = {
        node: replace(mb, connected=False, closed_at=late, seen=late) for node, mb in state.members.items()
    }
    actions: tuple[JobAction, ...] = (LogEntry("adopted", {"epoch": state.epoch}),)
    if state.ending is not None:
        actions = (*actions, state.ending)
    actions = (*actions, *(CommitCheckpoint(step) for step, layers in state.parts if _whole(state, layers)))
    return state.of(members=members), actions, "took the job over"


def _ticked(state: JobState, event: Tick, now: float) -> JobTransition:
    return (state if event.late_s == state.late_s else state.of(late_s=event.late_s)), (), ""


EVENT_HANDLERS: dict[type, Callable[[JobState, Any, float], JobTransition]] = {
    NodeReported: _reported,
    Heartbeat: _beat,
    Heartbeats: _beats,
    ConnectionClosed: _closed,
    DrainRequested: _drain_asked,
    m.Notice: notices.notice_received,
    StepFinished: _stepped,
    CheckpointPartWritten: _part_written,
    BackupReported: _backup_noted,
    HealthReported: remedies.health_reported,
    CheckpointCommitted: _checkpoint_committed,
    Tick: _ticked,
    CoordinatorFailover: _adopted,
}
