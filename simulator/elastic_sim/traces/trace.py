"""Traces and our file format for them.

The format is CSV with this header and one row per event, times ascending:

    # origin of the trace; lines that begin with # are comments, kept at the top
    seconds,event,node,zone,type,notice
    0,add,node1,us-east-1a,p3.2xlarge,
    3600,remove,node1,us-east-1a,p3.2xlarge,120
    39600,end,,,,

`add`: the node joins. `remove`: the node is lost, with notice of `notice` seconds (empty or 0:
none). `end`, the last row: the trace ends. Zone and type may be empty. A file without `end` was
truncated."""

from __future__ import annotations

import csv
import io
import itertools
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from elastic.command_line import input_bytes, input_text
from elastic.domain.errors import FieldError

ADD, REMOVE, END = "add", "remove", "end"
HEADER = ("seconds", "event", "node", "zone", "type", "notice")
MAX_BYTES = 1 << 30
"""Largest size of a file, which then has about ten million events."""
MAX_NODES = 100_000
"""Largest number of nodes at once: more than any cluster that trains one model has."""
MAX_EVENTS = 10_000_000
"""Largest imported trace: as many events as a file of `MAX_BYTES` holds."""
MAX_SECONDS = 100 * 365 * 86400.0
SUSPICIOUS_SECONDS = 60 * 86400.0
"""A trace longer than this whose times are all whole thousands is refused as milliseconds."""
SHORT_SUSPICIOUS_SECONDS, SUSPICIOUS_TIMES = 86400.0, 3
"""With `SUSPICIOUS_TIMES` or more different times above 0, a trace longer than this (86 s in
milliseconds) is refused for the same reason."""
_NAME = re.compile(r"[A-Za-z0-9_.:\-/]{1,128}")
NAME_RULE = "names of letters, digits and . : _ - /, at most 128"


@dataclass(frozen=True, slots=True)
class Event:
    """Join or loss of a node."""

    seconds: float
    kind: str
    """ADD or REMOVE."""
    node: str
    zone: str = ""
    type: str = ""
    notice_s: float = 0.0
    """Seconds of notice before the loss; 0: none."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Events in order, from second 0 to `end_s`."""

    events: tuple[Event, ...]
    end_s: float
    origin: str = ""
    """Source of the trace; may have several lines."""

    def steps(self) -> Iterator[tuple[float, tuple[Event, ...]]]:
        """Yield (seconds, all events of that moment), ascending."""
        for at, events in itertools.groupby(self.events, lambda event: event.seconds):
            yield at, tuple(events)


@dataclass(frozen=True, slots=True)
class Repair:
    """Repair of an unusable row; `line` 0: of the whole file."""

    line: int
    text: str


class PlacedEvent(NamedTuple):
    """An event with its place in the file and the text there."""

    event: Event
    where: str
    text: str
    line: int = 0
    """Number of the event's line in a file of our format; 0: another format."""


def build_trace(
    events: Iterable[Event], end_s: float, origin: str = "", where: str = "event"
) -> Trace:
    """Return a trace of `events`. Raises FieldError with the number of the first invalid event."""
    builder = TraceBuilder(end_s)
    for number, event in enumerate(events, 1):
        builder.add(event, f"{where} {number}")
    return builder.build(end_s, origin, where)


class TraceBuilder:
    """Builds a trace event by event and validates each event against those before it."""

    def __init__(self, end_s: float = math.inf) -> None:
        self.events = list[Event]()
        self._end_s, self._present, self._last = end_s, dict[str, None](), 0.0

    def add(self, event: Event, where: str, text: str = "") -> None:
        """Append an event. Raises FieldError with its place and text if it is invalid."""
        remedy = _problem(event, self._last, self._present, self._end_s)
        if remedy is not None:
            shown = text or f"{event.seconds:g},{event.kind},{event.node}"
            raise FieldError(where, shown[:200], remedy)
        self.events.append(event)
        self._last = event.seconds

    def build(self, end_s: float, origin: str, name: str) -> Trace:
        """Return the trace of all events. Raises FieldError if `end_s` is invalid."""
        if not (math.isfinite(end_s) and 0 < end_s <= MAX_SECONDS):
            raise FieldError(f"{name}: end", end_s, "seconds above 0, at most a hundred years")
        return Trace(tuple(self.events), end_s, origin)


