"""An agent ends, although a disk hangs.

A named pipe without a reader stands for the file of a disk that hangs: opening it does not return.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic import metrics, telemetry
from elastic.agent import service
from elastic.agent.service import NodeAgent
from elastic.agent.vault.vault import Vault
from elastic.config import JobConfig
from elastic.core.protocol import messages as m
from elastic.domain.errors import EXIT_INTERRUPTED
from elastic.domain.types import NodeInfo
from elastic.launcher.run.rundir import free_port
from tests.agent.agents import RecordingCoordinator, Slow
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S

MakeConfig = Callable[..., JobConfig]
LAUNCH = m.Launch(0, 1, 0, 1, "127.0.0.1", 0, 0)
QUICK = "CLOSE_S", "EXIT_GRACE_S", "KILL_S"


@pytest.fixture
def agent(make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch) -> NodeAgent:
    """An agent whose coordinator does not exist, and that waits shortly for its parts."""
    for name in QUICK:
        monkeypatch.setattr(service, name, 0.1)
    monkeypatch.setattr(telemetry, "LAST_WORDS_S", 0.1)
    monkeypatch.setattr(metrics, "REMOVE_S", 0.1)
    config = make_config("", preflight="off", shutdown_timeout_s=0.1)
    Path(config.run_dir, "logs").mkdir()
    Path(config.memory_dir, "node0").mkdir(parents=True)
    return NodeAgent(config, f"127.0.0.1:{free_port()}", NodeInfo("node0", "", "", workers=1))


def wait_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the agent wait for parts that end, however busy the machine is."""
    for name in QUICK:
        monkeypatch.setattr(service, name, LONG_S)
    monkeypatch.setattr(telemetry, "LAST_WORDS_S", LONG_S)


def run(agent: NodeAgent, order: object = None) -> int:
    """Run the agent to its end, after `order` at the latest; return its exit code."""
    codes = list[int]()
    thread = threading.Thread(target=lambda: codes.append(agent.run()), daemon=True)
    thread.start()
    if order is not None:
        agent._later(agent._apply)(order)
    thread.join(LONG_S)
    assert codes, "the agent did not end"
    return codes[0]


def release(pipe: Path) -> None:
    """Let those go on that open the pipe."""
    os.close(os.open(pipe, os.O_RDWR))


def test_a_log_file_of_a_worker_cannot_be_opened(agent: NodeAgent) -> None:
    folder = agent._config.log_path("node0", 0, 0)
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stdout.log")
    agent._apply(LAUNCH)
    assert run(agent, m.Stop(0, "the job is over")) == 0
    assert "starter" in agent.left
    release(folder / "stdout.log")


