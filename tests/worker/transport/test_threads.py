"""A process that ends while torch works in a thread of ours ends in order."""

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
from elastic.worker import threads

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=1))

def ask():
    try:
        store.wait(["never"])
    except RuntimeError:
        print("asked", flush=True)

threads.start("ask", ask)
"""


def test_the_process_ends_after_them() -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=LONG_S)
    assert (done.returncode, done.stdout) == (0, "asked\n"), done.stderr


def test_one_that_hangs_is_left() -> None:
    go_on = threading.Event()
    thread = threads.start("hangs", lambda: bool(go_on.wait()))
    assert not threads.wait(0.01)
    go_on.set()
    thread.join()
    assert threads.wait(LONG_S)
