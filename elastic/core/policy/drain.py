"""Drain: the coordinator's reaction to the notices of nodes.

    leave   drain the node at the end of the step, as `elastic drain` does; at once if the deadline
            is near
    hint    let a spare take the node's place at the end of a step. Without a spare the plan stays;
            later plans consider when the node will leave (`elastic.core.job.join_policy`)
    none    the notice was withdrawn: stop the drain; the node can take a stage again

A plan leaves out all draining nodes, so many notices lead to one change. A repeated notice changes
nothing, unless its deadline is earlier or only the new notice is final.

A drain pauses no job before its deadline is near: it waits until then if no plan fits without the
node. If several nodes are to leave, and not all can, they are considered in the order of their
deadlines. A node that must stay holds back no later one that can leave.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from elastic.core.job.epoch_change import begin_change, candidates, plan_request
from elastic.core.job.join_policy import member_key, with_expected_end, without_member
from elastic.core.job.membership import with_member
from elastic.core.job.state import (
    Cause,
    CauseKind,
    DrainRequested,
    JobAction,
    JobPhase,
    JobState,
    JobTransition,
    LogEntry,
    Member,
    Send,
)
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NoticeKind
from elastic.domain.errors import EXIT_DRAINED, InfeasiblePlan
from elastic.planning.search.search import make_plan

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
    first, earlier = not member.drain_deadline, member.notice
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
    draining = first or member.draining
    member = replace(member, draining=draining, drain_deadline=deadline, notice=notice)
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
    if member.drain_deadline or member.notice is not None:
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


def drain_requested(state: JobState, event: DrainRequested, now: float) -> JobTransition:
    """Record the user's request to drain a node, or an earlier deadline of it."""
    member, deadline = state.members.get(event.node), now + event.deadline_s
    if member is None:
        return state, (), f"drain of {event.node}: no such node"
    known = member.drain_deadline
    if known and member.notice is None and deadline >= known - SAME_S:
        return state, (), f"drain of {event.node}: already draining"
    deadline, draining = min(deadline, known or deadline), member.draining or not known
    member = replace(member, draining=draining, drain_deadline=deadline, notice=None)
    data = {"node": event.node, "deadline_s": event.deadline_s, "by": event.by}
    reason = f"drain of {event.node} requested" + (f" by {event.by}" if event.by else "")
    return with_member(state, member), (LogEntry("drain", data),), reason


def must_leave(state: JobState, member: Member, now: float) -> bool:
    """Return whether the deadline of a node that is to leave is near."""
    return now >= member.drain_deadline - state.limits.leave_s


def settle(state: JobState, now: float) -> JobTransition | None:
    """Decide which drains wait, if the members or the drains have changed."""
    leaving = [mb for mb in state.members.values() if mb.drain_deadline]
    if not leaving:
        return None
    situation = _situation(state, leaving, now)
    if situation == state.drains_settled:
        return None
    runs = state.plan if state.phase is JobPhase.RUNNING else None
    used = runs.nodes() if runs is not None else state.members
    late = {mb.node for mb in leaving if mb.node not in used or must_leave(state, mb, now)}
    by_deadline = sorted(leaving, key=lambda mb: mb.drain_deadline)
    order = [mb.node for mb in by_deadline if mb.node not in late]
    waits = _drains_that_wait(state, late, order)
    entries: list[JobAction] = []
    reasons: dict[str, list[str]] = {}
    for member in leaving:
        node, why = member.node, waits.get(member.node, "")
        state = with_member(state, replace(member, draining=not why))
        if member.draining and why:
            left_s = round(member.drain_deadline - now, 3)
            entries.append(LogEntry("drain", {"node": node, "deadline_s": left_s, "waits": why}))
            reasons.setdefault(why, []).append(node)
    leaving = [state.members[mb.node] for mb in leaving]
    state = state.of(drains_settled=_situation(state, leaving, now))
    texts = (f"drain of {' '.join(nodes)} waits: {why}" for why, nodes in reasons.items())
    return state, tuple(entries), "; ".join(texts)


def _situation(state: JobState, leaving: Collection[Member], now: float) -> tuple[str, ...]:
    """Return all that the decision about drains depends on, apart from the order of deadlines."""
    free = candidates(_without(state, ()))
    drains = (f"{mb.node} {mb.draining} {must_leave(state, mb, now)}" for mb in leaving)
    return (*sorted(mb.report.info.incarnation for mb in free), *drains)


def _drains_that_wait(
    state: JobState, late: Collection[str], order: Sequence[str]
) -> dict[str, str]:
    """Return the nodes of `order` whose drains wait, and why.

    Each node may leave with which, and with all those that are `late` or leave before it, a plan
    still fits. If all can leave, that is one search for a plan. Otherwise they are tried in halves,
    with fewer than two searches per node.
    """
    going, waits = frozenset(late), dict[str, str]()
    groups, failed = [tuple(order)], dict[frozenset[str], str]()
    while groups:
        group = groups.pop()
        for node in group:
            like = next((other for other in waits if _as_needed(state, node, other)), None)
            if like is not None:
                waits[node] = waits[like]
        group = tuple(node for node in group if node not in waits)
        trial = going | set(group)
        problem = failed.get(trial) or (_problem_without(state, trial) if group else "")
        if not problem:
            going = trial
        elif len(group) == 1:
            waits[group[0]] = problem
        else:
            failed[trial], half = problem, len(group) // 2
            groups += [group[half:], group[:half]]
    return waits


def _as_needed(state: JobState, node: str, other: str) -> bool:
    """Return whether no plan fits without `node` if none fits without `other`: it has the same
    devices, and no less memory. Without this, 64 notices in a job that needs all nodes would take
    127 searches."""
    if state.paths:
        return False  # a plan may leave one of the two out anyway
    one, two = (state.members[name].report for name in (node, other))
    same_kind = (one.info.device, one.info.workers) == (two.info.device, two.info.workers)
    no_less = (one.info.memory_bytes or inf) >= (two.info.memory_bytes or inf)
    return one.able == two.able and same_kind and no_less


def _problem_without(state: JobState, nodes: Collection[str]) -> str:
    """Return why no plan fits without these nodes; "": one does."""
    trial = _without(state, nodes)
    if not candidates(trial):
        return "no other node can take a stage"
    try:
        make_plan(plan_request(trial, state.epoch + 1))
    except InfeasiblePlan as error:
        return str(error)
    return ""


def _without(state: JobState, nodes: Collection[str]) -> JobState:
    """Return the state if these nodes alone drain. All quarantines are over, because they end if no
    plan fits otherwise."""
    changed = {
        node: replace(mb, draining=node in nodes)
        for node, mb in state.members.items()
        if mb.draining != (node in nodes)
    }
    return state.of(members={**state.members, **changed}, health={})


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
    """Let spares replace the nodes that have a hint, at the end of the step: as many as there are
    spares, first those that are expected to go first."""
    assert state.plan is not None
    if not state.stable:
        return None
    held = set(state.plan.nodes())
    members = state.members.values()
    waiting = [mb for mb in members if mb.node in held and _hinted(mb) and not mb.hint_used]
    if not waiting:
        return None
    able = [mb for mb in candidates(state) if mb.connected and mb.node not in held]
    spares = [mb for mb in able if mb.notice is None]
    hinted = sorted(waiting, key=lambda mb: mb.expected_end)[: len(spares)]
    if not hinted:
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
