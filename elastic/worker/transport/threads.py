"""Daemon threads that run torch's native code, joined when the process exits.

Python ends daemon threads at exit as soon as they try to run Python code again. Inside C++ frames
that aborts the process ("terminate called without an active exception"), and a job that succeeded
would look like one that failed. Hence an exit handler waits for these threads first.
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


def start(name: str, work: Callable[[], object]) -> threading.Thread:
    """Run `work` in a daemon thread of this name."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def wait(seconds: float = JOIN_TIMEOUT_S) -> bool:
    """Wait for all started threads. Returns False if some still run after `seconds`."""
    end = time.monotonic() + seconds
    for thread in list(_started):
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in _started)


atexit.register(wait)
