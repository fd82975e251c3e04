"""Rate at which a node sends copies to its peer, compared with earlier rates and other links.

Each report gives one sample, the rate of the fastest copy, because a busy machine can slow a single
copy. A link is slow only if

- the other links did not become slower by about the same factor, as in a busy network; and
- each copy takes longer by more than the delay that a busy machine's scheduler causes.

Rates are compared only between copies of about the same size, because small copies take the same
time on any link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

KEPT = 9
"""Number of baseline rates kept."""
ENOUGH = 3
"""Least number of baseline rates for which the usual rate is known."""
ALIKE = 2.0
"""Copies are of about the same size if their sizes differ by less than this factor."""
COMMON = 1.7
"""If the other links became slower by more than this factor, the link is not the cause."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Measurements of one node's link. Rates are in bytes per second."""

    peer: str = ""
    """Node that receives the copies now."""
    size: float = 0.0
    """Mean bytes of a copy in the first of these measurements."""
    baseline: tuple[float, ...] = ()
    """Rates measured while the link was not slow, newest last."""
    recent: tuple[float, ...] = ()
    """Newest rates to `peer`, newest last."""

    @property
    def usual(self) -> float:
        """Median baseline rate; 0: too few are known."""
        return median(self.baseline) if len(self.baseline) >= ENOUGH else 0.0

    @property
    def now(self) -> float:
        """Highest of the recent rates; 0: unknown."""
        return max(self.recent, default=0.0)

    @property
    def share(self) -> float:
        """`now` divided by `usual`; 1 if either is unknown."""
        return self.now / self.usual if self.usual and self.recent else 1.0


def record_rate(
    link: LinkSpeed, peer: str, rate: float, size: float, factor: float, windows: int
) -> LinkSpeed:
    """Add a rate that was measured with copies of `size` bytes.

    A rate below `usual` / `factor` is slow and is no baseline rate. The newest `windows` rates are
    kept. If the size of the copies has changed, all earlier rates are discarded.
    """
    if rate <= 0 or size <= 0:
        return link
    if not _alike(link.size, size):
        link = LinkSpeed(peer, size)
    recent = (*(link.recent if peer == link.peer else ()), rate)[-windows:]
    slow = bool(link.usual) and rate * factor < link.usual
    baseline = link.baseline if slow else (*link.baseline, rate)[-KEPT:]
    return replace(link, peer=peer, recent=recent, baseline=baseline)


def slow_factor(
    link: LinkSpeed, others: Sequence[LinkSpeed], factor: float, windows: int, least_s: float
) -> float:
    """Return normal rate / present rate if the link is slow by more than `factor`; else 0.

    The normal rate is the link's usual rate, or the median of at least two other links if the link
    was slow from the beginning. 0 also if fewer than `windows` recent rates are known, or if a copy
    takes less than `least_s` seconds longer than at the normal rate.
    """
    if len(link.recent) < windows:
        return 0.0
    known = [o for o in others if o.usual and o.recent and _alike(o.size, link.size)]
    if link.usual and link.now * factor < link.usual:
        common = median(other.share for other in known) if known else 1.0
        ours = common * COMMON >= 1.0 and _delay_s(link, link.usual) >= least_s
        return link.usual / link.now if ours else 0.0
    typical = median(other.now for other in known) if len(known) >= 2 else 0.0
    if link.now * factor < typical and _delay_s(link, typical) >= least_s:
        return typical / link.now
    return 0.0


def _delay_s(link: LinkSpeed, proper: float) -> float:
    """Return the seconds that a copy takes longer now than at rate `proper`."""
    return link.size / link.now - link.size / proper


def _alike(one: float, other: float) -> bool:
    return min(one, other) * ALIKE > max(one, other)
