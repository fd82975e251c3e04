"""Signals during training end all processes and leave nothing behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launcher.helpers import gone, send, wait_until
from tests.patience import LONG_S
from tests.scenarios.harness import ROOT
from tests.scenarios.jobs import Job
from tests.scenarios.shared import SCRIPT

MEMORY = Path("/dev/shm")


def processes_of(run_dir: Path) -> list[psutil.Process]:
    """All processes of this run, found by their environment or their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            words, env = process.cmdline(), process.environ()
        except psutil.Error:
            continue
        mine = str(run_dir) in words or env.get("ELASTIC_RUN_DIR") == str(run_dir)
        if mine and process.pid != os.getpid():
            found.append(process)
    return found


def wait_for_steps(
    run_dir: Path, run: subprocess.Popen[bytes], lines: int, deadline_s: float = LONG_S
) -> None:
    """Wait until the event log has this many steps."""
    end = time.monotonic() + deadline_s
    while True:
        path = run_dir / "events.jsonl"
        if path.exists() and path.read_text().count('"kind":"step"') >= lines:
            return
        assert run.poll() is None and time.monotonic() < end, "no steps were made"
        time.sleep(0.1)


@pytest.mark.parametrize(
    "number",
    [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.chaos)],
    ids=lambda n: n.name,
)
def test_a_signal_ends_everything(number: signal.Signals, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "elastic", "run", "--standalone", "--nnodes", "2", "--run-dir"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        [*command, str(run_dir), *SCRIPT, "--steps", "5000"],
        cwd=ROOT,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for_steps(run_dir, run, 3)
        assert len(processes_of(run_dir)) >= 6  # launcher, coordinator, 2 agents, 2 workers
        mine = memory_of(run_dir)
        assert mine.exists()
        run.send_signal(number)
        output, _ = run.communicate(timeout=LONG_S)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 128 + number, output
    end = json.loads((run_dir / "launcher-exit.json").read_text())
    assert end == {"code": 128 + number, "reason": f"ended by {number.name}"}
    assert wait_until(lambda: not processes_of(run_dir)), processes_of(run_dir)
    assert not mine.exists()


def test_workers_that_the_signal_ended_did_not_crash(tmp_path: Path) -> None:
    """The signal goes to all processes of a node.

    A busy agent may see its workers end before it gets the signal itself. It must not report a
    crash.
    """
    job = Job(
        tmp_path / "run", ["run", "--standalone", "--nnodes", "2"], [*SCRIPT, "--steps", "5000"]
    )
    try:
        job.await_steps(3)
        agent = job.agent("node0")
        (worker,) = agent.children()
        send(agent.pid, signal.SIGSTOP)
        job.process.send_signal(signal.SIGINT)
        assert wait_until(lambda: gone(worker.pid))
        agent.resume()
        run = job.finish()
    finally:
        job.kill()
    assert run.code == 130, run.output
    assert not [event for event in run.events if event["kind"] == "health"]
    assert "worker 0 ended" not in (run.run_dir / "logs" / "node0.log").read_text()


def memory_of(run_dir: Path) -> Path:
    """Directory of the job in shared memory."""
    from elastic.config import load_config

    return Path(load_config(run_dir).memory_dir)
