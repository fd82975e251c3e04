"""Ends an epoch early: a signal that wakes every blocked thread, and the error of a broken link.

Any thread may call `AbandonSignal.set`; usually the thread that reads the agent's messages does. A
thread that blocks in native code, where an event cannot wake it, subscribes a callback that makes
the native code fail.

A signal may be set *gently*: it ends the waits of this worker, but leaves its connections open for
workers that still compute (docs/design/local-recovery.md).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

from elastic.domain.errors import ElasticError
from elastic.worker.transport import threads

T = TypeVar("T")


class EpochAbandoned(Exception):
    """Raised to leave an epoch on purpose, which is no failure. The text tells the reason."""


class LinkFailed(ElasticError):
    """Communication with other ranks failed.

    `ranks` are the ranks whose connections are suspected to have broken first; () if unknown.
    """

    def __init__(self, ranks: tuple[int, ...], detail: str) -> None:
        self.ranks, self.detail = ranks, detail
        names = ", ".join(map(str, ranks)) or "unknown"
        super().__init__(f"link to rank {names} failed: {detail}")


class AbandonSignal:
    """Tells all threads of a worker to leave one epoch. Never cleared.

    A signal that was set gently may be set again, not gently. No other call has an effect after the
    first one.
    """

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._gentle = False
        self.reason = ""

    def set(self, reason: str, gently: bool = False) -> None:
        """Abandon the epoch; only the first reason is kept.

        Callbacks run in the calling thread and must be quick. After `gently`, they may be called a
        second time.
        """
        with self._lock:
            if not self._event.is_set():
                self.reason = reason
            elif gently or not self._gentle:
                return
            self._gentle = gently
            self._event.set()
            callbacks = self._callbacks
            self._callbacks = [*callbacks] if gently else []
        for callback in callbacks:
            callback()

    def is_set(self) -> bool:
        return self._event.is_set()

    @property
    def gentle(self) -> bool:
        """Whether the signal was set gently, and not otherwise since then."""
        return self._gentle

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the signal is set. Returns False after `timeout` seconds."""
        return self._event.wait(timeout)

    def check(self) -> None:
        """Raise EpochAbandoned if the signal is set."""
        if self._event.is_set():
            raise EpochAbandoned(self.reason)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the signal is set, or now if it is set already."""
        with self._lock:
            is_set = self._event.is_set()
            if not is_set or self._gentle:
                self._callbacks.append(callback)
        if is_set:
            callback()

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks = [c for c in self._callbacks if c != callback]


def run_abandonable(
    work: Callable[[], T],
    abandon: AbandonSignal,
    name: str,
    discard: Callable[[T], None] | None = None,
    *,
    within_s: float | None = None,
) -> T:
    """Run `work` in its own thread and return its result.

    If `abandon` is set first, or `within_s` seconds are over, the thread is left behind.

    Args:
        name: name of the thread.
        discard: releases a result that arrives too late.
        within_s: limit on the time; None: no limit.

    Raises:
        EpochAbandoned: the signal was set before `work` ended.
        RuntimeError: the limit was over before `work` ended.
        Exception: any error of `work`.
    """
    woken, result = threading.Event(), Future[T]()

    def body() -> None:
        try:
            result.set_result(work())
        except BaseException as error:  # noqa: BLE001 - the waiting thread raises it again
            result.set_exception(error)
        woken.set()

    abandon.subscribe(woken.set)
    threads.start(name, body)
    in_time = woken.wait(within_s)
    abandon.unsubscribe(woken.set)
    if in_time and not abandon.is_set():
        return result.result()
    if discard is not None:
        result.add_done_callback(lambda late: None if late.exception() else discard(late.result()))
    abandon.check()
    raise RuntimeError(f"{name} did not end within {within_s:g} s")
