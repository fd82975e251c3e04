"""Requests of `elastic run`, signals, and waiting with a deadline."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import psutil

from elastic.command_line import read_flags
from elastic.launcher.commands.run import run
from elastic.launcher.flags.request import Request, request
from tests.patience import LONG_S


def read(*words: str, **environ: str) -> Request:
    """The request of `elastic run WORDS` with these environment variables."""
    with mock.patch.dict(os.environ, environ):
        return request(read_flags(run, words), environ)


def gone(pid: int) -> bool:
    """Whether the process has ended; it may be a zombie."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return True


def send(pid: int, number: int) -> None:
    """Send a signal; after SIGSTOP wait until all threads of the process have stopped.

    The thread that gets the signal stops the others, which takes time on a busy machine.
    """
    os.kill(pid, number)
    if number == signal.SIGSTOP:
        assert wait_until(lambda: gone(pid) or set(thread_states(pid)) <= set("tTZX"))


def thread_states(pid: int) -> list[str]:
    """State of each thread, one letter as in proc(5)."""
    found: list[str] = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it ended just now
            found.append(stat.read_text().rpartition(")")[2].split()[0])
    return found


def wait_until(condition: Callable[[], object], timeout_s: float = LONG_S) -> bool:
    """Wait until `condition` holds; False after `timeout_s`."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return bool(condition())
