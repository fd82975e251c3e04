"""Who may say what to the coordinator: everything that a node sends passes here before it is an event.

A session belongs to the node that opened it. It speaks for that node alone; what a former member says, or what names
another node, or what only workers or coordinators say, changes nothing.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from elastic.core.job.state import JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import node_id
from elastic.core.protocol.health_report import MANY, HealthReport
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import FieldError

FORGED, STALE, MALFORMED = "forged", "stale", "malformed"
MOST = 1 << 53
"""Counts and numbers beyond this are none of ours; JSON readers disagree about them, too."""
MAX_NAME_CHARS = 256
MAX_DEADLINE_S = 30 * 86400.0
"""No deadline is farther away than this."""
WIDEST, HUGEST = 1 << 64, 1e30
"""Whole numbers (seeds have 64 bits) and others are smaller: sums and products of them stay finite."""
MOST_CHARS, MOST_ITEMS = 256 << 10, 1 << 17
"""Of a text, as a script's last words, and of a list, as the copies in a vault: of all that is said, ..."""
BOUNDS: dict[type, tuple[int, int]] = {HealthReport: (MAX_NAME_CHARS, MANY), m.Notice: (4096, MANY)}
"""... but for these."""
FREE = frozenset({"StepRecord.clip", "StepRecord.grad_norm", "StepRecord.loss", "StepDone.lr", "Copy.losses"})
"""What the training finds: where it diverges, no numbers."""
_fit: dict[type, Any] = {}
"""Of kinds that say `everywhere_the_same`: the newest that was found fit."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a message is refused."""

    reason: str
    """FORGED, STALE or MALFORMED."""
    text: str
    fence: bool = False
    """The sender is told that it is no member (any more)."""


def check_message(
    state: JobState, sender: str, message: Any, retired: Iterable[tuple[str, str]] = ()
) -> Rejection | None:
    """Why `message` on a session of node `sender` is refused; None: it is taken.

    `retired`: (node, incarnation) of members that came back as another incarnation.
    """
    try:
        node_id(sender)
    except FieldError:
        return Rejection(FORGED, f"a session of {sender!r}, which is no node's name")
    found = _objection(state, sender, message, retired)
    if found is None:
        problem = invalid_field(message)
        found = Rejection(MALFORMED, f"{sender} sent {problem}") if problem else None
    return found


def invalid_field(message: Any) -> str:
    """Which of its numbers, texts and lists is out of bounds, and why; "": none is."""
    problem = _unfit(message, *BOUNDS.get(type(message), (MOST_CHARS, MOST_ITEMS)))
    return f"{type(message).__name__}{problem}" if problem else ""


def _unfit(value: Any, chars: int, items: int) -> str:
    kind: Any = type(value)
    if kind is float:
        return "" if -HUGEST < value < HUGEST else f": {value} is no number to go by"
    if kind is int:
        return "" if -WIDEST < value < WIDEST else ": a number out of range"
    if kind is str:
        return "" if len(value) <= chars else f": {len(value)} characters, at most {chars} are taken"
    if kind is tuple or kind is frozenset:
        if len(value) > items:
            return f": {len(value)} entries, at most {items} are taken"
        if kind is frozenset and value:  # of micro-batches: a thousand in each of a thousand copies
            value = (min(value), max(value))
        return next(filter(None, (_unfit(item, chars, items) for item in value)), "")
    if _fit.get(kind) is value:
        return ""
    for name in _bound(kind):
        inner = getattr(value, name)
        if type(inner) is float and -HUGEST < inner < HUGEST:  # most of a heartbeat
            continue
        problem = _unfit(inner, chars, items)
        if problem:
            return f".{name}{problem}"
    if getattr(kind, "everywhere_the_same", False):
        _fit[kind] = value
    return ""


@functools.cache
def _bound(kind: type) -> tuple[str, ...]:
    """Fields of a dataclass, but for the free ones; of anything else none."""
    if not dataclasses.is_dataclass(kind):
        return ()
    names = (field.name for field in dataclasses.fields(kind))
    return tuple(name for name in names if f"{kind.__name__}.{name}" not in FREE)


def _objection(
    state: JobState, sender: str, message: Any, retired: Iterable[tuple[str, str]]
) -> Rejection | None:
    match message:
        case m.NodeReport():
            return _report(state, sender, message, frozenset(retired))
        case m.Heartbeat():
            return _heartbeat(state, sender, message)
        case m.StepDone():
            return _step(state, sender, message)
        case m.BackupNote():
            return _note(state, sender, message)
        case m.CheckpointPart():
            return _part(state, sender, message)
        case m.Notice():
            return _notice(state, sender, message)
        case HealthReport():
            return _of_incarnation(state, sender, message.node, message.incarnation, "HealthReport")
        case m.RefusalNote():
            return _named(sender, message.node, "RefusalNote") or _member(state, sender, "RefusalNote")
    return Rejection(FORGED, f"{type(message).__name__} is not for nodes to say")


