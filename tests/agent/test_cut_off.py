"""An agent without a coordinator ends with the job, or when nothing runs any more, and says so."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from elastic.agent import service
from elastic.agent.absence import Absence
from elastic.agent.service import NodeAgent
from elastic.config import JobConfig, WorkerCommand
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import JoinRefused
from elastic.domain.types import NodeInfo
from elastic.launcher.run.rundir import free_port
from elastic.telemetry import read_last_words
from tests.agent.agents import RecordingCoordinator
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[NodeAgent]:
    """An agent whose coordinator does not exist."""
    config = JobConfig(
        job_id="j",
        run_dir=str(tmp_path),
        memory_dir=str(tmp_path / "memory"),
        command=WorkerCommand(script="x"),
        checkpoint_dir=str(tmp_path / "checkpoints"),
        preflight="off",
    )
    for folder in (tmp_path / "memory" / "node0", tmp_path / "logs"):
        folder.mkdir(parents=True)
    made = NodeAgent(config, f"127.0.0.1:{free_port()}", NodeInfo("node0", "", "", workers=1))
    yield made
    if made._exit_code is None:
        made._exit_code = 0
        made._close()


def run(agent: NodeAgent) -> int:
    """Run the agent to its end; return its exit code."""
    codes = list[int]()
    thread = threading.Thread(target=lambda: codes.append(agent.run()), daemon=True)
    thread.start()
    thread.join(LONG_S)
    assert codes, "the agent did not end"
    return codes[0]


def test_an_agent_ends_when_it_finds_that_the_job_is_over(agent: NodeAgent, tmp_path: Path) -> None:
    agent._connected = True
    agent._handle_disconnected("the coordinator ended the stream")
    (tmp_path / "exit.json").write_text(json.dumps({"code": 0, "reason": "all 5 steps done"}))
    assert run(agent) == 0


def test_a_run_directory_that_hangs_does_not_stop_the_agent(
    agent: NodeAgent, tmp_path: Path
) -> None:
    """The machine of the coordinator may have served the directory, too. Opening the pipe hangs, as
    the file of a dead server does."""
    record, agent._connected = tmp_path / "exit.json", True
    os.mkfifo(record)
    agent._handle_disconnected("the coordinator's machine is gone")

    def beat() -> None:
        for _ in range(3):
            agent._heartbeat()

    beats = threading.Thread(target=beat, daemon=True)
    beats.start()
    beats.join(LONG_S)
    hung = beats.is_alive()
    readers = [thread for thread in threading.enumerate() if thread.name == "exit-record"]
    os.close(os.open(record, os.O_RDWR))  # the reads end
    assert not hung, "the agent's thread waits for the disk"
    assert len(readers) == 1, "one read at a time"


def test_a_record_that_was_read_late_is_not_obeyed(agent: NodeAgent, tmp_path: Path) -> None:
    """A read that began in an earlier absence of the coordinator ends in the next one."""
    agent._connected = True
    agent._handle_disconnected("connection reset")
    (tmp_path / "exit.json").write_text(json.dumps({"code": 0, "reason": "an earlier job"}))
    agent._heartbeat()
    agent._handle_disconnected("connection reset again")
    reader = agent._exit_record._reader
    assert reader is not None
    reader.join(LONG_S)
    while not agent._queue.empty():
        agent._queue.get()()
    assert agent._exit_code is None


def test_an_agent_ends_when_no_coordinator_comes_back(agent: NodeAgent) -> None:
    agent._handle_disconnected("connection reset")
    agent._absence.since -= agent._state.limits.orphan_s
    assert run(agent) == 1
    words = read_last_words(agent._config.run_dir, "node0")
    assert words.startswith("no coordinator was reached for 1200 s, and nothing runs here: ")


def test_an_agent_that_was_never_connected_waits(agent: NodeAgent, tmp_path: Path) -> None:
    """The record of an earlier job may lie in the run directory."""
    (tmp_path / "exit.json").write_text(json.dumps({"code": 0, "reason": "an earlier job"}))
    agent._heartbeat()
    assert agent._exit_record._reader is None and agent._exit_code is None


def test_an_agent_that_was_never_connected_does_not_wait_for_ever(agent: NodeAgent) -> None:
    agent._absence.since -= agent._state.limits.orphan_s
    assert run(agent) == 1


def test_an_agent_that_fails_ends_its_node_before_it_writes_to_disk(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writing can hang. Its workers must not live on meanwhile."""
    left = list[bool]()
    note = lambda *_: left.append(agent._directory.exists())  # noqa: E731
    monkeypatch.setattr(service, "write_last_words", note)
    agent.failed(RuntimeError("a bug"))
    assert left == [False]


