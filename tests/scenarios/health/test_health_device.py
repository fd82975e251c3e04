"""A simulated device fault in a real worker; the job continues unless the script is the cause."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.health.broken_device import ECC, IO_ERROR, NO_MEMORY, STEP
from tests.scenarios.health.test_health import health
from tests.scenarios.shared import exact, made_once

SCRIPT = ["-m", "tests.scenarios.health.broken_device"]


def broken(path: Path, *script: str, nodes: int = 2) -> Run:
    flags = exact("--nnodes", str(nodes), *(("--pipelines", "1") if nodes > 1 else ()))
    return elastic_run(path, flags, [*SCRIPT, *script])


def whole_run(directory: Path) -> Run:
    """The job without a fault, on one node."""
    return made_once(directory, exact("--nnodes", "1"), SCRIPT)


@pytest.mark.chaos  # the transient error below takes the same way
def test_a_broken_device_is_a_crash_of_its_worker_and_the_job_goes_on(tmp_path: Path) -> None:
    whole = whole_run(tmp_path)
    run = broken(tmp_path / "run", "--node", "node1")
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == whole.summary["params_sha256"]
    assert run.summary["ledger"] == proved(run.summary)
    (found,) = health(run)
    assert (found["node"], found["class"], found["action"]) == ("node1", "device", "restart"), found
    assert found["evidence"]["cause"] == f"RuntimeError: {ECC}"
    (recovery,) = run.summary["recoveries"]
    assert recovery["step"] == STEP and ECC in recovery["cause"]
    assert "Traceback" in run.output and ECC in run.output, "the user sees where"


@pytest.mark.parametrize("text", [IO_ERROR, pytest.param(NO_MEMORY, marks=pytest.mark.chaos)])
def test_a_transient_error_of_the_host_is_a_fault_of_its_node(tmp_path: Path, text: str) -> None:
    run = broken(tmp_path / "run", "--node", "node1", "--text", text)
    assert run.code == 0 and run.summary["steps"] == 6, run.output
    assert run.summary["params_sha256"] == whole_run(tmp_path).summary["params_sha256"]
    assert run.summary["ledger"] == proved(run.summary)
    (found,) = health(run)
    assert (found["node"], found["action"]) == ("node1", "restart")
    assert text in found["evidence"]["cause"]
    (recovery,) = run.summary["recoveries"]
    assert recovery["step"] == STEP and text in recovery["cause"]


@pytest.mark.chaos
def test_the_same_error_everywhere_ends_the_job(tmp_path: Path) -> None:
    """An illegal access that occurs on every device is a bug of the script, whatever its error
    says."""
    text = "CUDA error: an illegal memory access was encountered"
    run = broken(tmp_path / "run", "--node", "any", "--times", "99", "--text", text)
    assert run.code == 1, run.output
    (end,) = [e for e in run.events if e["kind"] == "end"]
    assert text in end["reason"] and "no step" in end["reason"], end
    assert len(list(run.run_dir.glob("broke-*"))) < 6


def test_running_out_of_memory_is_the_scripts_own_fault(tmp_path: Path) -> None:
    text = "CUDA out of memory. Tried to allocate 2.00 GiB"
    run = broken(tmp_path / "run", "--node", "node0", "--text", text, nodes=1)
    assert run.code == 1 and text in run.output
    assert not health(run) and len(list(run.run_dir.glob("broke-*"))) == 1
