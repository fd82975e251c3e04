"""A worker that stops without dying is found, killed and replaced; one that is merely slow never is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.scenarios.harness import Run, elastic_run
from tests.scenarios.shared import SCRIPT, exact, faults, reference

BURN = "while True: sum(range(10000))"


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


def test_a_stopped_worker_is_found_killed_and_replaced(tmp_path: Path) -> None:
    stop = faults("stop node=2 step=2 microbatch=2")
    run = elastic_run(tmp_path / "run", exact("--nnodes", "3", "--pipelines", "1", *stop), SCRIPT)
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == reference(tmp_path).summary["params_sha256"]
    (recovery,) = summary["recoveries"]
    assert "hang" in recovery["cause"], recovery
    assert recovery["detect_s"] > 0
    killed = [line for line in agent_log(run, "node2") if "workers are killed" in line and "stopped" in line]
    assert killed, agent_log(run, "node2")


def agent_log(run: Run, node: str) -> list[str]:
    return (run.run_dir / "logs" / f"{node}.log").read_text().splitlines()


def assert_nobody_was_killed(run: Run, nodes: int) -> None:
    assert run.code == 0, run.output
    assert run.summary["recoveries"] == []
    assert run.summary["ledger"] == {"double": 0, "missing": 0}
    assert not [e for e in run.events if e["kind"] == "lost" and _early(run, e)]
    assert [e["epoch"] for e in run.events if e["kind"] == "halt"] == [1]
    for node in range(nodes):
        assert not [line for line in agent_log(run, f"node{node}") if "workers are killed" in line]


def _early(run: Run, event: dict[str, object]) -> bool:
    """Whether it was before the end of the job."""
    end = next(e["at"] for e in run.events if e["kind"] == "end")
    return float(str(event["at"])) < float(end)


def test_nobody_is_killed_on_a_loaded_machine(tmp_path: Path) -> None:
    with loaded_machine():
        run = elastic_run(tmp_path / "run", ["--nnodes", "2"], [*SCRIPT, "--steps", "40"])
    assert_nobody_was_killed(run, 2)


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_nobody_is_killed_in_ten_minutes_on_a_loaded_machine(tmp_path: Path) -> None:
    with loaded_machine(4):
        script = ["-m", "examples.train_gpt", "--steps", "200"]
        run = elastic_run(tmp_path / "run", ["--nnodes", "4"], script, deadline_s=1700)
    assert run.summary["wall_s"] > 600, "the run must last ten minutes: give it more steps"
    assert_nobody_was_killed(run, 4)
