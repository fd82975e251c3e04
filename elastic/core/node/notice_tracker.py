"""What a node was told about its future, as its agent keeps it: many providers, one word to the coordinator.

A source is read again and again and always says all that stands; what it no longer says is taken back. Of all that
stands, the soonest deadline counts, and a hint only when nothing else stands. A notice is known by its identity: said
again it changes nothing, and once its deadline is long past while the node lives on it was false, and is not heard for
as long as it stands.

A drained node whose notice is not final is *parked*: it belongs to no job, waits, and returns as a new member when no
notice stands any more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NoticeKind

SAME_S = 1.0
"""Deadlines that differ by less are the same."""
MOST = 64
"""Notices of one source that are looked at, and identities that are remembered as false."""


@dataclass(frozen=True, slots=True)
class ProviderNotice:
    """One notice, as a provider tells it."""

    provider: str
    identity: str
    """The same for as long as it is the same notice; no other provider uses it."""
    kind: NoticeKind
    deadline: float
    """On the agent's clock, seconds."""
    detail: str = ""
    final: bool = False
    """The agent ends once the node is drained."""


@dataclass(frozen=True, slots=True)
class NoticeTracker:
    """All that stands."""

    source_read: dict[str, tuple[ProviderNotice, ...]] = field(default_factory=dict)
    """By source."""
    spent: tuple[str, ...] = ()
    """Identities of false notices."""
    told: ProviderNotice | None = None
    """What the coordinator was told last."""
    parked: bool = False

    @property
    def standing(self) -> tuple[ProviderNotice, ...]:
        """Everything that was not found false."""
        return tuple(one for many in self.heard.values() for one in many if one.identity not in self.spent)

    @property
    def strongest(self) -> ProviderNotice | None:
        """What counts of it."""
        leave = [one for one in self.standing if one.kind is NoticeKind.LEAVE]
        hints = [one for one in self.standing if one.kind is NoticeKind.HINT]
        first = min(leave or hints, key=lambda one: one.deadline, default=None)
        return first and replace(first, final=any(one.final for one in leave))


# ---- actions ----


@dataclass(frozen=True, slots=True)
class SendNotice:
    """Say to the coordinator what counts now; None: nothing stands."""

    source_read: ProviderNotice | None


@dataclass(frozen=True, slots=True)
class Acknowledge:
    """The provider may go ahead: nothing is lost with this node any more."""

    source_read: ProviderNotice


@dataclass(frozen=True, slots=True)
class RejoinJob:
    """The node stays: join again, as a new member."""


TrackerAction = SendNotice | Acknowledge | RejoinJob
TrackerTransition = tuple[NoticeTracker, tuple[TrackerAction, ...]]


def source_read(desk: NoticeTracker, source: str, found: Sequence[ProviderNotice]) -> TrackerTransition:
    """A source was read. A deadline that it tells again only counts if it is sooner."""
    known = {one.identity: one for one in desk.heard.get(source, ())}
    kept = []
    for one in found[:MOST]:
        before = known.get(one.identity)
        kept.append(replace(one, deadline=min(one.deadline, before.deadline)) if before else one)
    over = set(known) - {one.identity for one in kept}  # taken back: if it comes again it is another
    spent = tuple(identity for identity in desk.spent if identity not in over)
    return _settle(replace(desk, heard={**desk.heard, source: tuple(kept)}, spent=spent))


def expire_overdue(desk: NoticeTracker, now: float, overdue_s: float) -> TrackerTransition:
    """Time passed: notices that are overdue were false. A final one never is: its node ends."""
    late = [one.identity for one in desk.standing if now > one.deadline + overdue_s and not one.final]
    if not late:
        return desk, ()
    return _settle(replace(desk, spent=(*desk.spent, *late)[-MOST:]))


def node_released(desk: NoticeTracker) -> TrackerTransition:
    """The coordinator let the drained node go."""
    leave = tuple(Acknowledge(one) for one in desk.standing if one.kind is NoticeKind.LEAVE)
    desk, more = _settle(replace(desk, parked=True))
    return desk, (*leave, *more)


def resend(desk: NoticeTracker) -> tuple[TrackerAction, ...]:
    """What a coordinator that may not know it has to be told."""
    return (SendNotice(desk.told),) if desk.told is not None else ()


def notice_message(node: str, incarnation: str, source_read: ProviderNotice | None, now: float) -> m.Notice:
    """What counts, for the coordinator: seconds from now instead of a time."""
    if source_read is None:
        return m.Notice(node, incarnation, NoticeKind.NONE)
    left_s = max(0.0, source_read.deadline - now)
    return m.Notice(
        node,
        incarnation,
        source_read.kind,
        source_read.provider,
        left_s,
        source_read.detail,
        source_read.final,
    )


def _settle(desk: NoticeTracker) -> TrackerTransition:
    """Say what counts now if that is news; return if nothing keeps a parked node away."""
    old, new = desk.told, desk.strongest
    if desk.parked and (new is None or new.kind is not NoticeKind.LEAVE):
        told = (SendNotice(new),) if new is not None else ()
        return replace(desk, parked=False, told=new), (RejoinJob(), *told)
    if desk.parked or not _news(old, new):
        return desk, ()
    softer = old is not None and new is not None and new.kind is not old.kind and new.kind is NoticeKind.HINT
    actions = (SendNotice(None), SendNotice(new)) if softer else (SendNotice(new),)
    return replace(desk, told=new), actions


def _news(old: ProviderNotice | None, new: ProviderNotice | None) -> bool:
    if old is None or new is None:
        return old is not new
    return new.kind is not old.kind or new.final > old.final or new.deadline < old.deadline - SAME_S