def _problem(event: Event, last: float, present: dict[str, None], end_s: float) -> str | None:
    """Return the rule that an event violates, or None; a valid event updates `present`."""
    names = (event.node, event.zone, event.type)
    rules = (
        (math.isfinite(event.seconds) and event.seconds >= 0, "a time in seconds from 0 up"),
        (event.seconds <= end_s, f"the trace ends at {end_s:g} s: no event after that"),
        (event.seconds <= MAX_SECONDS, "at most a hundred years"),
        (event.seconds >= last, f"times must ascend; the row before is at {last:g} s"),
        (all(is_name(name) for name in names if name), NAME_RULE),
        (bool(event.node), "a node must be named"),
        (math.isfinite(event.notice_s) and event.notice_s >= 0, "a notice is seconds from 0 up"),
    )
    for holds, remedy in rules:
        if not holds:
            return remedy
    if event.kind == ADD:
        if event.node in present:
            return f"{event.node} is present already"
        if len(present) >= MAX_NODES:
            return f"at most {MAX_NODES} nodes at once; leave some out"
        present[event.node] = None
    elif event.kind == REMOVE:
        if event.node not in present:
            return f"{event.node} is not present: it was never added, or was removed before"
        del present[event.node]
    else:
        return "add, remove or end"
    return None


def read(path: Path | str, *, repair: bool = False) -> tuple[Trace, tuple[Repair, ...]]:
    """Return the trace in a file of our format, and repairs. Raises FieldError with an invalid
    line.

    With `repair`, invalid rows are dropped, unordered rows are sorted, and a missing end is set to
    the last event.
    """
    return parse(read_text(Path(path)), str(path), repair=repair)


def read_text(path: Path, field: str = "trace") -> str:
    """Return the text of a file, without a byte order mark. Raises FieldError about `field`."""
    return input_text(field, path, MAX_BYTES)


def read_bytes(path: Path, field: str = "file") -> bytes:
    """Return the content of a file. Raises FieldError about `field`."""
    return input_bytes(field, path, MAX_BYTES)


def is_name(text: str) -> bool:
    """Return whether `text` can be the name of a node, a zone or a type of node."""
    return _NAME.fullmatch(text) is not None


def parse(
    text: str, name: str = "trace", *, repair: bool = False
) -> tuple[Trace, tuple[Repair, ...]]:
    """Parse the text of a file; see `read`."""
    origin, rows = _rows(text, name)
    repairs: list[Repair] = []
    events, end_s, ended = list[PlacedEvent](), 0.0, False
    for line, fields in rows:
        where, shown = f"{name}, line {line}", ",".join(fields)
        try:
            if ended:
                raise FieldError(where, shown, "nothing may follow `end`")
            event = _event(fields, where)
        except FieldError as error:
            if not repair:
                raise
            repairs.append(Repair(line, f"dropped: {error.remedy}"))
            continue
        if event.kind == END:
            end_s, ended = event.seconds, True
        else:
            events.append(PlacedEvent(event, where, shown, line))
    if not ended:
        last = max((row.event.seconds for row in events), default=0.0)
        if not repair:
            remedy = f"the file is truncated: its last row must be {last:g},end,,,, or later"
            raise FieldError(f"{name}, last line", "", remedy)
        repairs.append(Repair(0, f"no end: set to {last:g} s"))
        end_s = last
    refuse_milliseconds(name, [row.event.seconds for row in events], end_s)
    if repair:
        ordered = sorted(events, key=lambda row: row.event.seconds)
        pairs = zip(events, ordered, strict=True)
        repairs += [
            Repair(row.line, "sorted by time") for row, now in pairs if row.line != now.line
        ]
        events = ordered
    builder = TraceBuilder(end_s)
    for row in events:
        try:
            builder.add(row.event, row.where, row.text)
        except FieldError as error:
            if not repair:
                raise
            repairs.append(Repair(row.line, f"dropped: {error.remedy}"))
    return builder.build(end_s, origin, name), tuple(repairs)


