"""Sends the copies that this node's workers publish to the vaults of their peers, in order.

One thread sends the bundles. A bundle is acknowledged when the peer has all of its copies. A bundle
that cannot be delivered is *held*: the thread retries with growing pauses and reports the failure
every few seconds, until `reset` drops the bundle at the end of the epoch. If the peer has no room,
or can store no copies at all, the bundle is given up but acknowledged, so that training goes on. A
bundle without a peer is acknowledged when it is the first in the queue; an empty one is a probe and
acknowledged at once, because its worker's earlier bundles are read. An unexpected error holds a
bundle like any other, because training waits for the acknowledgement.

While workers go on to the meeting point (docs/design/local-recovery.md), nothing repairs a lost
peer, so `stop_holding` lets bundles be acknowledged as not kept instead of being held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import Published
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import (
    ElasticError,
    FieldError,
    SlotError,
    StaleError,
    VaultError,
    VaultFull,
)
from elastic.domain.types import Assignment, Copy
from elastic.rpc.bulk.compression import CompressionPolicy
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.control.event_loop import run_callback

RETRY_S, MAX_RETRY_S = 0.05, 2.0
REPORT_S = 5.0
"""Interval between reports of one outage: an epoch change may drop the first report."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Bundle:
    worker: int
    published: Published
    round: int
    """Reset counter at the submission. If it is higher now, a reset has dropped the bundle."""
    announced: float
    """Time of the submission (time.monotonic)."""


