"""A server and a session that record their callbacks: tests wait for events and never sleep."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from elastic.core.protocol.version import ProtocolVersion
from elastic.domain.errors import ElasticError, FieldError
from elastic.rpc.control.client import CoordinatorSession
from elastic.rpc.control.envelope import SESSION_VERSION, Envelope
from elastic.rpc.control.server import ClientSession, Server
from elastic.rpc.security.tls import SecuritySettings
from tests.patience import LONG_S

WAIT_S = LONG_S
KEEPALIVE_S = 10 * LONG_S
"""What is noticed within the time that is waited is not noticed by silence."""


class Recorder:
    """Puts every callback into a queue as (name, arguments)."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[tuple[str, tuple[Any, ...]]] = queue.SimpleQueue()

    def callback(self, name: str) -> Callable[..., None]:
        return lambda *args: self._queue.put((name, args))

    def expect(self, name: str, timeout_s: float = WAIT_S) -> tuple[Any, ...]:
        """The next callback, which must be `name`; its arguments."""
        found, args = self._queue.get(timeout=timeout_s)
        assert found == name, (found, args)
        return args

    def empty(self) -> bool:
        return self._queue.empty()


def answer(kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The calls that the test server knows."""
    if kind == "echo":
        return body
    if kind == "repeat":
        return {"text": body["text"] * body["times"]}
    if kind == "busy":
        raise ElasticError("a recovery is under way")
    if kind == "broken":
        raise RuntimeError("a bug")
    raise FieldError("kind", kind, "one of echo, repeat, busy, broken")


class ServerBench(Recorder):
    """A server with a settable term."""

    def __init__(
        self,
        address: str = "127.0.0.1:0",
        term: int = 1,
        *,
        on_call: Callable[[str, dict[str, Any]], dict[str, Any]] = answer,
        version: ProtocolVersion = SESSION_VERSION,
        secure: SecuritySettings | None = None,
    ) -> None:
        super().__init__()
        self.term = term
        self.server = Server(
            address,
            on_open=self.callback("open"),
            on_message=self.callback("message"),
            on_close=self.callback("close"),
            on_call=on_call,
            term=lambda: self.term,
            keepalive_s=KEEPALIVE_S,
            version=version,
            secure=secure,
        )
        self.address = self.server.address

    def accepted(self) -> ClientSession:
        session: ClientSession
        (session,) = self.expect("open")
        return session

    def message(self) -> tuple[Any, Envelope]:
        _, message, envelope = self.expect("message")
        return message, envelope


class ClientBench(Recorder):
    def __init__(
        self,
        address: str,
        sender: str = "node0",
        keepalive_s: float = KEEPALIVE_S,
        version: ProtocolVersion = SESSION_VERSION,
    ) -> None:
        super().__init__()
        self.session = CoordinatorSession(
            address,
            on_message=self.callback("message"),
            on_up=self.callback("up"),
            on_down=self.callback("down"),
            on_refused=self.callback("refused"),
            sender=sender,
            keepalive_s=keepalive_s,
            version=version,
        )


@pytest.fixture
def server() -> Iterator[ServerBench]:
    bench = ServerBench()
    yield bench
    bench.server.close()


@pytest.fixture
def connect(server: ServerBench) -> Iterator[Callable[..., ClientBench]]:
    """Open sessions to `server`; closed at the end."""
    benches: list[ClientBench] = []

    def make(sender: str = "node0") -> ClientBench:
        benches.append(ClientBench(server.address, sender))
        return benches[-1]

    yield make
    for bench in benches:
        bench.session.close()
