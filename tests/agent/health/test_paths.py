"""The agent's watch of paths, with real vaults and a port that takes connections and is silent."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.agent.health.monitor import Monitor
from elastic.agent.health.paths import PathProber
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.core.protocol.health_report import HealthReport, UnreachablePeer
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
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
