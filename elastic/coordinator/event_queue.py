"""The coordinator's clock and its queue of events.

A busy coordinator handles events late, because messages of thousands of nodes arrive while it plans
or saves. So each event gets its time of arrival, and the rules use the time of the newest event
taken from the queue. A node then counts as silent only if no message arrived, not if the
coordinator is busy. Ticks come from the network thread, through the same queue. If the network
thread was delayed, `elastic.core.coordinator.transitions` extends the deadlines of the nodes.

A heartbeat waits for the next other event, such as a tick, because waking the coordinator for each
heartbeat costs more than handling it.
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
"""Python's thread switch interval in this process. With the default of 5 ms the network thread read
heartbeats of 2,000 nodes seconds late while the coordinator's thread was busy."""
WAIT_S = 1.0
"""Longest wait for an event if the network thread is delayed and no tick comes."""


class WallClock:
    """Wall time in seconds that never goes back during the life of the process."""

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
        """`interval_s()` returns the time until the next tick. Called on the network thread."""
        self._now, self._interval_s = now, interval_s
        self._queue: queue.SimpleQueue[tuple[float, list[Any]]] = queue.SimpleQueue()
        self._received: list[Any] = []
        self._lock, self._length = threading.Lock(), 0
        self._closed = False

    def __len__(self) -> int:
        return self._length

    def start(self) -> None:
        """Start the ticks."""
        event_loop().call_soon_threadsafe(self._tick, self._now())

    def put(self, item: Any) -> None:
        self._put([item])

    def receive(self, session: Any, message: Any = None, envelope: object = None) -> None:
        """Queue (session, message); None: the session ended. Called on the network thread."""
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
        """Wait for an event; yield (time of arrival, event) for all waiting events. Stops after
        `limit` events, or a few more if the last ones arrived together."""
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
        """Stop the ticks."""
        self._closed = True

    def _tick(self, due: float) -> None:
        if not self._closed:
            self._received.append(_PendingTick(due))
            self._flush()
            interval_s = self._interval_s()
            event_loop().call_later(interval_s, self._tick, self._now() + interval_s)
