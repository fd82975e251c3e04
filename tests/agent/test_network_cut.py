"""The injected fault `cut` drops packets: two network namespaces, and connections between them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic.agent import network_cut
from elastic.agent.network_cut import NetworkCut
from elastic.agent.service import NodeAgent
from elastic.config import JobConfig
from elastic.core.protocol import messages as m
from elastic.domain.types import NodeInfo
from tests.kubernetes.network import Network, missing, python_in
from tests.patience import LONG_S

ROOT = Path(__file__).resolve().parents[2]
ECHO = """
import socket, threading
server = socket.create_server(("0.0.0.0", 0))
print(server.getsockname()[1], flush=True)
def echo(one):
    while data := one.recv(100):
        one.sendall(data)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""
CLIENT = """
import socket, sys
from elastic.agent.network_cut import NetworkCut
own, peer, port, patience_s = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])

def answer(one, text, within_s):
    one.settimeout(within_s)
    try:
        one.sendall(text)
        return one.recv(100).decode()
    except OSError:
        return "nothing"

def new(within_s):
    try:
        return answer(socket.create_connection((peer, port), within_s), b"new", within_s)
    except OSError:
        return "nothing"

cut = NetworkCut(own)
old = socket.create_connection((peer, port), patience_s)
print("before:", answer(old, b"old", patience_s), new(patience_s))
cut.begin("b", f"{peer}:{port}", 3600.0)
cut.heal()
print("cut:", answer(old, b"old", 1.0), new(1.0))
cut.heal(all_cuts=True)
print("healed:", answer(old, b"+", patience_s)[:3], new(patience_s))
cut.begin("b", f"{peer}:{port}", 0.0)
cut.heal()
print("over:", new(patience_s))
"""


@pytest.fixture
def network() -> Iterator[Network]:
    if why := missing():
        pytest.skip(why)
    with contextlib.closing(Network()) as made:
        yield made


def test_a_cut_drops_the_packets_of_open_and_of_new_connections(network: Network) -> None:
    (here, own), (there, peer) = network.add("a"), network.add("b")
    with python_in(there, ECHO) as server:
        try:
            assert server.stdout is not None
            port = server.stdout.readline().strip()
            with python_in(here, CLIENT, own, peer, port, str(LONG_S)) as client:
                found, _ = client.communicate(timeout=LONG_S)
        finally:
            server.kill()
    assert found.splitlines() == [
        "before: old new",
        "cut: nothing nothing",
        "healed: old new",
        "over: new",
    ]


def test_a_node_is_never_cut_off_from_itself(caplog: pytest.LogCaptureFixture) -> None:
    NetworkCut("127.0.0.1").begin("node1", "127.0.0.1:1", 1.0)
    assert "has the address of this node: not cut" in caplog.text


def test_an_agent_cuts_the_path_to_the_peer_of_the_fault(
    make_config: Callable[..., JobConfig], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker tells its agent that the point of the fault is reached. The end of the agent ends
    the cut."""
    routes: list[tuple[str, str]] = []

    def change(what: str, address: str) -> bool:
        routes.append((what, address))
        return True

    monkeypatch.setattr(network_cut, "_route", change)
    agent = NodeAgent(make_config(preflight="off"), "127.0.0.1:1", NodeInfo("node0", "", ""))
    try:
        agent._replicator.vaults = {"node1": "10.99.0.2:7000", "node2": "10.99.0.3:7000"}
        fault = "cut node=node0 peer=node2 step=3 duration=3600"
        agent._handle_worker(agent._generation, 0, m.FaultReached(fault, time.time()))
        agent._poll()
        assert routes == [("add", "10.99.0.3")]
    finally:
        agent._close()
    assert routes == [("add", "10.99.0.3"), ("del", "10.99.0.3")]
