"""A process that exits while torch runs in one of its threads exits cleanly."""

from __future__ import annotations

import subprocess
import sys
import threading

from elastic.worker.transport import threads
from tests.patience import LONG_S

SCRIPT = """
import torch
from datetime import timedelta
from torch.distributed import TCPStore
from elastic.worker.transport import threads

second = timedelta(seconds=1)
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=second)

def wait_for_key():
    try:
        store.wait(["never"])
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
