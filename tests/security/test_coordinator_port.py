"""The coordinator's port under attack: who is refused, for what, and that it goes on serving."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import ssl
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from elastic import background
from elastic.core.protocol.messages import Heartbeat, Stop, Trim
from elastic.domain.errors import ElasticError, FieldError, UsageError
from elastic.rpc.control import channel_options, envelope, server
from elastic.rpc.control.channel_options import client_options
from elastic.rpc.control.client import ANNOUNCEMENT, CoordinatorSession, CoordinatorStub, call
from elastic.rpc.control.client import _channel as open_channel
from elastic.rpc.control.envelope import (
    CHALLENGE,
    PIECE,
    PIECE_BYTES,
    Envelope,
    from_wire,
    pack,
    pack_call,
    unpack_call,
)
from elastic.rpc.control.server import Server
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.tls import CA, CERT, KEY, Certificates, SecuritySettings
from elastic.rpc.security.token_proof import answer, digest, new_nonce
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S
from tests.rpc.conftest import Recorder
from tests.security.parts import TOKEN, WRONG, Authority, refused, secure

PORT = "coordinator"
NODE1, NODE2 = (pack_call("drain", {"node": node}).body for node in ("node1", "node2"))


class Bench(Recorder):
    """A server that asks for something."""

    def __init__(self, asked: SecuritySettings) -> None:
        super().__init__()
        self.server = Server(
            "127.0.0.1:0",
            on_open=self.callback("open"),
            on_message=self.callback("message"),
            on_close=self.callback("close"),
            on_call=lambda kind, body: {"kind": kind, **body},
            term=lambda: 1,
            secure=asked,
        )
        self.address = self.server.address
        host, port = self.address.split(":")
        self.where = (host, int(port))


@pytest.fixture(params=["tls", "plain"])
def bench(request: pytest.FixtureRequest, authority: Authority) -> Iterator[Bench]:
    made = Bench(secure(authority.good if request.param == "tls" else None))
    yield made
    made.server.close()


@pytest.fixture
def tls(authority: Authority) -> Iterator[Bench]:
    made = Bench(secure(authority.good))
    yield made
    made.server.close()


def serves(bench: Bench, certs: Path | None) -> None:
    """A session that stands there goes on, and calls are answered."""
    answer = call(bench.address, "echo", {"a": 1}, timeout_s=LONG_S, secure=secure(certs))
    assert answer == {"kind": "echo", "a": 1}


def session(
    bench: Bench, mine: SecuritySettings, sender: str = "node0"
) -> tuple[Recorder, CoordinatorSession]:
    told = Recorder()
    callbacks: dict[str, Any] = {
        name: told.callback(name) for name in ("on_message", "on_up", "on_down")
    }
    return told, CoordinatorSession(bench.address, sender=sender, secure=mine, **callbacks)


def certs_of(bench: Bench, authority: Authority) -> Path | None:
    return authority.good if bench.server._certificates is not None else None


def test_members_are_served(bench: Bench, authority: Authority) -> None:
    certs = certs_of(bench, authority)
    told, mine = session(bench, secure(certs))
    told.expect("on_up")
    (theirs,) = bench.expect("open")
    assert theirs.sender == "node0"
    mine.send(Heartbeat("node0", "i", 1, 2), 3)
    assert bench.expect("message")[1] == Heartbeat("node0", "i", 1, 2)
    theirs.send(Trim(4), 4)
    assert told.expect("on_message")[0] == Trim(4)
    serves(bench, certs)
    mine.close()


@pytest.mark.parametrize(
    "raw", [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64]
)
def test_plain_text_is_refused(tls: Bench, authority: Authority, raw: bytes) -> None:
    with (
        refused(Reason.HANDSHAKE, PORT),
        socket.create_connection(tls.where, timeout=LONG_S) as sock,
    ):
        sock.sendall(raw)
        with contextlib.suppress(ConnectionError):
            while sock.recv(4096):
                continue
    serves(tls, authority.good)


def test_a_plain_client_is_refused(tls: Bench, authority: Authority) -> None:
    with refused(Reason.HANDSHAKE, PORT), pytest.raises(ElasticError):
        call(tls.address, "echo", {}, secure=secure(None), timeout_s=3)
    serves(tls, authority.good)


@pytest.mark.parametrize("certs", ["foreign", "expired"])
def test_certificates_that_are_refused(
    tls: Bench, authority: Authority, tmp_path: Path, certs: str
) -> None:
    mine = tmp_path / "mine"
    shutil.copytree(getattr(authority, certs), mine)
    shutil.copy(
        authority.good / CA, mine / CA
    )  # it believes the server: only its own certificate is wrong
    with refused(Reason.HANDSHAKE, PORT), pytest.raises(UsageError):
        call(tls.address, "echo", {}, secure=secure(mine), timeout_s=3)
    serves(tls, authority.good)


def test_no_certificate_is_refused(tls: Bench, authority: Authority) -> None:
    context = ssl.create_default_context(cafile=str(authority.good / CA))
    with (
        refused(Reason.HANDSHAKE, PORT),
        socket.create_connection(tls.where, timeout=LONG_S) as sock,
        pytest.raises((ssl.SSLError, ConnectionError)),
        context.wrap_socket(sock, server_hostname="localhost") as secured,
    ):
        secured.sendall(b"PRI")
        while not secured.recv(4096):
            raise ConnectionError
    serves(tls, authority.good)


def test_weak_cipher_suites_are_refused(tls: Bench, authority: Authority) -> None:
    """gRPC accepts TLS 1.2 and newer, with forward secrecy and authenticated encryption only."""
    context = ssl.create_default_context(cafile=str(authority.good / CA))
    context.load_cert_chain(authority.good / CERT, authority.good / KEY)
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers("AES128-SHA256:AES256-SHA:@SECLEVEL=0")
    with (
        refused(Reason.HANDSHAKE, PORT),
        socket.create_connection(tls.where, timeout=LONG_S) as sock,
        pytest.raises((ssl.SSLError, ConnectionError)),
    ):
        context.wrap_socket(sock, server_hostname="localhost")


def test_a_server_of_another_authority_or_name_is_not_believed(authority: Authority) -> None:
    for theirs, mine in ((authority.foreign, authority.good), (authority.expired, authority.good)):
        bench = Bench(secure(theirs))
        with pytest.raises(UsageError, match="no coordinator answers"):
            call(bench.address, "echo", {}, secure=secure(mine), timeout_s=3)
        bench.server.close()
    bench = Bench(secure(authority.good))
    for name, works in (("localhost", True), ("elsewhere", False)):
        mine_named = SecuritySettings(authority.other, name, TOKEN)
        if works:
            assert call(bench.address, "echo", {}, secure=mine_named)
        else:
            with pytest.raises(UsageError, match="no coordinator answers"):
                call(bench.address, "echo", {}, secure=mine_named, timeout_s=3)
    bench.server.close()


def test_wrong_token_is_refused(bench: Bench, authority: Authority) -> None:
    certs = certs_of(bench, authority)
    with pytest.raises(UsageError, match="does not know the join token"):
        call(bench.address, "echo", {}, secure=secure(certs, WRONG))
    for wrong in ("", "x" * 32):
        with refused(Reason.TOKEN, PORT), pytest.raises(UsageError, match="--join-token-file"):
            shown(bench, certs, wrong, "echo", b"{}")
    with refused(Reason.TOKEN, PORT), pytest.raises(UsageError, match="--join-token-file"):
        call(bench.address, "echo", {}, secure=secure(certs, ""))
    told, mine = session(bench, secure(certs, WRONG))
    with refused(Reason.TOKEN, "agent", 2):
        pass
    assert told.empty() and bench.empty() and not mine.up
    mine.close()
    serves(bench, certs)


def shown(
    bench: Bench, certs: Path | None, proof: str, kind: str, body: bytes, nonce: str = ""
) -> bytes:
    """A call with any proof at all."""
    with open_channel(grpc, bench.address, client_options(5.0), secure(certs)) as channel:
        stub = CoordinatorStub(channel)
        if not nonce:
            asked = stub.call(pack_call(CHALLENGE, {"nonce": new_nonce()}), timeout=5)
            nonce = unpack_call(from_wire(asked))["nonce"]
        try:
            question = Envelope(0, 0, kind, body)
            metadata = (("nonce", nonce), ("proof", proof or "none"))
            return from_wire(stub.call(question, timeout=5, metadata=metadata)).body
        except grpc.RpcError as error:
            raise UsageError(f"{error.details()} --join-token-file") from error


def test_a_proof_is_good_once_and_for_its_question(bench: Bench, authority: Authority) -> None:
    certs = certs_of(bench, authority)
    asked = call(bench.address, CHALLENGE, {"nonce": "00"}, secure=secure(certs, ""))
    nonce = str(asked["nonce"])
    proof = answer(TOKEN, nonce, "call", "drain", digest(NODE1))
    with refused(Reason.TOKEN, PORT), pytest.raises(UsageError, match="wrong"):
        shown(bench, certs, proof, "drain", NODE2, nonce)
    assert shown(bench, certs, proof, "drain", NODE1, nonce)
    with refused(Reason.REPLAYED, PORT), pytest.raises(UsageError, match="used before"):
        shown(bench, certs, proof, "drain", NODE1, nonce)
    forged = "0.000." + new_nonce() + "." + "0" * 64
    with refused(Reason.REPLAYED, PORT), pytest.raises(UsageError, match="used before"):
        made = answer(TOKEN, forged, "call", "drain", digest(b"{}"))
        shown(bench, certs, made, "drain", b"{}", forged)


def test_a_captured_opening_opens_nothing(bench: Bench, authority: Authority) -> None:
    certs = certs_of(bench, authority)
    nonce = str(call(bench.address, CHALLENGE, {"nonce": "00"}, secure=secure(certs, ""))["nonce"])
    metadata = (
        ANNOUNCEMENT,
        ("sender", "node7"),
        ("nonce", nonce),
        ("proof", answer(TOKEN, nonce, "session", "node7")),
    )
    with open_channel(grpc, bench.address, client_options(5.0), secure(certs)) as channel:
        stub = CoordinatorStub(channel)
        first = stub.session(iter(()), metadata=metadata)
        assert list(first) == []
        bench.expect("open")
        bench.expect("close")
        for taken in (metadata, (ANNOUNCEMENT, ("sender", "node8"), *metadata[2:])):
            reason = Reason.REPLAYED if taken == metadata else Reason.TOKEN
            with refused(reason, PORT), pytest.raises(grpc.RpcError):
                list(stub.session(iter(()), metadata=taken))
    assert bench.empty(), "nobody was told of a session"


def test_a_message_that_comes_twice_is_refused(bench: Bench, authority: Authority) -> None:
    certs = certs_of(bench, authority)
    nonce = str(call(bench.address, CHALLENGE, {"nonce": "00"}, secure=secure(certs, ""))["nonce"])
    metadata = (
        ANNOUNCEMENT,
        ("sender", "node7"),
        ("nonce", nonce),
        ("proof", answer(TOKEN, nonce, "session", "node7")),
    )
    beats = [
        replace(pack(Heartbeat("node7", "i", n, 0), term=0, epoch=0), sequence=n) for n in (1, 2, 3)
    ]
    with open_channel(grpc, bench.address, client_options(5.0), secure(certs)) as channel:
        stub = CoordinatorStub(channel)
        again = [beats[0], beats[1], beats[1], beats[0], beats[2]]
        with refused(Reason.REPLAYED, PORT, 2):
            list(stub.session(iter(again), metadata=metadata))
    bench.expect("open")
    assert [bench.expect("message")[1].step for _ in range(3)] == [1, 2, 3]
    bench.expect("close")


def test_too_large_a_question_is_refused(bench: Bench, authority: Authority) -> None:
    certs = certs_of(bench, authority)
    with refused(Reason.OVERSIZE, PORT), pytest.raises(UsageError, match="at most"):
        call(bench.address, "echo", {"x": "y" * (1 << 20)}, secure=secure(certs))
    serves(bench, certs)


def test_a_stranger_makes_nobody_read_much(bench: Bench, authority: Authority) -> None:
    """gRPC reads a message before the proof is checked, so it must limit the message size."""
    certs = certs_of(bench, authority)
    with open_channel(grpc, bench.address, client_options(5.0), secure(certs)) as channel:
        asked = Envelope(0, 0, "echo", bytes(PIECE_BYTES + channel_options.SPARE_BYTES))
        with pytest.raises(grpc.RpcError) as caught:
            CoordinatorStub(channel).call(asked, timeout=10)
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    serves(bench, certs)


def test_a_member_sends_more_in_pieces_up_to_a_bound(
    bench: Bench, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    told, mine = session(bench, secure(certs_of(bench, authority)))
    told.expect("on_up")
    bench.expect("open")
    for chars in (3, PIECE_BYTES, 5 * PIECE_BYTES):
        mine.send(Stop(0, "x" * chars), 1)
        assert bench.expect("message")[1] == Stop(0, "x" * chars)
    monkeypatch.setattr(server, "MAX_BODY_BYTES", 2 * PIECE_BYTES)
    with refused(Reason.OVERSIZE, PORT):
        mine.send(Stop(0, "x" * 3 * PIECE_BYTES), 1)
    bench.expect("close")
    mine.close()


@pytest.mark.parametrize(
    "nbytes", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, PIECE_BYTES + 1, 3 * PIECE_BYTES]
)
def test_pieces_are_the_whole(nbytes: int) -> None:
    whole = envelope.Envelope(1, 2, "Stop", os.urandom(nbytes), "node0")
    found = list(envelope.pieces(whole))
    assert b"".join(one.body for one in found) == whole.body
    assert [one.kind for one in found] == [PIECE] * (len(found) - 1) + ["Stop"]
    assert all(len(one.body) <= PIECE_BYTES and (one.body or not nbytes) for one in found)


def test_certificates_are_replaced_under_a_running_server(
    authority: Authority, tmp_path: Path
) -> None:
    mine = tmp_path / "certs"
    shutil.copytree(authority.expired, mine)
    bench = Bench(secure(mine))
    with pytest.raises(UsageError):
        call(bench.address, "echo", {}, secure=secure(authority.good), timeout_s=3)
    client = tmp_path / "client"
    shutil.copytree(authority.foreign, client)
    told, session_ = session(bench, secure(client))
    for source, target in ((authority.good, mine), (authority.good, client)):
        for name in (CA, CERT, KEY):
            shutil.copy(source / name, target / "draft")
            os.replace(target / "draft", target / name)
    told.expect("on_up")
    serves(bench, authority.good)
    session_.close()
    bench.server.close()


def test_files_that_do_not_belong_together_leave_the_former_in_use(
    authority: Authority, tmp_path: Path
) -> None:
    mine = tmp_path / "certs"
    shutil.copytree(authority.good, mine)
    certificates = Certificates(mine)
    before = certificates.server()
    shutil.copy(authority.foreign / KEY, mine / KEY)
    assert certificates.server() is before
    (mine / CA).unlink()
    assert certificates.server() is before
    assert certificates.pem()
    with pytest.raises(FieldError, match="--certs"):
        Certificates(tmp_path / "nothing")


def test_files_on_a_disk_that_hangs_leave_the_former_in_use(
    authority: Authority, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for long, although reading a pipe without a writer lasts for ever."""
    monkeypatch.setattr(background, "READ_S", 0.01)
    mine, pipe, good = tmp_path / "certs", tmp_path / "pipe", tmp_path / "good"
    shutil.copytree(authority.good, mine)
    certificates = Certificates(mine)
    before = certificates.server()
    (mine / CERT).unlink()
    os.mkfifo(pipe)
    os.link(pipe, mine / CERT)
    for _ in range(100):
        assert certificates.server() is before and certificates.pem()
    shutil.copy(authority.good / CERT, good)
    good.replace(mine / CERT)

    def is_renewed() -> bool:
        os.close(os.open(pipe, os.O_RDWR))  # ends the wait of a reader, if there is one by now
        return certificates.server() is not before

    assert wait_until(is_renewed)


