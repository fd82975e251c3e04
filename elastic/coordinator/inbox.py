"""What comes to the coordinator, in the order and with the time in which it came.

The coordinator may be behind: it plans, saves, and is told a thousand things at once. What waits here meanwhile was
said in time. So everything is stamped when it comes, and the rules are applied as of the newest stamp that was taken
out: a node is silent when the network thread does not hear it, not when nobody looks. Ticks come from the network
thread too, and pass through the queue like all else; when that thread itself was held up, two stamps lie far apart, and
`elastic.core.coordinator.transitions` does not count that time against anybody.

Heartbeats are passed on with what comes next, a tick at the latest: to wake the coordinator for each of them cost more
than all that is done about it.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastic.core.job.state import Tick
from elastic.core.protocol.messages import Heartbeat
from elastic.rpc.control.event_loop import event_loop

SWITCH_S = 0.0005
"""While decisions are made the network thread waits this long for the interpreter, again and again: with Python's own
5 ms, signs of life of 2,000 nodes came seconds late."""
WAIT_S = 1.0
"""Without ticks, for the network thread is held up, other duties are looked at this often."""


@dataclass(frozen=True, slots=True)
class _Due:
    """A tick that nobody has come to yet."""

    at: float


class Inbox:
    """A queue with one reader; `put` is thread-safe and returns at once."""

    def __init__(self, now: Callable[[], float], interval_s: Callable[[], float]) -> None:
        """`interval_s` is asked on the network thread after each tick."""
        self._now, self._interval_s = now, interval_s
        self._queue: queue.SimpleQueue[tuple[float, list[Any]]] = queue.SimpleQueue()
        self._heard: list[Any] = []
        self._counting, self._waiting = threading.Lock(), 0
        self._closed = False

    def __len__(self) -> int:
        return self._waiting

    def start(self) -> None:
        """Ticks begin."""
        event_loop().call_soon_threadsafe(self._tick, self._now())

    def put(self, item: Any) -> None:
        self._put([item])

    def say(self, session: Any, message: Any = None, envelope: object = None) -> None:
        """On the network thread: what a session says; None: it ended."""
        self._heard.append((session, message))
        if not isinstance(message, Heartbeat):
            self._pass_on()

    def _pass_on(self) -> None:
        heard, self._heard = self._heard, []
        self._put(heard)

    def _put(self, items: list[Any]) -> None:
        with self._counting:
            self._waiting += len(items)
        self._queue.put((self._now(), items))

    def take(self, most: int) -> Iterator[tuple[float, Any]]:
        """Wait for what comes next, and give it and what else is there, until that is `most` or more: when each came,
        and what it is."""
        given = 0
        with suppress(queue.Empty):
            while given < most:
                came_at, items = self._queue.get(timeout=0.0 if given else WAIT_S)
                given += len(items)
                with self._counting:
                    self._waiting -= len(items)
                for item in items:
                    due = isinstance(item, _Due)
                    yield came_at, Tick(max(0.0, self._now() - item.at)) if due else item

    def close(self) -> None:
        """No more ticks."""
        self._closed = True

    def _tick(self, due: float) -> None:
        if not self._closed:
            self._heard.append(_Due(due))
            self._pass_on()
            interval_s = self._interval_s()
            event_loop().call_later(interval_s, self._tick, self._now() + interval_s)
