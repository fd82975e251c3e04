"""A path that drops large packets in silence: two network namespaces, and a switch between them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.kubernetes.network import Network, missing, python_in
from tests.patience import LONG_S

ROOT = Path(__file__).resolve().parents[3]
SERVE = """
import sys, threading
from pathlib import Path
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
server = VaultServer(Vault("b", Path(sys.argv[2])), sys.argv[1]).start()
print(server.address, flush=True)
sys.stdin.read()
"""
ASK = """
import sys
from dataclasses import replace
from queue import Queue
from elastic.agent.health.paths import PathProber
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.rpc.bulk.transfer import VaultClient
address, patience_s = sys.argv[1], float(sys.argv[2])
print("small packets pass:", VaultClient(address, timeout_s=patience_s).probe(1) > 0)
reports = Queue()
prober = PathProber("a", replace(DEFAULT_TIMEOUTS, path_s=2.0), reports.put)
prober.watch({"b": address})
print("unreachable:", *(one.peer for one in reports.get(timeout=patience_s)))
prober.close()
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    with contextlib.closing(Network()) as made:
        yield made


def test_a_path_that_drops_large_packets_is_reported(network: Network, tmp_path: Path) -> None:
    """Handshakes pass there, and the first activation would hang."""
    (here, _), (there, peer) = network.add("a"), network.add("b")
    network.drop_large(there, 1000)
    with python_in(there, SERVE, peer, str(tmp_path)) as server:
        try:
            assert server.stdout is not None
            address = server.stdout.readline().strip()
            with python_in(here, ASK, address, str(LONG_S)) as client:
                found, _ = client.communicate(timeout=2 * LONG_S)
        finally:
            server.kill()
    assert found.splitlines() == ["small packets pass: True", "unreachable: b"]
