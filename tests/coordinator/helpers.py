"""A clock and a network thread that are moved by hand."""

from __future__ import annotations

from typing import Any

START = 1000.0


class Hands:
    """In place of the event loop that ticks come from."""

    def __init__(self) -> None:
        self.now, self._timers = START, list[tuple[float, Any, float]]()

    def call_soon_threadsafe(self, call: Any, due: float) -> None:
        call(due)

    def call_later(self, after_s: float, call: Any, due: float) -> None:
        self._timers.append((self.now + after_s, call, due))

    def wait(self, seconds: float, held_up: bool = False) -> None:
        """Timers go off, unless the network thread is held up; those that are over then go off late."""
        end = self.now + seconds
        while not held_up and self._timers and self._timers[0][0] <= end:
            at, call, due = self._timers.pop(0)
            self.now = max(self.now, at)
            call(due)
        self.now = end
