"""Several addresses with TLS and token: nodes follow the newest genuine leader, no impostor."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.core.protocol.messages import Heartbeat
from elastic.rpc.control.client import CoordinatorSession, call
from elastic.rpc.control.server import Server
from elastic.rpc.security.rejections import Reason
from elastic.rpc.security.tls import SecuritySettings
from tests.launcher.helpers import wait_until
from tests.rpc.conftest import Recorder
from tests.rpc.test_several import free_address
from tests.security.parts import TOKEN, WRONG, Authority, refused, rejected, secure


class Bench(Recorder):
    """A coordinator of `term` at `address`."""

    def __init__(self, address: str, term: int, asked: SecuritySettings) -> None:
        super().__init__()
        self.server = Server(
            address,
            on_open=self.callback("open"),
            on_message=self.callback("message"),
            on_close=self.callback("close"),
            on_call=lambda kind, body: {"term": term},
            term=lambda: term,
            secure=asked,
        )


@pytest.fixture
def places() -> list[str]:
    return [free_address() for _ in range(3)]


@pytest.fixture(params=["tls", "plain"])
def certs(request: pytest.FixtureRequest, authority: Authority) -> Path | None:
    return authority.good if request.param == "tls" else None


@pytest.fixture
def node(places: list[str], certs: Path | None) -> Iterator[tuple[Recorder, CoordinatorSession]]:
    told = Recorder()
    callbacks: dict[str, Any] = {
        name: told.callback(name) for name in ("on_message", "on_up", "on_down")
    }
    session = CoordinatorSession(
        ",".join(places), sender="node0", secure=secure(certs), **callbacks
    )
    yield told, session
    session.close()


def test_the_newest_is_followed(
    places: list[str], certs: Path | None, node: tuple[Recorder, CoordinatorSession]
) -> None:
    told, session = node
    old = Bench(places[2], 3, secure(certs))
    told.expect("on_up")
    assert call(",".join(places), "term", {}, secure=secure(certs)) == {"term": 3}
    new = Bench(places[0], 4, secure(certs))
    assert told.expect("on_down") == ("a coordinator with term 4 took over",)
    told.expect("on_up")
    assert session.send(Heartbeat("node0", "i", 1, 2), 3)
    new.expect("open")
    assert new.expect("message")[1] == Heartbeat("node0", "i", 1, 2)
    new.server.close()
    told.expect("on_down")
    later = Bench(places[1], 5, secure(certs))
    told.expect("on_up")
    assert session.term == 5
    for bench in (old, later):
        bench.server.close()


def test_a_stranger_at_one_address_is_not_followed(
    places: list[str], certs: Path | None, node: tuple[Recorder, CoordinatorSession]
) -> None:
    told, session = node
    with refused(Reason.TOKEN, "agent", 2):
        stranger = Bench(places[0], 99, secure(certs, WRONG))
    ours = Bench(places[1], 3, secure(certs))
    told.expect("on_up")
    assert session.term == 3 and stranger.empty()
    for bench in (stranger, ours):
        bench.server.close()


def test_another_authority_at_one_address_is_not_followed(
    places: list[str], authority: Authority
) -> None:
    told = Recorder()
    callbacks: dict[str, Any] = {
        name: told.callback(name) for name in ("on_message", "on_up", "on_down")
    }
    stranger = Bench(places[0], 99, SecuritySettings(authority.foreign, "", TOKEN))
    with refused(Reason.HANDSHAKE, "agent"):
        session = CoordinatorSession(
            ",".join(places), sender="node0", secure=secure(authority.good), **callbacks
        )
    ours = Bench(places[1], 3, secure(authority.good))
    told.expect("on_up")
    assert session.term == 3 and stranger.empty()
    assert call(",".join(places), "term", {}, secure=secure(authority.good)) == {"term": 3}
    session.close()
    for bench in (stranger, ours):
        bench.server.close()


@contextlib.contextmanager
def silence(address: str) -> Iterator[None]:
    """At `address`, connections are neither accepted nor refused."""
    host, _, port = address.rpartition(":")
    with contextlib.ExitStack() as stack:
        stack.enter_context(socket.create_server((host, int(port)), backlog=0))
        for _ in range(4):
            waits = stack.enter_context(socket.socket())
            waits.setblocking(False)
            waits.connect_ex((host, int(port)))
        yield


def test_an_address_that_does_not_answer_refuses_nobody(
    places: list[str], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    """As that of a coordinator's pod that is being replaced."""
    caplog.set_level(logging.INFO)
    before = rejected(Reason.HANDSHAKE, "agent")
    callbacks: dict[str, Any] = dict.fromkeys(("on_message", "on_up", "on_down"), lambda *_: None)
    with silence(places[0]):
        session = CoordinatorSession(
            places[0], sender="node0", secure=secure(authority.good), **callbacks
        )
        assert wait_until(lambda: "tcp handshaker shutdown" in caplog.text), caplog.text
        session.close()
    assert rejected(Reason.HANDSHAKE, "agent") == before
