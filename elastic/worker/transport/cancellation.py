"""How an epoch ends: a flag that anybody may set and that wakes every wait, or a broken link.

`AbandonSignal.set` may come from any thread (usually the one that reads the agent's messages). Whoever blocks in
native code, where an event cannot wake it, registers a callback that makes that code fail.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

from elastic.domain.errors import ElasticError
from elastic.worker.transport import threads

T = TypeVar("T")


class EpochAbandoned(Exception):
    """The running epoch was left on purpose; not an error. The text says why."""


class LinkFailed(ElasticError):
    """Communication broke. `ranks`: whose connection broke first, as far as known; a suspicion, no proof."""

    def __init__(self, ranks: tuple[int, ...], detail: str) -> None:
        self.ranks, self.detail = ranks, detail
        super().__init__(f"link to rank {', '.join(map(str, ranks)) or 'unknown'} failed: {detail}")


class AbandonSignal:
    """One epoch's flag; set at most once, never cleared."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[], None]] = []
        self._reason = ""

    def set(self, reason: str) -> None:
        """Leave the epoch. The first reason stays. Callbacks run in the calling thread: keep them quick."""
        with self._lock:
            if self._event.is_set():
                return
            self._reason = reason
            self._event.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            callback()

    def is_set(self) -> bool:
        return self._event.is_set()

    @property
    def reason(self) -> str:
        return self._reason

    def wait(self, timeout: float | None = None) -> bool:
        return self._event.wait(timeout)

    def check(self) -> None:
        """Raise EpochAbandoned if the flag is set."""
        if self._event.is_set():
            raise EpochAbandoned(self._reason)

    def subscribe(self, callback: Callable[[], None]) -> None:
        """Have `callback` run when the flag is set; at once if it is."""
        with self._lock:
            if not self._event.is_set():
                self._callbacks.append(callback)
                return
        callback()

    def unsubscribe(self, callback: Callable[[], None]) -> None:
        with self._lock:
            self._callbacks = [c for c in self._callbacks if c != callback]


def run_abandonable(
    work: Callable[[], T], abandon: AbandonSignal, name: str, discard: Callable[[T], None] | None = None
) -> T:
    """Run `work` in a thread of its own and return its result, or leave it behind when `abandon` is set.

    Args:
        discard: disposes of a result that comes after the epoch was left.

    Raises:
        EpochAbandoned: the flag was set first.
        Exception: whatever `work` raised.
    """
    woken, lock = threading.Event(), threading.Lock()
    results: list[T] = []
    errors: list[BaseException] = []
    left: list[bool] = []

    def body() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001 - raised again by the waiting thread
            errors.append(error)
        else:
            with lock:
                results.append(result)
                late = bool(left)
            if late and discard is not None:
                discard(result)
        woken.set()

    abandon.subscribe(woken.set)
    threads.start(name, body)
    woken.wait()
    abandon.unsubscribe(woken.set)
    with lock:
        if results and not abandon.is_set():
            return results[0]
        left.append(True)
    if results and discard is not None:
        discard(results[0])
    abandon.check()
    raise errors[0]
