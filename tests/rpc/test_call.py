"""Questions of the command line, and servers that cannot start."""

from __future__ import annotations

import threading

import grpc
import pytest

from elastic.domain.errors import ElasticError, FieldError, UsageError
from elastic.rpc.control.channel_options import CONNECT_TIMEOUT_S
from elastic.rpc.control.client import CoordinatorStub, call
from elastic.rpc.control.envelope import CALL, Envelope, to_wire
from tests.patience import LONG_S
from tests.rpc.conftest import ServerBench
from tests.scenarios.network.proxy import Proxy


def test_answer(server: ServerBench) -> None:
    body = {"node": "node1", "deadline_s": 30.5, "deep": [{"ä": None}]}
    assert call(server.address, "echo", body) == body
    assert call(server.address, "echo", {}) == {}


def test_large_answer(server: ServerBench) -> None:
    body = {"text": "x", "times": 20 << 20}
    assert len(call(server.address, "repeat", body, timeout_s=30)["text"]) == 20 << 20


def test_refused_question(server: ServerBench) -> None:
    with pytest.raises(UsageError, match="kind: 'dance' is not usable: one of echo") as caught:
        call(server.address, "dance", {})
    assert caught.value.exit_code == 2


def test_question_that_cannot_be_met_now(server: ServerBench) -> None:
    with pytest.raises(ElasticError, match="a recovery is under way") as caught:
        call(server.address, "busy", {})
    assert not isinstance(caught.value, UsageError)


def test_bug_in_the_coordinator(server: ServerBench) -> None:
    with pytest.raises(ElasticError, match=r"failed on 'broken': UNKNOWN.*a bug"):
        call(server.address, "broken", {})
    assert call(server.address, "echo", {}) == {}


@pytest.mark.parametrize("body", [b"\xff", b"[]", b"3", b"{", b"[" * 60_000])
def test_malformed_question(server: ServerBench, body: bytes) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        CoordinatorStub(channel).call(Envelope(0, 0, "echo", body), timeout=LONG_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "echo.body" in caught.value.details()


@pytest.mark.parametrize(
    "data", [b"", b"\xc1", b"\x80", to_wire(Envelope(0, 0, "echo", b""))[:-1], b"\x91" * 9999]
)
def test_malformed_envelope(server: ServerBench, data: bytes) -> None:
    with grpc.insecure_channel(server.address) as channel, pytest.raises(grpc.RpcError) as caught:
        channel.unary_unary(CALL)(data, timeout=LONG_S)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "envelope: " in caught.value.details()


def test_a_slow_connection_may_take_the_whole_time_of_the_question(server: ServerBench) -> None:
    """A busy coordinator takes longer for a handshake than an agent waits before it tries again."""
    far = Proxy(server.address, rtt_s=0.8 * CONNECT_TIMEOUT_S)
    try:
        assert call(far.address, "echo", {"a": 1}, timeout_s=LONG_S) == {"a": 1}
        assert far.accepted == 1
    finally:
        far.close()


def test_nobody_there() -> None:
    bench = ServerBench()
    bench.server.close()
    with pytest.raises(
        UsageError, match=f"no coordinator answers at {bench.address} .*is the job running"
    ):
        call(bench.address, "status", {})


def test_no_answer_in_time() -> None:
    bench, asked, release = ServerBench(), threading.Event(), threading.Event()

    def hang(kind: str, body: dict[str, object]) -> dict[str, object]:
        asked.set()
        release.wait(LONG_S)
        return {}

    bench.server._on_call = hang
    for timeout_s in (0.3, 3.0, 30.0):  # a busy machine may not even ask in time
        with pytest.raises(UsageError, match=f"did not answer 'status' within {timeout_s:g} s"):
            call(bench.address, "status", {}, timeout_s=timeout_s)
        if asked.is_set():
            break
    assert asked.is_set()
    release.set()
    bench.server.close()


def test_proxies_are_ignored(server: ServerBench, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "https_proxy", "grpc_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.delenv("no_proxy", raising=False)
    assert call(server.address, "echo", {"a": 1}) == {"a": 1}


def test_address_in_use(server: ServerBench) -> None:
    with pytest.raises(FieldError, match=r"address: .* a free port"):
        ServerBench(server.address)


@pytest.mark.parametrize("address", ["", "nonsense", "127.0.0.1:http", "127.0.0.1:99999"])
def test_bad_server_address(address: str) -> None:
    with pytest.raises(FieldError, match="host:port is needed"):
        ServerBench(address)
