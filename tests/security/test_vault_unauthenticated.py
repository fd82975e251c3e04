"""Limits of a vault's port: unauthenticated clients have separate places and cost members none."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import pytest

from elastic.agent.vault import server as vault_server
from elastic.agent.vault.server import VaultServer
from elastic.domain.errors import VaultError
from elastic.rpc.bulk.handshake import HANDSHAKE_S
from elastic.rpc.security import unauthenticated
from elastic.rpc.security.rejections import REJECTIONS, Reason
from tests.patience import LONG_S
from tests.security.parts import Authority, refused, silent
from tests.security.vault_ports import COPY, DATA, PORT, certs_of, client, dial, serves, where

T = TypeVar("T")


def test_too_many_connections(
    server: VaultServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vault_server, "MAX_CONNECTIONS", 2)
    certs = certs_of(server, authority)
    members = [client(server, certs) for _ in range(2)]
    for one in members:
        one.inventory()
    with refused(Reason.TOO_MANY, PORT), pytest.raises(VaultError):
        client(server, certs).inventory()
    for one in members:
        one.inventory()
        one.close()


def test_a_client_that_only_tries_the_port_is_not_rejected(
    server: VaultServer, authority: Authority
) -> None:
    """The coordinator does so to learn whether an agent lives, and so do load balancers."""
    before = dict(REJECTIONS.counts())
    for _ in range(3):
        socket.create_connection(where(server), timeout=LONG_S).close()
    while server._unauthenticated:
        time.sleep(0.01)
    serves(server, certs_of(server, authority))
    assert REJECTIONS.counts() == before


def test_strangers_take_no_members_place(
    server: VaultServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Silent clients fill their places: the oldest is dropped, and members connect and stay."""
    monkeypatch.setattr(vault_server, "MAX_UNAUTHENTICATED", 3)
    monkeypatch.setattr(vault_server, "HANDSHAKE_S", LONG_S)
    monkeypatch.setattr(vault_server, "MAX_CONNECTIONS", 4)
    certs = certs_of(server, authority)
    member = client(server, certs)
    member.inventory()
    with refused(Reason.TOO_MANY, PORT), silent(where(server), 4) as held:
        assert held[0].recv(1) == b"", "the first one has to go"
        serves(server, certs)
        member.inventory()
    member.close()


def test_one_address_puts_out_its_own_strangers_alone(
    server: VaultServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unauthenticated, "_loopback", lambda address: False)
    monkeypatch.setattr(vault_server, "MAX_PER_ADDRESS", 2)
    monkeypatch.setattr(vault_server, "HANDSHAKE_S", LONG_S)
    with silent(where(server), 1, "127.0.0.2") as (other,), silent(where(server), 3) as held:
        assert held[0].recv(1) == b""
        serves(server, certs_of(server, authority))
        other.settimeout(0.2)
        with pytest.raises(TimeoutError):
            other.recv(1)


def in_time(attempt: Callable[[], T]) -> T:
    """What `attempt` returns once a busy machine lets it greet in time."""
    end = time.monotonic() + LONG_S
    while True:
        try:
            return attempt()
        except (OSError, VaultError):
            assert time.monotonic() < end


def test_who_drips_bytes_is_held_no_longer_than_the_greeting_may_take(
    server: VaultServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A header sent byte by byte: the TLS handshake and the greeting share one deadline."""
    greeting_s = HANDSHAKE_S
    monkeypatch.setattr(vault_server, "HANDSHAKE_S", 1.0)
    certs = certs_of(server, authority)
    for before_tls in (True, False):
        stream = in_time(partial(dial, server, None if before_tls else certs))
        sock = stream._sock
        sock.settimeout(0.1)
        said = b"\x16\x03\x01\x02\x00" if before_tls and certs else struct.pack("<I", 1000)
        over = False
        for byte in said + b" " * 200:
            try:
                sock.sendall(bytes([byte]))
                over = sock.recv(1) == b""
            except TimeoutError:
                continue
            except OSError:
                over = True
            if over:
                break
        assert over
        stream.close()
    monkeypatch.setattr(vault_server, "HANDSHAKE_S", greeting_s)
    serves(server, certs)


def test_a_member_is_not_held_to_the_greetings_deadline(
    server: VaultServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vault_server, "HANDSHAKE_S", 0.5)
    mine = client(server, certs_of(server, authority))
    in_time(mine.inventory)
    time.sleep(0.7)
    mine.put([(COPY, memoryview(DATA))])
    assert len(mine.inventory()) == 1
    mine.close()
