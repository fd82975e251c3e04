"""The time for which an agent has reached no coordinator, and when the user hears about it.

Every agent begins in this state.
"""

from __future__ import annotations

from elastic.reminder import Reminder


class Absence:
    """Absence of the coordinator. Times are those of time.monotonic()."""

    def __init__(self, now: float) -> None:
        self._told = False
        self.begin(now)

    def begin(self, now: float) -> None:
        """No coordinator is reached from now on."""
        self.since = now
        """Time since which no coordinator is reached; 0: one is."""
        self._reminder = Reminder(now)

    def is_due(self, now: float) -> bool:
        """Return whether the user must be told now. Then the next line is due later."""
        if not self.since or not self._reminder.is_due(now):
            return False
        self._told = True
        return True

    def end(self) -> bool:
        """A coordinator is reached. Return whether the user was told that none was."""
        told, self.since, self._told = self._told, 0.0, False
        return told
