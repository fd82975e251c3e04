"""Liveness: the evidence by which a member is lost, and the coordinator's doubt about itself.

A closed connection alone is no loss: networks reset connections of healthy nodes, which then
reconnect. A member is lost if its connection is closed and

- the port of its vault refuses connections, which proves that its agent has ended; or
- its neighbours lost contact with it, too, and it sends nothing within `Timeouts.closed_s`, but
  another member does afterwards: the coordinator's own network works. After a reconnect a heartbeat
  is a node's first message, because the report takes longer.

It is also lost if it is silent for `Timeouts.lease_s`, whatever its connection does. The last two
kinds of evidence are no proof: the network between the coordinator and the node may have failed.

If many connections are closed at the same time, their nodes return one after the other, and the
limits of the disconnected ones grow by the time that this takes (`with_crowd`).

**Doubt.** A coordinator that hears only a minority of the members suspects its own network. While
it does, it declares only those members lost whose agents have provably ended, and the time does not
count as silence of the others. Members that return end the doubt. If nobody is heard, the doubt has
no time limit, because there is no node to continue with. If a minority is heard for
`Timeouts.doubt_s` in total, it ends. A doubt is reported once it lasts so long that a member would
have been lost. After a reported one, silent members have `Timeouts.keepalive_s` more to return. If
another coordinator may take the lead, this one gives it up when nobody was heard for a lease, and
once before a doubt with a minority ends: the other one may reach all nodes.

**A short time in which nobody is heard** is no silence of a single node either: meanwhile nobody is
lost because of silence. Nor does it count as the time of a closed connection, because the node
could not reconnect. The same time again does not count, because TCP sends lost packets again
after pauses that double (RFC 6298): the next attempt may come as late after the failure as the
failure was long. At most one lease is excused.

**Excuses have a bound**, because a node may die during a doubt. `Member.excused_s` is the time that
does not count as silence. The next message of the node sets it to 0. Until then, it does not grow
beyond `Timeouts.doubt_s` and the additional time to return, apart from time in which nobody is
heard: doubts that come again and again do not keep a dead node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.core.job.state import (
    JobState,
    JobTransition,
    LogEntry,
    LossKind,
    Member,
    YieldLead,
)
from elastic.core.protocol.timeouts import RECONNECTS_PER_S

QUIET_BEATS = 2.0
"""Nobody is heard if no message has come for this many intervals between heartbeats."""

FEW = 32
"""So many nodes return within the usual limits."""

YIELD_DOUBTS = 3.0
"""A coordinator that hears a minority does not give up the lead again within this multiple of
`Timeouts.doubt_s`: another one has had the time for a doubt of its own."""


@dataclass(frozen=True, slots=True)
class Loss:
    """Evidence that a member is lost."""

    node: str
    kind: LossKind
    why: str
    proven: bool
    """Whether the node's agent has certainly ended."""


@dataclass(frozen=True, slots=True)
class Survey:
    """The coordinator's present view of all members."""

    losses: tuple[Loss, ...]
    """Evidence against members, if the coordinator's own network works."""
    heard: int
    """Number of members that are heard."""
    minority: bool
    """Whether less than half of the members are heard."""


def survey(state: JobState, now: float) -> Survey:
    """Return which members are heard, and the evidence against the others.

    If the coordinator is late, the limits grow by its delay, up to one lease, because messages of
    the members may wait in the queue.
    """
    late_s = min(state.late_s, state.limits.lease_s)
    away_s = late_s + max(0, state.crowd - FEW) / RECONNECTS_PER_S
    accused = {node for mb in state.members.values() for node in mb.report.suspects}
    found, heard, recent_s = [], 0, _recent_s(state)
    for node, member in state.members.items():
        if member.connected and now - member.seen <= recent_s:
            heard += 1
            continue
        closed_s = -1.0 if _is_back(member) else now - member.closed_at
        if not member.connected and member.refused:
            why = "connection closed and its port refuses connections"
            found.append(Loss(node, LossKind.CLOSED, why, proven=True))
        elif (
            node in accused
            and closed_s >= state.limits.closed_s + away_s
            and _hears_others(state, node, member.closed_at + state.limits.closed_s)
        ):
            why = "connection closed and neighbours lost contact"
            found.append(Loss(node, LossKind.CLOSED, why, proven=False))
        elif member.silence_s(now) > state.limits.lease_s + (
            late_s if member.connected else away_s
        ):
            why = f"silent for {now - member.seen:.1f} s"
            found.append(Loss(node, LossKind.SILENT, why, proven=False))
    return Survey(tuple(found), heard, 2 * heard < len(state.members))


