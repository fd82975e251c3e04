"""A worker that hangs is found, killed and replaced; a worker that is only slow is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.patience import LONG_S
from tests.scenarios.harness import ROOT, Run, elastic_run
from tests.scenarios.health.broken_device import HANG, LOOP
from tests.scenarios.shared import SCRIPT, exact, faults, made_once, reference

BURN = "import os; parent = os.getppid()\nwhile os.getppid() == parent: sum(range(10000))"
"""Ends with whoever started it, also when that is killed."""


@contextmanager
def loaded_machine(a_core: int = 2) -> Iterator[None]:
    """Keep every core busy with `a_core` other processes."""
    count = a_core * len(os.sched_getaffinity(0))
    burners = [subprocess.Popen([sys.executable, "-c", BURN]) for _ in range(count)]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()


@pytest.mark.chaos  # a worker that hangs before it attaches is found in the same way
def test_a_stopped_worker_is_found_killed_and_replaced(tmp_path: Path) -> None:
    stop = faults("stop node=2 step=2 microbatch=2")
    run = elastic_run(tmp_path / "run", exact("--nnodes", "3", "--pipelines", "1", *stop), SCRIPT)
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == reference(tmp_path).summary["params_sha256"]
    (recovery,) = summary["recoveries"]
    assert "hang" in recovery["cause"], recovery
    assert recovery["detect_s"] > 0
    (health,) = [e for e in run.events if e["kind"] == "health"]
    assert (health["node"], health["class"], health["action"]) == ("node2", "process", "restart")
    assert "stopped" in health["evidence"]["cause"] and health["evidence"]["detect_s"] > 0
    killed = [
        line
        for line in agent_log(run, "node2")
        if "killing the workers" in line and "stopped" in line
    ]
    assert killed, agent_log(run, "node2")


def check_restarted(folder: Path, text: str, *flags: str) -> tuple[Run, dict[str, Any]]:
    """Let the worker of node1 hang. It is restarted, and the parameters are those without a fault.
    Return the run and the event that names the suspect."""
    script = ["-m", "tests.scenarios.health.broken_device"]
    flags = ("--nnodes", "3", "--pipelines", "1", *flags)
    run = elastic_run(folder / "run", exact(*flags), [*script, "--node", "node1", "--text", text])
    assert run.code == 0, run.output
    whole = made_once(folder, exact("--nnodes", "1"), script)
    assert run.summary["params_sha256"] == whole.summary["params_sha256"]
    stalled = [e for e in run.events if e["kind"] == "stalled"]
    assert [(e["suspects"], e["action"]) for e in stalled] == [(["node1"], "restart")], stalled
    return run, stalled[0]


def test_a_worker_in_an_endless_loop_is_restarted(tmp_path: Path) -> None:
    """It uses CPU time and sends heartbeats; only the progress of the job shows the loop."""
    run, stalled = check_restarted(tmp_path, LOOP, "--lease", "3")
    assert "CPU time without progress" in stalled["evidence"]["node1"]
    (recovery,) = run.summary["recoveries"]
    assert "node1" in recovery["cause"] and "no progress of the job" in recovery["cause"]


@pytest.mark.chaos
def test_a_worker_that_hangs_before_it_attaches_is_restarted(tmp_path: Path) -> None:
    """It sends nothing and uses no CPU time, while the others wait to begin."""
    run, _ = check_restarted(tmp_path, HANG)
    assert not [e for e in run.events if e["kind"] == "lost"]


def agent_log(run: Run, node: str) -> list[str]:
    return (run.run_dir / "logs" / f"{node}.log").read_text().splitlines()


def assert_nobody_was_killed(run: Run, nodes: int, until: float = float("inf")) -> None:
    """Check that no worker was killed before the end of the job, or before `until` (seconds since
    1970)."""
    events = [e for e in run.events if e["at"] < until]
    end = next((e["at"] for e in events if e["kind"] == "end"), float("inf"))
    assert [e["epoch"] for e in events if e["kind"] == "halt"] == [1], "the plan was changed"
    assert not [e for e in events if e["kind"] in ("lost", "recovery") and e["at"] < end]
    for node in range(nodes):
        assert not [line for line in agent_log(run, f"node{node}") if "killing the workers" in line]


@pytest.mark.chaos  # test_soak has the same with more of everything
def test_nobody_is_killed_on_a_loaded_machine(tmp_path: Path) -> None:
    with loaded_machine():
        run = elastic_run(tmp_path / "run", ["--nnodes", "2"], [*SCRIPT, "--steps", "40"])
    assert run.code == 0, run.output
    assert_nobody_was_killed(run, 2)


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_nobody_is_killed_in_ten_minutes_on_a_loaded_machine(tmp_path: Path) -> None:
    script = ["-m", "examples.train_gpt", "--steps", "1000000"]
    flags = ["--nnodes", "4", "--run-dir", str(tmp_path / "run")]
    command = [sys.executable, "-m", "elastic", "run", "--standalone", *flags, *script]
    with loaded_machine(4), (tmp_path / "output").open("wb") as output:
        run = subprocess.Popen(
            command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=output
        )
        try:
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(600)
            ended = time.time()
            run.send_signal(signal.SIGINT)
            run.wait(LONG_S)
        finally:
            run.kill()
    done = Run(run.returncode, (tmp_path / "output").read_text(), tmp_path / "run")
    assert sum(e["kind"] == "step" for e in done.events) > 10
    assert_nobody_was_killed(done, 4, ended)
