"""Decides between a promise to halt at the meeting point and the commit of the step.

The meeting point is the end of a worker's micro-batches in a step, before the commit
(docs/design/local-recovery.md). The main thread tells where it is:

    elsewhere --depart--> computing --arrive--> arrived --accept--> elsewhere

A worker that is ordered to halt while it computes, or after it arrived, promises to halt at the
meeting point, unless the order halts its node at once. Then `arrive` or `accept` raises
`AtMeetingPoint`. After `accept` there is no promise any more, because the worker updates. One lock
makes each order either earlier or later than `accept`.

A worker makes at most one promise per epoch, and none after an order that it obeyed at once.
"""

from __future__ import annotations

import threading
from enum import Enum, auto

from elastic.core.protocol.messages import Halt, Promise
from elastic.worker.transport.cancellation import EpochAbandoned, LinkFailed


class AtMeetingPoint(EpochAbandoned):
    """Raised at the meeting point to leave the epoch, as the worker has promised."""


class _Place(Enum):
    ELSEWHERE = auto()
    COMPUTING = auto()
    ARRIVED = auto()


class MeetingPoint:
    """The place of one worker's main thread in a step, and its promise. Thread-safe.

    The thread that receives orders calls `order`, the main thread the methods that change its
    place. It runs each epoch inside the context manager.
    """

    def __init__(self, node: str) -> None:
        """`node`: node of this worker."""
        self._node, self._lock = node, threading.Lock()
        self._epoch, self._step = 0, -1
        self._place = _Place.ELSEWHERE
        self._promise: Promise | None = None
        self._halted = False
        """Whether an order halts this worker at once: then it makes no promise in this epoch."""

    def begin_epoch(self, epoch: int) -> None:
        """Forget the former epoch, with its promise."""
        with self._lock:
            self._epoch, self._place = epoch, _Place.ELSEWHERE
            self._promise, self._halted = None, False

    def depart(self, step: int) -> None:
        """Called when the run of the full schedule of `step` begins."""
        with self._lock:
            self._step, self._place = step, _Place.COMPUTING

    def arrive(self) -> None:
        """Called when all micro-batches are in the sums and the last copies are published. Raises
        AtMeetingPoint if the worker has promised to halt here."""
        with self._lock:
            self._place = _Place.ARRIVED
            self._keep_promise()

    def accept(self) -> None:
        """Called when the worker knows the result of the commit, before it uses it. Raises
        AtMeetingPoint if the worker has promised not to take part."""
        with self._lock:
            self._keep_promise()
            self._place = _Place.ELSEWHERE

    def _keep_promise(self) -> None:
        if self._promise is not None:
            raise AtMeetingPoint(f"epoch {self._promise.epoch}")

    def __enter__(self) -> MeetingPoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        """Called when the main thread leaves the epoch. It stays at the meeting point if it has
        arrived and leaves as ordered, or because another worker left: its sums are complete."""
        with self._lock:
            stays = isinstance(error, EpochAbandoned | LinkFailed)
            if not stays or self._place is not _Place.ARRIVED:
                self._place = _Place.ELSEWHERE

    def order(self, halt: Halt) -> Promise | None:
        """Return the promise with which this worker answers `halt`; None: it halts at once.

        The caller sends the promise. If the worker has `arrived` by then, it must halt now.
        """
        with self._lock:
            if halt.epoch <= self._epoch:
                return None
            outside = self._node in halt.outside
            free = self._promise is None and not self._halted
            if outside and free and self._place is not _Place.ELSEWHERE:
                self._promise = Promise(halt.epoch, self._epoch, self._step)
                return self._promise
            self._halted = True
            return None

    @property
    def arrived(self) -> bool:
        """Whether the main thread is at the meeting point, or has left the epoch from there."""
        with self._lock:
            return self._place is _Place.ARRIVED

    def kept(self, epoch: int | None = None) -> bool:
        """Return whether the worker has promised for `epoch` (None: any), and has arrived."""
        with self._lock:
            promise = self._promise
            promised = promise is not None and epoch in (None, promise.epoch)
            return promised and self._place is _Place.ARRIVED
