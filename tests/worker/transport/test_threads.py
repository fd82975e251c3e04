"""A process that exits while torch runs in one of its threads exits cleanly."""

from __future__ import annotations

import subprocess
import sys
import threading
from concurrent import futures

import pytest

from elastic.worker.transport import threads
from tests.patience import LONG_S

SCRIPT = """
import torch
from datetime import timedelta
from torch.distributed import TCPStore
from elastic.worker.transport import threads

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def wait_for_key():
    try:
        store.wait(["never"], timedelta(seconds=1))
    except RuntimeError:
        print("timed out", flush=True)

threads.start("wait", wait_for_key)
"""


def test_the_process_exits_after_its_threads() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=LONG_S
    )
    assert (done.returncode, done.stdout) == (0, "timed out\n"), done.stderr


def test_a_thread_that_hangs_is_left_behind() -> None:
    release = threading.Event()
    thread = threads.start("hangs", lambda: bool(release.wait()))
    assert not threads.wait(0.01)
    release.set()
    thread.join()
    assert threads.wait(LONG_S)


def test_a_thread_that_is_about_to_start_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    entered, proceed, ended = threading.Event(), threading.Event(), threading.Event()
    start = threading.Thread.start

    def start_late(thread: threading.Thread) -> None:
        if thread.name == "late":
            entered.set()
            proceed.wait()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", start_late)
    with futures.ThreadPoolExecutor(2) as pool:
        starting = pool.submit(threads.start, "late", ended.set)
        entered.wait()
        waiting = pool.submit(threads.wait, LONG_S)
        try:
            with pytest.raises(futures.TimeoutError):
                waiting.result(0.1)
        finally:
            proceed.set()
        assert waiting.result(LONG_S)
        starting.result(LONG_S).join()
    assert ended.is_set()
