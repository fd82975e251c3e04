"""An agent that loses its coordinator ends with the job, or when nothing runs any more."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.service import NodeAgent
from elastic.config import JobConfig, WorkerCommand
from elastic.domain.types import NodeInfo
from elastic.launcher.run.rundir import free_port
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
    (tmp_path / "memory" / "node0").mkdir(parents=True)
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
    agent._handle_disconnected("the coordinator ended the stream")
    (tmp_path / "exit.json").write_text(json.dumps({"code": 0, "reason": "all 5 steps done"}))
    assert run(agent) == 0


def test_a_run_directory_that_hangs_does_not_stop_the_agent(
    agent: NodeAgent, tmp_path: Path
) -> None:
    """The machine of the coordinator may have served the directory, too. Opening the pipe hangs, as
    the file of a dead server does."""
    record = tmp_path / "exit.json"
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
    agent._away_since -= agent._state.limits.orphan_s
    assert run(agent) == 1


def test_an_agent_that_was_never_connected_waits(agent: NodeAgent, tmp_path: Path) -> None:
    """The record of an earlier job may lie in the run directory."""
    (tmp_path / "exit.json").write_text(json.dumps({"code": 0, "reason": "an earlier job"}))
    agent._heartbeat()
    assert agent._exit_code is None