def test_a_slow_disk_gets_the_last_output_of_workers(
    agent: NodeAgent, make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs seconds for what is left when the worker has ended."""
    wait_long(monkeypatch)
    monkeypatch.setattr(service, "OUTPUT_S", LONG_S)
    nbytes, piece, got = 400_000, 1 << 16, bytearray()
    agent._config = make_config(
        f"print('x' * {nbytes - 1})", preflight="off", shutdown_timeout_s=3 * LONG_S
    )
    folder = agent._config.log_path("node0", 0, 0)
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stdout.log")
    disk = os.open(folder / "stdout.log", os.O_RDWR)

    def take() -> None:
        while len(got) < nbytes:
            got.extend(os.read(disk, piece))
            time.sleep(0.4)

    agent._apply(LAUNCH)
    assert wait_until(lambda: agent._group and agent._group.pids and not agent._group.alive())
    threading.Thread(target=take, daemon=True).start()
    assert run(agent, m.Stop(0, "the job is over")) == 0
    assert len(got) >= nbytes - 2 * piece and not agent.left  # the pipe holds the rest
    assert wait_until(lambda: len(got) == nbytes)
    os.close(disk)


def test_the_last_words_cannot_be_written(agent: NodeAgent, tmp_path: Path) -> None:
    words = telemetry.last_words_of(agent._config.run_dir, "node0")
    os.mkfifo(words)
    agent._last_words, agent._exit_code = "no coordinator was reached", 1
    assert run(agent) == 1
    assert "last words" in agent.left
    release(words)


def test_the_file_of_the_metrics_cannot_be_removed(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent.serve_metrics(0)
    slow = Slow(os.unlink, "node0.json")
    monkeypatch.setattr(os, "unlink", slow)
    monkeypatch.setattr(service, "CLOSE_S", LONG_S)  # the file has a limit of its own
    agent._exit_code = 0
    assert run(agent) == 0 and slow.begun.is_set()
    slow.go()


@pytest.mark.parametrize("part", ["vault", "directory"])
def test_memory_on_a_disk_cannot_be_freed(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    """Shared memory that is too small is replaced by files."""
    slow = Slow(Vault.close if part == "vault" else shutil.rmtree)
    owner, name = (Vault, "close") if part == "vault" else (shutil, "rmtree")
    monkeypatch.setattr(owner, name, slow)
    agent._exit_code = 0
    assert run(agent) == 0
    assert part in agent.left and slow.begun.is_set()
    slow.go()


def test_a_part_that_fails_does_not_keep_the_others(
    agent: NodeAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise ValueError("a bug")

    wait_long(monkeypatch)
    monkeypatch.setattr(agent._notices, "close", fail)
    agent._exit_code = 0
    assert run(agent) == 0 and not agent.left
    assert "end of notices failed" in caplog.text and not agent._directory.exists()


MAIN = f"""
import sys
from elastic.agent import service
for name in {QUICK}:
    setattr(service, name, 0.1)
sys.exit(service.main())
"""


def start(
    config: JobConfig, coordinator: str, environment: dict[str, str]
) -> subprocess.Popen[str]:
    config.save()
    Path(config.memory_dir, "node0").mkdir(parents=True)
    flags = ["--run-dir", config.run_dir, "--node", "node0", "--coordinator", coordinator]
    return subprocess.Popen([sys.executable, "-c", MAIN, *flags], env=environment, text=True)


def test_the_process_ends_without_the_threads_that_hang(
    make_config: MakeConfig, environment: dict[str, str]
) -> None:
    config = make_config("", preflight="off", shutdown_timeout_s=0.1)
    folder = config.log_path("node0", 0, 0)
    folder.mkdir(parents=True)
    os.mkfifo(folder / "stdout.log")
    coordinator = RecordingCoordinator()
    process = start(config, coordinator.server.address, environment)
    try:
        coordinator.report(lambda report: True)
        coordinator.order(LAUNCH)
        coordinator.order(m.Stop(0, "the job is over"))
        assert process.wait(LONG_S) == 0
    finally:
        process.kill()
        process.wait()
        coordinator.server.close()
    assert "ends without its starter" in Path(config.run_dir, "logs", "node0.log").read_text()


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether the process has a handler for the signal (the mask SigCgt of proc(5))."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    (caught,) = (line.split()[1] for line in lines if line.startswith("SigCgt:"))
    return bool(int(caught, 16) >> number - 1 & 1)


def test_the_process_ends_while_the_disk_of_its_log_hangs(
    make_config: MakeConfig, environment: dict[str, str]
) -> None:
    config = make_config("", preflight="off")
    path = Path(config.run_dir, "logs", "node0.log")
    path.parent.mkdir()
    os.mkfifo(path)
    disk = os.open(path, os.O_RDWR | os.O_NONBLOCK)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(disk, bytes(4096))
    process = start(config, f"127.0.0.1:{free_port()}", environment)
    try:
        assert wait_until(Path(config.memory_dir, "node0", "agent.sock").exists)
        assert wait_until(lambda: handles(process.pid, signal.SIGTERM))
        process.send_signal(signal.SIGTERM)
        assert process.wait(LONG_S) == EXIT_INTERRUPTED
    finally:
        process.kill()
        process.wait()
        os.close(disk)
