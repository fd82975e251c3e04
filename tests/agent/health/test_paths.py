"""The agent's watch of paths, with real vaults and a port that takes connections and is silent."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.agent.health.monitor import Monitor
from elastic.agent.health.paths import PROBE_BYTES, PathProber
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.core.node.path_watch import attempt_s, interval_s
from elastic.core.protocol.health_report import HealthReport, UnreachablePeer
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS, budget
from tests.patience import LONG_S

LIMITS = replace(DEFAULT_TIMEOUTS, path_s=2.0)
Found = tuple[UnreachablePeer, ...]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[VaultServer]:
    vault = Vault("node1", tmp_path / "vault1")
    server = VaultServer(vault).start()
    yield server
    server.close()
    vault.close()


def test_a_silent_peer_is_reported_until_it_answers(server: VaultServer, tmp_path: Path) -> None:
    reports: queue.Queue[Found] = queue.Queue()
    silent = socket.create_server(("127.0.0.1", 0))
    address = f"127.0.0.1:{silent.getsockname()[1]}"
    prober = PathProber("node0", LIMITS, reports.put)
    vault = Vault("node2", tmp_path / "vault2")
    later: VaultServer | None = None
    try:
        vaults = {"node0": "127.0.0.1:9", "node1": server.address, "node2": address}
        prober.watch(vaults)
        (found,) = reports.get(timeout=LONG_S)
        assert (found.peer, found.vault) == ("node2", address)
        assert found.silent_s >= LIMITS.path_s and "no progress" in found.detail
        prober.watch(vaults)  # a new epoch forgets nothing
        silent.close()
        later = VaultServer(vault, port=int(address.rpartition(":")[2])).start()
        assert reports.get(timeout=LONG_S) == ()
    finally:
        prober.close()
        silent.close()
        if later is not None:
            later.close()
        vault.close()


class Firewall:
    """Forwards connections to an address. New ones are refused once `closed` is set; `answered` is
    set when an answer came back."""

    def __init__(self, target: str) -> None:
        host, _, port = target.rpartition(":")
        self._target, self.closed = (host, int(port)), False
        self.answered = threading.Event()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets = [self._listener]
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                if self.closed:
                    near.close()
                    continue
                far = socket.create_connection(self._target)
                self._sockets += [near, far]
                for ways in ((near, far), (far, near)):
                    threading.Thread(target=self._copy, args=ways, daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(4096):
                target.sendall(data)
                if target.getsockname() == self._listener.getsockname():
                    self.answered.set()
            target.shutdown(socket.SHUT_WR)

    def end(self) -> None:
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def test_a_path_that_refuses_only_new_connections_is_reported_in_the_next_epoch(
    server: VaultServer,
) -> None:
    """Its workers could not connect. The watch's own connection still works."""
    reports: queue.Queue[Found] = queue.Queue()
    firewall = Firewall(server.address)
    prober = PathProber("node0", LIMITS, reports.put)
    vaults = {"node1": firewall.address}
    try:
        prober.watch(vaults)
        assert firewall.answered.wait(LONG_S)
        firewall.closed = True
        prober.watch(vaults)
        (found,) = reports.get(timeout=LONG_S)
        assert found.peer == "node1"
        firewall.closed = False
        assert reports.get(timeout=LONG_S) == ()
    finally:
        prober.close()
        firewall.end()


@pytest.mark.parametrize("silence_s", [0.1, 3.0, 30.0])
def test_attempts_fit_into_a_small_share_of_a_slow_link(silence_s: float) -> None:
    """1 Mbit/s: a busy link still has room for the training, and an attempt for delays."""
    limits, seconds = budget(silence_s), PROBE_BYTES / 125_000
    assert seconds < attempt_s(limits) / 8 and seconds < interval_s(limits) / 5


def test_a_peer_that_left_is_reported_no_more() -> None:
    reports: queue.Queue[Found] = queue.Queue()
    with socket.create_server(("127.0.0.1", 0)) as silent:
        prober = PathProber("node0", LIMITS, reports.put)
        prober.watch({"node2": f"127.0.0.1:{silent.getsockname()[1]}"})
        assert reports.get(timeout=LONG_S)
        prober.watch({})
        assert reports.get(timeout=LONG_S) == ()


def test_the_monitor_reports_unreachable_peers_at_once_and_after_a_reconnect() -> None:
    reports: queue.Queue[HealthReport] = queue.Queue()
    monitor = Monitor("node0", [], reports.put)
    monitor.enter("i", 1)
    assert monitor.sample() is not None and monitor.sample() is None
    one = UnreachablePeer("node2", "h:1", 4.0, "timed out")
    monitor.start()
    try:
        monitor.unreachable((one,))
        found = reports.get(timeout=LONG_S)
        assert found.unreachable == (one,)
        monitor.connected()
        assert reports.get(timeout=LONG_S).unreachable == (one,)
        monitor.unreachable(())
        assert reports.get(timeout=LONG_S).unreachable == ()
    finally:
        monitor.close()
