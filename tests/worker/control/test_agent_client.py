"""The worker's thread that reads orders: without it the worker would wait for ever."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from elastic.core.protocol import messages as m
from elastic.domain.errors import ChannelClosed
from elastic.domain.types import Assignment
from elastic.planning.plan.plan import parse_plan
from elastic.rpc.frames import Channel, listen_unix
from elastic.worker.control.agent_client import AgentClient, WorkerSettings
from tests.patience import LONG_S

PLAN = """plan epoch=1 layers=1 microbatches=1 tp=1 backup=stream+snapshot
pipeline 0 microbatches=0: a[0:1]
"""


def settings_of(path: Path) -> WorkerSettings:
    return WorkerSettings(
        agent=str(path), node="a", local_rank=0, local_world_size=1, run_dir="", memory_dir="",
        tp_store="", accumulate="exact", faults=(), host="127.0.0.1", profile="", device="",
    )  # fmt: skip


def test_an_epoch_that_begins_after_the_end_of_the_job_is_abandoned(tmp_path: Path) -> None:
    """The order to stop overtakes the installation, which waits for its turn."""
    with listen_unix(tmp_path / "agent.sock"):
        client = AgentClient(settings_of(tmp_path / "agent.sock"))
    for message in (m.Install(1, Assignment(parse_plan(PLAN), 0)), m.Stop(0, "done")):
        client._receive(message, lambda acked: None)
    assert isinstance(client.next_order(), m.Install)
    assert client.begin_epoch(1).is_set()
    client._channel.close()
    client.close()


def test_an_unexpected_error_ends_the_worker(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its agent then starts it again. An acknowledgement meets an error in the backup."""
    codes: list[int] = []
    ended = threading.Event()

    def end(code: int) -> None:
        codes.append(code)
        ended.set()

    def fail(acked: m.BundleAcknowledged) -> None:
        raise KeyError("bundle")

    monkeypatch.setattr(os, "_exit", end)
    listener = listen_unix(tmp_path / "agent.sock")
    client = AgentClient(settings_of(tmp_path / "agent.sock"))
    sock: socket.socket = listener.accept()[0]
    agent = Channel(sock)
    assert isinstance(agent.receive(), m.Hello)
    client.start(fail)
    agent.send(m.BundleAcknowledged(1))
    assert ended.wait(LONG_S) and codes == [70]
    client.close()
    agent.close()
    listener.close()
    assert "KeyError: 'bundle'" in capsys.readouterr().err


def client_in_epoch(path: Path, epoch: int) -> tuple[AgentClient, Channel]:
    """Return a client whose epoch has begun, and its agent's end of the channel."""
    with listen_unix(path) as listener:
        client = AgentClient(settings_of(path))
        agent = Channel(listener.accept()[0])
    assert isinstance(agent.receive(), m.Hello)
    client.begin_epoch(epoch)
    return client, agent


@pytest.mark.parametrize("arrived", [False, True])
def test_a_worker_outside_the_scope_promises(tmp_path: Path, arrived: bool) -> None:
    """If it is at its meeting point, its waits end. A second order ends all at once."""
    client, agent = client_in_epoch(tmp_path / "agent.sock", 1)
    abandon = client.begin_epoch(1)
    client.meeting.depart(5)
    if arrived:
        client.meeting.arrive()
    client._receive(m.Halt(2, outside=("a",)), lambda acked: None)
    assert agent.receive() == m.Promise(2, 1, 5)
    assert (abandon.is_set(), abandon.gentle) == (arrived, arrived)
    assert client.await_halt(1) == 2
    client._receive(m.Halt(3), lambda acked: None)
    assert abandon.is_set() and not abandon.gentle
    client.close()
    client._channel.close()
    agent.close()


def test_a_worker_in_an_update_halts_at_once(tmp_path: Path) -> None:
    client, agent = client_in_epoch(tmp_path / "agent.sock", 1)
    abandon = client.begin_epoch(1)
    client._receive(m.Halt(2, outside=("a",)), lambda acked: None)
    assert abandon.is_set() and not abandon.gentle
    client._channel.close()
    with pytest.raises(ChannelClosed):
        agent.receive()
    client.close()
    agent.close()