def with_crowd(state: JobState) -> JobState:
    """Record how many members were disconnected at a time. This is forgotten when all are back or
    lost."""
    away = sum(not member.connected for member in state.members.values())
    crowd = max(state.crowd, away) if away else 0
    return state if crowd == state.crowd else state.of(crowd=crowd)


def _is_back(member: Member) -> bool:
    """Return whether the member is connected, or has reconnected and its report may still come."""
    return member.connected or member.seen > member.closed_at


def may_return(state: JobState, node: str) -> bool:
    """Return whether the member's connection closed, and it has neither reconnected nor ended."""
    member = state.members.get(node)
    return member is not None and not (_is_back(member) or member.refused)


def _hears_others(state: JobState, node: str, since: float) -> bool:
    """Return whether another member was heard at `since` or later, so that the coordinator's own
    network worked until then."""
    return any(mb.seen >= since for name, mb in state.members.items() if name != node)


def is_heard(state: JobState, member: Member, now: float) -> bool:
    """Return whether the member is connected, and its newest message is recent."""
    return member.connected and now - member.seen <= _recent_s(state)


def all_heard(state: JobState, now: float) -> bool:
    """Return whether every member is heard."""
    recent_s = _recent_s(state)
    return all(mb.connected and now - mb.seen <= recent_s for mb in state.members.values())


def _quiet_s(state: JobState, now: float) -> float:
    """Return the time for which nobody has been heard."""
    return now - max((mb.seen for mb in state.members.values()), default=now)


def _is_quiet(state: JobState, now: float) -> bool:
    """Return whether nobody has been heard for `QUIET_BEATS`. This ends at the first member that
    was heard, because it is asked for every message of a large job."""
    limit_s = QUIET_BEATS * state.limits.heartbeat_s
    return all(now - mb.seen >= limit_s for mb in state.members.values())


def excuse_common_silence(state: JobState, now: float) -> JobState:
    """Excuse the members if nobody was heard for some time: it is neither silence nor time without
    a connection. Call this when a message arrives. The time of a doubt is excused at its end."""
    until = state.doubt_since or now
    if not _is_quiet(state, until):
        return state
    quiet_s = _quiet_s(state, until)

    def excused(member: Member) -> Member:
        most_s = min(2 * quiet_s, state.limits.lease_s - member.excused_s, member.silence_s(now))
        more_s = max(0.0, most_s)
        closed_at = member.closed_at + (0.0 if _is_back(member) else more_s)
        return replace(member, excused_s=member.excused_s + more_s, closed_at=closed_at)

    return state.of(members={node: excused(mb) for node, mb in state.members.items()})


def _recent_s(state: JobState) -> float:
    """Return the age of a member's newest message up to which the member is heard. It is half a
    lease shorter than the limit for a loss: after a cut that silences all members, the first
    deadline passes before the others."""
    lease_s = state.limits.lease_s
    return lease_s / 2 + min(state.late_s, lease_s)


def believed_losses(state: JobState, found: Survey, now: float) -> tuple[Loss, ...]:
    """Return the losses on which the coordinator may act now."""
    yields = state.yielded_at > 0 and now - state.yielded_at < state.limits.lease_s
    if state.doubt_since and (yields or not _is_expired(state, now)):
        return tuple(loss for loss in found.losses if loss.proven)
    quiet = bool(found.losses) and _is_quiet(state, now)
    return tuple(loss for loss in found.losses if loss.kind is not LossKind.SILENT or not quiet)


