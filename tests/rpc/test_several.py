"""Several coordinators: nodes follow the highest term, also when the old leader is only paused."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any

import pytest

from elastic.core.protocol.messages import Heartbeat, Trim
from elastic.domain.errors import FieldError, UsageError
from elastic.rpc.control.client import CoordinatorSession, call
from elastic.rpc.control.server import Superseded
from tests.patience import LONG_S
from tests.rpc.conftest import ClientBench, ServerBench


def free_address() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{sock.getsockname()[1]}"


@pytest.fixture
def places() -> list[str]:
    return [free_address() for _ in range(3)]


@pytest.fixture
def client(places: list[str]) -> Iterator[ClientBench]:
    bench = ClientBench(",".join(places))
    yield bench
    bench.session.close()


def test_the_one_that_serves_is_found_and_then_the_next(
    places: list[str], client: ClientBench
) -> None:
    first = ServerBench(places[1], term=3)
    client.expect("up")
    first.accepted()
    first.server.close()
    client.expect("down")
    second = ServerBench(places[0], term=4)
    client.expect("up")
    session = second.accepted()
    session.send(Trim(1), 1)
    assert client.expect("message")[1].term == 4
    second.server.close()


def test_a_newer_one_is_followed_although_the_older_ones_stream_is_open(
    places: list[str], client: ClientBench
) -> None:
    old = ServerBench(places[0], term=3)
    client.expect("up")
    former = old.accepted()
    new = ServerBench(places[2], term=5)
    (reason,) = client.expect("down")
    assert reason == "a coordinator with term 5 took over"
    client.expect("up")
    session = new.accepted()
    assert old.expect("close") == (former,)
    old.term = 3
    former.send(Trim(9), 9)
    assert client.session.send(Heartbeat("node0", "i", 1, 1), 1)
    assert new.message()[1].term == 5
    session.send(Trim(2), 2)
    assert client.expect("message")[0] == Trim(2), "what the former one says is not heard"
    old.server.close()
    new.server.close()


def test_an_older_one_is_not_followed_again(places: list[str], client: ClientBench) -> None:
    new = ServerBench(places[0], term=5)
    client.expect("up")
    new.accepted()
    new.server.close()
    client.expect("down")
    old = ServerBench(places[1], term=4)
    refused = old.accepted()
    assert old.expect("close") == (refused,)
    again = ServerBench(places[2], term=6)
    client.expect("up")
    for bench in (old, again):
        bench.server.close()


def test_one_coordinator_under_two_addresses_has_one_stream(places: list[str]) -> None:
    server = ServerBench(places[0], term=1)
    port = places[0].rpartition(":")[2]
    client = ClientBench(f"{places[0]},localhost:{port}")
    client.expect("up")
    assert client.session.send(Heartbeat("node0", "i", 1, 1), 1)
    seen = []
    while "message" not in seen:
        seen.append(server._queue.get(timeout=LONG_S)[0])
    assert client.empty()
    client.session.close()
    server.server.close()


def test_a_question_finds_the_one_that_answers(places: list[str]) -> None:
    server = ServerBench(places[1], term=1)
    assert call(",".join(places), "echo", {"a": 1}) == {"a": 1}
    with pytest.raises(UsageError, match="one of echo"):
        call(",".join(places), "nonsense", {})
    server.server.close()
    with pytest.raises(UsageError, match="no coordinator answers"):
        call(",".join(places), "echo", {})


@pytest.mark.parametrize("text", ["", "a:1,", "a:1,b", ",a:1"])
def test_bad_lists(text: str) -> None:
    with pytest.raises(FieldError, match="address"):
        CoordinatorSession(text, on_message=print, on_up=print, on_down=print, sender="node0")


def test_a_question_passes_over_a_deposed_coordinator() -> None:
    """It still serves, but another one answers; if there is none, its reason is told."""

    def refuse(kind: str, body: dict[str, Any]) -> dict[str, Any]:
        raise Superseded("no node is connected to it")

    deposed, leader = ServerBench(on_call=refuse), ServerBench(term=2)
    both = f"{deposed.address},{leader.address}"
    assert call(both, "echo", {"a": 1}, timeout_s=LONG_S) == {"a": 1}
    leader.server.close()
    with pytest.raises(UsageError, match="may be deposed: no node is connected to it"):
        call(both, "echo", {})
    deposed.server.close()
