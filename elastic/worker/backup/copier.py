"""Writes copies to host memory beside the computing: from a GPU, on streams of its own.

Jobs are done one after the other, the copies of a job by several threads. Each waits, on the device, for what was
computed when the job was given, and for nothing later. Whoever is to change what is being read waits for its
`Copying` first (`LayerReplica`).
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

T = TypeVar("T")
THREADS = 4
"""One thread copies from a GPU and takes checksums at a fraction of what the bus carries."""


def beside(device: torch.device) -> torch.device | None:
    """`device`, if copies are made beside its computing: a GPU's always, others' where it is asked for."""
    return device if device.type == "cuda" or os.environ.get("ELASTIC_COPY_BESIDE") == "1" else None


class Copying:
    """A job under way."""

    def __init__(self) -> None:
        self._done = threading.Event()
        self.error: BaseException | None = None

    def wait(self) -> None:
        """Until all was read that the job reads. Raises what went wrong in it."""
        self._done.wait()
        if self.error is not None:
            raise self.error

    def end(self, error: BaseException | None) -> None:
        self.error = error
        self._done.set()


_Job = tuple[Copying, torch.cuda.Event | None, Sequence[Callable[[], Any]], Callable[[list[Any]], None]]


class Copier:
    """One a worker. Its threads begin with the first job and end with the process, or with `close`."""

    def __init__(
        self, device: torch.device, failed: Callable[[BaseException], None], threads: int = THREADS
    ) -> None:
        """`failed` hears of errors, from the thread that they came up in."""
        self._device, self._failed = device, failed
        self._pool = ThreadPoolExecutor(threads, "copy")
        self._own = threading.local()
        self._queue: SimpleQueue[_Job | None] = SimpleQueue()
        self._last = Copying()
        self._last.end(None)
        self._thread: threading.Thread | None = None

    def start(self, writes: Sequence[Callable[[], T]], then: Callable[[list[T]], None]) -> Copying:
        """Run `writes`, then `then` with what they returned, after all jobs before. Returns at once."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="copier", daemon=True)
            self._thread.start()
        ready = torch.cuda.current_stream(self._device).record_event() if self._cuda else None
        self._last = Copying()
        self._queue.put((self._last, ready, writes, then))
        return self._last

    def settle(self) -> None:
        """Wait for all jobs. Raises what went wrong in the last one."""
        self._last.wait()

    def close(self) -> None:
        self._queue.put(None)
        self._pool.shutdown(wait=False)

    @property
    def _cuda(self) -> bool:
        return self._device.type == "cuda"

    def _run(self) -> None:
        while (job := self._queue.get()) is not None:
            copying, ready, writes, then = job
            error: BaseException | None = None
            try:
                then(list(self._pool.map(partial(self._write, ready), writes)))
            except Exception as problem:  # noqa: BLE001 - whatever it is, the main thread must hear of it
                error = problem
                self._failed(problem)
            copying.end(error)

    def _write(self, ready: torch.cuda.Event | None, write: Callable[[], T]) -> T:
        with self._stream(ready):
            return write()

    @contextlib.contextmanager
    def _stream(self, ready: torch.cuda.Event | None) -> Any:
        """This thread's own stream, behind what the job was given with."""
        if ready is None:
            yield
            return
        if not hasattr(self._own, "stream"):
            torch.cuda.set_device(self._device)
            self._own.stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        with torch.cuda.stream(self._own.stream):
            self._own.stream.wait_event(ready)
            yield
            self._own.stream.synchronize()
