"""Calls functions that may hang on threads of their own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")
log = logging.getLogger(__name__)
READ_S = 0.5
"""A call that takes longer is not waited for."""


class BackgroundReading(Generic[T]):
    """The newest result of `function()`. Thread-safe."""

    def __init__(self, name: str, function: Callable[[], T], first: T) -> None:
        """`name`: name of the thread. `first`: result until the first call has ended."""
        self._name, self._function, self._newest = name, function, first
        self._lock, self._began = threading.Lock(), 0.0
        self._reader: threading.Thread | None = None

    def read(self) -> T:
        """Call the function, unless a call is under way; return the newest result. Waits for the
        call until it has taken `READ_S`."""
        with self._lock:
            if self._reader is None or not self._reader.is_alive():
                self._began = time.monotonic()
                self._reader = threading.Thread(target=self._read, name=self._name, daemon=True)
                self._reader.start()
            reader, left_s = self._reader, self._began + READ_S - time.monotonic()
        if left_s > 0:
            reader.join(left_s)
        return self._newest

    def _read(self) -> None:
        try:
            self._newest = self._function()
        except Exception as error:  # noqa: BLE001 - the next call may succeed
            log.warning("the %s cannot be read: %r", self._name, error)


def ends_within(limit_s: float, name: str, function: Callable[[], object]) -> bool:
    """Call a function that may hang on a thread `name`; return whether it has ended after at most
    `limit_s`. An error is only logged. A function that has not ended goes on."""

    def call() -> None:
        try:
            function()
        except Exception:
            log.exception("%s failed", name)

    caller = threading.Thread(target=call, name=name, daemon=True)
    try:
        caller.start()
    except RuntimeError:  # no thread is left
        call()
        return True
    caller.join(limit_s)
    if caller.is_alive():
        log.error("%s has not ended within %g s and is left behind", name, limit_s)
    return not caller.is_alive()