class Replicator:
    """Sends bundles of copies to peers on a thread of its own; all callbacks run on this thread.

    `acked(worker, bundle, kept)` is called once for each finished bundle; `kept` is False if the
    peer does not have it: it had no room, or the bundle may not be held. `failed(epoch, bundle,
    peer, error)` is called every few seconds while a bundle is held; `epoch` is the epoch at the
    time of the failure.
    """

    def __init__(
        self,
        vault: Vault,
        acked: Callable[[int, int, bool], None],
        failed: Callable[[int, int, str, ElasticError], None],
        *,
        timeout_s: float = DEFAULT_TIMEOUTS.bulk_s,
        prepare: Callable[[Published], None] = lambda published: None,
        pace: Callable[[int], None] | None = None,
        no_room: Callable[[str, str], None] = lambda peer, why: None,
        broken: Callable[[str, str], None] = lambda peer, why: None,
        compressing: CompressionPolicy | None = None,
        sent: Callable[[str, int, float], None] = lambda peer, nbytes, seconds: None,
        delivered: Callable[[Sequence[Copy], float, bool], None] = lambda copies, seconds, kept: (
            None
        ),
    ) -> None:
        """`prepare(published)` is called once per bundle, before the bundle is sent or
        acknowledged. `no_room(peer, why)` is called for the first bundle of an epoch for which the
        peer has no room, `broken(peer, why)` for the first that it cannot store.
        `sent(peer, nbytes, seconds)` is called after each transfer, with its duration.
        `delivered(copies, seconds, kept)` is called for each finished bundle with a peer, with the
        time since `submit`. `pace`: see `elastic.rpc.frames.FrameStream`; `compressing`: see
        `VaultClient`."""
        self._delivered = delivered
        self._prepare, self._pace, self._compressing = prepare, pace, compressing
        self._no_room, self._broken, self._sent = no_room, broken, sent
        self._refusals: set[tuple[int, str]] = set()
        """(`_Bundle.round`, peer) of each report of this round that a peer refused a bundle."""
        self._vault, self._acked, self._failed, self._timeout_s = vault, acked, failed, timeout_s
        self._changed = threading.Condition()
        self._queue: deque[_Bundle] = deque()
        self._holds, self._lost = True, set[str]()
        """Whether bundles may be held, and peers whose bundles are neither sent nor held."""
        self._vaults: dict[str, str] = {}
        self._clients: dict[str, VaultClient] = {}
        self._round, self._epoch, self._closed = 0, 0, False
        self._thread = threading.Thread(target=self._run, name="replicator", daemon=True)
        self._thread.start()

    @property
    def vaults(self) -> dict[str, str]:
        """Address (host:port) of each node's vault. A change closes the connection to a node."""
        with self._changed:
            return dict(self._vaults)

    @vaults.setter
    def vaults(self, addresses: Mapping[str, str]) -> None:
        with self._changed:
            for node in [n for n in self._clients if addresses.get(n) != self._vaults.get(n)]:
                self._clients.pop(node).close()
            self._vaults = dict(addresses)
            self._changed.notify_all()

    def enter(self, epoch: int, assignment: Assignment) -> None:
        """Begin `epoch`: drop the bundles of older epochs and use the addresses of `assignment`."""
        self.reset(epoch)
        self.vaults = dict(assignment.vaults)

    def submit(self, worker: int, published: Published) -> None:
        """Queue a bundle whose copies are in the vault. A bundle for a peer is dropped if any of
        its copies belongs to a past epoch. A probe is acknowledged in the caller's thread."""
        if not published.peer and not published.copies:
            self._acked(worker, published.bundle, True)
            return
        with self._changed:
            stale = any(local.copy.epoch < self._epoch for local in published.copies)
            if self._closed or (published.peer and stale):
                return
            self._queue.append(_Bundle(worker, published, self._round, time.monotonic()))
            self._changed.notify_all()

    def reset(self, epoch: int) -> None:
        """Drop all queued bundles and close the connections to peers, so a send in progress fails.
        From now on, bundles for a peer are dropped if a copy is older than `epoch`."""
        with self._changed:
            self._epoch = max(self._epoch, epoch)
            self._clear()

    def stop_holding(self, peers: Collection[str] | None) -> None:
        """Until the next epoch or reset, acknowledge the bundles for `peers` as not kept, and send
        them nothing. None: acknowledge each bundle that would be held as not kept.

        This includes the bundle that is held or in transfer now. It causes no report.
        """
        which = "that cannot be delivered" if peers is None else f"for {', '.join(sorted(peers))}"
        if peers is None or peers:
            log.info("bundles %s are not held until the next epoch", which)
        with self._changed:
            self._holds = self._holds and peers is not None
            self._lost |= set(peers or ())
            for peer in self._lost & self._clients.keys():
                self._clients.pop(peer).close()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._clear()
        if threading.current_thread() is not self._thread:
            self._thread.join(self._timeout_s)

    @property
    def pending(self) -> int:
        """Number of bundles that are not acknowledged."""
        with self._changed:
            return len(self._queue)

    @property
    def exposed_s(self) -> float:
        """Age of the oldest unacknowledged bundle for a peer; 0: all are acknowledged."""
        with self._changed:
            first = next(
                (bundle.announced for bundle in self._queue if bundle.published.peer), None
            )
        return 0.0 if first is None else max(0.0, time.monotonic() - first)

    def _clear(self) -> None:
        self._round += 1
        self._holds, self._lost = True, set()
        self._queue.clear()
        while self._clients:
            self._clients.popitem()[1].close()
        self._changed.notify_all()

    def _run(self) -> None:
        pause_s, reported = RETRY_S, (-1, 0.0)
        prepared: _Bundle | None = None
        while (bundle := self._next()) is not None:
            if bundle is not prepared:
                run_callback(partial(self._prepare, bundle.published))
                prepared = bundle
            error = self._deliver(bundle)
            refused = isinstance(error, VaultFull | SlotError)
            if error is not None and not refused and self._may_hold(bundle):
                if reported[0] != bundle.round or time.monotonic() - reported[1] > REPORT_S:
                    self._report_held(bundle, error)
                    reported = bundle.round, time.monotonic()
                self._pause(bundle, pause_s)
                pause_s = min(2 * pause_s, MAX_RETRY_S)
                if self._may_hold(bundle):
                    continue
            pause_s, reported = RETRY_S, (-1, 0.0)
            self._finish(bundle, error)

    def _next(self) -> _Bundle | None:
        """Wait for the oldest bundle and return it, still queued; None after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._closed or bool(self._queue))
            return None if self._closed else self._queue[0]

    def _deliver(self, bundle: _Bundle) -> ElasticError | None:
        peer, copies = bundle.published.peer, bundle.published.copies
        if not peer or not copies:
            return None
        try:
            payload = [(local.copy, self._vault.view(local)) for local in copies]
            began = time.perf_counter()
            self._client(bundle).put(payload)
            self._sent(peer, sum(data.nbytes for _, data in payload), time.perf_counter() - began)
        except (VaultError, StaleError, FieldError) as error:
            return error
        except Exception as error:
            log.exception("bundle %d for %s", bundle.published.bundle, peer)
            return VaultError(f"unexpected {type(error).__name__}: {error}")
        return None

    def _client(self, bundle: _Bundle) -> VaultClient:
        peer = bundle.published.peer
        with self._changed:
            if bundle.round != self._round:
                raise StaleError("the epoch is over")
            if peer in self._lost:
                raise VaultError(f"{peer} is lost")
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
                    peer=peer,
                )
            return self._clients[peer]

    def _report_held(self, bundle: _Bundle, error: ElasticError) -> None:
        """Log and report that a bundle is held, unless a reset has dropped it or it may not be held
        any more."""
        with self._changed:
            epoch = self._epoch
            if bundle.round != self._round or not self._may_hold(bundle):
                return
        number, peer = bundle.published.bundle, bundle.published.peer
        log.warning("bundle %d for %s is held: %s", number, peer, error)
        self._failed(epoch, number, peer, error)

    def _may_hold(self, bundle: _Bundle) -> bool:
        """Return whether the bundle may be held. One that a reset has dropped needs no end."""
        with self._changed:
            may = self._holds and bundle.published.peer not in self._lost
            return may or bundle.round != self._round

    def _finish(self, bundle: _Bundle, error: ElasticError | None) -> None:
        """Remove the bundle and acknowledge it, unless a reset has dropped it. `error`: the reason
        why the peer does not have the bundle, else None."""
        peer, number = bundle.published.peer, bundle.published.bundle
        if isinstance(error, VaultFull | SlotError):
            self._report_refusal(bundle, error)
        with self._changed:
            if bundle.round != self._round:
                return
            self._queue.popleft()
        if peer:
            copies = [local.copy for local in bundle.published.copies]
            seconds = time.monotonic() - bundle.announced
            run_callback(partial(self._delivered, copies, seconds, error is None))
        self._acked(bundle.worker, number, error is None)

    def _report_refusal(self, bundle: _Bundle, refusal: VaultFull | SlotError) -> None:
        """Log and report the first bundle of an epoch that a peer, unless it is lost, refuses."""
        peer = bundle.published.peer
        with self._changed:
            lost = peer in self._lost
        if lost or (bundle.round, peer) in self._refusals:
            return
        of_round = {entry for entry in self._refusals if entry[0] == bundle.round}
        self._refusals = {*of_round, (bundle.round, peer)}
        text = "%s cannot keep copies of this node; training continues without them: %s"
        log.warning(text, peer, refusal)
        report = self._no_room if isinstance(refusal, VaultFull) else self._broken
        report(peer, str(refusal))

    def _pause(self, bundle: _Bundle, pause_s: float) -> None:
        with self._changed:
            addresses = self._vaults
            self._changed.wait_for(
                lambda: (
                    self._closed
                    or bundle.round != self._round
                    or addresses is not self._vaults
                    or not self._may_hold(bundle)
                ),
                pause_s,
            )
