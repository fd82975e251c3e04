"""The event loop thread that all gRPC work of a process runs on, and threads that run callbacks in order.

One loop a process, because gRPC's asyncio layer shares one completion queue between loops and complains when
there are several. Callbacks never run on it: a slow one would hold up everybody's messages and keepalives.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)
_starting = threading.Lock()


def event_loop() -> asyncio.AbstractEventLoop:
    """The running loop of this process; started at first use, ends with the process."""
    with _starting:
        return _started_loop()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="rpc-loop", daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop and wait for its result; from any other thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


class Directly:
    """In place of a dispatcher where callbacks return at once: they run on the loop itself, in order."""

    def post(self, callback: Callable[[], object]) -> None:
        try:
            callback()
        except Exception:  # its owner reads of it in the log; the others must be served
            log.exception("a callback failed")

    def close(self) -> None:
        """Nothing is left to run."""


class Dispatcher:
    """One thread that runs callbacks one after another, in the order in which they were posted."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def post(self, callback: Callable[[], object]) -> None:
        self._queue.put(callback)

    def abandon(self) -> None:
        """Begin no callback any more; the one at hand goes on."""
        self._abandoned = True

    def close(self) -> None:
        """Run what was posted so far, then end. Waits for the end, unless called from a callback."""
        self._queue.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while (callback := self._queue.get()) is not None and not self._abandoned:
            try:
                callback()
            except Exception:  # its owner reads of it in the log; the others must be served
                log.exception("a callback failed")
