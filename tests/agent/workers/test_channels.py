"""Messages to workers: a worker that does not read delays nobody."""

from __future__ import annotations

import errno
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.workers import channels
from elastic.agent.workers.channels import WorkerChannels
from elastic.core.protocol import messages as m
from elastic.domain.errors import ChannelClosed
from elastic.domain.types import JobSpec
from elastic.rpc.frames import Channel, connect_unix, listen_unix
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S

LARGE = m.Stop(0, "x" * (1 << 20))
"""Larger than the socket's buffer."""
SPEC = JobSpec((), 1, 1)


class Workers:
    """The agent's side, and a connection for each local rank."""

    def __init__(self, path: Path) -> None:
        self.heard: queue.Queue[tuple[int, int, Any]] = queue.Queue()
        self.path = path
        self.channels = WorkerChannels(
            path, lambda *message: self.heard.put(message), lambda: (1, {0: 100, 1: 101})
        )

    def attach(self, rank: int) -> Channel:
        channel = connect_unix(str(self.path))
        for message in (m.Hello(rank, 100 + rank), m.Attach(rank, 100 + rank, SPEC, "")):
            channel.send(message)
            assert self.heard.get(timeout=LONG_S) == (1, rank, message)
        return channel


@pytest.fixture
def workers(tmp_path: Path) -> Iterator[Workers]:
    yield Workers(tmp_path / "agent.sock")


def test_a_stopped_worker_delays_neither_the_agent_nor_the_other_worker(workers: Workers) -> None:
    stopped, other = workers.attach(0), workers.attach(1)
    sent = threading.Event()

    def send() -> None:
        for number in range(8):
            workers.channels.send(LARGE)
            workers.channels.send(m.BundleAcknowledged(number), 1)
        sent.set()

    threading.Thread(target=send, daemon=True).start()
    for number in range(8):
        assert other.receive() == LARGE
        assert other.receive() == m.BundleAcknowledged(number)
    assert sent.wait(LONG_S)
    assert [stopped.receive() for _ in range(8)] == [LARGE] * 8, "it goes on after SIGCONT"
    for channel in (stopped, other):
        channel.close()


def test_the_thread_of_a_removed_worker_ends(workers: Workers) -> None:
    before = threading.active_count()
    worker = workers.attach(0)
    again = workers.attach(0)
    workers.channels.send(m.BundleAcknowledged(1), 0)
    assert again.receive() == m.BundleAcknowledged(1)
    workers.channels.clear()
    workers.channels.send(m.BundleAcknowledged(2))
    for channel in (worker, again):
        channel.close()
    assert wait_until(lambda: threading.active_count() <= before)


def test_a_worker_ends_if_an_acknowledgement_cannot_be_sent(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever for the acknowledgement."""
    worker, send = workers.attach(0), socket.socket.send
    failures = [OSError(errno.ENOBUFS, "no buffer space")]

    def fail_once(self: socket.socket, data: Any, flags: int = 0) -> int:
        if failures:
            raise failures.pop()
        return send(self, data, flags)

    monkeypatch.setattr(socket.socket, "send", fail_once)
    workers.channels.send(m.BundleAcknowledged(1), 0)
    with pytest.raises(ChannelClosed):
        worker.receive()


def test_a_lack_of_descriptors_does_not_end_the_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refusals = [OSError(errno.EMFILE, "too many open files")] * 2

    class Short(socket.socket):
        def accept(self) -> Any:
            if refusals:
                raise refusals.pop()
            return super().accept()

    def listen(path: Path) -> socket.socket:
        listener = listen_unix(path)
        return Short(listener.family, listener.type, fileno=listener.detach())

    monkeypatch.setattr(channels, "listen_unix", listen)
    workers = Workers(tmp_path / "agent.sock")
    workers.attach(1).close()
    assert refusals == []


class Threadless:
    """Lets the next start of a thread named `name` fail, as a full process table does."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        failing, start = [name], threading.Thread.start

        def start_or_fail(thread: threading.Thread) -> None:
            if thread.name in failing:
                failing.remove(thread.name)
                raise RuntimeError("can't start new thread")
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", start_or_fail)
        self.failing = failing


def test_a_lack_of_threads_costs_one_connection(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker sees the end of its connection and ends. The next worker attaches."""
    lack = Threadless("worker", monkeypatch)
    refused = connect_unix(str(workers.path))
    with pytest.raises(ChannelClosed):
        refused.receive()
    assert lack.failing == []
    workers.attach(1).close()


def test_a_worker_to_which_no_thread_can_send_is_given_up(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would wait for ever for its orders."""
    Threadless("to-worker", monkeypatch)
    channel = connect_unix(str(workers.path))
    for message in (m.Hello(0, 100), m.Attach(0, 100, SPEC, "")):
        channel.send(message)
    assert workers.heard.get(timeout=LONG_S) == (1, 0, m.Hello(0, 100))
    _, rank, crash = workers.heard.get(timeout=LONG_S)
    assert rank == 0 and isinstance(crash, m.Crashed) and "can't start new thread" in crash.message
    with pytest.raises(ChannelClosed):
        channel.receive()
    workers.attach(0).close()
