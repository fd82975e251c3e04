"""The port of a disconnected node: only a refused connection proves the end of its agent."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from elastic.coordinator.port_watch import PortWatch, is_refused
from elastic.core.job.state import PortRefused
from elastic.rpc.control.event_loop import run
from tests.patience import LONG_S


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def address_of(listener: socket.socket) -> str:
    return f"127.0.0.1:{listener.getsockname()[1]}"


def test_only_a_refusal_is_a_refusal(listener: socket.socket) -> None:
    place = address_of(listener)
    assert not run(is_refused(place))
    listener.close()
    assert run(is_refused(place))
    for unknown in ("", "127.0.0.1", "127.0.0.1:x", "no.such.host.invalid:1"):
        assert not run(is_refused(unknown)), unknown
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        bound.bind(("127.0.0.1", 0))
        held = []
        for _ in range(4):  # a hung process accepts nothing, and its queue fills up
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(full.getsockname())
        assert not run(is_refused(address_of(full), 0.2))
        for sock in held:
            sock.close()


def test_a_node_is_watched_until_its_port_refuses(listener: socket.socket) -> None:
    events: queue.SimpleQueue[PortRefused] = queue.SimpleQueue()
    asked = threading.Event()

    def is_away(node: str, incarnation: str) -> bool:
        asked.set()
        return (node, incarnation) == ("n1", "i1")

    watch = PortWatch(events.put, is_away)
    watch.watch("n1", "i1", address_of(listener))
    for _ in range(3):  # attempts are accepted while the agent lives
        listener.accept()[0].close()
    assert events.empty()
    listener.close()
    assert events.get(timeout=LONG_S) == PortRefused("n1", "i1")
    asked.clear()
    watch.watch("n1", "another life", address_of_closed())
    assert asked.wait(LONG_S)
    watch.watch("n1", "i1", address_of_closed())
    assert events.get(timeout=LONG_S) == PortRefused("n1", "i1"), "the other one said nothing"
    watch.close()


def address_of_closed() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return address_of(server)
