"""Drain: the coordinator's reaction to the notices of nodes.

    leave   drain the node at the end of the step, as `elastic drain` does; at once if the deadline
            is near
    hint    let a spare take the node's place at the end of a step. Without a spare the plan stays;
            later plans consider when the node will leave (`elastic.core.job.join_policy`)
    none    the notice was withdrawn: stop the drain; the node can take a stage again

A plan leaves out all draining nodes, so many notices lead to one change. A repeated notice changes
nothing, unless its deadline is earlier or only the new notice is final.
"""

from __future__ import annotations

from dataclasses import replace

from elastic.core.job.epoch_change import begin_change, candidates
from elastic.core.job.join_policy import member_key, with_expected_end, without_member
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
from elastic.domain.errors import EXIT_DRAINED

RELEASED = 256
"""Number of released nodes that are kept in the state."""
SAME_S = 1.0
"""Deadlines that differ by fewer seconds count as equal."""


def notice_received(state: JobState, event: m.Notice, now: float) -> JobTransition:
    """Record the notice of a node."""
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
    first, earlier = not member.draining, member.notice
    sooner = deadline < member.drain_deadline - SAME_S
    becomes_final = event.final and earlier is not None and not earlier.final
    if not (first or sooner or becomes_final):
        return state, (), f"notice of {member.node}: known"
    if not first:
        deadline = min(deadline, member.drain_deadline)
    notice = None  # a drain that `elastic drain` requested has no notice
    if first or earlier is not None:
        final = not first and earlier is not None and earlier.final
        notice = replace(event, final=event.final or final)
    member = replace(member, draining=True, drain_deadline=deadline, notice=notice)
    reason = f"{member.node} leaves within {max(0.0, event.deadline_s):.3g} s ({_source(event)})"
    entries = [_entry(event, reason)]
    if first:
        data = {"node": member.node, "deadline_s": round(event.deadline_s, 3)}
        entries.append(LogEntry("drain", data))
    return with_member(state, member), tuple(entries), reason


def _hint(state: JobState, member: Member, event: m.Notice, now: float) -> JobTransition:
    if member.notice is not None and member.notice.kind is NoticeKind.LEAVE:
        # A hint is effective only without notices to leave, so a message was lost.
        state, stays, why = _withdrawn(state, member, now)
        state, actions, reason = _hint(state, state.members[member.node], event, now)
        return state, (*stays, *actions), f"{why}; {reason}"
    if member.draining or member.notice is not None:
        return state, (), f"notice of {member.node}: known"
    end = now + max(0.0, event.deadline_s)
    end = min(member.expected_end, end) if member.expected_end > now else end
    member = replace(member, expected_end=end, notice=event, hint_used=False)
    reason = f"{member.node} is expected to go within {end - now:.3g} s ({_source(event)})"
    return with_member(state, member), (_entry(event, reason),), reason


def _withdrawn(state: JobState, member: Member, now: float) -> JobTransition:
    if member.notice is None:
        return state, (), f"notice of {member.node}: none to take back"
    notice = replace(member.notice, kind=NoticeKind.NONE)
    stays = replace(member, draining=False, drain_deadline=0.0, notice=None, hint_used=False)
    considered = tuple(one for one in state.considered if one != member_key(member))
    state = with_member(state, with_expected_end(stays, now)).of(considered=considered)
    reason = f"{member.node} stays after all ({_source(notice)})"
    return state, (_entry(notice, reason),), reason


def _source(notice: m.Notice) -> str:
    return ": ".join(filter(None, (notice.provider, notice.detail)))


def _entry(notice: m.Notice, reason: str) -> LogEntry:
    data = {
        "node": notice.node,
        "notice": notice.kind.value,
        "provider": notice.provider,
        "deadline_s": round(notice.deadline_s, 3),
        "source": _source(notice),
        "reason": reason,
    }
    return LogEntry("notice", data)


def drain_cause(state: JobState) -> Cause:
    """Return the cause of the change that moves the layers of all draining nodes away."""
    leaving = [mb for mb in state.members.values() if mb.draining]
    names = [f"{mb.node} ({mb.notice.provider})" if mb.notice else mb.node for mb in leaving]
    return Cause(CauseKind.DRAIN, f"drain {' '.join(names)}", tuple(mb.node for mb in leaving))


def release(state: JobState, member: Member, now: float) -> tuple[JobState, tuple[JobAction, ...]]:
    """Remove a drained node. It must end, or wait because its notice may be withdrawn."""
    node, incarnation = member.node, member.report.info.incarnation
    ends = member.notice is None or member.notice.final
    released = (*state.released, (node, incarnation, ends))[-RELEASED:]
    state = without_member(state, node, now, left=1).of(released=released)
    return state, (_release_order(node, ends), LogEntry("drained", {"node": node}))


def missed_release(state: JobState, node: str, incarnation: str) -> tuple[JobAction, ...]:
    """Return the order to a node that was released, but has missed it. (): it was not released, or
    another incarnation has joined since."""
    known = {(name, which): ends for name, which, ends in state.released}
    ends = known.get((node, incarnation))
    return () if ends is None or node in state.members else (_release_order(node, ends),)


def _release_order(node: str, ends: bool) -> JobAction:
    return Send(node, m.Stop(EXIT_DRAINED, "drained") if ends else m.Released("drained"))


def replace_hinted_nodes(state: JobState, now: float) -> JobTransition | None:
    """Let spares replace the nodes that have a hint, at the end of the step."""
    assert state.plan is not None
    if not state.stable:
        return None
    held = set(state.plan.nodes())
    members = state.members.values()
    hinted = [mb for mb in members if mb.node in held and _hinted(mb) and not mb.hint_used]
    able = [mb for mb in candidates(state) if mb.connected and mb.node not in held]
    spares = [mb for mb in able if mb.notice is None]
    if not hinted or not spares:
        return None
    for member in hinted:
        state = with_member(state, replace(member, hint_used=True))
    going, coming = (" ".join(mb.node for mb in some) for some in (hinted, spares))
    why = f"{going} may go, {coming} can step in"
    cause = Cause(CauseKind.OTHER, why, tuple(mb.node for mb in hinted))
    return begin_change(state, cause, now, boundary=True)


def _hinted(member: Member) -> bool:
    hint = member.notice is not None and member.notice.kind is NoticeKind.HINT
    return hint and not member.draining
