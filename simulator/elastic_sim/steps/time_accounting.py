"""Accounts for the nodes' time: every node has exactly one use in every millisecond.

node-milliseconds = useful + detect + plan + transfer + lost + redundant + idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Use(StrEnum):
    """Uses of a node's time."""

    USEFUL = "useful"
    """Computing that no loss discards."""
    DETECT = "detect"
    """Waiting for the detection of a loss."""
    PLAN = "plan"
    """Planning, rendezvous, starting processes."""
    TRANSFER = "transfer"
    """Moving state; reading and writing checkpoints while training waits."""
    LOST = "lost"
    """Computing that was lost and is repeated."""
    REDUNDANT = "redundant"
    """Computing that only protects against losses."""
    IDLE = "idle"
    """Present, but not used, or still booting."""


@dataclass(frozen=True, slots=True)
class TimeSpan:
    """An interval of milliseconds in which the number of nodes and their use did not change."""

    began: int
    ended: int
    alive: int
    """Number of nodes present."""
    used: int
    """Number of nodes with this `use`; all other nodes present are idle."""
    use: Use
    redundant: float = 0.0
    """Fraction of useful time that counts as `Use.REDUNDANT`."""

    def shares(self) -> Iterator[tuple[Use, int]]:
        """Yield (use, node-milliseconds): whole numbers that add up to the time of all nodes."""
        length = self.ended - self.began
        yield Use.IDLE, (self.alive - self.used) * length
        useful = self.use is Use.USEFUL
        redundant = int(self.used * length * self.redundant) if useful else 0
        yield Use.REDUNDANT, redundant
        yield self.use, self.used * length - redundant


class TimeAccount:
    """Time spans of one run, in order and without gaps."""

    def __init__(self) -> None:
        self.spans: list[TimeSpan] = []

    @property
    def ended(self) -> int:
        return self.spans[-1].ended if self.spans else 0

    def add(self, until: int, alive: int, used: int, use: Use, redundant: float = 0.0) -> None:
        """Add a span from the end of the last span to `until`. Raises ValueError."""
        began = self.ended
        if until < began or not 0 <= used <= alive:
            raise ValueError(f"{used} of {alive} nodes from {began} to {until} ms")
        if until == began:
            return
        span = TimeSpan(began, until, alive, used, use, redundant)
        last = self.spans[-1] if self.spans else None
        if last is not None and replace(last, ended=until) == replace(span, began=last.began):
            self.spans[-1] = replace(last, ended=until)
        else:
            self.spans.append(span)

    def lose(self, useful_ms: int) -> None:
        """Turn the last `useful_ms` of useful time into lost time. Raises ValueError if there is
        less useful time."""
        at = len(self.spans) - 1
        while useful_ms > 0 and at >= 0:
            span = self.spans[at]
            if span.use is Use.USEFUL:
                length = span.ended - span.began
                lost_ms = min(length, useful_ms)
                useful_ms -= lost_ms
                lost = replace(span, began=span.ended - lost_ms, use=Use.LOST, redundant=0.0)
                kept = [replace(span, ended=span.ended - lost_ms)] if lost_ms < length else []
                self.spans[at : at + 1] = [*kept, lost]
            at -= 1
        if useful_ms:
            raise ValueError(f"{useful_ms} ms more are lost than were ever useful")

    def totals(self) -> dict[Use, int]:
        """Return the node-milliseconds by use."""
        found = dict.fromkeys(Use, 0)
        for span in self.spans:
            for use, amount in span.shares():
                found[use] += amount
        return found
