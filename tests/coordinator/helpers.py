"""A clock and an event loop that tests advance by hand."""

from __future__ import annotations

from typing import Any

START = 1000.0


class ManualLoop:
    """Replaces the network thread's event loop, from which ticks come."""

    def __init__(self) -> None:
        self.now, self._timers = START, list[tuple[float, Any, float]]()

    def call_soon_threadsafe(self, call: Any, due: float) -> None:
        call(due)

    def call_later(self, after_s: float, call: Any, due: float) -> None:
        self._timers.append((self.now + after_s, call, due))

    def advance(self, seconds: float, delayed: bool = False) -> None:
        """Fire the timers that become due. A delayed network thread fires them later."""
        end = self.now + seconds
        while not delayed and self._timers and self._timers[0][0] <= end:
            at, call, due = self._timers.pop(0)
            self.now = max(self.now, at)
            call(due)
        self.now = end
