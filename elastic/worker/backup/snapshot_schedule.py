"""Decides when whole states go to the peer under `replay:N`, besides the inputs of updates.

A layer's whole state goes to the peer when an epoch begins, and then after every N updates. Layers
take turns, so that each step sends about the same number of bytes. If the peer had no room for an
update, later updates are useless there, and the whole states of all layers follow at once. If the
peer refuses those states as well, layers continue to take turns until it drops older copies.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from elastic.worker.replica.replica import LayerReplica

RETRIES = 3
"""Number of updates after `retry` at which refused states are sent again at once."""


class SnapshotSchedule:
    """Selects the layers whose whole state is due, for one worker and epoch. Thread-safe."""

    def __init__(self, every: int) -> None:
        """`every`: updates between two whole states of a layer; 1: after each update."""
        self._every, self._wait = every, 0
        self._sent: dict[int, bool] = {}
        """Bundle -> whether it has whole states, for bundles since the previous update."""
        self._oldest = 0
        """First bundle since the last update; 0: none."""
        self._refused: set[int] = set()
        self._retries = 0
        self._lock = threading.Lock()

    def sent(self, bundle: int, *, whole: bool) -> int:
        """Record a bundle that goes to the peer; return it."""
        with self._lock:
            self._oldest = self._oldest or bundle
            self._sent[bundle] = whole
        return bundle

    def refused(self, bundle: int) -> None:
        """Record that the peer had no room for `bundle`, which may be of any kind."""
        with self._lock:
            self._refused.add(bundle)

    def retry(self) -> None:
        """Send refused states again at the next updates. Called when the peer will have room."""
        with self._lock:
            self._retries = RETRIES

    def due(self, replicas: Iterable[LayerReplica]) -> set[int]:
        """Return the layers whose whole states go to the peer now. Call once per update."""
        with self._lock:
            lost = self._refused & self._sent.keys()
            again = self._retries > 0 and (self._wait > 0 or bool(lost))
            self._retries -= again
            if any(self._sent[bundle] for bundle in lost):
                self._wait = self._every
            everything = again or (bool(lost) and self._wait <= 0)
            self._wait -= 1
            self._sent = {
                bundle: whole
                for bundle, whole in self._sent.items()
                if bundle >= self._oldest and bundle not in lost
            }
            self._refused = {b for b in self._refused - lost if b >= self._oldest}
            self._oldest = 0
        return {r.index for r in replicas if everything or (r.version + r.index) % self._every == 0}