def _is_expired(state: JobState, now: float) -> bool:
    """Return whether a minority was heard for so long that the doubt ends."""
    return state.minority_since > 0 and _minority_s(state, now) >= state.limits.doubt_s


def judge_own_network(state: JobState, found: Survey, now: float) -> JobTransition | None:
    """Begin, report or end the doubt, or give up the lead because of it; None: nothing changes."""
    if not state.doubt_since:
        return (state.of(doubt_since=now), (), "") if found.minority else None
    if not found.minority:
        return _end_doubt(state, found, now)
    if bool(found.heard) != bool(state.minority_since):
        since, heard_s = state.minority_since, state.minority_s
        if found.heard:
            return state.of(minority_since=now), (), ""
        return state.of(minority_since=0.0, minority_s=heard_s + now - since), (), ""
    count = f"{found.heard} of {len(state.members)} nodes"
    if not state.doubt_reported and not all(loss.proven for loss in found.losses):
        reason = f"only {count} are heard: the coordinator's network may have failed"
        entry = LogEntry("doubt", _figures(state, found) | {"why": reason})
        return state.of(doubt_reported=True), (entry,), reason
    since = max(state.doubt_since, state.yielded_at)
    # Another coordinator may hear the majority. If none does, the majority is lost.
    tried = state.yielded_at > 0 and now - state.yielded_at < YIELD_DOUBTS * state.limits.doubt_s
    alone = not found.heard or (_is_expired(state, now) and not tried)
    yields = state.policy.standbys and alone and state.doubt_reported
    if yields and now - since >= state.limits.lease_s:
        reason = f"only {count} are heard: another coordinator may take over"
        return state.of(yielded_at=now), (LogEntry("yield", {"why": reason}), YieldLead()), reason
    return None


def _end_doubt(state: JobState, found: Survey, now: float) -> JobTransition:
    """Blame nodes again. The time of the doubt does not count as their silence. After a long one
    they get more time, because the transport may still wait for an answer to its last packet."""
    lasted_s, reported = now - state.doubt_since, state.doubt_reported
    members = {
        node: mb if is_heard(state, mb, now) else _excused_doubt(state, mb, now)
        for node, mb in state.members.items()
    }
    state = without_doubt(state.of(members=members))
    if not reported:
        return state, (), ""
    figures = _figures(state, found) | {"seconds": round(lasted_s, 3)}
    reason = f"{found.heard} of {len(state.members)} nodes are heard again"
    return state, (LogEntry("doubt-over", figures),), reason


def _excused_doubt(state: JobState, member: Member, now: float) -> Member:
    """Return a member that is not heard at the end of a doubt, with more time to return."""
    limits, lasted_s = state.limits, now - state.doubt_since
    more_s = now - max(member.seen, state.doubt_since)
    until = 0.0
    if state.doubt_reported:
        more_s = max(more_s, member.silence_s(now) + limits.keepalive_s)
        until = now + limits.keepalive_s
    left_s = max(0.0, limits.doubt_s + limits.keepalive_s - member.excused_s)
    more_s = min(more_s, lasted_s - _minority_s(state, now) + left_s)
    closed_at = member.closed_at
    if not _is_back(member):
        closed_at = max(closed_at + lasted_s, until)
    return replace(member, excused_s=member.excused_s + more_s, closed_at=closed_at)


def _minority_s(state: JobState, now: float) -> float:
    """Return the time of the doubt in which a minority was heard."""
    return state.minority_s + (now - state.minority_since if state.minority_since else 0.0)


def without_doubt(state: JobState) -> JobState:
    return state.of(doubt_since=0.0, minority_since=0.0, minority_s=0.0, doubt_reported=False)


def _figures(state: JobState, found: Survey) -> dict[str, object]:
    return {"heard": found.heard, "nodes": len(state.members)}
