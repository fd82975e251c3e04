"""Saves the coordinator's state, and holds back what may only happen once it is saved.

While the store is out of reach decisions go on being made, in memory; nothing of them is sent or told. Once it is
back, the newest state is saved and everything held back happens in its order, as after a slow network. A store that
refuses (a state too large for it, a permission taken away) is out of reach, too: training goes on until somebody
mends it, while a coordinator that gave up would only be started again.

A report from which nothing follows yet need not be saved at once: its node says it again to the next coordinator, for
which it is as if it had come a little later. In a job of thousands of nodes a change of plan brings thousands.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from math import inf
from typing import Any

from elastic.coordinator.records.state_encoding import StateText
from elastic.core.job.state import JobState
from elastic.core.protocol.election import retry_s
from elastic.store.interface import Conflict, Entry, Lease, Store, StoreError, StoreUnavailable

log = logging.getLogger("elastic.coordinator")
TOLD_AT = 2
"""Failures in a row until it is told in the event log. One alone may be ours: a coordinator that was stopped in the
middle of a save finds its time over when it goes on, and at the next attempt that it was replaced; it tells nothing.
"""

SOON_S, LATEST_S = 0.1, 2.0
"""What can wait is saved after so long at least and at most; in between, such that saving takes a tenth of a core,
while a save takes less than 0.2 s."""


class Saver:
    """Belongs to one term. All methods are called from the coordinator's thread."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        key: str,
        entry: Entry | None,
    ) -> None:
        self._store, self._token, self._key = store, lease.token, key
        self.tell: Callable[[str, dict[str, Any]], object] = lambda kind, data: None
        """Told of events of the store itself."""
        self.measured: Callable[[float, int], object] = lambda seconds, nbytes: None
        """Told of each save: how long it took, and how large the state is."""
        self._text = StateText()
        self._revision = entry.revision if entry is not None else None
        self._saved = entry.value if entry is not None else b""
        self._held: list[tuple[object, Callable[[], object]]] = []
        self._unsaved: JobState | None = None
        self._waiting: JobState | None = None
        self._wait_until = self._took_s = 0.0
        self._failures, self._again, self._lost_at = 0, 0.0, 0.0

    @property
    def away(self) -> bool:
        """The store was out of reach, or refused, when it was last asked."""
        return self._failures > 0

    @property
    def nbytes(self) -> int:
        """Size of the state as it was saved last."""
        return len(self._saved)

    def hold(self, what: object, deed: Callable[[], object]) -> None:
        """Do this once the state is saved. `what`, when given, is done once however often it is held."""
        if what is not None and any(what == other for other, _ in self._held):
            return
        self._held.append((what, deed))

    def save(self, state: JobState) -> None:
        """Save `state` and do what was held back; or, if the store is out of reach or refuses, do neither for now.

        Raises StaleError if another coordinator has taken over.
        """
        self._unsaved = state
        if time.monotonic() >= self._again:
            self.retry()

    def wait(self, state: JobState) -> None:
        """Save `state` by and by, or with the next decision: nothing follows from what is new in it."""
        if self._unsaved is not None:
            self._unsaved = state
            return
        if self._waiting is None:
            self._wait_until = time.monotonic() + min(LATEST_S, max(SOON_S, 10 * self._took_s))
        self._waiting = state

    def flush(self) -> None:
        """Do what needs no saving, if nothing waits to be saved."""
        if self._unsaved is None:
            held, self._held = self._held, []
            for _, deed in held:
                deed()

    def due(self) -> bool:
        """Time to look for the store again, or to save what waited."""
        now, waited = time.monotonic(), self._waiting is not None
        return now >= (self._again if self.away else self._wait_until if waited else inf)

    def retry(self) -> None:
        """Save now what is not saved. Raises as `save`."""
        state = self._unsaved = self._unsaved or self._waiting
        self._waiting = None
        if state is None:
            return
        try:
            self._put(state)
        except (StoreUnavailable, StoreError) as error:
            self._failures += 1
            self._again = time.monotonic() + retry_s(self._failures)
            if self._failures == 1:
                self._lost_at = time.monotonic()
                log.warning("decisions wait: %s", error)
            elif self._failures == TOLD_AT:
                self.tell("store-lost", {"why": str(error)})
            return
        self._unsaved = None
        failures, self._failures = self._failures, 0
        if failures >= TOLD_AT:
            away_s = round(time.monotonic() - self._lost_at, 3)
            log.warning("the store is back after %.1f s; %d deeds were held back", away_s, len(self._held))
            self.tell("store-back", {"away_s": away_s, "held": len(self._held)})
        self.flush()

    def _put(self, state: JobState) -> None:
        began = time.perf_counter()
        value = self._text.dumps(state).encode()
        if value == self._saved:
            return
        try:
            entry = self._store.put_if(self._key, value, self._revision, self._token)
        except Conflict:
            # Only our token may write here: an earlier attempt arrived although its answer was lost.
            present = self._store.get(self._key)
            self._revision = present.revision if present is not None else None
            entry = self._store.put_if(self._key, value, self._revision, self._token)
        self._revision, self._saved = entry.revision, value
        self._took_s = time.perf_counter() - began
        self.measured(self._took_s, len(value))
