"""The time for which an agent has reached no coordinator, and when it tells the user about that.

Every agent begins in this state. The first line comes after `FIRST_S`, and the pauses between
further lines grow.
"""

from __future__ import annotations

FIRST_S, LONGEST_PAUSE_S = 5.0, 60.0


class Absence:
    """Absence of the coordinator. Times are those of time.monotonic()."""

    def __init__(self, now: float) -> None:
        self._told = False
        self.begin(now)

    def begin(self, now: float) -> None:
        """No coordinator is reached from now on."""
        self.since = now
        """Time since which no coordinator is reached; 0: one is."""
        self._pause_s, self._due_at = FIRST_S, now + FIRST_S

    def is_due(self, now: float) -> bool:
        """Return whether the user must be told now. Then the next line is due later."""
        if not self.since or now < self._due_at:
            return False
        self._told, self._pause_s = True, min(2 * self._pause_s, LONGEST_PAUSE_S)
        self._due_at = now + self._pause_s
        return True

    def end(self) -> bool:
        """A coordinator is reached. Return whether the user was told that none was."""
        told, self.since, self._told = self._told, 0.0, False
        return told
