"""When whole states go to the peer, where in between it gets what the updates take (`replay:N`).

A layer's whole state goes when an epoch begins, and then after every N updates; layers take turns, so that the bytes
of all steps are alike. An update that the peer had no room for leaves a gap that nothing leads across: whole states of
all layers then follow at once. If the peer has no room for those either, layers just go on taking turns for a while,
or until older copies there make room.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from elastic.worker.replica.replica import LayerReplica

RETRIES = 3


class Rebase:
    """Of one worker in one epoch. Thread-safe: `given_up` comes from the thread that reads orders."""

    def __init__(self, every: int) -> None:
        """`every`: updates between two whole states of a layer; 1: after each one."""
        self._every, self._wait = every, 0
        self._sent: dict[int, bool] = {}
        """Bundles of this update and the one before, and whether they have whole states; older ones are settled."""
        self._oldest = 0
        """The first bundle of this update."""
        self._refused: set[int] = set()
        self._retries = 0
        """Times that whole states are tried again at once, though the peer refused them."""
        self._lock = threading.Lock()

    def sent(self, bundle: int, *, whole: bool) -> int:
        """Note a bundle that goes to the peer; return it."""
        with self._lock:
            self._oldest = self._oldest or bundle
            self._sent[bundle] = whole
        return bundle

    def given_up(self, bundle: int) -> None:
        """The peer had no room for a bundle, of whatever kind."""
        with self._lock:
            self._refused.add(bundle)

    def again(self) -> None:
        """The peer is about to have room: whole states that it refused are due at the next updates."""
        with self._lock:
            self._retries = RETRIES

    def due(self, replicas: Iterable[LayerReplica]) -> set[int]:
        """Layers whose whole states go to the peer now, at the versions that they have; asked once an update."""
        with self._lock:
            lost = self._refused & self._sent.keys()
            again = self._retries > 0 and (self._wait > 0 or bool(lost))
            self._retries -= again
            if any(self._sent[bundle] for bundle in lost):
                self._wait = self._every
            everything = again or (bool(lost) and self._wait <= 0)
            self._wait -= 1
            self._sent = {b: whole for b, whole in self._sent.items() if b >= self._oldest and b not in lost}
            self._refused = {b for b in self._refused - lost if b >= self._oldest}
            self._oldest = 0
        return {r.index for r in replicas if everything or (r.version + r.index) % self._every == 0}
