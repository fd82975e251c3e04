"""Where the nodes' time went, to the millisecond: every node is in one use at every moment.

node-milliseconds in = useful + detect + plan + transfer + lost + redundant + idle.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import StrEnum


class Use(StrEnum):
    USEFUL = "useful"
    """Computing what counts in the end."""
    DETECT = "detect"
    """From a loss to the moment at which somebody knows."""
    PLAN = "plan"
    """Deciding, meeting, starting processes."""
    TRANSFER = "transfer"
    """Moving state; reading and writing checkpoints that training waits for."""
    LOST = "lost"
    """Computing what was lost and done again."""
    REDUNDANT = "redundant"
    """Computing that only guards against losses."""
    IDLE = "idle"
    """There, and not used, or still booting."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch in which nothing changed. Milliseconds."""

    began: int
    ended: int
    alive: int
    """Nodes that are there."""
    used: int
    """Of these, nodes that do `use`; the others are idle."""
    use: Use
    redundant: float = 0.0
    """Of what useful nodes do, the part that only guards against losses."""

    def shares(self) -> Iterator[tuple[Use, int]]:
        """Node-milliseconds by use; whole numbers that add up."""
        length = self.ended - self.began
        yield Use.IDLE, (self.alive - self.used) * length
        guarding = int(self.used * length * self.redundant) if self.use is Use.USEFUL else 0
        yield Use.REDUNDANT, guarding
        yield self.use, self.used * length - guarding


class Account:
    """Spans of one run, in order and without gaps."""

    def __init__(self) -> None:
        self.spans: list[Span] = []

    @property
    def ended(self) -> int:
        return self.spans[-1].ended if self.spans else 0

    def add(self, until: int, alive: int, used: int, use: Use, redundant: float = 0.0) -> None:
        """From where the last span ended to `until`."""
        began = self.ended
        if until < began or not 0 <= used <= alive:
            raise ValueError(f"{used} of {alive} nodes from {began} to {until} ms")
        if until == began:
            return
        span = Span(began, until, alive, used, use, redundant)
        last = self.spans[-1] if self.spans else None
        if last is not None and replace(last, ended=until) == replace(span, began=last.began):
            self.spans[-1] = replace(last, ended=until)
        else:
            self.spans.append(span)

    def lose(self, useful_ms: int) -> None:
        """The last `useful_ms` of useful time, whatever lay in between, came to nothing."""
        at = len(self.spans) - 1
        while useful_ms > 0 and at >= 0:
            span = self.spans[at]
            if span.use is Use.USEFUL:
                length = span.ended - span.began
                gone = min(length, useful_ms)
                useful_ms -= gone
                lost = replace(span, began=span.ended - gone, use=Use.LOST, redundant=0.0)
                kept = [replace(span, ended=span.ended - gone)] if gone < length else []
                self.spans[at : at + 1] = [*kept, lost]
            at -= 1
        if useful_ms:
            raise ValueError(f"{useful_ms} ms more are lost than were ever useful")

    def totals(self) -> dict[Use, int]:
        """Node-milliseconds by use."""
        found = dict.fromkeys(Use, 0)
        for span in self.spans:
            for use, amount in span.shares():
                found[use] += amount
        return found

    @property
    def node_ms(self) -> int:
        """Of all nodes that were there."""
        return sum(span.alive * (span.ended - span.began) for span in self.spans)
