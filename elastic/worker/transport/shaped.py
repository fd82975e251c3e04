"""A transport whose messages to other nodes take as long as on a slower network (`elastic.rpc.shaping`).

A send returns at once, as always; a thread hands the message over when its bytes would have arrived. Sums over holders
take the time of a ring: each rank sends 2 (k - 1) / k of the data, in 2 (k - 1) turns. A gather is half of one.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from typing import Any

import torch

from elastic.rpc.shaping import Shaper
from elastic.worker.transport.gloo import Operation, Transport

CLOSE_CHECK_S = 0.5
"""A message that came too late for the thread is found out after this."""


class _DelayedSend:
    """A message that is not handed over yet."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.work: Operation | None = None
        self.error: RuntimeError | None = None

    def is_completed(self) -> bool:
        """An error is not: it is for whoever waits."""
        return self.begun.is_set() and self.work is not None and bool(self.work.is_completed())


class _DelayedCollective:
    """A sum that is not done before `moment`."""

    def __init__(self, work: Operation, moment: float) -> None:
        self.work, self.moment = work, moment

    def is_completed(self) -> bool:
        return time.monotonic() >= self.moment and bool(self.work.is_completed())


class ShapedTransport:
    """Shapes what goes to the ranks in `remote`; the rest goes through `inner` as it is."""

    def __init__(self, inner: Transport, shaper: Shaper, remote: Collection[int]) -> None:
        self._inner, self._shaper, self._remote = inner, shaper, frozenset(remote)
        self._queue: queue.SimpleQueue[tuple[float, torch.Tensor, int, int, _DelayedSend] | None] = (
            queue.SimpleQueue()
        )
        self._closed = threading.Event()
        threading.Thread(target=self._run, name="shaper", daemon=True).start()

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Operation:
        if dst not in self._remote:
            return self._inner.send(tensor, dst, tag)
        later = _DelayedSend()
        moment = self._shaper.reserve(tensor.nbytes, training=True) + self._shaper.limit.latency_s
        self._queue.put((moment, tensor, dst, tag, later))
        return later

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Operation:
        return self._inner.recv(tensor, src, tag)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Operation:
        work, k = self._inner.all_reduce(tensor, ranks), len(ranks)
        if not self._remote.intersection(ranks):
            return work
        sent = int(2 * (k - 1) / k * tensor.nbytes)
        moment = self._shaper.reserve(sent, training=True) + 2 * (k - 1) * self._shaper.limit.latency_s
        return _DelayedCollective(work, moment)

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> Operation:
        work, turns = self._inner.all_gather(outputs, tensor, ranks), len(ranks) - 1
        if not self._remote.intersection(ranks):
            return work
        moment = self._shaper.reserve(turns * tensor.nbytes, training=True)
        return _DelayedCollective(work, moment + turns * self._shaper.limit.latency_s)

    def open_set(self, ranks: tuple[int, ...]) -> None:
        self._inner.open_set(ranks)

    def wait(self, operation: Operation) -> None:
        one: Any = operation
        if isinstance(one, _DelayedSend):
            while not one.begun.wait(CLOSE_CHECK_S):
                if self._closed.is_set():
                    raise RuntimeError("the links were closed")
            if one.error is not None:
                raise one.error
            assert one.work is not None
            self._inner.wait(one.work)
        elif isinstance(one, _DelayedCollective):
            self._inner.wait(one.work)
            if self._closed.wait(max(0.0, one.moment - time.monotonic())):
                raise RuntimeError("the links were closed")
        else:
            self._inner.wait(operation)

    def close(self) -> None:
        self._closed.set()
        self._queue.put(None)
        self._inner.close()

    def _run(self) -> None:
        """Hand messages over, each in its time; after `close` they fail."""
        while (item := self._queue.get()) is not None:
            moment, tensor, dst, tag, later = item
            try:
                if self._closed.wait(max(0.0, moment - time.monotonic())):
                    raise RuntimeError("the links were closed")
                later.work = self._inner.send(tensor, dst, tag)
            except Exception as error:  # noqa: BLE001 - whatever it is, the one who waits must hear of it
                later.error = error if isinstance(error, RuntimeError) else RuntimeError(str(error))
            later.begun.set()
        while not self._queue.empty():
            left = self._queue.get()
            if left is not None:
                left[-1].error = RuntimeError("the links were closed")
                left[-1].begun.set()
