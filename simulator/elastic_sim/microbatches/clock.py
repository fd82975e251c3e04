"""Virtual time: one heap of (time, order) actions and one seeded generator for all delays."""

from __future__ import annotations

import heapq
import itertools
import random
from collections import deque
from collections.abc import Callable

BEGIN_S = 1000.0
"""Virtual time at the start of a run; decisions use time 0 for "never"."""
ROUNDING_S = 1e-9


class VirtualClock:
    """Runs actions in the order of their times, then in the order of scheduling."""

    def __init__(self, seed: int, jitter: float) -> None:
        """`jitter`: largest relative deviation of a varied delay."""
        self.now = BEGIN_S
        self._rng, self._jitter = random.Random(seed), jitter
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()

    @property
    def ms(self) -> int:
        """Milliseconds since the beginning."""
        return round((self.now - BEGIN_S) * 1000)

    def vary(self, seconds: float) -> float:
        """Return `seconds` times a random factor of mean 1."""
        return seconds * self._rng.uniform(1 - self._jitter, 1 + self._jitter)

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action exactly `seconds` from now."""
        heapq.heappush(self._heap, (self.now + seconds, next(self._order), action))

    def after_about(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule an action after a varied delay."""
        self.after(self.vary(seconds), action)

    def run(self, until_s: float, over: Callable[[], bool]) -> None:
        """Run actions up to `until_s` after the beginning, or until `over` returns True."""
        end = BEGIN_S + until_s
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if over():
                return
        self.now = max(self.now, end)


class Uplink:
    """A node's outgoing link. Streams share its bandwidth evenly; each stream keeps its order."""

    def __init__(self, clock: VirtualClock, bytes_per_s: float, latency_s: float) -> None:
        self._clock, self._rate, self._latency_s = clock, bytes_per_s, latency_s
        self._streams: dict[str, deque[tuple[float, Callable[[], None]]]] = {}
        """(bytes left, action at arrival) of each transfer, by stream."""
        self._updated_at, self._version = clock.now, 0

    @property
    def busy_s(self) -> float:
        """Seconds until everything queued is sent."""
        self._advance()
        left = sum(nbytes for stream in self._streams.values() for nbytes, _ in stream)
        return left / self._rate if self._rate > 0 else 0.0

    def send(self, stream: str, nbytes: float, done: Callable[[], None]) -> None:
        """Queue a transfer and call `done` when it has arrived."""
        if self._rate <= 0:
            self._clock.after(self._latency_s, done)
            return
        self._advance()
        self._streams.setdefault(stream, deque()).append((nbytes, done))
        self._schedule()

    def drop(self, stream: str) -> None:
        """Cancel the unsent transfers of a stream."""
        self._advance()
        if self._streams.pop(stream, None) is not None:
            self._schedule()

    def _advance(self) -> None:
        """Subtract the bytes sent until now from the first transfer of each stream."""
        moved = (self._clock.now - self._updated_at) * self._rate / max(1, len(self._streams))
        self._updated_at = self._clock.now
        for stream in self._streams.values():
            nbytes, done = stream[0]
            stream[0] = nbytes - moved, done

    def _schedule(self) -> None:
        """Schedule the end of the next transfer."""
        self._version += 1
        if self._streams:
            least = max(0.0, min(stream[0][0] for stream in self._streams.values()))
            version = self._version
            seconds = least * len(self._streams) / self._rate
            self._clock.after(seconds, lambda: self._finish(version))

    def _finish(self, version: int) -> None:
        if version != self._version:
            return
        self._advance()
        rounding = ROUNDING_S * self._rate
        for name in [n for n, stream in self._streams.items() if stream[0][0] <= rounding]:
            _, done = self._streams[name].popleft()
            if not self._streams[name]:
                del self._streams[name]
            self._clock.after(self._latency_s, done)
        self._schedule()
