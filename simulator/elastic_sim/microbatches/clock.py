"""Virtual time: one heap of (time, order) actions, and one seeded generator that all delays come from."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

BEGIN_S = 1000.0
"""Of virtual time: decisions take a time of 0 for "never"."""
ROUNDING_S = 1e-9


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
    """What a node sends to others' vaults. Streams share the link evenly; what is of one stream goes in order."""

    def __init__(self, clock: Clock, bytes_per_s: float, latency_s: float) -> None:
        self._clock, self._rate, self._latency_s = clock, bytes_per_s, latency_s
        self._streams: dict[str, deque[tuple[float, Callable[[], None]]]] = {}
        """Name: (bytes that are left, what to do when they are there)."""
        self._at, self._version = clock.now, 0

    @property
    def busy_s(self) -> float:
        """Seconds for which it has something to send."""
        self._advance()
        left = sum(nbytes for stream in self._streams.values() for nbytes, _ in stream)
        return left / self._rate if self._rate > 0 else 0.0

    def send(self, stream: str, nbytes: float, done: Callable[[], None]) -> None:
        if self._rate <= 0:
            self._clock.after(self._latency_s, done)
            return
        self._advance()
        self._streams.setdefault(stream, deque()).append((nbytes, done))
        self._expect()

    def drop(self, stream: str) -> None:
        """What is left of it is not sent."""
        self._advance()
        if self._streams.pop(stream, None) is not None:
            self._expect()

    def _advance(self) -> None:
        """Let the heads of all streams move up to now."""
        moved = (self._clock.now - self._at) * self._rate / max(1, len(self._streams))
        self._at = self._clock.now
        for stream in self._streams.values():
            nbytes, done = stream[0]
            stream[0] = nbytes - moved, done

    def _expect(self) -> None:
        """Look again when the next head will be gone."""
        self._version += 1
        if self._streams:
            least = max(0.0, min(stream[0][0] for stream in self._streams.values()))
            version = self._version
            self._clock.after(least * len(self._streams) / self._rate, lambda: self._look(version))

    def _look(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        for name in [
            n for n, stream in self._streams.items() if stream[0][0] <= ROUNDING_S * self._rate
        ]:
            _, done = self._streams[name].popleft()
            if not self._streams[name]:
                del self._streams[name]
            self._clock.after(self._latency_s, done)
        self._expect()
