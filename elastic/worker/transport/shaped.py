"""Transport whose messages to other nodes take as long as on a slower network.

`elastic.rpc.link_shaping` defines the bandwidth and latency. A send returns at once, as on any
transport; a thread hands the message over when its last byte would have arrived. An all-reduce
over k ranks takes the time of a ring: each rank sends 2 (k - 1) / k of the bytes in 2 (k - 1)
turns. An all-gather takes k - 1 turns, with the tensor's bytes sent per turn.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Collection
from concurrent.futures import Future

import torch

from elastic.rpc.link_shaping import LinkShaper
from elastic.worker.transport.interface import Operation, Transport

_CLOSED = "the links were closed"


class _DelayedSend(Future[Operation]):
    """A message that may not have been handed over yet; the result is the inner operation."""

    def is_completed(self) -> bool:
        """Return whether the message has left; false after an error, which only `wait` raises."""
        return self.done() and self.exception() is None and self.result().is_completed()


class _DelayedCollective:
    """A collective that does not complete before the time `moment` (time.monotonic)."""

    def __init__(self, work: Operation, moment: float) -> None:
        self.work, self.moment = work, moment

    def is_completed(self) -> bool:
        return time.monotonic() >= self.moment and bool(self.work.is_completed())


class ShapedTransport:
    """Delays the traffic to the ranks in `remote`; `inner` moves all tensors."""

    def __init__(self, inner: Transport, shaper: LinkShaper, remote: Collection[int]) -> None:
        self._inner, self._shaper, self._remote = inner, shaper, frozenset(remote)
        self._queue: queue.SimpleQueue[tuple[float, torch.Tensor, int, int, _DelayedSend] | None]
        self._queue = queue.SimpleQueue()
        self._closed, self._lock = threading.Event(), threading.Lock()
        """`_closed`: set by `close` and `wake`. No message is handed over any more."""
        threading.Thread(target=self._run, name="shaper", daemon=True).start()

    def send(self, tensor: torch.Tensor, dst: int, tag: int) -> Operation:
        if dst not in self._remote:
            return self._inner.send(tensor, dst, tag)
        delayed = _DelayedSend()
        sent_at = self._shaper.reserve(tensor.nbytes, training=True)
        moment = sent_at + self._shaper.limit.latency_s
        with self._lock:
            if self._closed.is_set():
                raise RuntimeError(_CLOSED)
            self._queue.put((moment, tensor, dst, tag, delayed))
        return delayed

    def recv(self, tensor: torch.Tensor, src: int, tag: int) -> Operation:
        return self._inner.recv(tensor, src, tag)

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> Operation:
        work, k = self._inner.all_reduce(tensor, ranks), len(ranks)
        if not self._remote.intersection(ranks):
            return work
        turns = 2 * (k - 1)
        sent_at = self._shaper.reserve(int(turns / k * tensor.nbytes), training=True)
        return _DelayedCollective(work, sent_at + turns * self._shaper.limit.latency_s)

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> Operation:
        work, turns = self._inner.all_gather(outputs, tensor, ranks), len(ranks) - 1
        if not self._remote.intersection(ranks):
            return work
        sent_at = self._shaper.reserve(turns * tensor.nbytes, training=True)
        return _DelayedCollective(work, sent_at + turns * self._shaper.limit.latency_s)

    def open_group(self, ranks: tuple[int, ...]) -> None:
        self._inner.open_group(ranks)

    def wait(self, operation: Operation) -> None:
        if isinstance(operation, _DelayedSend):
            self._inner.wait(operation.result())
        elif isinstance(operation, _DelayedCollective):
            self._inner.wait(operation.work)
            if self._closed.wait(max(0.0, operation.moment - time.monotonic())):
                raise RuntimeError(_CLOSED)
        else:
            self._inner.wait(operation)

    def wake(self) -> None:
        self._end_delays()
        self._inner.wake()

    def close(self) -> None:
        self._end_delays()
        self._inner.close()

    def _end_delays(self) -> None:
        with self._lock:
            self._closed.set()
            self._queue.put(None)

    def _run(self) -> None:
        """Hand each message over at its time. After `close` or `wake`, fail the remaining ones."""
        while (item := self._queue.get()) is not None:
            moment, tensor, dst, tag, delayed = item
            try:
                if self._closed.wait(max(0.0, moment - time.monotonic())):
                    raise RuntimeError(_CLOSED)
                delayed.set_result(self._inner.send(tensor, dst, tag))
            except Exception as error:  # noqa: BLE001 - the waiting thread raises it
                delayed.set_exception(RuntimeError(str(error)))
