"""Streams between nodes and the coordinator: order, terms, bad messages, kills, silence."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from elastic.core.protocol.messages import Halt, Heartbeat, Stop, Trim
from elastic.domain.errors import FieldError
from elastic.rpc.control import client as client_module
from elastic.rpc.control.client import (
    ANNOUNCEMENT,
    ENDED,
    CoordinatorSession,
    CoordinatorStub,
    call,
)
from elastic.rpc.control.envelope import (
    MAX_BODY_BYTES,
    MAX_CALL_BYTES,
    SESSION,
    Envelope,
    Rejected,
    encode_body,
    from_wire,
    pack,
    pack_call,
    unpack,
)
from elastic.rpc.control.server import CALL_THREADS
from elastic.rpc.security.rejections import REJECTIONS, Reason
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S
from tests.rpc.conftest import ClientBench, ServerBench

ROOT = Path(__file__).parents[2]
Connect = Callable[..., ClientBench]


def opened(channel: grpc.Channel, *messages: Envelope) -> Any:
    """A raw session that announces this version and sends the messages."""
    return CoordinatorStub(channel).session(iter(messages), metadata=[ANNOUNCEMENT])


def spawn(*args: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.rpc.peers", *args],
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_no_stream_is_opened_before_there_is_a_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Given up by a busy agent, it would reach the coordinator as a session that ends at once."""
    monkeypatch.setattr(client_module, "CONNECT_TIMEOUT_S", 0.05)
    opened = list[Any]()

    class Stub(CoordinatorStub):
        def __init__(self, channel: Any) -> None:
            super().__init__(channel)
            self.session = opened.append

    monkeypatch.setattr(client_module, "CoordinatorStub", Stub)
    with socket.create_server(("127.0.0.1", 0)) as mute:  # it accepts, and says nothing
        host, port = mute.getsockname()
        bench = ClientBench(f"{host}:{port}")
        try:
            assert wait_until(lambda: bench.session.problem), "one attempt has failed"
        finally:
            bench.session.close()
    assert not opened


def test_messages_both_ways(server: ServerBench, connect: Connect) -> None:
    client = connect("node3")
    client.expect("up")
    session = server.accepted()
    assert session.sender == "node3"
    assert session.peer.startswith("ipv4:127.0.0.1:")
    assert client.session.send(Heartbeat("node3", "i", 7, 2), 4)
    message, envelope = server.message()
    assert message == Heartbeat("node3", "i", 7, 2)
    assert (envelope.epoch, envelope.sender, envelope.kind, envelope.term) == (
        4,
        "node3",
        "Heartbeat",
        1,
    )
    assert session.send(Halt(5), 5)
    message, envelope = client.expect("message")
    assert (message, envelope.term, envelope.epoch) == (Halt(5), 1, 5)
    client.session.send(Heartbeat("node3", "i", 7, 3), 4)
    assert server.message()[1].term == 1, "a node tells the highest term that it has seen"


def test_order_is_kept_from_many_senders(server: ServerBench, connect: Connect) -> None:
    clients = [connect(f"node{i}") for i in range(5)]
    for client in clients:
        client.expect("up")
    sessions = {session.sender: session for session in (server.accepted() for _ in clients)}
    for step in range(50):
        for i, client in enumerate(clients):
            client.session.send(Heartbeat(f"node{i}", "", step, 0), 0)
    seen: dict[str, list[int]] = {}
    for _ in range(250):
        message, _ = server.message()
        seen.setdefault(message.node, []).append(message.step)
    assert seen == {f"node{i}": list(range(50)) for i in range(5)}
    for epoch in range(50):
        for session in sessions.values():
            session.send(Trim(epoch), epoch)
    for client in clients:
        assert [client.expect("message")[0].epoch for _ in range(50)] == list(range(50))


def test_large_message(server: ServerBench, connect: Connect) -> None:
    client = connect()
    client.expect("up")
    large = Stop(0, "x" * (48 << 20))
    client.session.send(large, 0)
    server.accepted().send(large, 0)
    assert server.message()[0] == large
    assert client.expect("message")[0] == large


def test_too_large_or_unknown_message(server: ServerBench, connect: Connect) -> None:
    client = connect()
    client.expect("up")
    with pytest.raises(FieldError, match=r"Stop\.body.*at most 67108864 bytes"):
        client.session.send(Stop(0, "x" * MAX_BODY_BYTES), 0)
    with pytest.raises(FieldError, match="message: 'dict'"):
        client.session.send({"kind": "Stop"}, 0)


def test_a_closed_session(server: ServerBench, connect: Connect) -> None:
    client = connect()
    session = server.accepted()
    client.expect("up")
    client.session.close()
    client.session.close()
    assert server.expect("close") == (session,)
    assert not session.open
    assert not session.send(Trim(0), 0)
    assert not client.session.send(Trim(0), 0)
    assert client.empty(), "no callback after close"


