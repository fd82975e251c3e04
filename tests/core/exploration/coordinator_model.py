"""The coordinator of the exploration: the real transition on states with a canonical time.

Every state is shifted in time so that the present is `NOW`. Figures that only serve statistics,
and texts for people, are set to constants. So states that decide alike are equal.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any, NamedTuple, TypeVar

from elastic.core.coordinator.authorization import check_message
from elastic.core.coordinator.transitions import CHANGING, INSTALLED, transition
from elastic.core.health.diagnosis import Finding, NodeHealth
from elastic.core.job import scope
from elastic.core.job import state as job
from elastic.core.job.membership import name_conflict
from elastic.core.job.state import JobPhase, JobState, Policy
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import Assignment
from elastic.planning.backup.amortization import DEFAULT_PAUSE_S
from elastic.planning.backup.loss_history import LossHistory
from elastic.planning.plan.plan import validate_plan

T = TypeVar("T")
NOW = 1e6
"""Time of every event, in seconds."""
OLDEST_S = 2000.0
"""Older times count as this old: longer than every limit."""
START_S = 2.0
"""Measured time that workers need to start."""
STEPS_S = (0.2, 0.6, 1.7, 2.2, 3.3, 5.0, 8.0, 11.0, 16.0, 31.0, 61.0, 121.0, 301.0, 601.0)
"""Times after which a deadline may have passed, ascending."""
UNSAVED = (job.Heartbeat, job.Heartbeats, job.Tick, m.NodeReport)
"""Events whose result is saved at once only if actions follow."""
OVER = (JobPhase.FINISHED, JobPhase.FAILED)


class Decision(NamedTuple):
    """Result of one event."""

    state: JobState
    actions: tuple[Any, ...]
    saved: bool
    """Whether the state is saved before the actions are carried out."""


class Passed(NamedTuple):
    """Result of time without events, until something happens."""

    seconds: float
    decision: Decision


def initial(policy: Policy) -> JobState:
    return canonical(JobState(policy=policy, updated_at=NOW), 0.0)


def take(state: JobState, event: Any) -> Decision:
    """Apply an event."""
    after, actions, _ = _transition(state, event, NOW)
    saved = bool(actions) or not isinstance(event, UNSAVED)
    _check(state, after, actions)
    return Decision(canonical(after, 0.0), _plain(actions), saved)


def _transition(state: JobState, event: Any, now: float) -> job.JobTransition:
    try:
        return transition(state, event, now)
    except Exception as error:
        raise AssertionError(f"the coordinator fails: {error!r}") from error


def answer(state: JobState, sender: str, message: Any) -> Any | None:
    """Return the answer to a message that the session filter rejects, or None."""
    problem = check_message(state, sender, message)
    if problem is not None:
        assert problem.reason != "malformed", problem.text
        if not problem.fence:
            return ()
        new = (
            isinstance(message, m.NodeReport)
            and message.phase is NodePhase.EMPTY
            and message.epoch <= 0
        )
        return m.Released("") if new else m.Fenced("")
    if isinstance(message, m.NodeReport):
        return name_conflict(state, message, NOW)
    return None


def wait(state: JobState, heard: Collection[str], most_s: float) -> Passed | None:
    """Let time pass until the coordinator decides something; None: nothing happens in `most_s`.

    The nodes `heard` send heartbeats. Ticks before that change nothing.
    """
    quiet = aged(state, 0.0)
    for seconds in STEPS_S:
        if seconds > most_s:
            return None
        now = NOW + seconds
        members = {
            name: replace(member, seen=now, excused_s=0.0) if name in heard else member
            for name, member in quiet.members.items()
        }
        before = quiet.of(members=members, updated_at=now)
        after, actions, _ = _transition(before, job.Tick(), now)
        after = canonical(after, seconds)
        if actions or freeze(after) != freeze(canonical(before, seconds)):
            _check(before, after, actions)
            return Passed(seconds, Decision(after, _plain(actions), bool(actions)))
    return None


def aged(state: JobState, seconds: float) -> JobState:
    """Return the state `seconds` later."""
    return canonical(state, seconds)


def _check(before: JobState, after: JobState, actions: tuple[Any, ...]) -> None:
    """One transition keeps the promises that need no other node."""
    assert after.epoch >= before.epoch, "epochs only grow"
    if after.phase in CHANGING and after.spec is not None and after.failure is None:
        for member in after.members.values():
            _check_epoch(after, member)
    for action in actions:
        if not isinstance(action, job.Send) or after.starts == before.starts:
            continue  # an order is repeated
        if isinstance(action.message, m.Install):
            validate_plan(action.message.assignment.plan)
            for member in after.members.values():
                assert scope.has_answered(after, member), (
                    f"{member.node} has neither halted nor promised to for epoch {after.epoch}"
                )


def _check_epoch(state: JobState, member: job.Member) -> None:
    """The coordinator leads all connected members in an epoch that it knows.

    It refuses finished steps of later epochs, so it would not see that training goes on. And a
    node with an assignment of the present epoch ignores the order to halt for it.
    """
    report = member.report
    halts = state.phase is JobPhase.HALTING and report.able and report.phase in INSTALLED
    later = report.epoch >= state.epoch if halts else report.epoch > state.epoch
    assert not (member.connected and later), (
        f"{member.node} is {report.phase} in epoch {report.epoch}, "
        f"the coordinator is {state.phase} in epoch {state.epoch}"
    )


# ---- canonical form ----


def _with(value: T, **changes: Any) -> T:
    """Return `value` with other fields; the same object if they are equal, which saves memory."""
    if all(getattr(value, name) == new for name, new in changes.items()):
        return value
    return replace(value, **changes)  # type: ignore[type-var]


def _plain(actions: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return the sends, the end, and the names of important log entries."""
    found: list[Any] = []
    for action in actions:
        match action:
            case job.Send(node, message):
                found.append(job.Send(node, plain_message(message)))
            case job.JobFinished():
                found.append(action)
            case job.LogEntry(kind, data) if kind in ("stalled", "doubt", "paused", "yield"):
                found.append((kind, str(data.get("action", ""))))
    return tuple(found)


