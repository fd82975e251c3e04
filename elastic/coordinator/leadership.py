"""The lease of the leading coordinator, and the name of its run (one execution of a job).

A standby has all modules imported and the store open, and tries to take the lease. The leader
renews its lease on a separate thread, so that it keeps the lease during a long decision. A stopped
process does not renew its lease and loses it.

If the store cannot be reached, a standby retries until it can. Nobody can take the lease meanwhile,
so the leader still decides, but holds back messages (`elastic.coordinator.records.state_saver`).
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic.background import READ_S, BackgroundReading, ends_within
from elastic.core.protocol.election import owns_saved_state, retry_s
from elastic.domain.errors import ElasticError, StaleError
from elastic.store.interface import Conflict, Lease, Store, StoreFull, StoreUnavailable

log = logging.getLogger("elastic.coordinator")
STATE_KEY, RUN_KEY, OVER_KEY = "job/state", "job/run", "job/over"
LEASE_S = 10.0
"""Duration of the lease of a single coordinator; no standby waits for its end."""
SHARED_LEASE_S = 1.5
"""Duration of the lease with several coordinators: a standby takes over and decides within 3 s of
the leader's death, including POLL_S and the reconnection of the nodes."""
POLL_S = 0.15
"""Interval between a standby's attempts to take the lease."""
RENEWALS = 5
"""Number of renewals per duration of the lease."""
FIRST_PAUSE_S, LAST_PAUSE_S = 2.0, 15.0
"""First and longest pause of a coordinator that gave up the lead; it doubles each time. A standby
takes the lead within the first."""
STEADY_S = 60.0
"""A coordinator that led this long begins with the first pause again."""


class LeadGivenUp(Exception):
    """The leader hears no node and has released its lease for another coordinator."""


def pause_after_giving_up(times: int, led_s: float) -> tuple[int, float]:
    """Return (number of times in a row, seconds to wait) after the lead was given up.

    `times`: number of times before; `led_s`: seconds for which this coordinator led.
    """
    times = 1 if led_s >= STEADY_S else times + 1
    return times, min(LAST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(times - 1, 8))


def stand_by(
    store: Store,
    run: RunMembership,
    holder: str,
    ttl_s: float,
    now: Callable[[], float],
    told: Callable[[ElasticError], object] = lambda why: None,
) -> Lease:
    """Wait until this coordinator (`holder`) gets the lease; retry while the store is away.
    `told(error)` is called with the reason of the wait, and again when it changes."""
    failures, logged = 0, ""
    while True:
        try:
            run.join_current()
            lease = store.acquire(holder, ttl_s, now())
            log.info("%s leads with term %d", holder, lease.token)
            return lease
        except (Conflict, StoreUnavailable) as error:
            kind = type(error).__name__
            if logged != kind:
                log.warning("standing by: %s", error)
                told(error)
            logged = kind
            failures = 0 if isinstance(error, Conflict) else failures + 1
            time.sleep(retry_s(failures) if failures else POLL_S)