def test_older_term_is_refused(server: ServerBench, connect: Connect) -> None:
    before = REJECTIONS.counts().get(("agent", Reason.STALE), 0)
    client = connect()
    client.expect("up")
    session = server.accepted()
    for term, epoch in ((5, 1), (4, 2), (5, 3)):
        server.term = term
        session.send(Trim(epoch), epoch)
    assert client.expect("message")[0] == Trim(1)
    assert client.expect("message")[0] == Trim(3)
    # The answer to a ping carries the term as well, and may be refused beside the message.
    assert REJECTIONS.counts()["agent", Reason.STALE] >= before + 1
    assert client.session.term == 5


def test_replaced_coordinator_loses_its_sessions(server: ServerBench, connect: Connect) -> None:
    client = connect()
    client.expect("up")
    session = server.accepted()
    server.term = 5
    session.send(Trim(0), 0)
    client.expect("message")
    server.term = 4
    client.session.send(Heartbeat("node0", "", 0, 0), 0)
    (reason,) = client.expect("down")
    # gRPC loses the coordinator's reason if a ping is being written at this moment
    assert reason in ("this coordinator has term 4, node0 knows 5", ENDED)
    assert server.expect("close") == (session,)


@pytest.mark.parametrize(
    ("kind", "body", "text"),
    [
        ("Nonsense", b"{}", "kind: 'Nonsense'"),
        ("", b"", "kind: ''"),
        ("Heartbeat", b"\xc1", "not MessagePack"),
        ("Heartbeat", b"", "not MessagePack"),
        ("Heartbeat", b"\x91\x01", "expected `object`, got `array`"),
        (
            "Heartbeat",
            encode_body("", {"node": "a"}),
            "Heartbeat.incarnation: None is not usable: missing field",
        ),
        (
            "Heartbeat",
            encode_body("", {"node": "a", "incarnation": "b", "step": "x", "microbatch": 0}),
            "Heartbeat.step: 'x'",
        ),
        ("Heartbeat", b"\x91" * 100_000, "Heartbeat"),
        (
            "NodeReport",
            encode_body("", {"info": {}, "phase": "x", "epoch": 0}),
            "NodeReport.info.node",
        ),
    ],
)
def test_bad_message_is_answered_and_the_session_goes_on(
    server: ServerBench, kind: str, body: bytes, text: str
) -> None:
    good = pack(Heartbeat("a", "b", 1, 0), term=0, epoch=0)
    with grpc.insecure_channel(server.address) as channel:
        stream = opened(channel, Envelope(0, 0, kind, body), good)
        rejected = unpack(from_wire(next(stream)))
        assert isinstance(rejected, Rejected)
        assert rejected.kind == kind
        assert text in rejected.text
        server.accepted()
        assert server.message()[0] == Heartbeat("a", "b", 1, 0)
        server.expect("close")


def test_nobody_makes_the_coordinator_inflate(server: ServerBench) -> None:
    """A few bytes may stand for tens of megabytes; only a coordinator has a use for that."""
    common = zlib.compress(encode_body("", {"epoch": 1, "assignment": {}}))
    with grpc.insecure_channel(server.address) as channel:
        message = Envelope(0, 0, "Install", b"\x90", common=common)
        rejected = unpack(from_wire(next(opened(channel, message))))
        assert isinstance(rejected, Rejected) and "only a coordinator sends it" in rejected.text
        asked = Envelope(0, 0, "status", b"", common=bytes(MAX_CALL_BYTES))
        with pytest.raises(grpc.RpcError, match="bytes may be asked"):
            CoordinatorStub(channel).call(asked, timeout=LONG_S)


def test_rubbish_instead_of_an_envelope_ends_the_stream(server: ServerBench) -> None:
    with grpc.insecure_channel(server.address) as channel:
        rubbish = channel.stream_stream(SESSION)(iter([b"\xc1"]), metadata=[ANNOUNCEMENT])
        assert list(rubbish) == []
    server.accepted()
    server.expect("close")


def test_noise_on_the_port_does_not_hurt(server: ServerBench) -> None:
    host, port = server.address.split(":")
    with socket.create_connection((host, int(port)), timeout=LONG_S) as sock:
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n" + os.urandom(4096))
        while sock.recv(65536):
            continue
    assert call(server.address, "echo", {"a": 1}) == {"a": 1}


