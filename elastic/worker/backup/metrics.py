"""What backups cost a worker: bytes and seconds of copying, waiting and sending, counted while it trains."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from time import perf_counter

from elastic.core.protocol.messages import BackupTraffic


class TrafficMeter:
    """Counts until it is asked. The main thread copies and waits; acknowledgements come from another one.

    A bundle's sending takes from its announcement, or the acknowledgement of the one before it, to its own: they are
    sent one after the other.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._under_way: deque[tuple[int, int, float]] = deque()
        """(bundle, bytes, announced at) of bundles for a peer, oldest first."""
        self._acked_at = 0.0
        self._reset()

    def _reset(self) -> None:
        self._copied = self._sent = 0
        self._copied_s = self._sent_s = self._waited_s = 0.0

    @property
    def busy(self) -> bool:
        """Something is on its way to a peer."""
        return bool(self._under_way)

    def copied(self, nbytes: int, seconds: float) -> None:
        """A copy was written and its checksum taken."""
        with self._lock:
            self._copied, self._copied_s = self._copied + nbytes, self._copied_s + seconds

    def waited(self, seconds: float) -> None:
        """The main thread stood still until something was acknowledged."""
        with self._lock:
            self._waited_s += seconds

    def announced(self, bundle: int, nbytes: int) -> None:
        """A bundle for a peer was given to the agent."""
        with self._lock:
            self._under_way.append((bundle, nbytes, self._clock()))

    def acked(self, bundle: int, kept: bool = True) -> None:
        """`bundle` and all before it are whole at the peer; or (not `kept`) it had no room, which tells nothing."""
        with self._lock:
            now, began = self._clock(), None
            while self._under_way and self._under_way[0][0] <= bundle:
                _, nbytes, at = self._under_way.popleft()
                began = max(at, self._acked_at) if began is None else began
                self._sent += nbytes if kept else 0
            if began is not None:
                self._sent_s += now - began if kept else 0.0
                self._acked_at = now

    def forget(self) -> None:
        """The epoch is over: what is under way will never be acknowledged."""
        with self._lock:
            self._under_way.clear()

    def take(self) -> BackupTraffic:
        """What was counted since the last call."""
        with self._lock:
            found = BackupTraffic(self._copied, self._copied_s, self._waited_s, self._sent, self._sent_s)
            self._reset()
            return found
