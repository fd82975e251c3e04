"""Waiting for the lease, and keeping it.

A standby has everything imported and the store open, and serves nobody. The leader's lease is renewed by a thread of
its own: a long decision costs nobody the lead, while a process that is stopped renews nothing.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

from elastic.core.protocol.election import owns_saved_state, retry_s
from elastic.domain.errors import ElasticError, StaleError
from elastic.store.interface import Conflict, Lease, Store, StoreUnavailable

log = logging.getLogger("elastic.coordinator")
LEASE_NAME, STATE_KEY, RUN_KEY, OVER_KEY = "coordinator", "job/state", "job/run", "job/over"
LEASE_S = 10.0
"""Of a coordinator that is alone: nobody waits for it."""
SHARED_LEASE_S = 1.5
"""Of one among several. With the look of a standby, and nodes that find it, less than 3 s from death to decision."""
LOOK_S = 0.15
"""How often a standby tries to take the lease."""
RENEWALS = 5
"""How often a lease is renewed in its time."""


def stand_by(store: Store, part: Part, holder: str, ttl_s: float, now: Callable[[], float]) -> Lease:
    """Wait until the lease is ours. A store out of reach is waited for."""
    failures, told = 0, ""
    while True:
        try:
            part.look()
            lease = store.acquire(LEASE_NAME, holder, ttl_s, now())
            log.info("%s leads with term %d", holder, lease.token)
            return lease
        except (Conflict, StoreUnavailable) as error:
            kind = type(error).__name__
            if told != kind:
                log.warning("standing by: %s", error)
            told = kind
            failures = 0 if isinstance(error, Conflict) else failures + 1
            time.sleep(retry_s(failures) if failures else LOOK_S)


class Keeper:
    """Renews the lease from its own thread until closed. `on_lost` is called there, once, if another took it."""

    def __init__(
        self,
        store: Store,
        lease: Lease,
        now: Callable[[], float],
        on_lost: Callable[[ElasticError], object],
    ) -> None:
        self._store, self._lease, self._now, self._on_lost = store, lease, now, on_lost
        self._renewed, self._closed = time.monotonic(), threading.Event()
        threading.Thread(target=self._work, name="lease", daemon=True).start()

    @property
    def sure(self) -> bool:
        """The lease was ours less than its time ago, so that nobody can have taken it from us unseen."""
        return time.monotonic() - self._renewed < self._lease.ttl_s

    def close(self) -> None:
        """Idempotent."""
        self._closed.set()

    def _work(self) -> None:
        failures, every_s = 0, self._lease.ttl_s / RENEWALS
        while not self._closed.wait(min(retry_s(failures), every_s) if failures else every_s):
            begun = time.monotonic()
            try:
                self._store.renew(self._lease, self._now())
                self._renewed, failures = begun, 0
            except StaleError as error:
                if not self._closed.is_set():
                    self._on_lost(error)
                return
            except ElasticError as error:  # out of reach: the coordinator's own saving tells of it
                failures += 1
                log.info("the lease could not be renewed: %s", error)


class Part:
    """Which run in a shared store this coordinator takes part in, kept in the run directory over its restarts.

    A name may be used again: the state of a job that ended stays in the store, for standbys that have not noticed.
    """

    def __init__(self, store: Store, run_dir: Path) -> None:
        self._store, self._file = store, run_dir / "store-run"

    @property
    def mine(self) -> str:
        """ "": none yet."""
        return self._file.read_text().strip() if self._file.exists() else ""

    def look(self) -> None:
        """Join the run that is under way in the store, if there is one and we are in none."""
        if not self.mine:
            run, over = self._names()
            if run and run != over:
                self._join(run)

    def adopt(self) -> bool:
        """Join the run whose state is saved; False: there is none, or it is left over from an earlier run."""
        run, over = self._names()
        if not owns_saved_state(self.mine, run, over):
            return False
        self._join(run)
        return True

    def begin(self, name: str, token: int) -> None:
        """Start a run, once its first state is saved."""
        self._put(RUN_KEY, name, token)
        self._join(name)

    def end(self, token: int) -> None:
        """The run is over, and everything about it told."""
        self._put(OVER_KEY, self.mine, token)

    def _names(self) -> tuple[str, str]:
        run, over = (self._store.get(key) for key in (RUN_KEY, OVER_KEY))
        return run.value.decode() if run else "", over.value.decode() if over else ""

    def _put(self, key: str, name: str, token: int) -> None:
        present = self._store.get(key)
        self._store.put_if(key, name.encode(), present.revision if present else None, token)

    def _join(self, run: str) -> None:
        if self.mine == run:  # also on a full disk
            return
        draft = self._file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(run + "\n")
        draft.replace(self._file)
