"""Patience with a deadline, for what other processes do."""

from __future__ import annotations

import time
from collections.abc import Callable

import psutil


def gone(pid: int) -> bool:
    """Ended, whether or not its parent has asked for the exit code."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def wait_until(condition: Callable[[], object], timeout_s: float = 10.0) -> bool:
    """Look until `condition` holds or `timeout_s` went by; say whether it holds."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())
