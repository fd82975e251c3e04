"""Channels to workers: the first frame, other versions, and messages that cannot be read."""

from __future__ import annotations

import os
import queue
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.workers.channels import WorkerChannels
from elastic.core.protocol import messages as m
from elastic.core.protocol.version import PROTOCOL, ProtocolVersion, this_version
from elastic.domain.errors import ChannelClosed
from elastic.rpc.frames import CHANNEL_VERSION, Channel, connect_unix
from tests.core.recovery.job_model import make_spec
from tests.patience import LONG_S

ATTACH = m.Attach(0, os.getpid(), make_spec(2, 2, 4), "h:1")
HELLO = m.Hello(0, os.getpid(), CHANNEL_VERSION)


class Bench:
    """The agent's side, which expects this process as worker 0 of launch 7."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._heard: queue.SimpleQueue[tuple[int, int, Any]] = queue.SimpleQueue()
        self.channels = WorkerChannels(path, self._put, lambda: (7, {0: os.getpid()}))

    def _put(self, *heard: Any) -> None:
        self._heard.put(heard)

    def heard(self) -> Any:
        generation, rank, message = self._heard.get(timeout=LONG_S)
        assert (generation, rank) == (7, 0)
        return message

    def worker(self, *messages: Any) -> Channel:
        channel = connect_unix(str(self.path))
        for message in messages:
            channel.send(message)
        return channel


@pytest.fixture
def bench() -> Iterator[Bench]:
    with tempfile.TemporaryDirectory() as folder:  # short, as a socket's path must be
        yield Bench(Path(folder) / "agent.sock")


def ended(channel: Channel) -> None:
    with pytest.raises(ChannelClosed):
        channel.receive()


def raw(channel: Channel, kind: str, body: Any) -> None:
    channel._stream.send({"kind": kind, "body": body})


def test_a_worker_greets_and_attaches(bench: Bench) -> None:
    worker = bench.worker(HELLO, ATTACH, m.Ready(1, 0.1, 0.2))
    assert [bench.heard() for _ in range(3)] == [HELLO, ATTACH, m.Ready(1, 0.1, 0.2)]
    bench.channels.send(m.Halt(3))
    assert worker.receive() == m.Halt(3)


@pytest.mark.parametrize("first", [ATTACH, m.Ready(1, 0.1, 0.2)], ids=["Attach", "Ready"])
def test_who_does_not_greet_is_refused(bench: Bench, first: Any) -> None:
    ended(bench.worker(first))


def test_another_process_may_only_report_a_failure(bench: Bench) -> None:
    """A script may start the training process, and that one cannot attach."""
    stranger = m.Hello(0, 1, CHANNEL_VERSION)
    ended(bench.worker(stranger, ATTACH))
    failed = m.Failed("tp: 3 is not usable", 2)
    bench.worker(stranger, failed)
    assert bench.heard() == failed


def test_fields_and_kinds_of_a_newer_worker_are_ignored(bench: Bench) -> None:
    worker = bench.worker(HELLO)
    raw(worker, "Tomorrow", {"x": 1})
    raw(worker, "Ready", {"epoch": 1, "transfer_s": 0.1, "rebuild_s": 0.2, "tomorrow": [1]})
    assert [bench.heard() for _ in range(2)] == [HELLO, m.Ready(1, 0.1, 0.2)]


def test_an_unreadable_message_is_the_cause_of_the_crash(bench: Bench) -> None:
    worker = bench.worker(HELLO)
    assert bench.heard() == HELLO
    raw(worker, "Ready", {"epoch": "one"})
    crashed = bench.heard()
    assert isinstance(crashed, m.Crashed)
    assert "its agent cannot read its message" in crashed.message
    assert "Ready.epoch: 'one'" in crashed.message
    ended(worker)


def test_an_older_worker_gets_only_what_it_can_read(bench: Bench) -> None:
    old = ProtocolVersion(PROTOCOL - 1, "", ("Trim", "Halt"))
    worker = bench.worker(m.Hello(0, os.getpid(), old), ATTACH)
    assert [type(bench.heard()) for _ in range(2)] == [m.Hello, m.Attach]
    for message in (m.Prefetch(1, (), ()), m.Halt(4)):
        bench.channels.send(message)
    assert worker.receive() == m.Halt(4)
    worker.peer = this_version(("Halt",))
    worker.send(m.Ready(1, 0.1, 0.2))  # not sent
    worker.peer = ProtocolVersion()
    worker.send(m.Protected(1))
    assert bench.heard() == m.Protected(1)