def plain_message(message: Any) -> Any:
    """Return the message without texts for people."""
    match message:
        case m.Install(epoch, assignment):
            return m.Install(epoch, _plain_assignment(assignment))
        case m.Fenced() | m.Released():
            return _with(message, reason="")
        case m.Stop(code):
            return m.Stop(code, "")
        case m.RestartWorkers(_, count):
            return m.RestartWorkers("", count)
    return message


def _plain_assignment(assignment: Assignment) -> Assignment:
    return _with(assignment, plan=_with(assignment.plan, reason=""))


def canonical(state: JobState, passed_s: float) -> JobState:
    """Return the canonical form of a state at time `NOW + passed_s`."""

    def shift(at: float) -> float:
        if not at:
            return 0.0
        return _rounded(round(at - passed_s - NOW, 3))

    if state.phase in OVER:
        return _ended(state)
    waiting, launched = state.phase is JobPhase.WAITING, state.phase is JobPhase.LAUNCHED
    members = {name: _member(state, state.members[name], shift) for name in sorted(state.members)}
    plan = _shared(_with(state.plan, reason="")) if state.plan is not None else None
    assignment = state.assignment
    if assignment is not None:
        assignment = _shared(_plain_assignment(assignment))
    missing = state.missing
    watch = state.watch
    retry_at = shift(watch.retry_at)
    watch = replace(
        watch,
        since=shift(watch.since),
        signs={
            name: _with(watch.signs[name], at=shift(watch.signs[name].at))
            for name in sorted(watch.signs)
        },
        retry_at=retry_at if retry_at > NOW else 0.0,
        # The times before the newest one count only after five failed epochs within a minute.
        failed_times=tuple(map(shift, watch.failed_times[-1:])) if retry_at > NOW else (),
        cause="",
        orders={
            name: _with(watch.orders[name], at=shift(watch.orders[name].at))
            for name in sorted(watch.orders)
        },
        blamed=dict(sorted(watch.blamed.items())),
        failures=dict(sorted(watch.failures.items())),
    )
    return state.of(
        members=members,
        plan=plan,
        assignment=assignment,
        change=_change(state.change, shift),
        step_finished_at=0.0,
        recovered_at=0.0,
        enough_since=shift(state.enough_since) if waiting or launched else 0.0,
        launched_at=shift(state.launched_at) if launched else 0.0,
        start_s=START_S if state.start_s else 0.0,
        considered=tuple(sorted(state.considered)),
        joining_since=shift(state.joining_since) if state.joining else 0.0,
        updated_at=NOW,
        late_s=0.0,
        suspected_since=shift(state.suspected_since),
        paces={},
        gauges={},
        backup_checked_at=0.0,
        history=LossHistory(),
        pauses=(DEFAULT_PAUSE_S,) if state.trained else (),
        reconsider_at=0.0,
        improve_at=max(shift(state.improve_at), NOW) if state.improve_at else 0.0,
        health={name: _health(state.health[name], shift) for name in sorted(state.health)},
        durations=(),
        seen=_shared(_with(state.seen, pause_s=0.0)),
        doubt_since=shift(state.doubt_since),
        minority_since=shift(state.minority_since),
        crowd=0,
        adopted_until=max(shift(state.adopted_until), NOW) if state.adopted_until else 0.0,
        yielded_at=shift(state.yielded_at),
        absent=tuple((node, NOW) for node, _ in state.absent),
        missing=_with(missing, since=shift(missing.since)) if missing is not None else None,
        watch=watch,
    )


