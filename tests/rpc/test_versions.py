"""Sessions between versions: the next and the former one are served, others are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager

import grpc
import pytest

from elastic.core.protocol.messages import AgentFailed, Halt, Heartbeat, Trim
from elastic.core.protocol.version import PROTOCOL, ProtocolVersion
from elastic.rpc.control.channel_options import PROTOCOL_KEY, TERM
from elastic.rpc.control.client import CoordinatorSession, CoordinatorStub
from elastic.rpc.control.envelope import KINDS, SESSION, SESSION_VERSION
from elastic.rpc.control.server import Server
from elastic.rpc.frames import version_text
from elastic.rpc.security.rejections import REJECTIONS, Reason
from tests.launcher.helpers import wait_until
from tests.rpc.conftest import ClientBench, Recorder, ServerBench


@contextmanager
def serving(version: ProtocolVersion) -> Iterator[tuple[Recorder, Server]]:
    bench = ServerBench(version=version)
    with closing(bench.server):
        yield bench, bench.server


def connected(
    server: Server, version: ProtocolVersion
) -> AbstractContextManager[tuple[Recorder, CoordinatorSession]]:
    return session_to(server.address, version)


@contextmanager
def session_to(
    address: str, version: ProtocolVersion
) -> Iterator[tuple[Recorder, CoordinatorSession]]:
    bench = ClientBench(address, "node3", version=version)
    with closing(bench.session):
        yield bench, bench.session


def numbered(number: int) -> ProtocolVersion:
    return ProtocolVersion(number, f"0.{number}", tuple(KINDS))


@pytest.mark.parametrize("step", [-1, 0, 1])
def test_a_neighbour_is_served(step: int) -> None:
    other = numbered(PROTOCOL + step)
    with (
        serving(SESSION_VERSION) as (heard, server),
        connected(server, other) as (told, session),
    ):
        told.expect("up")
        assert heard.expect("open")[0].version == other
        assert session.send(Heartbeat("node3", "i", 1, 2), 3)
        assert heard.expect("message")[1] == Heartbeat("node3", "i", 1, 2)


@pytest.mark.parametrize("swapped", [False, True], ids=["other node", "other coordinator"])
@pytest.mark.parametrize("number", [PROTOCOL - 2, PROTOCOL + 2], ids=["older", "newer"])
def test_another_version_is_refused_on_both_sides(number: int, swapped: bool) -> None:
    """No session opens, and both sides name both versions and the remedy, once."""
    mine, theirs = SESSION_VERSION, numbered(number)
    mine, theirs = (theirs, mine) if swapped else (mine, theirs)
    before = REJECTIONS.counts().get(("coordinator", Reason.VERSION), 0)
    with serving(mine) as (heard, server), connected(server, theirs) as (told, session):
        (why,) = told.expect("refused")
        assert mine.text in why and theirs.text in why and "install the same version" in why
        assert "node3" in why and server.address in why
        assert not session.up and told.empty() and heard.empty()
        assert wait_until(
            lambda: REJECTIONS.counts().get(("coordinator", Reason.VERSION), 0) > before
        )


def test_a_node_without_a_version_is_refused() -> None:
    with (
        serving(SESSION_VERSION) as (heard, server),
        grpc.insecure_channel(server.address) as channel,
        pytest.raises(grpc.RpcError, match="announces no protocol") as caught,
    ):
        list(CoordinatorStub(channel).session(iter(()), metadata=[("sender", "node1")]))
    assert caught.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    assert heard.empty()


def test_messages_that_the_other_side_cannot_read_are_not_sent() -> None:
    few = ProtocolVersion(PROTOCOL - 1, "", ("Heartbeat", "Trim"))
    with serving(few) as (heard, server), connected(server, few) as (told, session):
        told.expect("up")
        theirs = heard.expect("open")[0]
        assert not session.send(AgentFailed("node3", "i", "OSError"), 0)
        assert session.send(Heartbeat("node3", "i", 1, 2), 0)
        assert isinstance(heard.expect("message")[1], Heartbeat)
        assert not theirs.send(Halt(4), 4) and theirs.send(Trim(4), 4)
        assert told.expect("message")[0] == Trim(4)


@pytest.mark.parametrize("named", [True, False], ids=["named at the end", "not named"])
def test_a_refusal_whose_opening_is_lost_opens_no_session(named: bool) -> None:
    """gRPC may drop the metadata with which a stream was opened if an error follows at once."""
    theirs = numbered(PROTOCOL + 2)
    known = ((TERM, "1"), (PROTOCOL_KEY, version_text(theirs))) if named else ()
    calls: list[object] = []

    def refuse(requests: object, context: grpc.ServicerContext) -> None:
        calls.append(requests)
        context.set_trailing_metadata(known)
        context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another version")

    with refusing(refuse) as address, session_to(address, SESSION_VERSION) as (told, session):
        if named:
            (why,) = told.expect("refused")
            assert theirs.text in why and SESSION_VERSION.text in why
        assert wait_until(lambda: len(calls) > 2)
        assert not session.up and told.empty()


@contextmanager
def refusing(refuse: Callable[[object, grpc.ServicerContext], None]) -> Iterator[str]:
    """Serve sessions that end with `refuse`; yield the address."""
    _, service, method = SESSION.split("/")
    server = grpc.server(ThreadPoolExecutor(1))
    handlers = {method: grpc.stream_stream_rpc_method_handler(refuse)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(None)
