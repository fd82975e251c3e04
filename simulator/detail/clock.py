"""Virtual time: one heap of (time, order) actions, and one seeded generator that all delays come from."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable

BEGIN_S = 1000.0
"""Of virtual time: decisions take a time of 0 for "never"."""


class Clock:
    def __init__(self, seed: int, jitter: float) -> None:
        self.now = BEGIN_S
        self._rng, self._jitter = random.Random(seed), jitter
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def ms(self) -> int:
        """Milliseconds since the beginning."""
        return round((self.now - BEGIN_S) * 1000)

    def vary(self, seconds: float) -> float:
        """`seconds`, times a random factor."""
        return seconds * self._rng.uniform(1 - self._jitter, 1 + self._jitter)

    def within(self, seconds: float) -> float:
        """Somewhere between 0 and `seconds`."""
        return self._rng.uniform(0.0, seconds)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it so many seconds from now, exactly."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), action))

    def about(self, seconds: float, action: Callable[[], None]) -> None:
        """Do it about so many seconds from now."""
        self.after(self.vary(seconds), action)

    def run(self, until_s: float, over: Callable[[], bool]) -> None:
        """Let time pass up to `until_s` after the beginning, or until it is `over`."""
        end = BEGIN_S + until_s
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if over():
                return
        self.now = max(self.now, end)


class Wire:
    """What a node sends to others' vaults goes over one link, piece by piece."""

    def __init__(self, clock: Clock, bytes_per_s: float, latency_s: float) -> None:
        self._clock, self._rate, self._latency_s = clock, bytes_per_s, latency_s
        self._free_at = 0.0

    @property
    def busy_s(self) -> float:
        """Seconds for which it has something to send."""
        return max(0.0, self._free_at - self._clock.now)

    def send(self, nbytes: float) -> float:
        """Seconds until so many bytes, behind what waits already, are there."""
        self._free_at = max(self._free_at, self._clock.now) + (nbytes / self._rate if self._rate > 0 else 0.0)
        return self._free_at - self._clock.now + self._latency_s

    def clear(self) -> None:
        """What waits is dropped."""
        self._free_at = 0.0
