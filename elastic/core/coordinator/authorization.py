"""Authorization: checks each message of a node before it becomes an event.

A session belongs to the node that opened it and carries messages of that node only. A message is
refused if its sender is a former member, if it names another node as its sender, if only workers
or coordinators send its type, or if a value is out of bounds.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from elastic.core.job.state import JobState
from elastic.core.policy.drain import missed_release
from elastic.core.protocol import messages as m
from elastic.core.protocol.fault_spec import node_id
from elastic.core.protocol.health_report import MAX_ENTRIES, HealthReport
from elastic.core.protocol.messages import NodePhase
from elastic.domain.errors import FieldError

FORGED, STALE, MALFORMED = "forged", "stale", "malformed"
MAX_COUNT = 1 << 53
"""Limit on counts and indices, because JSON readers disagree about larger numbers."""
MAX_NAME_CHARS = 256
MAX_DEADLINE_S = 30 * 86400.0
MAX_INT, MAX_FLOAT = 1 << 64, 1e30
"""Limits on the absolute value of numbers. Seeds have 64 bits; sums and products must stay
finite."""
MAX_CHARS, MAX_ITEMS = 256 << 10, 1 << 17
"""Limits on the length of a text (a script's last output) and of a list (a vault's copies)."""
LIMITS: dict[type, tuple[int, int]] = {
    HealthReport: (MAX_NAME_CHARS, MAX_ENTRIES),
    m.Notice: (4096, MAX_ENTRIES),
    m.AgentFailed: (4096, MAX_ENTRIES),
}
"""(characters, items) by message type, in place of MAX_CHARS and MAX_ITEMS."""
UNBOUNDED = frozenset(
    {
        "StepRecord.clip",
        "StepRecord.grad_norm",
        "StepRecord.loss",
        "StepDone.lr",
        "Copy.losses",
        "EvaluationResult.loss",
        "Figure.value",
    }
)
"""Results of the training, which are not finite if the training diverges."""
_checked: dict[type, Any] = {}
"""Newest valid value of each type with `everywhere_the_same`, so that it is checked only once."""


@dataclass(frozen=True, slots=True)
class Rejection:
    """Reason to refuse a message."""

    reason: str
    """FORGED, STALE or MALFORMED."""
    text: str
    fence: bool = False
    """Whether to tell the sender that it is not a member."""


def check_message(state: JobState, sender: str, message: Any) -> Rejection | None:
    """Return the reason to refuse a message on a session of node `sender`, or None."""
    if sender not in state.members:
        try:
            node_id(sender)
        except FieldError:
            return Rejection(FORGED, f"a session of {sender!r}, which is not the name of a node")
    rejection = _check_sender(state, sender, message)
    if rejection is None and (problem := invalid_field(message)):
        return Rejection(MALFORMED, f"{sender} sent {problem}")
    return rejection


def invalid_field(message: Any) -> str:
    """Return the first number, text or list out of bounds, with the reason; "": none."""
    problem = _out_of_bounds(message, *LIMITS.get(type(message), (MAX_CHARS, MAX_ITEMS)))
    return f"{type(message).__name__}{problem}" if problem else ""


def _out_of_bounds(value: Any, chars: int, items: int) -> str:
    kind: Any = type(value)
    if kind is float:
        return "" if -MAX_FLOAT < value < MAX_FLOAT else f": {value} is out of range"
    if kind is int:
        return "" if -MAX_INT < value < MAX_INT else ": a number out of range"
    if kind is str:
        return "" if len(value) <= chars else f": {len(value)} characters, the limit is {chars}"
    if kind is tuple or kind is frozenset:
        if len(value) > items:
            return f": {len(value)} entries, the limit is {items}"
        if kind is frozenset and value:  # a ledger; a report may have a thousand large ones
            value = (min(value), max(value))
        return next(filter(None, (_out_of_bounds(item, chars, items) for item in value)), "")
    return _out_of_bounds_field(value, kind, chars, items)


def _out_of_bounds_field(value: Any, kind: Any, chars: int, items: int) -> str:
    if _checked.get(kind) is value:
        return ""
    names, values = _bounded_fields(kind)
    for at, inner in enumerate(values(value)):
        # Shortcuts for speed: a report of a large job has thousands of short values.
        inner_kind = type(inner)
        if inner_kind is str:
            if len(inner) <= chars:
                continue
        elif inner_kind is int:
            if -MAX_INT < inner < MAX_INT:
                continue
        elif inner_kind is float and -MAX_FLOAT < inner < MAX_FLOAT:
            continue
        problem = _out_of_bounds(inner, chars, items)
        if problem:
            return f".{names[at]}{problem}"
    if getattr(kind, "everywhere_the_same", False):
        _checked[kind] = value
    return ""


@functools.cache
def _bounded_fields(kind: type) -> tuple[tuple[str, ...], Callable[[Any], Iterable[Any]]]:
    """Return the names of a dataclass's fields that have bounds, and a function from an instance to
    their values. Other types have none."""
    fields = dataclasses.fields(kind) if dataclasses.is_dataclass(kind) else ()
    names = tuple(f.name for f in fields if f"{kind.__name__}.{f.name}" not in UNBOUNDED)
    if not names:
        return (), lambda value: ()
    if len(names) == 1:
        return names, lambda value: (getattr(value, names[0]),)
    return names, operator.attrgetter(*names)


def _check_sender(state: JobState, sender: str, message: Any) -> Rejection | None:
    kind, node = type(message).__name__, _named_node(message, sender)
    if node is None:
        return Rejection(FORGED, f"{kind} is not a message of nodes")
    if node != sender:
        return Rejection(FORGED, f"{sender} sent a {kind} in the name of {node}")
    problem = _out_of_range(state, message)
    if problem:
        return Rejection(MALFORMED, problem)
    member = state.members.get(sender)
    info = member.report.info if member is not None else None
    match message:
        case m.NodeReport():
            return _check_report(state, sender, message)
        case m.Heartbeat() if info is None or message.incarnation != info.incarnation:
            # A released node that has missed its order reports after it has reconnected.
            fence = not missed_release(state, sender, message.incarnation)
            return Rejection(STALE, f"{sender} is not a member (any more)", fence=fence)
        case m.Notice() | HealthReport() | m.AgentFailed():
            # From an unknown node they are accepted, but have no effect.
            if info is not None and message.incarnation != info.incarnation:
                return Rejection(STALE, f"{kind} of a former {sender}")
        case m.StepDone():
            return _check_step(state, sender, message)
        case m.BackupNote() | m.CheckpointPart() | m.RefusalNote() if info is None:
            return Rejection(STALE, f"{sender} is not a member, but sent {kind}")
    return None


def _named_node(message: Any, sender: str) -> str | None:
    """Return the node that the message names as its sender; None: nodes do not send this type."""
    match message:
        case m.NodeReport():
            return message.info.node
        case m.Heartbeat() | m.Notice() | HealthReport() | m.RefusalNote() | m.AgentFailed():
            return message.node
        case m.BackupNote(kind=m.BACKUP_SHORT | m.KEEPER_FAILED):
            return message.owner
        case m.BackupNote(kind=m.COPY_CORRUPT):
            return message.keeper
        case m.CheckpointPart():
            return message.node or sender
        case m.StepDone() | m.BackupNote():
            return sender
    return None


def _out_of_range(state: JobState, message: Any) -> str:
    """Return a description of a value that is out of range; "": none."""
    spec = state.spec
    steps, layers = (spec.n_steps, spec.n_layers) if spec is not None else (MAX_COUNT, MAX_COUNT)
    match message:
        case m.Heartbeat(step=step, microbatch=index):
            if not (0 <= step < MAX_COUNT and -1 <= index < MAX_COUNT):
                return f"step {step} is out of range"
        case m.StepDone(epoch=epoch, record=record):
            if not 0 <= record.step < steps or not 0 <= epoch < MAX_COUNT:
                return f"step {record.step} of {steps}, epoch {epoch}"
        case m.BackupNote(kind=kind) if kind not in m.BACKUP_NOTES:
            return f"a note of kind {kind!r}"
        case m.CheckpointPart(step=step, layers=slots, epoch=epoch):
            known = 0 <= step <= steps and -1 <= epoch < MAX_COUNT
            if not known or any(not 0 <= slot[0] < layers for slot in slots):
                return f"a part of step {step} of {steps}"
        case m.Notice(node=node, deadline_s=left_s):
            if not -MAX_DEADLINE_S <= left_s <= MAX_DEADLINE_S:
                return f"a notice of {node} {left_s} s ahead"
    return ""


def _check_report(state: JobState, sender: str, report: m.NodeReport) -> Rejection | None:
    foreign = [copy for copy in report.inventory if copy.node not in ("", sender)]
    if foreign:
        return Rejection(FORGED, f"{sender} lists a copy of {foreign[0].node}'s vault")
    info, incarnation = report.info, report.info.incarnation
    texts = (incarnation, info.vault, info.domain, info.host, info.device, report.store)
    if not incarnation or any(len(text) > MAX_NAME_CHARS for text in texts):
        text = f"names and addresses of 1 to {MAX_NAME_CHARS} characters are needed"
        return Rejection(MALFORMED, text)
    counts = [report.epoch, report.restart, report.step, report.microbatch]
    if not all(-1 <= n < MAX_COUNT for n in (*counts, info.workers, info.memory_bytes)):
        return Rejection(MALFORMED, f"a number in the report of {sender} is out of range")
    member = state.members.get(sender)
    if member is not None and member.report.info.incarnation == incarnation:
        return None
    new = report.phase is NodePhase.EMPTY and report.epoch <= 0 and report.restart < 0
    # The transition refuses an unknown node with state, and remembers that it may have copies.
    if (new or member is None) and (sender, incarnation) not in state.retired:
        return None
    return Rejection(STALE, f"{sender} ({incarnation}) is not a member (any more)", fence=True)


def _check_step(state: JobState, sender: str, done: m.StepDone) -> Rejection | None:
    """Check a finished step. A former member may report an old step, such as after a partition. A
    new coordinator whose store has lost its last writes may not know the epoch of a step; it is
    recorded, but changes nothing."""
    step = done.record.step
    adopting = sender in state.members and state.updated_at < state.adopted_until
    if done.epoch > state.epoch and not adopting:
        text = f"a step of epoch {done.epoch}, but the newest epoch is {state.epoch}"
        return Rejection(FORGED, text)
    if sender not in state.members and (step > state.newest_step or done.epoch >= state.epoch):
        return Rejection(STALE, f"{sender} is not a member, but reports step {step}")
    return None
