"""Traces: which nodes are there when.

Our format is CSV with this header and one row an event, times ascending:

    # where it comes from; lines that begin with # are comments, kept at the top
    seconds,event,node,zone,type,notice
    0,add,node1,us-east-1a,p3.2xlarge,
    3600,remove,node1,us-east-1a,p3.2xlarge,120
    39600,end,,,,

`add`: the node is there; `remove`: it is gone, of which it was told `notice` seconds before (empty or 0: it was not);
`end`: the trace ends, in its last row. Zone and type may be empty. A file without `end` was cut short.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from elastic.domain.errors import FieldError

ADD, REMOVE, END = "add", "remove", "end"
HEADER = ("seconds", "event", "node", "zone", "type", "notice")
MOST_BYTES = 1 << 30
"""Of a file: some ten million events."""
MOST_NODES = 100_000
"""At once: more than any cluster that trains one model has, and what a few lines of a wrong file ask for at most."""
MOST_EVENTS = 10_000_000
"""Of an imported trace: what a file of `MOST_BYTES` holds."""
MOST_SECONDS = 100 * 365 * 86400.0
LIKELY_SECONDS = 60 * 86400.0
"""Traces longer than this whose times are all whole thousands are taken for milliseconds."""
NOTED_SECONDS, NOTED_TIMES = 86400.0, 3
"""So are those longer than this (86 seconds of milliseconds) with at least so many different times above 0."""
_NAME = re.compile(r"[A-Za-z0-9_.:\-/]{1,128}")


@dataclass(frozen=True, slots=True)
class Event:
    """A node comes or goes."""

    seconds: float
    kind: str
    """add | remove"""
    node: str
    zone: str = ""
    type: str = ""
    notice_s: float = 0.0
    """Of a removal: how long before the node was told."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Events in order, from second 0 to `end_s`."""

    events: tuple[Event, ...]
    end_s: float
    origin: str = ""
    """Where it comes from, in a few words; may have several lines."""

    def steps(self) -> Iterator[tuple[float, tuple[Event, ...]]]:
        """All events of one moment together, moments ascending."""
        at, found = 0.0, list[Event]()
        for event in self.events:
            if event.seconds != at and found:
                yield at, tuple(found)
                found = []
            at = event.seconds
            found.append(event)
        if found:
            yield at, tuple(found)


@dataclass(frozen=True, slots=True)
class Repair:
    """What was done to a row that could not be used."""

    line: int
    text: str


class _Row(NamedTuple):
    """An event with the line it is in, and what stands there."""

    line: int
    text: str
    event: Event


def check(events: Iterable[Event], end_s: float, origin: str = "", where: str = "event") -> Trace:
    """The trace of these events. Raises FieldError naming the first (counted from 1) that makes no sense."""
    growing = Growing(end_s)
    for number, event in enumerate(events, 1):
        growing.add(event, f"{where} {number}")
    return growing.ended(end_s, origin, where)


class Growing:
    """A trace that is put together event by event, each checked after those before it."""

    def __init__(self, end_s: float = math.inf) -> None:
        self.events = list[Event]()
        self._end_s, self._present, self._last = end_s, dict[str, None](), 0.0

    def add(self, event: Event, where: str, told: str = "") -> None:
        """`where`: where it stands; `told`: what stands there. Raises FieldError with both if it makes no sense."""
        problem = _problem(event, self._last, self._present, self._end_s)
        if problem is not None:
            raise FieldError(where, told[:200] or _told(event), problem)
        self.events.append(event)
        self._last = event.seconds

    def ended(self, end_s: float, origin: str, name: str) -> Trace:
        """Raises FieldError."""
        if not (math.isfinite(end_s) and 0 < end_s <= MOST_SECONDS):
            raise FieldError(f"{name}: end", end_s, "seconds above 0, at most a hundred years")
        return Trace(tuple(self.events), end_s, origin)


def _problem(event: Event, last: float, present: dict[str, None], end_s: float) -> str | None:
    """What is wrong with an event after those before it, which left these nodes; takes note of it if nothing is."""
    if not math.isfinite(event.seconds) or event.seconds < 0:
        return "a time in seconds from 0 up"
    if event.seconds > end_s:
        return f"the trace ends at {end_s:g} s: no event after that"
    if event.seconds > MOST_SECONDS:
        return "at most a hundred years"
    if event.seconds < last:
        return f"times must ascend; the row before is at {last:g} s"
    for text in (event.node, event.zone, event.type):
        if text and not _NAME.fullmatch(text):
            return "names of letters, digits and . : _ - /, at most 128"
    if not event.node:
        return "a node must be named"
    if not math.isfinite(event.notice_s) or event.notice_s < 0:
        return "a notice is seconds from 0 up"
    if event.kind == ADD:
        if event.node in present:
            return f"{event.node} is there already"
        if len(present) >= MOST_NODES:
            return f"at most {MOST_NODES} nodes at once; leave some out"
        present[event.node] = None
    elif event.kind == REMOVE:
        if event.node not in present:
            return f"{event.node} is not there: it was never added, or removed before"
        del present[event.node]
    else:
        return "add, remove or end"
    return None


def read(path: Path | str, *, repair: bool = False) -> tuple[Trace, tuple[Repair, ...]]:
    """Read a file of our format. Raises FieldError with the line that is wrong.

    With `repair` rows that cannot be used are dropped, rows out of order are sorted, and a missing end is put at the
    last event; what was done is returned.
    """
    return parse(text_of(Path(path)), str(path), repair=repair)


