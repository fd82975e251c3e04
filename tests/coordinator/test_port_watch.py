"""The port of a disconnected node: only a refused connection proves the end of its agent."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterator

import pytest

from elastic.coordinator import port_watch
from elastic.coordinator.port_watch import Answer, PortWatch, ask
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
    assert run(ask(place)) is Answer.OPEN
    listener.close()
    assert run(ask(place)) is Answer.REFUSED
    for unknown in ("", "127.0.0.1", "127.0.0.1:x", "no.such.host.invalid:1"):
        assert run(ask(unknown)) is Answer.NONE, unknown
    with socket.socket() as bound, socket.create_server(("127.0.0.1", 0), backlog=0) as full:
        bound.bind(("127.0.0.1", 0))
        held = []
        for _ in range(4):  # a hung process accepts nothing, and its queue fills up
            held.append(socket.socket())
            held[-1].setblocking(False)
            held[-1].connect_ex(full.getsockname())
        assert run(ask(address_of(full), 0.2)) is Answer.NONE
        for sock in held:
            sock.close()


def test_a_node_is_watched_until_its_port_refuses(listener: socket.socket) -> None:
    events: queue.SimpleQueue[PortRefused] = queue.SimpleQueue()
    asked = threading.Event()

    def is_away(node: str, incarnation: str) -> bool:
        asked.set()
        return (node, incarnation) == ("n1", "i1")

    watch, vault = PortWatch(events.put, is_away), address_of(listener)
    watch.watch("n1", "i1", vault)
    for _ in range(3):  # attempts are accepted while the agent lives
        listener.accept()[0].close()
    asked.clear()
    watch.watch("n1", "another life", vault)
    assert asked.wait(LONG_S)
    assert events.empty()
    listener.close()
    assert events.get(timeout=LONG_S) == PortRefused("n1", "i1")
    assert events.empty(), "the other one said nothing"
    watch.close()


def test_a_port_that_was_never_reached_proves_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A firewall refuses connections to vaults. This is logged once, with the remedy."""
    events: queue.SimpleQueue[PortRefused] = queue.SimpleQueue()
    asked = queue.SimpleQueue[Answer]()

    async def noted(address: str) -> Answer:
        answer = await ask(address)
        asked.put(answer)
        return answer

    monkeypatch.setattr(port_watch, "ask", noted)
    away = set[str]()
    watch = PortWatch(events.put, lambda node, _: node in away)
    vault = address_of_closed()
    for node, place in (("n1", vault), ("n2", address_of_closed())):
        watch.check(node, "i1", place)
        assert asked.get(timeout=LONG_S) is not Answer.OPEN
    away.add("n1")
    watch.watch("n1", "i1", vault)
    for _ in range(3):
        while asked.get(timeout=LONG_S) is not Answer.REFUSED:
            pass  # on a busy machine an attempt may come to its time limit
    watch.close()
    (text,) = (one.getMessage() for one in caplog.records)
    assert "n1" in text and "let the coordinators connect" in text and events.empty()


def test_a_node_that_was_reached_when_it_connected(listener: socket.socket) -> None:
    events: queue.SimpleQueue[PortRefused] = queue.SimpleQueue()
    watch, vault = PortWatch(events.put, lambda *_: True), address_of(listener)
    watch.check("n1", "i1", vault)
    listener.accept()[0].close()
    watch.check("n1", "i1", vault)
    listener.close()
    watch.watch("n1", "i1", vault)
    assert events.get(timeout=LONG_S) == PortRefused("n1", "i1")
    watch.close()


def address_of_closed() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return address_of(server)
