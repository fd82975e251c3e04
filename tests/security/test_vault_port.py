"""A vault's port under attack: who is refused, for what, and that what it keeps stays as it was."""

from __future__ import annotations

import contextlib
import shutil
import socket
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.domain import codec
from elastic.domain.errors import ChannelClosed, FieldError, VaultError
from elastic.rpc.bulk.transfer import Put
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.tls import CA
from elastic.rpc.security.token_proof import GOOD_S, TokenGate, answer
from tests.agent.vault.copies import content, make
from tests.patience import LONG_S
from tests.security.parts import TOKEN, WRONG, Authority, refused, secure
from tests.security.vault_ports import (
    COPY,
    DATA,
    PORT,
    certs_of,
    client,
    dial,
    ended,
    enter,
    serves,
)


def test_members_are_served(server: VaultServer, authority: Authority, vault: Vault) -> None:
    certs = certs_of(server, authority)
    mine = client(server, certs)
    large = content(2, 9_000_000)
    both = [(COPY, DATA), (make(large, layer=2), large)]
    mine.put([(copy, memoryview(data)) for copy, data in both])
    for copy, data in both:
        assert bytes(mine.get(copy)) == data
    mine.put([(COPY, memoryview(DATA))])
    assert len(vault.inventory()) == 2, "a write that comes twice is one copy"
    mine.close()


def test_plain_text_is_refused(tls: VaultServer, authority: Authority) -> None:
    with refused(Reason.PLAIN_TEXT, PORT), pytest.raises(VaultError):
        client(tls, None).inventory()
    serves(tls, authority.good)


