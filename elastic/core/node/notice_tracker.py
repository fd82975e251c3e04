"""Notice tracker: the agent's record of notices about the future of its node.

Each source is read again and again, and always returns all its active notices. A notice that it no
longer returns is withdrawn. Of all active notices the one with the soonest deadline is effective; a
hint is effective only if there is nothing else. A repeated notice (same identity) changes nothing.
A notice whose deadline is long past while the node lives was false: it is ignored until its source
withdraws it.

A drained node whose notice is not final is *parked*: it belongs to no job, waits, and joins again
as a new member when no notice is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NoticeKind

SAME_S = 1.0
"""Deadlines that differ by less are the same."""
MOST = 64
"""Limit on the notices per source, and on the remembered false notices."""


@dataclass(frozen=True, slots=True)
class ProviderNotice:
    """One notice of a provider."""

    provider: str
    identity: str
    """Constant while it is the same notice, and unique among all providers."""
    kind: NoticeKind
    deadline: float
    """Seconds on the agent's clock."""
    detail: str = ""
    final: bool = False
    """The agent ends once the node is drained."""


@dataclass(frozen=True, slots=True)
class NoticeTracker:
    """All notices of a node."""

    by_source: dict[str, tuple[ProviderNotice, ...]] = field(default_factory=dict)
    false: tuple[str, ...] = ()
    """Identities of false notices."""
    sent: ProviderNotice | None = None
    """The notice that the coordinator knows."""
    parked: bool = False

    @property
    def active(self) -> tuple[ProviderNotice, ...]:
        """All notices that were not found false."""
        notices = (one for many in self.by_source.values() for one in many)
        return tuple(one for one in notices if one.identity not in self.false)

    @property
    def effective(self) -> ProviderNotice | None:
        """The notice that decides; it is final if any notice is."""
        leave = [one for one in self.active if one.kind is NoticeKind.LEAVE]
        hints = [one for one in self.active if one.kind is NoticeKind.HINT]
        first = min(leave or hints, key=lambda one: one.deadline, default=None)
        return first and replace(first, final=any(one.final for one in leave))


# ---- actions ----


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Send the effective notice to the coordinator; None: there is none any more."""

    notice: ProviderNotice | None


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """Tell the provider to proceed: the node holds nothing any more."""

    notice: ProviderNotice


@dataclass(frozen=True, slots=True)
class RejoinJob:
    """The node stays: join again, as a new member."""


TrackerAction = SendNotice | Acknowledge | RejoinJob
TrackerTransition = tuple[NoticeTracker, tuple[TrackerAction, ...]]


def source_read(
    tracker: NoticeTracker, source: str, found: Sequence[ProviderNotice]
) -> TrackerTransition:
    """Record all notices of a source. The deadline of a known notice can only get sooner."""
    known = {one.identity: one for one in tracker.by_source.get(source, ())}
    notices = tuple(
        replace(one, deadline=min(one.deadline, known[one.identity].deadline))
        if one.identity in known
        else one
        for one in found[:MOST]
    )
    # A withdrawn notice that comes again is a new one.
    withdrawn = known.keys() - {one.identity for one in notices}
    false = tuple(identity for identity in tracker.false if identity not in withdrawn)
    by_source = {**tracker.by_source, source: notices}
    return _settle(replace(tracker, by_source=by_source, false=false))


def expire_overdue(tracker: NoticeTracker, now: float, overdue_s: float) -> TrackerTransition:
    """Mark notices as false that are overdue. A final notice is never false: its node ends."""
    late = [
        one.identity for one in tracker.active if now > one.deadline + overdue_s and not one.final
    ]
    if not late:
        return tracker, ()
    return _settle(replace(tracker, false=(*tracker.false, *late)[-MOST:]))


def node_released(tracker: NoticeTracker) -> TrackerTransition:
    """The coordinator released the drained node."""
    leave = tuple(Acknowledge(one) for one in tracker.active if one.kind is NoticeKind.LEAVE)
    tracker, more = _settle(replace(tracker, parked=True))
    return tracker, (*leave, *more)


def resend(tracker: NoticeTracker) -> tuple[TrackerAction, ...]:
    """Actions after a reconnect, for a coordinator that may not know the notice."""
    return (SendNotice(tracker.sent),) if tracker.sent is not None else ()


def notice_message(
    node: str, incarnation: str, notice: ProviderNotice | None, now: float
) -> m.Notice:
    """The message to the coordinator. Its deadline is in seconds from now."""
    if notice is None:
        return m.Notice(node, incarnation, NoticeKind.NONE)
    left_s = max(0.0, notice.deadline - now)
    return m.Notice(
        node, incarnation, notice.kind, notice.provider, left_s, notice.detail, notice.final
    )


def _settle(tracker: NoticeTracker) -> TrackerTransition:
    """Send the effective notice if it changed; rejoin if nothing keeps a parked node away."""
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
