"""The loop that gRPC runs on."""

from __future__ import annotations

import asyncio
import socket
from contextlib import suppress
from functools import partial

import grpc
import pytest

from elastic.rpc.control import event_loop as loops
from elastic.rpc.control.channel_options import MAX_CALLS
from elastic.rpc.control.client import CoordinatorStub
from elastic.rpc.control.envelope import from_wire, pack_call
from elastic.rpc.control.event_loop import GrpcEventLoop, ended, event_loop, run
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S
from tests.rpc.conftest import ServerBench

TOGETHER = MAX_CALLS // 2


def test_many_events_take_few_turns(server: ServerBench) -> None:
    """With the real gRPC: this fails if a newer one wakes the loop in another way.

    On a busy machine the events of a few hundred calls may come one by one.
    """
    loop = event_loop()
    assert isinstance(loop, GrpcEventLoop)
    before = loop.spared
    with grpc.insecure_channel(server.address) as channel:
        stub = CoordinatorStub(channel)

        def some_are_spared() -> bool:
            asked = [
                stub.call.future(pack_call("echo", {}), timeout=LONG_S) for _ in range(TOGETHER)
            ]
            assert all(from_wire(answer.result()).body == b"{}" for answer in asked)
            return loop.spared > before

        assert wait_until(some_are_spared)


@pytest.mark.parametrize("bound", [False, True])
def test_no_wakeup_is_lost(bound: bool) -> None:
    """A poller's bytes, as gRPC's reader takes them: one, and then all events."""
    loop, (reader, writer) = GrpcEventLoop(), socket.socketpair()
    reader.setblocking(False)
    events, handled, turns = list[int](), list[int](), 0

    def _handle_events(among: list[int] = events) -> None:
        nonlocal turns
        turns += 1
        assert reader.recv(1) == b"1"
        if turns == 1:
            wake(99)  # while they are handled
        while among:
            handled.append(among.pop(0))
        if turns == 2:
            loop.call_soon(wake, 100)
        if 100 in handled:
            loop.call_later(0.05, loop.stop)

    def wake(event: int) -> None:
        events.append(event)
        writer.send(b"1")

    for number in range(50):
        wake(number)
    loop.add_reader(reader, partial(_handle_events, events) if bound else _handle_events)
    loop.call_later(LONG_S, loop.stop)
    loop.run_forever()
    assert handled == [*range(50), 99, 100] and turns == 3
    loop.remove_reader(reader)
    loop.close()
    reader.close()
    writer.close()


def test_a_task_that_misses_its_cancellation_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loops, "CANCEL_AGAIN_S", 0.01)

    async def misses() -> None:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        await asyncio.Event().wait()

    async def body() -> bool:
        task = asyncio.create_task(misses())
        await asyncio.sleep(0)
        await asyncio.wait_for(ended({task}), LONG_S)
        return task.cancelled()

    assert run(body())
