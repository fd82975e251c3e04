"""Training continues while no coordinator runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import DEADLINE_S, Run, elastic_run
from tests.scenarios.jobs import Job
from tests.scenarios.paced import STEPS, paced, paced_reference
from tests.scenarios.shared import SCRIPT, exact, faults, reference

DOWN_S = 6
"""Longer than a step of a busy machine."""
LONGER = ("--steps", "40", "--hidden", "128", "--seq-len", "128")
"""So long that the outage is within the run."""
STEADY = ("--backup", "stream+snapshot")
"""Only provoked epoch changes: on a busy machine, the choice of schemes might cause others."""


def outage(run: Run) -> tuple[float, float]:
    """Kill of the first coordinator and start of the second, in seconds since 1970."""
    fired = min(path.stat().st_mtime for path in (run.run_dir / "faults").glob("0.*fired"))
    starts = [event["at"] for event in run.events if event["kind"] == "coordinator"]
    assert len(starts) == 2, starts
    return fired, starts[1]


def steps_during(run: Run) -> set[int]:
    """Number of steps without a coordinator, by their durations after the last report."""
    _, back = outage(run)
    events = [e for e in run.events if e["kind"] == "step"]
    before = max((e for e in events if e["at"] < back), key=lambda e: e["step"])
    seconds = {e["step"]: e["seconds"] for e in events}
    found, ended = set(), before["at"]
    for step in range(before["step"] + 1, max(seconds) + 1):
        ended += seconds[step]
        if ended > back:
            break
        found.add(step)
    return found


def test_training_does_not_feel_it(tmp_path: Path) -> None:
    flags = exact(
        "--nnodes",
        "2",
        "--pipelines",
        "1",
        *STEADY,
        *faults(f"kill-coordinator step=4 down={DOWN_S}"),
    )
    hurry = tmp_path / "hurry"
    job = Job(tmp_path / "run", ["run", "--standalone", *flags], paced(hurry))
    try:
        job.wait("the second coordinator", lambda: len(job.of("coordinator")) == 2, DEADLINE_S)
        job.await_steps(2)
        hurry.touch()
        run = job.finish()
    finally:
        job.kill()
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    assert summary["steps"] == len(summary["loss"]) == STEPS
    assert summary["recoveries"] == []
    assert steps_during(run), "no step was made while nobody coordinated"


@pytest.mark.chaos
def test_a_node_killed_meanwhile_is_recovered_once_it_is_back(tmp_path: Path) -> None:
    texts = ("kill-coordinator step=4 down=5", "kill node=1 step=8 microbatch=3")
    flags = exact("--nnodes", "3", "--pipelines", "1", *STEADY, *faults(*texts))
    run = elastic_run(tmp_path / "run", flags, [*SCRIPT, *LONGER])
    assert run.code == 0, run.output
    down, back = outage(run)
    killed = min(path.stat().st_mtime for path in (run.run_dir / "faults").glob("1.*fired"))
    assert down < killed < back
    (recovery,) = run.summary["recoveries"]
    assert recovery["nodes_after"] == 2
    assert recovery["microbatches_lost"] <= 3 + 1
    assert run.summary["params_sha256"] == reference(tmp_path, *LONGER).summary["params_sha256"]
