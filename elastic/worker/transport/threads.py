"""Threads that run native code of torch: left alone by whoever starts them, waited for when the process ends.

Python ends the threads that outlive it as soon as they want to run Python again. Inside of C++ that aborts the process
("terminate called without an active exception"), and a job that is done would look like one that failed.
"""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections.abc import Callable

JOIN_TIMEOUT_S = 5.0
"""How long all of them together are waited for; one that hangs longer is left."""
_started: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


def start(name: str, work: Callable[[], None]) -> threading.Thread:
    """Run `work` in a daemon thread of this name."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    _started.add(thread)
    thread.start()
    return thread


def wait(seconds: float = JOIN_TIMEOUT_S) -> bool:
    """Wait for all that were started; False if some still run."""
    end = time.monotonic() + seconds
    for thread in list(_started):
        thread.join(max(0.0, end - time.monotonic()))
    return not any(thread.is_alive() for thread in _started)


atexit.register(wait)
