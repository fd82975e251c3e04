"""The coordinator's clock and its queue of events.

A busy coordinator handles events late: while it plans or saves, messages of thousands of nodes
arrive. So each event gets the time of its arrival, and the rules are applied as of the newest event
that was taken: a node is silent if the network thread does not hear it, not if the coordinator is
busy. Ticks come from the network thread and pass through the queue too. If the network thread
itself was delayed, `elastic.core.coordinator.transitions` blames no node for that time.

Heartbeats are delivered with the next other event, at the latest a tick: waking the coordinator for
each of them costs more than their handling.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic.core.job.state import Tick
from elastic.core.protocol.messages import Heartbeat
from elastic.rpc.control.event_loop import event_loop

SWITCH_S = 0.0005
"""Interpreter switch interval of the process. With Python's default of 5 ms the network thread read
heartbeats of 2,000 nodes seconds late while decisions were made."""
WAIT_S = 1.0
"""Longest wait for an event, in case that the network thread is delayed and no tick comes."""


class WallClock:
    """Wall time in seconds that never jumps back while the process lives."""

    def __init__(self) -> None:
        self._base = time.time() - time.monotonic()

    def now(self) -> float:
        return self._base + time.monotonic()


@dataclass(frozen=True, slots=True)
class _PendingTick:
    at: float


class EventQueue:
    """A queue with one reader. `put` is thread-safe and never blocks."""

    def __init__(self, now: Callable[[], float], interval_s: Callable[[], float]) -> None:
        """`interval_s` returns the time to the next tick; called on the network thread."""
        self._now, self._interval_s = now, interval_s
        self._queue: queue.SimpleQueue[tuple[float, list[Any]]] = queue.SimpleQueue()
        self._received: list[Any] = []
        self._lock, self._length = threading.Lock(), 0
        self._closed = False

    def __len__(self) -> int:
        return self._length

    def start(self) -> None:
        """Begin with the ticks."""
        event_loop().call_soon_threadsafe(self._tick, self._now())

    def put(self, item: Any) -> None:
        self._put([item])

    def receive(self, session: Any, message: Any = None, envelope: object = None) -> None:
        """Queue (session, message); `message` is None when the session ends. Called on the network
        thread."""
        self._received.append((session, message))
        if not isinstance(message, Heartbeat):
            self._flush()

    def _flush(self) -> None:
        received, self._received = self._received, []
        self._put(received)

    def _put(self, items: list[Any]) -> None:
        with self._lock:
            self._length += len(items)
        self._queue.put((self._now(), items))

    def take(self, limit: int) -> Iterator[tuple[float, Any]]:
        """Wait for an event; yield (time of arrival, event) for it and for the waiting ones, until
        `limit` or more were taken."""
        taken = 0
        with suppress(queue.Empty):
            while taken < limit:
                came_at, items = self._queue.get(timeout=0.0 if taken else WAIT_S)
                taken += len(items)
                with self._lock:
                    self._length -= len(items)
                for item in items:
                    if isinstance(item, _PendingTick):
                        item = Tick(max(0.0, self._now() - item.at))
                    yield came_at, item

    def close(self) -> None:
        """End the ticks."""
        self._closed = True

    def _tick(self, due: float) -> None:
        if not self._closed:
            self._received.append(_PendingTick(due))
            self._flush()
            interval_s = self._interval_s()
            event_loop().call_later(interval_s, self._tick, self._now() + interval_s)
