"""Which finished steps and evaluations a run has recorded, so that each is recorded once.

Nodes report their last 4,096 steps again after each reconnect (`elastic.agent.outbox`), and a new
coordinator finds the steps of the former ones in events.jsonl.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from elastic.telemetry import EventLog

STEP = re.compile(rb'"kind":"(step|evaluation)","epoch":(\d+),"step":(\d+),')
"""Start of a line about a step or an evaluation (`elastic.core.job.goodput`), after its time."""
Recorded = tuple[bytes, int, int]
"""(kind, epoch, step) of such a line."""
PIECE_BYTES = 1 << 20
"""The log is read in pieces of this size."""
STEP_BYTES = 128
"""A piece begins with so many bytes of the piece before, which may end within a match."""


class RecordedSteps:
    """A set of (epoch, step), kept as ranges: memory grows with the number of epochs only."""

    def __init__(self, known: Iterable[tuple[int, int]] = ()) -> None:
        self._ranges: dict[int, list[list[int]]] = {}
        """Sorted ranges [first, last] of steps per epoch, which neither overlap nor touch."""
        for epoch, step in known:
            self.add(epoch, step)

    def __contains__(self, item: tuple[int, int]) -> bool:
        epoch, step = item
        ranges = self._ranges.get(epoch, [])
        at = bisect_right(ranges, step, key=lambda known: known[0])
        return at > 0 and step <= ranges[at - 1][1]

    def add(self, epoch: int, step: int) -> bool:
        """Add a step of an epoch; return whether it is new."""
        if (epoch, step) in self:
            return False
        ranges = self._ranges.setdefault(epoch, [])
        at = bisect_right(ranges, step, key=lambda known: known[0])
        follows = at > 0 and ranges[at - 1][1] == step - 1
        precedes = at < len(ranges) and ranges[at][0] == step + 1
        if follows and precedes:
            ranges[at - 1][1] = ranges.pop(at)[1]
        elif follows:
            ranges[at - 1][1] = step
        elif precedes:
            ranges[at][0] = step
        else:
            ranges.insert(at, [step, step])
        return True


class RecordedLines:
    """The steps and evaluations of a log."""

    def __init__(self, lines: Iterable[Recorded] = ()) -> None:
        self._kinds = {b"step": RecordedSteps(), b"evaluation": RecordedSteps()}
        for kind, epoch, step in lines:
            self._kinds[kind].add(epoch, step)

    def __contains__(self, line: Recorded) -> bool:
        kind, epoch, step = line
        return (epoch, step) in self._kinds[kind]


def lines_in(file: EventLog) -> Iterator[Recorded]:
    """Yield the steps and evaluations in a log; each may come twice."""
    rest = b""
    for piece in file.pieces(PIECE_BYTES):
        piece = rest + piece
        for match in STEP.finditer(piece):
            yield match[1], int(match[2]), int(match[3])
        rest = piece[-STEP_BYTES:]


def recorded_in(line: bytes) -> Recorded | None:
    """Return the step or evaluation of a line; None: the line is another event."""
    match = STEP.search(line)
    return (match[1], int(match[2]), int(match[3])) if match else None
