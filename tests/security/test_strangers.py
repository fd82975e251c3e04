"""Connections to the coordinator's port that never show whose they are: they keep no member out."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from elastic.rpc import front, options, strangers
from elastic.rpc.refusals import REFUSALS, Reason
from elastic.rpc.strangers import Strangers
from tests.patience import LONG_S
from tests.security.parts import Authority, refused, secure, silent
from tests.security.test_coordinator_port import PORT, Bench, serves, session


@pytest.fixture
def tls(authority: Authority) -> Iterator[Bench]:
    made = Bench(secure(authority.good))
    yield made
    made.server.close()


def test_places_go_to_who_comes_next() -> None:
    held = Strangers[int]()
    for number, address in enumerate(("10.0.0.1", "10.0.0.2", "10.0.0.1", "127.0.0.1", "127.0.0.1")):
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
    """All places are taken by silent ones: the first of them leaves for who comes, long before its time is over."""
    monkeypatch.setattr(front, "MOST_HANDSHAKES", 4)
    monkeypatch.setattr(front, "HANDSHAKE_S", 5 * LONG_S)
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
    monkeypatch.setattr(strangers, "_loopback", lambda address: False)
    monkeypatch.setattr(front, "MOST_OF_ONE", 3)
    monkeypatch.setattr(front, "HANDSHAKE_S", 5 * LONG_S)
    with silent(tls.where, 1, "127.0.0.2") as (other,), silent(tls.where, 5) as held:
        assert drained(held[0]) and drained(held[1])
        serves(tls, authority.good)
        other.settimeout(0.2)
        assert not drained(other)


def test_members_that_come_all_at_once_wait_for_each_other(
    tls: Bench, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(front, "MOST_HANDSHAKES", 2)
    monkeypatch.setattr(front, "SPARED_S", 60.0)
    before = REFUSALS.total(Reason.TOO_MANY, PORT)
    many = [session(tls, secure(authority.good), f"node{number}") for number in range(12)]
    for told, _ in many:
        told.expect("on_up")
    assert REFUSALS.total(Reason.TOO_MANY, PORT) == before
    for _, mine in many:
        mine.close()


def test_silence_on_the_plain_port_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "HANDSHAKE_S", 0.5)
    bench = Bench(secure(None))
    with socket.create_connection(bench.where, timeout=LONG_S) as sock:
        assert drained(sock)
    bench.server.close()
