"""The worker's thread that reads orders: without it the worker would wait for ever."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from elastic.core.protocol import messages as m
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