def test_the_user_is_told_why_no_coordinator_answers_and_when_one_does(
    agent: NodeAgent, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def printed() -> str:
        assert agent._console.flush(LONG_S)
        return capfd.readouterr().err

    address = agent._coordinator
    assert wait_until(lambda: "onnection refused" in agent._session.problem)
    agent._absence.begin(time.monotonic())
    agent._heartbeat()
    assert printed() == "", "it may still start"
    agent._absence.begin(time.monotonic() - 7.0)
    for _ in range(3):
        agent._heartbeat()
    (line,) = printed().splitlines()
    assert line.startswith(f"elastic agent: no coordinator has answered node0 at {address} for 7 s")
    assert "onnection refused" in line
    assert line.endswith("without work, node0 ends after 1200 s unless one answers")
    record = tmp_path / "waiting-node0.json"
    assert wait_until(record.exists) and "onnection refused" in record.read_text()
    coordinator = RecordingCoordinator(address)
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    coordinator.report(lambda report: True)
    assert "a coordinator answers node0 at last, after " in printed()
    assert wait_until(lambda: record.read_text() == "{}\n")
    agent.stop()
    thread.join(LONG_S)
    coordinator.server.close()


def test_a_node_that_has_joined_says_that_it_waits_for_work(
    agent: NodeAgent, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its launcher does not know what the job waits for, if the coordinator is elsewhere."""
    printed = list[str]()

    def told(text: str = "node0 waits for work from the coordinator") -> bool:
        assert agent._console.flush(LONG_S)
        printed.append(capfd.readouterr().err)
        return text in printed[-1]

    agent.alone = True
    coordinator = RecordingCoordinator(agent._coordinator)
    thread = threading.Thread(target=agent.run, daemon=True)
    thread.start()
    coordinator.report(lambda report: True)
    assert wait_until(told)
    assert "its workers start when the job has enough nodes" in printed[-1]
    coordinator.order(m.Launch(0, 1, 0, 1, "127.0.0.1", 0, 0))
    assert wait_until(lambda: told(f"node0 has joined the job at {agent._coordinator}"))
    agent.stop()
    thread.join(LONG_S)
    coordinator.server.close()


def test_a_node_without_work_says_what_it_waits_for(agent: NodeAgent) -> None:
    """A refusal, until the node has asked again: then it may have joined."""
    agent._gate._check = lambda: ([], 0.0)
    assert "when the job has enough nodes" in agent._end_of_idleness()
    agent._handle_order(JoinRefused("its disk is full", 0.0), None)
    assert agent._end_of_idleness() == "it may not join yet: its disk is full"
    agent._queue.get(timeout=LONG_S)()  # the pre-flight has passed
    assert "when the job has enough nodes" in agent._end_of_idleness()
    agent._notices._tracker = replace(agent._notices._tracker, parked=True)
    assert agent._end_of_idleness().startswith("it was drained")


def test_the_user_is_never_left_without_a_line_for_5_s() -> None:
    absence, times = Absence(100.0), list[float]()
    for tenth in range(1000, 5000):
        if absence.is_due(tenth / 10):
            times.append(tenth / 10 - 100.0)
    pauses = [after - before for before, after in pairwise([0.0, *times])]
    assert len(times) > 50 and max(pauses) < 5.0
    assert absence.end() and not absence.is_due(1000.0)
    absence.begin(1000.0)
    assert not absence.end(), "a short absence is not told"