def text_of(path: Path, field: str = "trace") -> str:
    """The text of a file that is not too large, without the byte order mark that Excel writes. Raises FieldError
    about `field`."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise FieldError(field, str(path), f"{size} bytes are too many: at most {MOST_BYTES}; split it")
        return path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        raise FieldError(field, str(path), f"a readable text file is needed: {error}") from error


def parse(text: str, name: str = "trace", *, repair: bool = False) -> tuple[Trace, tuple[Repair, ...]]:
    """Read the text of a file; see `read`."""
    origin, rows = _rows(text, name)
    repairs: list[Repair] = []
    events, end_s, ended = list[_Row](), 0.0, False
    for line, fields in rows:
        try:
            if ended:
                raise FieldError(f"{name}, line {line}", ",".join(fields), "nothing may follow `end`")
            event = _event(fields, f"{name}, line {line}")
        except FieldError as error:
            if not repair:
                raise
            repairs.append(Repair(line, f"dropped: {error.remedy}"))
            continue
        if event.kind == END:
            end_s, ended = event.seconds, True
        else:
            events.append(_Row(line, ",".join(fields), event))
    if not ended:
        last = max((row.event.seconds for row in events), default=0.0)
        if not repair:
            remedy = f"the file is cut short: its last row must be {last:g},end,,,, or later"
            raise FieldError(f"{name}, last line", "", remedy)
        repairs.append(Repair(0, f"no end: taken as {last:g} s"))
        end_s = last
    refuse_milliseconds(name, [row.event.seconds for row in events], end_s)
    if repair:
        ordered = sorted(events, key=lambda row: row.event.seconds)
        pairs = zip(events, ordered, strict=True)
        repairs += [Repair(row.line, "sorted by time") for row, now in pairs if row.line != now.line]
        events = ordered
    growing = Growing(end_s)
    for row in events:
        try:
            growing.add(row.event, f"{name}, line {row.line}", row.text)
        except FieldError as error:
            if not repair:
                raise
            repairs.append(Repair(row.line, f"dropped: {error.remedy}"))
    return growing.ended(end_s, origin, name), tuple(repairs)


def _rows(text: str, name: str) -> tuple[str, list[tuple[int, list[str]]]]:
    """The comments at the top, and all rows with their line numbers."""
    lines, comments = text.splitlines(), list[str]()
    for line in lines:
        if not line.startswith("#"):
            break
        comments.append(line.lstrip("#").strip())
    first = len(comments)
    header = tuple(word.strip() for word in lines[first].split(",")) if first < len(lines) else ()
    if header != HEADER:
        remedy = f"the first line must be {','.join(HEADER)}; `elastic-sim traces import` reads other formats"
        raise FieldError(f"{name}, line {first + 1}", ",".join(header)[:80], remedy)
    rows = list[tuple[int, list[str]]]()
    reader = csv.reader(io.StringIO("\n".join(lines[first + 1 :])))
    try:
        for fields in reader:
            if fields and not fields[0].startswith("#"):
                rows.append((first + 1 + reader.line_num, [field.strip() for field in fields]))
    except csv.Error as error:
        raise FieldError(f"{name}, line {first + 1 + reader.line_num}", "", f"not CSV: {error}") from error
    return "\n".join(comments), rows


def _event(fields: list[str], where: str) -> Event:
    text = ",".join(fields)
    if len(fields) != len(HEADER):
        raise FieldError(where, text[:200], f"{len(HEADER)} fields are needed: {','.join(HEADER)}")
    seconds, kind, node, zone, machine, notice = fields
    if kind not in (ADD, REMOVE, END):
        raise FieldError(where, kind[:80], "add, remove or end")
    at = _number(seconds, where, "a time in seconds from 0 up")
    if kind == END and (node or zone or machine or notice):
        raise FieldError(where, text[:200], "the end has a time alone")
    told = _number(notice, where, "a notice is seconds from 0 up, or empty") if notice else 0.0
    return Event(at, kind, node, zone, machine, told)


def _number(text: str, where: str, remedy: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise FieldError(where, text[:80], remedy) from None
    if not math.isfinite(value) or value < 0:
        raise FieldError(where, text[:80], remedy)
    return value


def refuse_milliseconds(name: str, times: list[float], end_s: float) -> None:
    """Raises FieldError where all times of a long trace are whole thousands."""
    if end_s <= NOTED_SECONDS or any(at % 1000 for at in (*times, end_s)):
        return
    if (end_s > LIKELY_SECONDS and len(times) > 1) or len({*times, end_s} - {0.0}) >= NOTED_TIMES:
        remedy = (
            "all times are whole thousands: if they are milliseconds, divide them by 1000; "
            "if they are seconds, let it end a second later"
        )
        raise FieldError(f"{name}: end", end_s, remedy)


def _told(event: Event) -> str:
    return f"{event.seconds:g},{event.kind},{event.node}"[:200]


def format_trace(trace: Trace) -> str:
    """The text of a file; `parse` reads it back, the same."""
    out = io.StringIO()
    for line in trace.origin.splitlines():
        out.write(f"# {line}\n")
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(HEADER)
    for event in trace.events:
        notice = _plain(event.notice_s) if event.notice_s else ""
        writer.writerow((_plain(event.seconds), event.kind, event.node, event.zone, event.type, notice))
    writer.writerow((_plain(trace.end_s), END, "", "", "", ""))
    return out.getvalue()


def _plain(value: float) -> str:
    return str(int(value)) if value == int(value) else repr(value)


def window(trace: Trace, first_s: float, last_s: float) -> Trace:
    """What happens from `first_s` to `last_s`; nodes that are there at its beginning are added at 0."""
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
    return check((*start, *inside), last_s - first_s, trace.origin)
