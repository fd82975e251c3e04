"""The event loop thread that all gRPC work of a process runs on, and threads that run callbacks in order.

One loop a process, because gRPC's asyncio layer shares one completion queue between loops and complains when
there are several. Callbacks never run on it: a slow one would hold up everybody's messages and keepalives.

gRPC's poller thread wakes the loop by a byte for each event, in a socket that takes a few hundred; its reader handles
all events that are there, but takes one byte. So each event cost a turn of the loop; and when turns became long, as
with a busy second thread, the socket was full, the poller waited for one byte a turn, and messages for seconds. Our
loop takes all bytes but the one (decision 023).
"""

from __future__ import annotations

import asyncio
import functools
import logging
import queue
import socket
import threading
from collections.abc import Callable, Collection, Coroutine
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

T = TypeVar("T")
Ts = TypeVarTuple("Ts")
log = logging.getLogger(__name__)
WAKES = 1 << 16
"""More bytes than the socket takes."""
CANCEL_AGAIN_S = 2.0
"""Time for a task to end once it is cancelled; then it is told again."""
_starting = threading.Lock()


class Loop(asyncio.SelectorEventLoop):
    """One on which gRPC's poller never waits for more than one turn."""

    spared = 0
    """Turns that were not needed."""

    def add_reader(self, fd: FileDescriptorLike, callback: Callable[[*Ts], Any], *args: *Ts) -> None:
        function = getattr(callback, "func", callback)
        if isinstance(fd, socket.socket) and getattr(function, "__name__", "") == "_handle_events":
            super().add_reader(fd, self._woken, fd, partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)

    def _woken(self, wakes: socket.socket, handle: Callable[[], Any]) -> None:
        """Bytes first, events then: what comes in between has a byte that is still there."""
        with suppress(BlockingIOError):
            more = len(wakes.recv(WAKES, socket.MSG_PEEK)) - 1
            if more > 0:
                self.spared += len(wakes.recv(more))
        handle()


def event_loop() -> asyncio.AbstractEventLoop:
    """The running loop of this process; started at first use, ends with the process."""
    with _starting:
        return _started_loop()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = Loop()
    threading.Thread(target=loop.run_forever, name="rpc-loop", daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop and wait for its result; from any other thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


async def ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks and return when all have ended.

    They are told again: in Python 3.11 `asyncio.wait_for` forgets a cancellation that meets the end of its wait.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


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