class LeaseKeeper:
    """Renews the lease on a separate thread until closed. `on_lost(error)` is called once, on that
    thread, if another coordinator took the lease.

    A coordinator that is not `ready` within `ready_s` seconds may wait for a disk that hangs on its
    machine alone. Then the lease is not renewed until it is, so that another one can lead.
    """

    def __init__(
        self,
        store: Store,
        lease: Lease,
        now: Callable[[], float],
        on_lost: Callable[[ElasticError], object],
        ready_s: float,
    ) -> None:
        self._store, self._lease, self._now, self._on_lost = store, lease, now, on_lost
        self._renewed, self._closed = time.monotonic(), threading.Event()
        self._failing_since = 0.0
        self._ready_s, self.ready = ready_s, threading.Event()
        self.full = False
        """Whether the last renewal has failed because the store has no room."""
        threading.Thread(target=self._run, name="lease", daemon=True).start()

    @property
    def certain(self) -> bool:
        """Whether the last renewal is so recent that nobody can have taken the lease."""
        return time.monotonic() - self._renewed < self._lease.ttl_s

    @property
    def away_s(self) -> float:
        """Seconds since the first of the failed renewals in a row; 0: the last one succeeded."""
        since = self._failing_since
        return time.monotonic() - since if since else 0.0

    def close(self) -> None:
        """Stop the renewals. Idempotent."""
        self._closed.set()
        self.ready.set()

    def _run(self) -> None:
        failures, every_s = 0, self._lease.ttl_s / RENEWALS
        until = time.monotonic() + self._ready_s
        while not self._closed.wait(min(retry_s(failures), every_s) if failures else every_s):
            began = time.monotonic()
            if began > until and not self.ready.is_set():
                text = "the run cannot begin for %g s: a disk may hang. The lease is not renewed"
                log.error(text, self._ready_s)
                self.ready.wait()
            try:
                self._store.renew(self._lease, self._now())
                self._renewed, failures, self._failing_since = began, 0, 0.0
                self.full = False
            except StaleError as error:
                if not self._closed.is_set():
                    self._on_lost(error)
                return
            except ElasticError as error:  # the store is away, which the state saver reports
                failures, self.full = failures + 1, isinstance(error, StoreFull)
                self._failing_since = self._failing_since or began
                if failures == 1 and self.full:
                    log.warning("the lease is not renewed: %s", error)
                log.info("the lease could not be renewed: %s", error)
            except Exception:  # the thread must not end while this coordinator leads
                failures += 1
                log.exception("the lease could not be renewed")


class RunMembership:
    """The run in a shared store to which this coordinator belongs.

    The state of a finished job stays in the store for standbys that have not noticed the end, and a
    later job may use the same job name. The name of the run distinguishes the two jobs. It is kept
    in the run directory for restarted coordinators. The disk of this directory may hang, so nobody
    waits for it longer than `READ_S`.
    """

    def __init__(self, store: Store, run_dir: Path) -> None:
        self._store, self._file, self._known = store, run_dir / "store-run", ""
        self._reading = BackgroundReading("name of the run", self._read, "")

    @property
    def name(self) -> str:
        """Name of the run; "": no run yet."""
        self._known = self._known or self._reading.read()
        return self._known

    def join_current(self) -> None:
        """Join the unfinished run in the store, if any, unless this coordinator has a run."""
        if not self.name:
            run, over = self._stored_names()
            if run and run != over:
                self._join(run)

    def is_over(self) -> bool:
        """Return whether all nodes of the run of this run directory were told its end, or the store
        has lost the run. Raises StoreUnavailable."""
        run, over = self._stored_names()
        return self.name == over or not owns_saved_state(self.name, run, over)

    def adopt(self) -> bool:
        """Join the run of the saved state; return False if only an earlier job saved a state."""
        run, over = self._stored_names()
        if not owns_saved_state(self.name, run, over):
            return False
        self._join(run)
        return True

    def begin(self, name: str, token: int) -> None:
        """Start a run, after its first state was saved."""
        self._put(RUN_KEY, name, token)
        self._join(name)

    def end(self, token: int) -> None:
        """Mark the run as over, after its results were written and its nodes were told."""
        self._put(OVER_KEY, self.name, token)

    def _stored_names(self) -> tuple[str, str]:
        run, over = (self._store.get(key) for key in (RUN_KEY, OVER_KEY))
        return run.value.decode() if run else "", over.value.decode() if over else ""

    def _put(self, key: str, name: str, token: int) -> None:
        present = self._store.get(key)
        self._store.put_if(key, name.encode(), present.revision if present else None, token)

    def _join(self, run: str) -> None:
        if self.name != run:
            self._known = run
            ends_within(READ_S, "record of the run's name", partial(self._write, run))

    def _read(self) -> str:
        return self._file.read_text().strip() if self._file.exists() else ""

    def _write(self, run: str) -> None:
        draft = self._file.with_suffix(f".{os.getpid()}.tmp")
        draft.write_text(run + "\n")
        draft.replace(self._file)
