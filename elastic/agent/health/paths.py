"""Asks the vaults of other nodes for an answer, over the network that the workers use.

A thread per peer asks, so that one path that hangs delays no other. The rules are in
`elastic.core.node.path_watch`. The result goes into the node's health report.
"""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic.core.node.path_watch import (
    PathWatch,
    attempt_s,
    attempted,
    changed_vaults,
    interval_s,
    peers_to_watch,
)
from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, UnreachablePeer
from elastic.core.protocol.timeouts import Timeouts
from elastic.domain.errors import ElasticError
from elastic.domain.types import Plan
from elastic.rpc.bulk.transfer import VaultClient
from elastic.rpc.security.rejections import Reason
from elastic.rpc.security.tls import rejection_reason

PROBE_BYTES = 10_000
"""Bytes of an attempt: more than the largest Ethernet packet. A path may pass handshakes and drop
large packets in silence, so that the first activation would hang. Larger attempts would need more
round trips, because a connection begins with ten packets."""
Report = Callable[[tuple[UnreachablePeer, ...]], object]


@dataclass(slots=True, eq=False)
class _Watched:
    """A peer that a thread asks."""

    peer: str
    vault: str
    client: VaultClient
    watch: PathWatch
    ended: threading.Event = field(default_factory=lambda: threading.Event())
    new_epoch: threading.Event = field(default_factory=lambda: threading.Event())
    """Set if no attempt was made in this epoch."""


class PathProber:
    """Asks peers until `close`. `watch` sets the peers; any thread may call these two."""

    def __init__(self, node: str, limits: Timeouts, report: Report) -> None:
        """`report(unreachable)` is called, on any thread, when other peers are unreachable than
        before. It must return at once."""
        self._node, self._limits, self._report = node, limits, report
        self._lock = threading.Lock()
        self._watched: dict[str, _Watched] = {}
        self._unreachable: tuple[UnreachablePeer, ...] = ()

    def watch(self, vaults: Mapping[str, str], plan: Plan | None = None) -> None:
        """Ask these vaults (node -> host:port) from now on, or of many those near in `plan`. The
        next attempts use new connections, as the workers of the next epoch do."""
        with self._lock:
            bad = [one.peer for one in self._unreachable]
            peers = peers_to_watch(self._node, plan, vaults, bad)
            before = {one.peer: one.vault for one in self._watched.values()}
            wanted = {peer: vaults[peer] for peer in peers if vaults[peer]}
            gone, new = changed_vaults(before, wanted)
            ended = [self._watched.pop(peer) for peer in gone]
            for one in self._watched.values():
                one.new_epoch.set()
            begun = [self._begin(peer, vault) for peer, vault in new.items()]
        for one in ended:
            one.ended.set()
            one.client.close()
        for one in begun:
            threading.Thread(
                target=self._ask, args=(one,), name=f"path-{one.peer}", daemon=True
            ).start()
        self._update()

    def close(self) -> None:
        self.watch({})

    def _begin(self, peer: str, vault: str) -> _Watched:
        client = VaultClient(vault, node=self._node, timeout_s=attempt_s(self._limits))
        now = time.monotonic()
        one = self._watched[peer] = _Watched(peer, vault, client, PathWatch(now, now))
        return one

    def _ask(self, one: _Watched) -> None:
        """Ask one peer until its watch ends."""
        while not one.ended.is_set():
            if one.new_epoch.is_set():
                one.new_epoch.clear()
                one.client.disconnect()
            began, error = time.monotonic(), ""
            try:
                one.client.probe(PROBE_BYTES)
            except ElasticError as problem:
                error = "" if _concerns_certificates(problem) else str(problem)[:MAX_TEXT_LENGTH]
            now = time.monotonic()
            one.watch = attempted(one.watch, error, began, now, self._limits)
            self._update()
            one.ended.wait(max(0.0, began + interval_s(self._limits) - now))

    def _update(self) -> None:
        """Report the unreachable peers if they have changed."""
        now = time.monotonic()
        with self._lock:
            found = tuple(
                UnreachablePeer(one.peer, one.vault, round(silent_s, 1), one.watch.error)
                for _, one in sorted(self._watched.items())
                if (silent_s := one.watch.silent_s(now, self._limits))
            )
            if _places(found) == _places(self._unreachable):
                return
            self._unreachable = found
            self._report(found)  # under the lock, so that reports keep their order


def _concerns_certificates(problem: ElasticError) -> bool:
    """Return whether the peer answered, but one of the two refuses the other's certificate. Then
    the path is well; the job tells of certificates otherwise, and open connections go on."""
    causes = (problem.__cause__, problem.__cause__ and problem.__cause__.__cause__)
    refused = (cause for cause in causes if isinstance(cause, ssl.SSLError))
    return any(rejection_reason(one) in (Reason.EXPIRED, Reason.WRONG_CA) for one in refused)


def _places(found: tuple[UnreachablePeer, ...]) -> list[tuple[str, str]]:
    return [(one.peer, one.vault) for one in found]
