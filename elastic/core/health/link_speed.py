"""How fast a node's link carries copies to its peer, compared with its past and with other links.

Each report gives one sample, the rate of the fastest copy, because a busy machine can slow a single
copy. A link counts as slow only if

- it fell behind while the others did not: a busy network slows all links at once; and
- each copy takes longer by more than a busy machine's scheduler delays it.

Rates are compared only between copies of about the same size, because small copies take the same
time on any link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

KEPT = 9
"""Samples kept of the baseline rate."""
ENOUGH = 3
"""Samples needed before the baseline rate is known."""
ALIKE = 2.0
"""Copies are of about the same size if their sizes differ by less than this factor."""
COMMON = 1.7
"""If the other links slowed down by this factor as well, the link is not the cause."""


@dataclass(frozen=True, slots=True)
class LinkSpeed:
    """Measurements of one node's link. Rates are in bytes per second."""

    peer: str = ""
    """Node that it sends to now."""
    size: float = 0.0
    """Bytes of one copy."""
    baseline: tuple[float, ...] = ()
    """Rates from when the link was not slow, newest last."""
    recent: tuple[float, ...] = ()
    """Newest rates to this peer."""

    @property
    def usual(self) -> float:
        """Median baseline rate; 0: not known yet."""
        return median(self.baseline) if len(self.baseline) >= ENOUGH else 0.0

    @property
    def now(self) -> float:
        """The fastest of the recent rates; 0: none is known."""
        return max(self.recent, default=0.0)

    @property
    def share(self) -> float:
        """`now` divided by `usual`; 1 if either is unknown."""
        return self.now / self.usual if self.usual and self.recent else 1.0


def record_rate(
    link: LinkSpeed, peer: str, rate: float, size: float, factor: float, windows: int
) -> LinkSpeed:
    """Add one rate, measured on copies of `size` bytes.

    A rate below `usual` by `factor` is slow and does not count as baseline. `windows` recent rates
    are kept. Another size of copies starts a new measurement.
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
    """The factor by which the link is slower than it should be; 0 if it is not or cannot be told.

    A link that became slow is compared with its own baseline. One that was slow from the beginning
    is compared with at least two other links. Copies that take less than `least_s` seconds longer
    show nothing.
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
    """Seconds that a copy takes now beyond its time at rate `proper`."""
    return link.size / link.now - link.size / proper


def _alike(one: float, other: float) -> bool:
    return min(one, other) * ALIKE > max(one, other)