@pytest.mark.parametrize(
    ("certs", "reason"), [("foreign", Reason.WRONG_CA), ("expired", Reason.EXPIRED)], ids=str
)
def test_certificates_that_are_refused(
    tls: VaultServer, authority: Authority, tmp_path: Path, certs: str, reason: Reason
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(getattr(authority, certs), mine)
    shutil.copy(authority.good / CA, mine / CA)
    with refused(reason, PORT), pytest.raises(VaultError):
        client(tls, mine).inventory()
    serves(tls, authority.good)


@pytest.mark.parametrize("theirs", ["foreign", "expired"])
def test_a_vault_of_another_authority_is_not_believed(
    vault: Vault, authority: Authority, theirs: str
) -> None:
    made = VaultServer(vault, timeout_s=LONG_S, secure=secure(getattr(authority, theirs))).start()
    with pytest.raises(VaultError, match="certificate verify failed"):
        client(made, authority.good).inventory()
    made.close()


def test_wrong_or_no_token_is_refused(server: VaultServer, authority: Authority) -> None:
    certs = certs_of(server, authority)
    with refused(Reason.TOKEN, PORT), pytest.raises(VaultError):
        client(server, certs, "").inventory()
    with pytest.raises(VaultError, match="does not know the join token"):
        client(server, certs, WRONG).inventory()
    stream = dial(server, certs)
    stream.send({"kind": "Hello", "body": {"node": "b", "nonce": "00"}})
    nonce = stream.receive()[0]["nonce"]
    with refused(Reason.TOKEN, PORT):
        stream.send({"kind": "Proof", "body": {"proof": answer(WRONG, nonce, "vault", "b")}})
    assert "wrong" in stream.receive()[0]["error"]
    ended(stream)
    serves(server, certs)


def test_what_was_captured_cannot_be_sent_again(
    server: VaultServer, authority: Authority, vault: Vault
) -> None:
    """The whole of a connection, byte for byte: greeting and a write."""
    certs = certs_of(server, authority)
    stream = dial(server, certs)
    stream.send({"kind": "Hello", "body": {"node": "b", "nonce": "11"}})
    nonce = stream.receive()[0]["nonce"]
    proof = {"kind": "Proof", "body": {"proof": answer(TOKEN, nonce, "vault", "b")}}
    stream.send(proof)
    assert stream.receive()[0] == {"error": ""}
    put = {"kind": "Put", "body": codec.encode(Put((COPY,)))}
    stream.send(put, [memoryview(DATA)])
    assert stream.receive()[0]["error"] == ""
    stream.close()
    vault.trim(COPY.epoch + 1)
    again = dial(server, certs)
    with refused(Reason.TOKEN, PORT):
        again.send({"kind": "Hello", "body": {"node": "b", "nonce": "11"}})
        again.receive()
        again.send(proof)
    assert "wrong" in again.receive()[0]["error"]
    with contextlib.suppress(ChannelClosed):
        again.send(put, [memoryview(DATA)])
    again.close()
    serves(server, certs)


def test_a_nonce_is_good_once_and_not_for_long() -> None:
    now = 5.0
    gate = TokenGate(TOKEN, lambda: now)
    nonce = gate.nonce()
    assert gate.check(nonce, answer(TOKEN, nonce, "x"), "x") is None
    assert gate.check(nonce, answer(TOKEN, nonce, "x"), "x") is Reason.REPLAYED
    assert gate.check(nonce, answer(TOKEN, nonce, "x"), "y") is Reason.TOKEN
    late = gate.nonce()
    now += GOOD_S + 1
    assert gate.check(late, answer(TOKEN, late, "x"), "x") is Reason.REPLAYED
    other = TokenGate(TOKEN, lambda: now).nonce()
    assert gate.check(other, answer(TOKEN, other, "x"), "x") is Reason.REPLAYED


def test_oversize_frames_are_refused(server: VaultServer, authority: Authority) -> None:
    certs = certs_of(server, authority)
    with refused(Reason.OVERSIZE, PORT):  # before the greeting a kilobyte is too much
        stream = dial(server, certs)
        stream.send({"kind": "Hello", "body": {"node": "b" * 5000, "nonce": ""}})
        ended(stream)
    for header in (
        struct.pack("<I", 0xFFFFFFFF),
        struct.pack("<I", 2) + b"{}" + struct.pack("<Q", 1 << 60),
    ):
        with refused(Reason.OVERSIZE, PORT):
            stream = dial(server, certs)
            enter(stream)
            stream.write(memoryview(header))
            ended(stream)
    serves(server, certs)


def test_a_request_with_what_it_must_not_carry_is_refused(
    server: VaultServer, authority: Authority
) -> None:
    certs = certs_of(server, authority)
    bad = [
        {"kind": "Get", "body": {"key": 3}},
        {"kind": ["Get"], "body": {}},
        {"kind": "Steal", "body": {}},
        [],
        {"kind": "Put", "body": {"copies": []}, "more": 1},
        {"kind": "Put", "body": codec.encode(Put((make(DATA, epoch=1 << 70),)))},
    ]
    for header in bad:
        with refused(Reason.MALFORMED, PORT):
            stream = dial(server, certs)
            enter(stream)
            payload = [memoryview(DATA)] if "Put" in str(header) else []
            with contextlib.suppress(ChannelClosed):
                stream.send(header, payload)
            stream.close()
    with refused(Reason.MALFORMED, PORT):
        stream = dial(server, certs)
        enter(stream)
        with contextlib.suppress(ChannelClosed):  # closed before it could be sent whole
            stream.send({"kind": "Inventory", "body": {}}, [memoryview(DATA)])
        ended(stream)
    serves(server, certs)


def test_nobody_asks_in_the_name_of_another(
    server: VaultServer, authority: Authority, vault: Vault
) -> None:
    certs = certs_of(server, authority)
    mine = client(server, certs)
    mine.put([(COPY, memoryview(DATA))])
    mine.close()
    stream = dial(server, certs)
    enter(stream, "b")
    with refused(Reason.FORGED, PORT):
        stream.send({"kind": "Locate", "body": {"key": vault.inventory()[0].key, "node": "a"}})
    assert "not to a" in stream.receive()[0]["error"]
    stream.close()


@settings(max_examples=60)
@given(raw=st.binary(min_size=1, max_size=400), after=st.booleans())
def test_rubbish_hurts_nobody(
    server: VaultServer, authority: Authority, raw: bytes, after: bool
) -> None:
    """Before the greeting and after it; inside of TLS and instead of it."""
    certs = certs_of(server, authority)
    stream = dial(server, certs if after else None)
    try:
        if after:
            enter(stream)
        stream.write(memoryview(raw))
        stream._sock.shutdown(socket.SHUT_WR)
        while True:
            stream.drain(stream.receive()[1])
    except TimeoutError:
        raise  # nobody answers, and nobody hangs up
    except (ChannelClosed, OSError, FieldError):
        stream.close()


def test_after_all_of_it_members_are_served(server: VaultServer, authority: Authority) -> None:
    certs = certs_of(server, authority)
    before = sum(REJECTIONS.counts().values())
    with refused(Reason.MALFORMED, PORT):
        stream = dial(server, certs)
        enter(stream)
        stream.write(memoryview(struct.pack("<I", 7) + b"rubbish" + struct.pack("<Q", 0)))
        ended(stream)
    assert sum(REJECTIONS.counts().values()) > before
    serves(server, certs)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=60)
@given(field=st.sampled_from(sorted(codec.encode(COPY))), value=JSON)
def test_a_copy_with_any_field_hurts_nobody(
    server: VaultServer, authority: Authority, vault: Vault, field: str, value: object
) -> None:
    """Any value in any field of a sent copy: the vault refuses it or keeps it whole."""
    stream = dial(server, certs_of(server, authority))
    with contextlib.suppress(ChannelClosed, TimeoutError):
        enter(stream)
        stream.send(
            {"kind": "Put", "body": {"copies": [{**codec.encode(COPY), field: value}]}},
            [memoryview(DATA)],
        )
        stream.receive()
    stream.close()
    vault.check_integrity()