def _rows(text: str, name: str) -> tuple[str, list[tuple[int, list[str]]]]:
    """Return the comments at the top, and all rows with their line numbers."""
    lines, comments = text.splitlines(), list[str]()
    for line in lines:
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("#").strip())
    first = len(comments)
    header = tuple(word.strip() for word in lines[first].split(",")) if first < len(lines) else ()
    if header != HEADER:
        remedy = (
            f"the first line must be {','.join(HEADER)}; "
            "`elastic-sim traces import` reads other formats"
        )
        raise FieldError(f"{name}, line {first + 1}", ",".join(header)[:80], remedy)
    rows = list[tuple[int, list[str]]]()
    reader = csv.reader(io.StringIO("\n".join(lines[first + 1 :])))
    try:
        for fields in reader:
            if fields and not fields[0].startswith("#"):
                rows.append((first + 1 + reader.line_num, [field.strip() for field in fields]))
    except csv.Error as error:
        where = f"{name}, line {first + 1 + reader.line_num}"
        raise FieldError(where, "", f"not CSV: {error}") from error
    return "\n".join(comments), rows


def _event(fields: list[str], where: str) -> Event:
    text = ",".join(fields)
    if len(fields) != len(HEADER):
        remedy = f"write {len(HEADER)} fields: {','.join(HEADER)}"
        raise FieldError(where, text[:200], remedy)
    seconds, kind, node, zone, machine, notice = fields
    if kind not in (ADD, REMOVE, END):
        raise FieldError(where, kind[:80], "add, remove or end")
    at = _number(seconds, where, "a time in seconds from 0 up")
    if kind == END and (node or zone or machine or notice):
        raise FieldError(where, text[:200], "the end has only a time")
    remedy = "a notice is seconds from 0 up, or empty"
    notice_s = _number(notice, where, remedy) if notice else 0.0
    return Event(at, kind, node, zone, machine, notice_s)


def _number(text: str, where: str, remedy: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise FieldError(where, text[:80], remedy) from None
    if not math.isfinite(value) or value < 0:
        raise FieldError(where, text[:80], remedy)
    return value


def refuse_milliseconds(name: str, times: list[float], end_s: float) -> None:
    """Raise FieldError if all times of a long trace are whole thousands."""
    if end_s <= SHORT_SUSPICIOUS_SECONDS or any(at % 1000 for at in (*times, end_s)):
        return
    distinct = len({*times, end_s} - {0.0})
    if (end_s > SUSPICIOUS_SECONDS and len(times) > 1) or distinct >= SUSPICIOUS_TIMES:
        remedy = (
            "all times are whole thousands: if they are milliseconds, divide them by 1000; "
            "if they are seconds, let the trace end a second later"
        )
        raise FieldError(f"{name}: end", end_s, remedy)


def format_trace(trace: Trace) -> str:
    """Return the text of a file, which `parse` reads back without a difference."""
    out = io.StringIO()
    for line in trace.origin.splitlines():
        out.write(f"# {line}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for event in trace.events:
        notice = _plain(event.notice_s) if event.notice_s else ""
        at = _plain(event.seconds)
        writer.writerow((at, event.kind, event.node, event.zone, event.type, notice))
    writer.writerow((_plain(trace.end_s), END, "", "", "", ""))
    return out.getvalue()


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def window(trace: Trace, first_s: float, last_s: float) -> Trace:
    """Return the part from `first_s` to `last_s`; nodes present at `first_s` are added at 0."""
    present: dict[str, Event] = {}
    inside = list[Event]()
    for event in trace.events:
        if event.seconds > first_s:
            if event.seconds <= last_s:
                inside.append(replace(event, seconds=event.seconds - first_s))
        elif event.kind == ADD:
            present[event.node] = event
        else:
            present.pop(event.node, None)
    start = [replace(event, seconds=0.0) for event in present.values()]
    return build_trace((*start, *inside), last_s - first_s, trace.origin)
