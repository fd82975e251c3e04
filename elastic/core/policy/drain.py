"""What a node's own notice leads to, on the coordinator's side.

    leave   the node is drained at the end of the step, as by `elastic drain`; at once when time is short
    hint    it is expected to go: where a spare can take its place it does, at the end of a step; else plans only know
            how long it will probably stay, and weigh it at the next change (`elastic.core.job.join_policy`)
    none    taken back: a drain that has not ended is ended, and the node takes part again

All nodes that have been told to leave when a plan is made are left out of it: many notices, one change. A notice that
is repeated changes nothing; one with a sooner deadline moves the deadline.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.job import epoch_change as epoch_change
from elastic.core.job.join_policy import member_key, with_expected_end
from elastic.core.job.membership import with_member
from elastic.core.job.state import (
    Cause,
    CauseKind,
    JobAction,
    JobState,
    JobTransition,
    LogEntry,
    Member,
    Send,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NoticeKind
from elastic.core.protocol.timeouts import budget
from elastic.domain.errors import EXIT_DRAINED

SAME_S = 1.0
"""Deadlines that differ by less are the same."""


def notice_received(state: JobState, event: m.Notice, now: float) -> JobTransition:
    """Take note of what a node was told."""
    member = state.members.get(event.node)
    if member is None or member.report.info.incarnation != event.incarnation:
        over = state.ending
        stop = (Send(event.node, m.Stop(over.code, over.reason)),) if over is not None else ()
        return state, stop, f"notice of {event.node}: not a member"
    match event.kind:
        case NoticeKind.LEAVE:
            return _leave(state, member, event, now)
        case NoticeKind.HINT:
            return _hint(state, member, event, now)
        case _:
            return _withdrawn(state, member, now)


def _leave(state: JobState, member: Member, event: m.Notice, now: float) -> JobTransition:
    deadline = now + max(0.0, event.deadline_s)
    fresh = not member.draining
    sooner = deadline < member.drain_deadline - SAME_S
    ends = event.final and member.notice is not None and not member.notice.final
    if not (fresh or sooner or ends):
        return state, (), f"notice of {member.node}: known"
    deadline = deadline if fresh else min(deadline, member.drain_deadline)
    asked = member.draining and member.notice is None  # by `elastic drain`, which stands
    final = event.final or (member.draining and member.notice is not None and member.notice.final)
    notice = None if asked else replace(event, final=final)
    state = with_member(state, replace(member, draining=True, drain_deadline=deadline, notice=notice))
    told = _told(event)
    reason = f"{member.node} leaves within {max(0.0, event.deadline_s):.3g} s ({told['source']})"
    drain = (LogEntry("drain", {"node": member.node, "deadline_s": told["deadline_s"]}),) if fresh else ()
    return state, (LogEntry("notice", {**told, "reason": reason}), *drain), reason


def _hint(state: JobState, member: Member, event: m.Notice, now: float) -> JobTransition:
    if member.draining or member.notice is not None:
        return state, (), f"notice of {member.node}: known"
    until = now + max(0.0, event.deadline_s)
    until = min(member.until, until) if member.until else until
    state = with_member(state, replace(member, until=until, notice=event, weighed=False))
    told = _told(event)
    reason = f"{member.node} is expected to go within {until - now:.3g} s ({told['source']})"
    return state, (LogEntry("notice", {**told, "reason": reason}),), reason


def _withdrawn(state: JobState, member: Member, now: float) -> JobTransition:
    if member.notice is None:
        return state, (), f"notice of {member.node}: none to take back"
    told = _told(replace(member.notice, kind=NoticeKind.NONE))
    stays = with_expected_end(
        replace(member, draining=False, drain_deadline=0.0, notice=None, weighed=False), now
    )
    considered = tuple(one for one in state.considered if one != member_key(member))
    reason = f"{member.node} stays after all ({told['source']})"
    note = LogEntry("notice", {**told, "reason": reason})
    return with_member(state, stays).of(considered=considered), (note,), reason


def _told(event: m.Notice) -> dict[str, Any]:
    source = ": ".join(text for text in (event.provider, event.detail) if text)
    return {
        "node": event.node,
        "notice": event.kind.value,
        "provider": event.provider,
        "deadline_s": round(event.deadline_s, 3),
        "source": source,
    }


def drain_cause(state: JobState) -> Cause:
    """Why nodes that leave are moved off: all of them at once."""
    leaving = [mb for mb in state.members.values() if mb.draining]
    said = [f"{mb.node}{f' ({mb.notice.provider})' if mb.notice else ''}" for mb in leaving]
    return Cause(CauseKind.DRAIN, f"drain {' '.join(said)}", tuple(mb.node for mb in leaving))


def release_order(member: Member) -> JobAction:
    """What a drained node is told: to end, or to wait for what becomes of it."""
    if member.notice is None or member.notice.final:
        return Send(member.node, m.Stop(EXIT_DRAINED, "drained"))
    return Send(member.node, m.Released("drained"))


def replace_hinted_nodes(state: JobState, now: float) -> JobTransition | None:
    """Nodes that will probably go make place for spares, at the end of a step."""
    assert state.plan is not None
    if state.change is not None or state.trimmed < state.epoch or state.joining:
        return None
    held = set(state.plan.nodes())
    likely = [mb for mb in state.members.values() if mb.node in held and _hinted(mb) and not mb.weighed]
    spares = [mb for mb in epoch_change.candidates(state) if mb.node not in held and mb.notice is None]
    if not likely or not spares:
        return None
    for member in likely:
        state = with_member(state, replace(member, weighed=True))
    why = f"{' '.join(mb.node for mb in likely)} may go, {' '.join(mb.node for mb in spares)} can step in"
    drain_cause = Cause(CauseKind.OTHER, why, tuple(mb.node for mb in likely))
    return epoch_change.begin_change(state, drain_cause, now, boundary=True)


def _hinted(member: Member) -> bool:
    return member.notice is not None and member.notice.kind is NoticeKind.HINT and not member.draining


def retimed(state: JobState) -> tuple[JobState, tuple[JobAction, ...]]:
    """Limits on waiting as they follow from what was measured; told when they are others than before."""
    limits = budget(state.policy.lease_s, heartbeat_s=state.policy.heartbeat_s, seen=state.seen)
    if limits == state.timeouts:
        return state, ()
    before = state.timeouts
    changed = [name for name in limits.__slots__ if getattr(limits, name) != getattr(before, name, None)]
    measured = {name: getattr(state.seen, name) for name in ("step_s", "microbatch_s", "pause_s")}
    note = LogEntry("timeouts", {name: getattr(limits, name) for name in changed} | {"measured": measured})
    return state.of(timeouts=limits), (note,)
