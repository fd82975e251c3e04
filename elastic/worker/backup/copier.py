"""Writes copies to host memory in background threads; from a GPU, on streams of their own.

Jobs run one after the other, and the copies of one job in parallel. A copy waits on the device for
the work that was queued before `start`, and for nothing later. Before a change of data that a job
reads, wait for the job's future (`GradientSum.settle`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import torch

T = TypeVar("T")
THREADS = 4
"""One thread alone, with copying and checksums, uses a fraction of the bus bandwidth."""


class Copier:
    """Runs one worker's copy jobs in background threads, until `close`."""

    def __init__(self, device: torch.device, failed: Callable[[BaseException], None]) -> None:
        """`failed(error)` is called in the job's thread if a job raises an error."""
        self._device, self._failed = device, failed
        self._jobs = ThreadPoolExecutor(1, "copier")
        self._pool = ThreadPoolExecutor(THREADS, "copy")
        self._local = threading.local()
        self._last: Future[None] | None = None

    def start(
        self, writes: Sequence[Callable[[], T]], then: Callable[[list[T]], None]
    ) -> Future[None]:
        """Start a job and return its future: run `writes`, then call `then` with the results."""
        cuda = self._device.type == "cuda"
        ready = torch.cuda.current_stream(self._device).record_event() if cuda else None
        self._last = self._jobs.submit(self._run, ready, writes, then)
        return self._last

    def settle(self, timeout_s: float | None = None) -> None:
        """Wait for all jobs. Raises the last job's error, if it failed, or TimeoutError."""
        if self._last is not None:
            self._last.result(timeout_s)

    def close(self) -> None:
        self._jobs.shutdown(wait=False)
        self._pool.shutdown(wait=False)

    def _run(
        self,
        ready: torch.cuda.Event | None,
        writes: Sequence[Callable[[], T]],
        then: Callable[[list[T]], None],
    ) -> None:
        try:
            then(list(self._pool.map(partial(self._write, ready), writes)))
        except Exception as error:
            self._failed(error)
            raise

    def _write(self, ready: torch.cuda.Event | None, write: Callable[[], T]) -> T:
        """Call `write`; on a GPU, on this thread's own stream and after the event `ready`."""
        if ready is None:
            return write()
        if not hasattr(self._local, "stream"):
            torch.cuda.set_device(self._device)
            self._local.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._local.stream):
            self._local.stream.wait_event(ready)
            result = write()
            self._local.stream.synchronize()
        return result