@settings(max_examples=60)
@given(raw=st.binary(min_size=1, max_size=600), http=st.booleans())
def test_rubbish_on_the_port(bench: Bench, raw: bytes, http: bool) -> None:
    with socket.create_connection(bench.where, timeout=LONG_S) as sock:
        try:
            sock.sendall((b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" if http else b"") + raw)
            sock.shutdown(socket.SHUT_WR)
            while sock.recv(4096):
                continue
        except ConnectionError:
            return


def test_rubbish_left_the_port_serving(bench: Bench, authority: Authority) -> None:
    certs = certs_of(bench, authority)
    before = sum(REJECTIONS.counts().values())
    inner_test = test_rubbish_on_the_port.hypothesis.inner_test  # type: ignore[attr-defined]
    inner_test(bench, b"\x16\x03\x01\xff\xff" + b"\0" * 300, False)
    serves(bench, certs)
    if certs is not None:
        with refused(Reason.HANDSHAKE, PORT):
            inner_test(bench, b"\xff" * 40, False)
        assert sum(REJECTIONS.counts().values()) > before


KINDS = st.sampled_from([*envelope.KINDS, "", "Nonsense"])
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats()
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
    ),
    max_leaves=12,
)


@settings(max_examples=150, deadline=None)
@given(kind=KINDS, body=st.binary(max_size=200) | JSON.map(msgspec.msgpack.encode))
def test_whatever_an_envelope_holds_is_a_message_or_a_clear_error(kind: str, body: bytes) -> None:
    try:
        message = envelope.unpack(envelope.Envelope(0, 0, kind, body))
    except FieldError:
        return
    assert type(message).__name__ == kind
