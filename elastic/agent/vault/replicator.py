"""Sends what this node's workers publish to the peer's vault, in order, and acknowledges what is whole there.

One thread. A bundle that cannot be delivered is held, never acknowledged and never skipped: the failure is
reported every few seconds, delivery is tried again with growing pauses, and `reset` (the epoch is over) drops it.
Where the peer has no room, the bundle is given up and acknowledged, so that training goes on: `short` is told, once an
epoch.
Bundles for no peer are acknowledged in their turn.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import Published
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import ElasticError, FieldError, StaleError, VaultError, VaultFull
from elastic.domain.types import Assignment, Copy
from elastic.rpc.bulk.compression import CompressionPolicy
from elastic.rpc.bulk.transfer import VaultClient

RETRY_S, RETRY_LIMIT_S = 0.05, 2.0
REPORT_S = 5.0
"""Between two reports of the same outage: the first may cross an epoch change and go unheard."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Job:
    worker: int
    published: Published
    round: int
    """Which reset it came after."""
    announced: float
    """time.monotonic()"""


class Replicator:
    """`acked(worker, bundle, kept)` and `failed(epoch, bundle, peer, error)` are called from the replicator's thread:
    `epoch` is the one that was served then, whatever is served when the failure is heard of."""

    def __init__(
        self,
        vault: Vault,
        acked: Callable[[int, int, bool], None],
        failed: Callable[[int, int, str, ElasticError], None],
        *,
        timeout_s: float = DEFAULT_TIMEOUTS.bulk_s,
        prepare: Callable[[Published], None] = lambda published: None,
        pace: Callable[[int], None] | None = None,
        short: Callable[[str, str], None] = lambda peer, why: None,
        compressing: CompressionPolicy | None = None,
        sent: Callable[[str, int, float], None] = lambda peer, nbytes, seconds: None,
        delivered: Callable[[Sequence[Copy], float, bool], None] = lambda copies, seconds, kept: None,
    ) -> None:
        """`delivered` hears of copies that a peer took or (not kept) had no room for, and how long after their
        announcement. `prepare` sees every bundle once, in the same thread, before it is sent or acknowledged; `pace`:
        see `elastic.rpc.frames.Stream`; `compressing`: see `VaultClient`; `sent` is told of everything that is whole
        at a peer: bytes and seconds."""
        self._delivered = delivered
        self._prepare, self._pace, self._short, self._compressing = prepare, pace, short, compressing
        self._sent = sent
        self._told_short = (-1, "")
        """(round, peer) of the last report that there is no room."""
        self._vault, self._acked, self._failed, self._timeout_s = vault, acked, failed, timeout_s
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._vaults: dict[str, str] = {}
        self._clients: dict[str, VaultClient] = {}
        self._round, self._epoch, self._closed = 0, 0, False
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)
        self._thread.start()

    @property
    def vaults(self) -> dict[str, str]:
        """Node -> host:port of its vault."""
        with self._changed:
            return dict(self._vaults)

    @vaults.setter
    def vaults(self, book: Mapping[str, str]) -> None:
        with self._changed:
            for node in [n for n in self._clients if book.get(n) != self._vaults.get(n)]:
                self._clients.pop(node).close()
            self._vaults = dict(book)
            self._changed.notify_all()

    def enter(self, epoch: int, assignment: Assignment) -> None:
        """Serve the epoch of this assignment: what is left of older ones is dropped."""
        self.reset(epoch)
        self.vaults = dict(assignment.vaults)

    def submit(self, worker: int, published: Published) -> None:
        """Queue a bundle that the vault has indexed; dropped if it is for a peer and of a past epoch."""
        with self._changed:
            stale = any(local.copy.epoch < self._epoch for local in published.copies)
            if self._closed or (published.peer and stale):
                return
            self._jobs.append(_Job(worker, published, self._round, time.monotonic()))
            self._changed.notify_all()

    def reset(self, epoch: int) -> None:
        """Drop what is unacknowledged, refuse bundles of epochs below `epoch`, end a send in progress."""
        with self._changed:
            self._epoch = max(self._epoch, epoch)
            self._clear()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._clear()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout_s)

    @property
    def pending(self) -> int:
        """Bundles not yet acknowledged."""
        with self._changed:
            return len(self._jobs)

    @property
    def exposed_s(self) -> float:
        """Age of the oldest bundle that a peer must have and has not; 0: there is none."""
        with self._changed:
            first = next((job.announced for job in self._jobs if job.published.peer), None)
        return 0.0 if first is None else max(0.0, time.monotonic() - first)

    @property
    def link_bytes_per_s(self) -> float:
        """What the link was seen to carry; 0: not known."""
        return self._compressing.link_bytes_per_s if self._compressing is not None else 0.0

    def _clear(self) -> None:
        self._round += 1
        self._jobs.clear()
        while self._clients:
            self._clients.popitem()[1].close()
        self._changed.notify_all()

    def _run(self) -> None:
        pause_s, reported = RETRY_S, (-1, 0.0)
        prepared: _Job | None = None
        while (job := self._next()) is not None:
            if job is not prepared:
                self._prepare(job.published)
                prepared = job
            error = self._deliver(job)
            if isinstance(error, VaultFull):
                self._give_up(job, error)
            if error is None or isinstance(error, VaultFull):
                pause_s, reported = RETRY_S, (-1, 0.0)
                self._finish(job, kept=error is None)
            else:
                again = reported[0] != job.round or time.monotonic() - reported[1] > REPORT_S
                epoch = self._epoch_of(job) if again else None
                if epoch is not None:
                    log.warning(
                        "bundle %d for %s is held: %s", job.published.bundle, job.published.peer, error
                    )
                    self._failed(epoch, job.published.bundle, job.published.peer, error)
                    reported = (job.round, time.monotonic())
                self._pause(job, pause_s)
                pause_s = min(2 * pause_s, RETRY_LIMIT_S)

    def _next(self) -> _Job | None:
        """Wait for the oldest bundle; it stays at the head until it is finished."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._jobs))
            return None if self._closed else self._jobs[0]

    def _deliver(self, job: _Job) -> ElasticError | None:
        peer, copies = job.published.peer, job.published.copies
        if not peer or not copies:
            return None
        try:
            bundle = [(local.copy, self._vault.view(local)) for local in copies]
            began = time.perf_counter()
            self._client(job).put(bundle)
            self._sent(peer, sum(data.nbytes for _, data in bundle), time.perf_counter() - began)
        except (VaultError, StaleError, FieldError) as error:
            return error
        return None

    def _client(self, job: _Job) -> VaultClient:
        peer = job.published.peer
        with self._changed:
            if job.round != self._round:
                raise StaleError("the epoch is over")
            if peer not in self._vaults:
                raise VaultError(f"no vault of {peer} is known")
            if peer not in self._clients:
                address = self._vaults[peer]
                self._clients[peer] = VaultClient(
                    address,
                    node=self._vault.node,
                    timeout_s=self._timeout_s,
                    pace=self._pace,
                    compressing=self._compressing,
                )
            return self._clients[peer]

    def _epoch_of(self, job: _Job) -> int | None:
        """The epoch that is served; None: there was a reset since, the bundle is none of ours any more."""
        with self._changed:
            return self._epoch if job.round == self._round else None

    def _finish(self, job: _Job, *, kept: bool) -> None:
        """Acknowledge, unless a reset came between: then the bundle is none of ours any more."""
        with self._changed:
            if job.round != self._round:
                return
            self._jobs.popleft()
        if job.published.peer:
            copies = [local.copy for local in job.published.copies]
            self._delivered(copies, time.monotonic() - job.announced, kept)
        self._acked(job.worker, job.published.bundle, kept)

    def _give_up(self, job: _Job, error: VaultFull) -> None:
        peer = job.published.peer
        if self._told_short != (job.round, peer):
            self._told_short = job.round, peer
            log.warning(
                "%s keeps no more copies of this node, training goes on without them: %s", peer, error
            )
            self._short(peer, str(error))

    def _pause(self, job: _Job, pause_s: float) -> None:
        with self._changed:
            book = self._vaults
            self._changed.wait_for(
                lambda: self._closed or job.round != self._round or book is not self._vaults, pause_s
            )