@contextmanager
def deaf(address: str) -> Iterator[str]:
    """Address of a proxy to `address` that passes on only the first bytes of each answer."""
    host, _, port = address.rpartition(":")
    ends: list[socket.socket] = []

    def serve(one: socket.socket) -> None:
        other = socket.create_connection((host, int(port)))
        ends.extend((one, other))
        threading.Thread(target=forward, args=(one, other), daemon=True).start()
        left = 4096  # enough for the connection to open
        with suppress(OSError):
            while left > 0 and (data := other.recv(left)):
                one.sendall(data)
                left -= len(data)

    def forward(one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(1 << 16):
                other.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        listener.shutdown(socket.SHUT_RDWR)
        for end in ends:
            end.close()


def test_clients_that_read_nothing_delay_nobody(server: ServerBench, connect: Connect) -> None:
    """More of them than the server has threads for calls."""
    with deaf(server.address) as address, grpc.insecure_channel(address) as channel:
        stub = CoordinatorStub(channel)
        nothing = iter(queue.SimpleQueue[Envelope | None]().get, None)
        stream = stub.session(nothing, metadata=[ANNOUNCEMENT])
        session = server.accepted()
        for _ in range(64):
            assert session.send(Stop(0, "x" * (1 << 20)), 1)
        question = pack_call("repeat", {"text": "x", "times": 4 << 20})
        asked = [stub.call.future(question) for _ in range(2 * CALL_THREADS)]
        client = connect("node3")
        client.expect("up")
        server.accepted().send(Halt(5), 5)
        assert client.expect("message")[0] == Halt(5)
        assert client.session.send(Heartbeat("node3", "i", 7, 2), 4)
        assert server.message()[0] == Heartbeat("node3", "i", 7, 2)
        assert call(server.address, "echo", {"a": 1}) == {"a": 1}
        assert not any(one.done() for one in asked) and session.open
        stream.cancel()


def test_a_failing_callback_does_not_stop_the_others(server: ServerBench, connect: Connect) -> None:
    client = connect()
    server.server._on_message = lambda *args: 1 / 0
    client.expect("up")
    client.session.send(Heartbeat("node0", "", 0, 0), 0)
    server.accepted()
    client.session.close()
    server.expect("close")


def test_killed_node_is_noticed_before_it_is_silent_for_long(server: ServerBench) -> None:
    process = spawn("node", server.address)
    server.accepted()
    server.message()
    os.kill(process.pid, signal.SIGKILL)
    server.expect("close")
    process.communicate()


def test_killed_coordinator_is_found_again_at_the_same_address() -> None:
    process = spawn("coordinator", "127.0.0.1:0", "1")
    address = first_line(process)
    client = ClientBench(address)
    client.expect("up")
    for term in (2, 3):
        os.kill(process.pid, signal.SIGKILL)
        client.expect("down")
        assert not client.session.send(Trim(0), 0)
        assert not client.session.up
        process.communicate()
        process = spawn("coordinator", address, str(term))
        assert first_line(process) == address
        client.expect("up")
    client.session.close()
    process.kill()
    process.communicate()


def test_silent_coordinator_is_noticed() -> None:
    process = spawn("coordinator", "127.0.0.1:0", "1")
    client = ClientBench(first_line(process), keepalive_s=0.3)
    client.expect("up")
    os.kill(process.pid, signal.SIGSTOP)
    client.expect("down")
    os.kill(process.pid, signal.SIGCONT)
    client.expect("up")
    client.session.close()
    process.kill()
    process.communicate()


def test_session_waits_for_a_coordinator_that_is_not_there_yet() -> None:
    placeholder = ServerBench()
    placeholder.server.close()
    client = ClientBench(placeholder.address)
    assert not client.session.send(Trim(0), 0)
    late = ServerBench(placeholder.address)
    client.expect("up")
    assert client.empty()
    client.session.close()
    late.server.close()


@pytest.mark.parametrize(("listens", "why"), [(False, "onnection refused"), (True, "")])
def test_session_tells_why_it_has_no_coordinator(
    listens: bool, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing listens, or the kernel accepts the connection for a process that never answers."""
    caplog.set_level("INFO")
    with socket.create_server(("127.0.0.1", 0)) as place:
        address = f"127.0.0.1:{place.getsockname()[1]}"
        if not listens:
            place.close()
        client = ClientBench(address)
        assert wait_until(lambda: client.session.problem and why in client.session.problem)
        assert client.empty()
        client.session.close()
    assert f"no stream to {address}: " in caplog.text


def test_session_that_is_up_has_no_problem(server: ServerBench, connect: Connect) -> None:
    client = connect()
    client.expect("up")
    assert client.session.problem == ""
    server.accepted()
    server.server.close()
    (why,) = client.expect("down")
    assert client.session.problem == why


@pytest.mark.parametrize(
    "address", ["", "host", ":1", "host:", "host:x", "host:0", "host:65536", "host:-1"]
)
def test_bad_address(address: str) -> None:
    with pytest.raises(FieldError, match="host:port"):
        CoordinatorSession(
            address,
            on_message=lambda message, envelope: None,
            on_up=lambda: None,
            on_down=lambda reason: None,
            sender="a",
        )
