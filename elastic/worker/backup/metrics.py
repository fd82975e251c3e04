"""Cost of a worker's backups: bytes and seconds of copying, waiting and sending."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter

from elastic.core.protocol.messages import BackupTraffic


class TrafficMeter:
    """Counts a worker's backup traffic between two calls of `take`. Thread-safe.

    Bundles are sent one after the other. A bundle's sending time begins with its announcement or
    with the acknowledgement of the bundle before it, whichever is later, and ends with its own
    acknowledgement.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._unacked: deque[tuple[int, int, float]] = deque()
        """(bundle, bytes, time of announcement) of bundles for a peer, oldest first."""
        self._acked_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self._copied = self._sent = 0
        self._copied_s = self._sent_s = self._waited_s = 0.0

    @property
    def busy(self) -> bool:
        """Whether a bundle is on its way to a peer."""
        return bool(self._unacked)

    def copied(self, nbytes: int, seconds: float) -> None:
        """Count a copy that was written, with its checksum."""
        with self._lock:
            self._copied, self._copied_s = self._copied + nbytes, self._copied_s + seconds

    def waited(self, seconds: float) -> None:
        """Count time in which the main thread waited for an acknowledgement."""
        with self._lock:
            self._waited_s += seconds

    def announced(self, bundle: int, nbytes: int) -> None:
        """Count a bundle for a peer that was given to the agent."""
        with self._lock:
            self._unacked.append((bundle, nbytes, self._clock()))

    def acked(self, bundle: int, kept: bool = True) -> None:
        """Count all bundles up to `bundle` as sent; `kept` is false if the peer had no room."""
        with self._lock:
            now, began = self._clock(), None
            while self._unacked and self._unacked[0][0] <= bundle:
                _, nbytes, at = self._unacked.popleft()
                began = max(at, self._acked_at) if began is None else began
                self._sent += nbytes if kept else 0
            if began is not None:
                self._sent_s += now - began if kept else 0.0
                self._acked_at = now

    def forget(self) -> None:
        """Forget the bundles on their way, because no acknowledgement follows the epoch's end."""
        with self._lock:
            self._unacked.clear()

    def take(self) -> BackupTraffic:
        """Return the counts since the last call."""
        with self._lock:
            found = BackupTraffic(
                self._copied, self._copied_s, self._waited_s, self._sent, self._sent_s
            )
            self._reset()
            return found
