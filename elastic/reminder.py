"""When the user is told again that something is awaited: no wait is silent for longer than 5 s."""

from __future__ import annotations

EVERY_S = 3.0
"""Time from the beginning of a wait to its first line, and between two lines. A process that begins
to wait right after its start has been silent for a second or two before."""


class Reminder:
    """Reminder of one wait. Times are those of time.monotonic()."""

    def __init__(self, now: float) -> None:
        self.begin(now)

    def begin(self, now: float) -> None:
        """The wait begins, or the user has just been told of it."""
        self._due_at = now + EVERY_S

    def is_due(self, now: float) -> bool:
        """Return whether the user must be told now. Then the next line is due later."""
        if now < self._due_at:
            return False
        self.begin(now)
        return True
