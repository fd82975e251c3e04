"""Notice tracker: the agent's record of notices about the future of its node.

Each source is polled and returns all its active notices each time. A notice that the source no
longer returns is withdrawn. The active notice with the earliest deadline is effective; a hint is
effective only if all active notices are hints. A repeated notice (same identity) changes nothing. A
notice whose deadline is long past although the node lives is false: it is ignored until its source
withdraws it.

A drained node whose notice is not final is *parked*: it belongs to no job until all notices to
leave are withdrawn or false, and then joins again as a new member.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NoticeKind

SAME_S = 1.0
"""Deadlines that differ by fewer seconds count as equal."""
MOST = 64
"""Limit on the notices per source, and on the kept identities of false notices."""


@dataclass(frozen=True, slots=True)
class ProviderNotice:
    """One notice of a provider."""

    provider: str
    identity: str
    """Identifies the notice when it is repeated; unique among all providers."""
    kind: NoticeKind
    deadline: float
    """Seconds on the agent's clock."""
    detail: str = ""
    final: bool = False
    """Whether the agent ends once the node is drained; else the node is parked."""


@dataclass(frozen=True, slots=True)
class NoticeTracker:
    """All notices of a node."""

    by_source: dict[str, tuple[ProviderNotice, ...]] = field(default_factory=dict)
    false: tuple[str, ...] = ()
    """Identities of false notices."""
    sent: ProviderNotice | None = None
    """Notice that was last sent to the coordinator; None: none, or it was withdrawn."""
    parked: bool = False

    @property
    def active(self) -> tuple[ProviderNotice, ...]:
        """All notices that are not false."""
        notices = (one for many in self.by_source.values() for one in many)
        return tuple(one for one in notices if one.identity not in self.false)

    @property
    def effective(self) -> ProviderNotice | None:
        """The effective notice, which is final if any notice to leave is final; None: no notice."""
        leave = [one for one in self.active if one.kind is NoticeKind.LEAVE]
        hints = [one for one in self.active if one.kind is NoticeKind.HINT]
        first = min(leave or hints, key=lambda one: one.deadline, default=None)
        return first and replace(first, final=any(one.final for one in leave))


# ---- actions ----


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Send the effective notice to the coordinator; None: the notice was withdrawn."""

    notice: ProviderNotice | None


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the provider that the node is drained, so that it can be taken away."""

    notice: ProviderNotice


@dataclass(frozen=True, slots=True)
class RejoinJob:
    """Join the job again as a new member, because the node stays."""


TrackerAction = SendNotice | Acknowledge | RejoinJob
TrackerTransition = tuple[NoticeTracker, tuple[TrackerAction, ...]]


def source_read(
    tracker: NoticeTracker, source: str, found: Sequence[ProviderNotice]
) -> TrackerTransition:
    """Record all notices of a source. The deadline of a known notice can only become earlier."""
    known = {one.identity: one for one in tracker.by_source.get(source, ())}
    notices = tuple(
        replace(one, deadline=min(one.deadline, known[one.identity].deadline))
        if one.identity in known
        else one
        for one in found[:MOST]
    )
    # A notice that was withdrawn and returns counts as new, so it is no longer false.
    withdrawn = known.keys() - {one.identity for one in notices}
    false = tuple(identity for identity in tracker.false if identity not in withdrawn)
    by_source = {**tracker.by_source, source: notices}
    return _settle(replace(tracker, by_source=by_source, false=false))


def expire_overdue(tracker: NoticeTracker, now: float, overdue_s: float) -> TrackerTransition:
    """Mark notices as false that are overdue by more than `overdue_s`, except final ones."""
    late = [
        one.identity for one in tracker.active if now > one.deadline + overdue_s and not one.final
    ]
    if not late:
        return tracker, ()
    return _settle(replace(tracker, false=(*tracker.false, *late)[-MOST:]))


def node_released(tracker: NoticeTracker) -> TrackerTransition:
    """Park the node, which the coordinator has released, and acknowledge its notices."""
    leave = tuple(Acknowledge(one) for one in tracker.active if one.kind is NoticeKind.LEAVE)
    tracker, more = _settle(replace(tracker, parked=True))
    return tracker, (*leave, *more)


def resend(tracker: NoticeTracker) -> tuple[TrackerAction, ...]:
    """Return the actions after a reconnect: the coordinator may not know the notice, or not that it
    was withdrawn."""
    return (SendNotice(tracker.sent),) if tracker.by_source else ()


def notice_message(
    node: str, incarnation: str, notice: ProviderNotice | None, now: float
) -> m.Notice:
    """Return the message to the coordinator, with the deadline in seconds from now."""
    if notice is None:
        return m.Notice(node, incarnation, NoticeKind.NONE)
    left_s = max(0.0, notice.deadline - now)
    return m.Notice(
        node, incarnation, notice.kind, notice.provider, left_s, notice.detail, notice.final
    )


def _settle(tracker: NoticeTracker) -> TrackerTransition:
    """Send the effective notice if it changed; let a parked node rejoin if it need not leave."""
    old, new = tracker.sent, tracker.effective
    if tracker.parked:
        if new is not None and new.kind is NoticeKind.LEAVE:
            return tracker, ()
        send = (SendNotice(new),) if new is not None else ()
        return replace(tracker, parked=False, sent=new), (RejoinJob(), *send)
    if not _changed(old, new):
        return tracker, ()
    withdraw: tuple[TrackerAction, ...] = ()
    if old is not None and new is not None and old.kind is not new.kind:
        withdraw = (SendNotice(None),) if new.kind is NoticeKind.HINT else ()
    return replace(tracker, sent=new), (*withdraw, SendNotice(new))


def _changed(old: ProviderNotice | None, new: ProviderNotice | None) -> bool:
    if old is None or new is None:
        return old is not new
    sooner = new.deadline < old.deadline - SAME_S
    return new.kind is not old.kind or new.final > old.final or sooner
