"""History of a job's losses, from which the hazard of its nodes is estimated.

Nodes often leave together: a zone is taken back, or a rack fails. Training pauses once for all of
them. So losses that belong together count as one event:

- A loss belongs to the event before it if it comes within `TOGETHER` of the mean time between
  events after the first loss of that event. With independent losses so few times are that short
  that the estimate hardly changes. Losses that go on for longer are further events, so a market
  that becomes rough is noticed.
- The mean time is that of `elastic.planning.backup.amortization.horizon_s`: 1 / (hazard * nodes).

Markets change within hours, so old events and old node-seconds count less: by a factor of e each
`MEMORY_S`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import exp

from elastic.planning.backup.amortization import hazard_per_s, horizon_s

TOGETHER = 0.05
"""Fraction of the mean time between events within which losses belong together."""
MEMORY_S = 6 * 3600.0
"""Time in which the weight of an observation falls by a factor of e."""


@dataclass(frozen=True, slots=True)
class LossHistory:
    """Weighted events and node-seconds until `counted_at`."""

    events: float = 0.0
    """Weighted number of events. Losses that belong together are one event."""
    node_seconds: float = 0.0
    """Weighted seconds of membership, summed over all members."""
    counted_at: float = 0.0
    """Time until which the above are counted; 0: nothing is counted yet."""
    event_at: float = 0.0
    """Time of the first loss of the newest event; 0: there was none."""

    @property
    def hazard_per_s(self) -> float:
        """Expected events per node and second."""
        return hazard_per_s(self.events, self.node_seconds)

    def at(self, now: float, nodes: int) -> LossHistory:
        """Return the history at `now`, if there were `nodes` members since `counted_at`."""
        past_s = max(0.0, now - self.counted_at) if self.counted_at else 0.0
        weight = exp(-past_s / MEMORY_S)
        added = nodes * MEMORY_S * (1 - weight)
        return replace(
            self,
            events=self.events * weight,
            node_seconds=self.node_seconds * weight + added,
            counted_at=now,
        )

    def with_losses(self, now: float, nodes: int) -> LossHistory:
        """Return the history after one or more of `nodes` members left at `now`."""
        history = self.at(now, nodes)
        apart_s = TOGETHER * horizon_s(history.hazard_per_s, nodes)
        if history.event_at and now - history.event_at <= apart_s:
            return history
        return replace(history, events=history.events + 1, event_at=now)
