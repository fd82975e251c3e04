"""Which finished steps a run has recorded, so that each is recorded once.

Nodes report their last 4,096 steps again after each reconnect (`elastic.agent.outbox`), and a new
coordinator finds the steps of the former ones in events.jsonl.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator

from elastic.telemetry import EventLog

STEP = re.compile(rb'"kind":"step","epoch":(\d+),"step":(\d+),')
"""Start of a line about a step (`elastic.core.job.goodput.step_entry`), after its time."""
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


def steps_in(file: EventLog) -> Iterator[tuple[int, int]]:
    """Yield (epoch, step) of the steps in a log; a step may come twice."""
    rest = b""
    for piece in file.pieces(PIECE_BYTES):
        piece = rest + piece
        for match in STEP.finditer(piece):
            yield int(match[1]), int(match[2])
        rest = piece[-STEP_BYTES:]


def step_of(line: bytes) -> tuple[int, int] | None:
    """Return (epoch, step) of a step's line; None: the line is another event."""
    match = STEP.search(line)
    return (int(match[1]), int(match[2])) if match else None