def is_member(state: JobState, sender: str) -> bool:
    """Whether `sender` is a member: what it says of finished steps counts, and is not just written down."""
    return sender in state.members


def _report(
    state: JobState, sender: str, report: m.NodeReport, retired: frozenset[tuple[str, str]]
) -> Rejection | None:
    info = report.info
    problem = _named(sender, info.node, "NodeReport")
    if problem is not None:
        return problem
    lies = [copy for copy in report.inventory if copy.node not in ("", sender)]
    if lies:
        return Rejection(FORGED, f"{sender} lists a copy of {lies[0].node}'s vault")
    texts = (info.incarnation, info.vault, info.domain, info.host, info.device, report.store)
    if not info.incarnation or any(len(text) > MAX_NAME_CHARS for text in texts):
        return Rejection(MALFORMED, f"names and addresses of 1 to {NAME_CHARS} characters are needed")
    numbers = (report.epoch, report.restart, report.step, report.microbatch, info.workers, info.memory_bytes)
    if not all(-1 <= number < MOST for number in numbers):
        return Rejection(MALFORMED, f"a number in the report of {sender} is out of range")
    member = state.members.get(sender)
    if member is not None and member.report.info.incarnation == info.incarnation:
        return None
    new = report.phase is NodePhase.EMPTY and report.epoch <= 0 and report.restart < 0
    if not new or (sender, info.incarnation) in retired:
        return Rejection(STALE, f"{sender} ({info.incarnation}) is not a member (any more)", fence=True)
    return None


def _heartbeat(state: JobState, sender: str, beat: m.Heartbeat) -> Rejection | None:
    problem = _named(sender, beat.node, "Heartbeat")
    if problem is not None:
        return problem
    member = state.members.get(sender)
    if member is None or member.report.info.incarnation != beat.incarnation:
        return Rejection(STALE, f"{sender} is not a member (any more)", fence=True)
    if not (0 <= beat.step < MOST and -1 <= beat.microbatch < MOST):
        return Rejection(MALFORMED, f"step {beat.step} is out of range")
    return None


def _step(state: JobState, sender: str, done: m.StepDone) -> Rejection | None:
    """A former member may tell of steps that are over, as after a partition: they are written down, no more."""
    step, steps = done.record.step, state.spec.n_steps if state.spec is not None else MOST
    if not 0 <= step < steps or not 0 <= done.epoch < MOST:
        return Rejection(MALFORMED, f"step {step} of {steps}, epoch {done.epoch}")
    if done.epoch > state.epoch:
        return Rejection(FORGED, f"a step of epoch {done.epoch}, which has not begun: it is {state.epoch}")
    known = state.record.step if state.record is not None else -1
    if sender not in state.members and (step > known or done.epoch >= state.epoch):
        return Rejection(STALE, f"{sender} is no member, and tells of step {step}")
    return None


def _note(state: JobState, sender: str, note: m.BackupNote) -> Rejection | None:
    if note.kind not in m.BACKUP_NOTES:
        return Rejection(MALFORMED, f"a note of kind {note.kind!r}")
    who = note.owner if note.kind == m.BACKUP_SHORT else note.keeper
    return _named(sender, who, "BackupNote") or _member(state, sender, "BackupNote")


def _part(state: JobState, sender: str, part: m.CheckpointPart) -> Rejection | None:
    steps = state.spec.n_steps if state.spec is not None else MOST
    layers = state.spec.n_layers if state.spec is not None else MOST
    if not 0 <= part.step <= steps or any(not 0 <= slot[0] < layers for slot in part.layers):
        return Rejection(MALFORMED, f"a part of step {part.step} of {steps}")
    return _member(state, sender, "CheckpointPart")


def _notice(state: JobState, sender: str, notice: m.Notice) -> Rejection | None:
    """A deadline that is over is one, too."""
    if not -MAX_DEADLINE_S <= notice.deadline_s <= MAX_DEADLINE_S:
        return Rejection(MALFORMED, f"a notice of {sender} {notice.deadline_s} s ahead")
    return _of_incarnation(state, sender, notice.node, notice.incarnation, "Notice")


def _of_incarnation(state: JobState, sender: str, node: str, incarnation: str, kind: str) -> Rejection | None:
    """Of a node that is no member nothing is known, and nothing comes of it; a former incarnation is over."""
    problem = _named(sender, node, kind)
    if problem is not None:
        return problem
    member = state.members.get(sender)
    if member is not None and member.report.info.incarnation != incarnation:
        return Rejection(STALE, f"{kind} of a former {sender}")
    return None


def _named(sender: str, node: str, kind: str) -> Rejection | None:
    return None if node == sender else Rejection(FORGED, f"{sender} sent a {kind} in the name of {node}")


def _member(state: JobState, sender: str, kind: str) -> Rejection | None:
    return None if sender in state.members else Rejection(STALE, f"{sender} is no member, and sent {kind}")