def _rounded(ahead_s: float) -> float:
    """Return the canonical form of a time `ahead_s` from now. Ages are rounded down."""
    if ahead_s >= 0:
        return NOW + min(ahead_s, OLDEST_S)
    return NOW - max(s for s in (0.0, *STEPS_S, OLDEST_S) if s <= -ahead_s)


def _ended(state: JobState) -> JobState:
    """Return what an ended job still needs: whom to tell the end."""
    members = {
        name: job.Member(
            m.NodeReport(state.members[name].report.info, NodePhase.EMPTY, epoch=0), NOW
        )
        for name in sorted(state.members)
    }
    return JobState(
        policy=state.policy,
        phase=state.phase,
        epoch=state.epoch,
        members=members,
        ending=state.ending,
        updated_at=NOW,
        timeouts=state.timeouts,
    )


def _member(state: JobState, member: job.Member, shift: Any) -> job.Member:
    closed_at = 0.0 if member.connected else shift(member.closed_at)
    excused_s = NOW - _rounded(-member.excused_s)
    report = member.report
    if report.inventory and not _may_use_copies(state, report):
        report = _without_copies(report)
    seen = shift(member.seen)
    return _with(
        member, seen=seen, excused_s=excused_s, closed_at=closed_at, report=_shared(report)
    )


def _may_use_copies(state: JobState, report: m.NodeReport) -> bool:
    """Return whether a decision may still use the copies in a member's report.

    A plan is decided after all members have reported in the new epoch, so copies in reports of
    the present epoch are read only while it halts. Besides, a new epoch is above those of all
    copies, which matters only for copies of a later epoch than the present one.
    """
    halting = state.phase is JobPhase.HALTING and report.epoch >= state.epoch
    later = report.epoch > state.epoch
    return halting or later or any(copy.epoch > state.epoch for copy in report.inventory)


@cache
def _without_copies(report: m.NodeReport) -> m.NodeReport:
    return replace(report, inventory=())


def _change(change: job.EpochChange | None, shift: Any) -> job.EpochChange | None:
    if change is None:
        return None
    until = change.wait_until
    if until > 0:
        until = max(shift(until), NOW)
    old = _with(change.old_plan, reason="") if change.old_plan is not None else None
    plain = _with(
        change,
        causes=tuple(_with(cause, text="") for cause in change.causes),
        began=0.0,
        old_plan=old,
        detect_s=0.0,
        paused=0.0,
        halted=0.0,
        decided=0.0,
        network_bytes=0,
        state_source="",
        wait_until=until,
        reason="",
    )
    return _shared(plain)


def _health(record: NodeHealth, shift: Any) -> NodeHealth:
    findings = tuple(
        Finding(one.kind, one.action, "") for one in sorted(record.findings, key=lambda f: f.kind)
    )
    return _with(
        record,
        crashes=(NOW,) * len(record.crashes),
        link_crashes=(NOW,) * len(record.link_crashes),
        fault_plans=(),  # they matter for errors of links only, which the model does not have
        departures=(NOW,) * len(record.departures),
        until=shift(record.until) if record.quarantined else 0.0,
        quarantine_changed_at=NOW if record.quarantine_changed_at else 0.0,
        findings=findings,
    )


def freeze(value: Any) -> Any:
    """Return a hashable form of a canonical state."""
    kind = type(value)
    if kind in _PLAIN:
        return value
    names = _PARTS.get(kind)
    if names is not None:
        return tuple([freeze(getattr(value, name)) for name in names])
    if kind is dict:
        return tuple([(key, freeze(inner)) for key, inner in value.items()])
    if kind is Finding:
        return value.kind, value.action
    if kind is tuple and value and is_dataclass(value[0]):
        return tuple(map(freeze, value))
    return _number(value)


_PLAIN = frozenset({bool, int, float, str, type(None), JobPhase})
_PARTS: dict[type, tuple[str, ...]] = {
    kind: tuple(field.name for field in fields(kind))
    for kind in (JobState, job.ProgressWatch, NodeHealth, job.Member)
}
_numbers: dict[Any, tuple[Any, int]] = {}
"""For each large value: the first equal one, and its number."""
_by_identity: dict[int, tuple[Any, int]] = {}
"""The same by the identity of the first one, because its hash is slow to compute."""


def _shared(value: T) -> T:
    """Return the first value that is equal. The others need no memory."""
    return _entry(value)[0]  # type: ignore[no-any-return]


def _number(value: Any) -> Any:
    """Return a small stand-in for a large value."""
    return _entry(value)[1] if is_dataclass(value) else value


def _entry(value: Any) -> tuple[Any, int]:
    known = _by_identity.get(id(value))
    if known is not None and known[0] is value:
        return known
    entry = _numbers.setdefault(value, (value, len(_numbers)))
    if entry[0] is value:
        _by_identity[id(value)] = entry
    return entry
