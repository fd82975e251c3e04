"""Connections to the coordinator's port that never show whose they are: they keep no member out."""

from __future__ import annotations

import select
import socket
from collections.abc import Iterator

import pytest

from elastic.rpc.control import channel_options, connection_watch
from elastic.rpc.security import unauthenticated
from elastic.rpc.security.rejections import Reason
from elastic.rpc.security.unauthenticated import UnauthenticatedConnections
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S
from tests.security.parts import Authority, refused, rejected, secure, silent
from tests.security.test_coordinator_port import PORT, Bench, serves, session


@pytest.fixture
def tls(authority: Authority, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Its handshakes may take longer than any test waits: only the watch ends one."""
    monkeypatch.setattr(channel_options, "HANDSHAKE_S", 5 * LONG_S)
    made = Bench(secure(authority.good))
    yield made
    made.server.close()


def test_places_go_to_who_comes_next() -> None:
    held = UnauthenticatedConnections[int]()
    for number, address in enumerate(
        ("10.0.0.1", "10.0.0.2", "10.0.0.1", "127.0.0.1", "127.0.0.1")
    ):
        held.enter(number, address)
    assert held.full(5) == 0 and held.full(6) is None
    assert held.crowded("10.0.0.2", 2) is None and held.crowded("10.0.0.1", 2) == 0
    assert held.crowded("127.0.0.1", 2) is None and held.crowded("::1", 0) is None
    assert held.leave(0) == "10.0.0.1" and held.leave(0) == ""
    assert held.crowded("10.0.0.1", 1) == 2 and held.full(4) == 1 and len(held) == 4


def drained(sock: socket.socket) -> bool:
    """The other side ends the connection in time."""
    try:
        while sock.recv(4096):
            continue
    except TimeoutError:
        return False
    except OSError:
        pass
    return True


def test_strangers_hold_no_handshake_that_others_need(
    tls: Bench, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent clients take all places: the first one is dropped early when a new client comes."""
    monkeypatch.setattr(connection_watch, "MAX_HANDSHAKES", 4)
    told, mine = session(tls, secure(authority.good))
    told.expect("on_up")
    with refused(Reason.TOO_MANY, PORT), silent(tls.where, 8) as held:
        assert drained(held[0])
        serves(tls, authority.good)
        assert mine.up
    mine.close()


def test_one_address_puts_out_its_own_handshakes_alone(
    tls: Bench, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated, "_loopback", lambda address: False)
    monkeypatch.setattr(connection_watch, "MAX_PER_ADDRESS", 3)
    with silent(tls.where, 1, "127.0.0.2") as (other,), silent(tls.where, 5) as held:
        # Which ones: connections that the watch sees at the same time are equally old.
        assert wait_until(lambda: len(select.select(held, [], [], 0.0)[0]) >= 2)
        serves(tls, authority.good)
        other.settimeout(0.2)
        assert not drained(other)


def test_members_that_come_all_at_once_wait_for_each_other(
    tls: Bench, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_watch, "MAX_HANDSHAKES", 2)
    monkeypatch.setattr(connection_watch, "SPARED_S", 60.0)
    before = rejected(Reason.TOO_MANY, PORT)
    many = [session(tls, secure(authority.good), f"node{number}") for number in range(12)]
    for told, _ in many:
        told.expect("on_up")
    assert rejected(Reason.TOO_MANY, PORT) == before
    for _, mine in many:
        mine.close()


def test_a_flood_of_young_handshakes_is_bounded(
    tls: Bench, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection_watch, "MAX_HANDSHAKES", 4)
    monkeypatch.setattr(connection_watch, "MAX_SPARED", 8)
    monkeypatch.setattr(connection_watch, "SPARED_S", 60.0)
    with refused(Reason.TOO_MANY, PORT, 12), silent(tls.where, 20) as held:
        assert all(drained(sock) for sock in held[:12])
        serves(tls, authority.good)


def test_only_handshakes_that_fail_are_counted(tls: Bench, authority: Authority) -> None:
    before = rejected(Reason.HANDSHAKE, PORT)
    told, mine = session(tls, secure(authority.good))
    told.expect("on_up")
    for _ in range(20):
        serves(tls, authority.good)
    with refused(Reason.HANDSHAKE, PORT, 3):
        for _ in range(3):
            with socket.create_connection(tls.where, timeout=LONG_S) as sock:
                sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
                assert drained(sock)
    mine.close()
    serves(tls, authority.good)
    assert rejected(Reason.HANDSHAKE, PORT) == before + 3


def test_silence_on_the_plain_port_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channel_options, "HANDSHAKE_S", 0.5)
    bench = Bench(secure(None))
    with socket.create_connection(bench.where, timeout=LONG_S) as sock:
        assert drained(sock)
    bench.server.close()
