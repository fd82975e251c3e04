"""The event loop thread that runs all gRPC work of a process, and threads for callbacks.

There is one loop per process, because gRPC's asyncio layer shares one completion queue between
loops and complains about several. A callback that may be slow must not run on the loop, because it
would delay everybody's messages and keepalives.

gRPC's poller thread wakes the loop by one byte per event, through a socket that holds a few hundred
bytes. gRPC's reader handles all waiting events in one turn of the loop but takes one byte, so that
each event costs a turn. If turns are long, for example because of a busy second thread, the socket
fills up, the poller waits a turn per event, and messages wait for seconds. `GrpcEventLoop`
therefore takes all bytes but one (decision 023).
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
"""Bytes to take at once, more than the socket holds."""
CANCEL_AGAIN_S = 2.0
"""A cancelled task that has not ended after this time is cancelled again."""
_starting = threading.Lock()


class GrpcEventLoop(asyncio.SelectorEventLoop):
    """An event loop on which gRPC's poller never waits for more than one turn."""

    spared = 0
    """Number of turns saved so far."""

    def add_reader(
        self, fd: FileDescriptorLike, callback: Callable[[*Ts], Any], *args: *Ts
    ) -> None:
        function = getattr(callback, "func", callback)
        if isinstance(fd, socket.socket) and getattr(function, "__name__", "") == "_handle_events":
            super().add_reader(fd, self._woken, fd, partial(callback, *args))
        else:
            super().add_reader(fd, callback, *args)

    def _woken(self, wakes: socket.socket, handle: Callable[[], Any]) -> None:
        """Take the bytes before the events: an event that comes in between still has its byte."""
        with suppress(BlockingIOError):
            more = len(wakes.recv(WAKES, socket.MSG_PEEK)) - 1
            if more > 0:
                self.spared += len(wakes.recv(more))
        handle()


def event_loop() -> asyncio.AbstractEventLoop:
    """Return the loop of this process. It starts at the first use and ends with the process."""
    with _starting:
        return _started_loop()


@functools.cache
def _started_loop() -> asyncio.AbstractEventLoop:
    loop = GrpcEventLoop()
    threading.Thread(target=loop.run_forever, name="rpc-loop", daemon=True).start()
    return loop


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the loop and return its result. Call this from any other thread."""
    return asyncio.run_coroutine_threadsafe(coroutine, event_loop()).result()


async def ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Cancel tasks until all have ended.

    In Python 3.11 `asyncio.wait_for` loses a cancellation that comes at the end of its wait.
    """
    pending = set(tasks)
    while pending:
        for task in pending:
            task.cancel()
        _, pending = await asyncio.wait(pending, timeout=CANCEL_AGAIN_S)


def run_callback(callback: Callable[[], object]) -> None:
    """Call `callback`, and only log an error, so that the next callbacks run."""
    try:
        callback()
    except Exception:
        log.exception("a callback failed")


class Dispatcher:
    """Runs callbacks on one thread, in the order in which they were posted."""

    def __init__(self, name: str) -> None:
        self._queue: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._abandoned = False
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._thread.start()

    def post(self, callback: Callable[[], object]) -> None:
        self._queue.put(callback)

    def abandon(self) -> None:
        """Start no further callback; the current one continues."""
        self._abandoned = True
        self._queue.put(None)  # a thread that waits for a callback ends

    def end(self) -> None:
        """Run the callbacks posted so far, then end. Do not wait for it."""
        self._queue.put(None)

    def close(self) -> None:
        """Run the callbacks posted so far, then end. Wait for the end, except in a callback."""
        self.end()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        while (callback := self._queue.get()) is not None and not self._abandoned:
            run_callback(callback)
