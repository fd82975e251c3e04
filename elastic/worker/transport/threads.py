"""Daemon threads that run torch's native code, joined when the process exits.

At exit, Python ends daemon threads as soon as they try to run Python code again. If a thread is
inside C++ frames then, the process aborts ("terminate called without an active exception"), and a
successful job would look like a failed job. Hence an exit handler waits for these threads first.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

JOIN_TIMEOUT_S = 5.0
"""Time for all threads together to end at exit; threads that hang longer are left behind."""
_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
_starting = threading.Lock()
"""Held while a thread starts: one that is not running yet cannot be joined."""


def start(name: str, work: Callable[[], object]) -> threading.Thread:
    """Run `work` in a new daemon thread and return the thread."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    with _starting:
        thread.start()
        _started.add(thread)
    return thread


def wait(seconds: float = JOIN_TIMEOUT_S) -> bool:
    """Wait for all started threads, also for those that are started meanwhile.

    Returns False if a thread still runs after `seconds`.
    """
    end = time.monotonic() + seconds
    while running := _running():
        if time.monotonic() >= end:
            return False
        for thread in running:
            thread.join(max(0.0, end - time.monotonic()))
    return True


def _running() -> list[threading.Thread]:
    with _starting:
        return [thread for thread in _started if thread.is_alive()]


atexit.register(wait)
