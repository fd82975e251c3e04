"""A tensor-parallel group whose ranks are threads of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable

from tests.patience import LONG_S


class ThreadGroup:
    """A tensor-parallel group of threads; `sync` is the maximum of their flags."""

    def __init__(self, size: int) -> None:
        self.barrier = threading.Barrier(size, timeout=LONG_S)
        self.flags = [False] * size
        self.calls = [0] * size

    def sync_of(self, rank: int) -> Callable[[bool], bool]:
        def sync(flag: bool) -> bool:
            self.calls[rank] += 1
            self.flags[rank] = flag
            self.barrier.wait()
            found = any(self.flags)
            self.barrier.wait()
            return found

        return sync
