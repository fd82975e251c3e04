"""How fast a node's link carries copies to its peer, against what it did before and what others' links do.

One sample a report: the quickest of the copies that were sent meanwhile. What slows a single copy may be the machine,
so the quickest counts; what slows all links at once is a busy network or a busy machine, so a link is slow only if it
fell behind while the others did not. Small copies take the same time on any link: only rates of copies of about the
same size are compared. A copy of a few milliseconds tells how soon both ends got a processor: a link is slow only if
each copy takes longer by more than what the scheduler of a busy machine keeps anybody waiting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

KEPT = 9
"""Samples of the proper rate."""
ENOUGH = 3
"""Samples without which the proper rate is not known."""
ALIKE = 2.0
"""Copies whose sizes differ by less than this factor tell the same."""
COMMON = 1.7
"""Others that fell behind by this factor, too, say that it is not this link."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """What is known of the link of one node. Rates are bytes a second."""

    peer: str = ""
    """Where it sends now."""
    size: float = 0.0
    """Bytes of one copy."""
    proper: tuple[float, ...] = ()
    """Rates of when it was not slow, newest last."""
    recent: tuple[float, ...] = ()
    """Newest rates to this peer."""

    @property
    def usual(self) -> float:
        """Its proper rate; 0: not known yet."""
        return median(self.proper) if len(self.proper) >= ENOUGH else 0.0

    @property
    def now(self) -> float:
        """The quickest of the newest rates; 0: none is known."""
        return max(self.recent, default=0.0)

    @property
    def share(self) -> float:
        """What it carries now over what is proper; 1 where either is unknown."""
        return self.now / self.usual if self.usual and self.recent else 1.0


def record_rate(pace: LinkSpeed, peer: str, rate: float, size: float, factor: float, windows: int) -> LinkSpeed:
    """Take note of one rate, of copies of `size` bytes; `factor` and `windows`: what is slow, and how many must agree
    on it. With copies of another size begins another measure."""
    if rate <= 0 or size <= 0:
        return pace
    if not alike(pace.size, size):
        pace = LinkSpeed(peer, size)
    recent = (*(pace.recent if peer == pace.peer else ()), rate)[-windows:]
    slow = bool(pace.usual) and rate * factor < pace.usual
    proper = pace.proper if slow else (*pace.proper, rate)[-KEPT:]
    return replace(pace, peer=peer, recent=recent, proper=proper)


def slow_factor(
    pace: LinkSpeed, others: Sequence[LinkSpeed], factor: float, windows: int, least_s: float
) -> float:
    """By what factor the link is slower than it should be; 0: it is not, or that cannot be told: copies that take
    less than `least_s` seconds longer say nothing.

    A link that is slow from the beginning shows beside at least two others; one that got slow beside itself.
    """
    if len(pace.recent) < windows:
        return 0.0
    known = [other for other in others if other.usual and other.recent and alike(other.size, pace.size)]
    if pace.usual and pace.now * factor < pace.usual:
        common = median(other.share for other in known) if known else 1.0
        return 0.0 if common * COMMON < 1.0 or _longer(pace, pace.usual) < least_s else pace.usual / pace.now
    beside = median(other.now for other in known) if len(known) >= 2 else 0.0
    if pace.now * factor < beside and _longer(pace, beside) >= least_s:
        return beside / pace.now
    return 0.0


def _longer(pace: LinkSpeed, proper: float) -> float:
    """Seconds that a copy takes now beyond what it would at the proper rate."""
    return pace.size / pace.now - pace.size / proper


def alike(one: float, other: float) -> bool:
    return min(one, other) * ALIKE > max(one, other)
