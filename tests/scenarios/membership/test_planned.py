"""Nodes that join, and nodes that leave with notice, cost no micro-batch and only a short pause."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.jobs import Job
from tests.scenarios.paced import finish_after, paced, paced_reference
from tests.scenarios.shared import GPT, exact, faults, median

STEPS = ("--steps", "120", "--hidden", "128", "--seq-len", "128")
SLACK_S = 0.2
"""What a change may take besides a micro-batch."""


def microbatch_s(run: Run, recovery: dict[str, Any]) -> float:
    """Seconds of one micro-batch on one stage before the change, computed from step times."""
    events = [e for e in run.events if e["kind"] == "step" and e["epoch"] == recovery["epoch"] - 1]
    plan = next(
        e for e in run.events if e["kind"] == "plan" and e["epoch"] == recovery["epoch"] - 1
    )
    text: str = plan["text"]
    depth, m = text.count("[", 0, text.index("peers")), 6
    seconds: list[float] = [e["seconds"] for e in events]
    typical = float(median(seconds[1:] or seconds))
    return typical / (m + depth - 1)


FLAGS = exact(
    "--nnodes", "2:3", "--pipelines", "1", *faults("drain node=1 step=3 deadline=60", "join step=3")
)
"""Three nodes: one is drained; another comes and takes its place."""


def test_drain_and_join_lose_nothing(tmp_path: Path) -> None:
    hurry = tmp_path / "hurry"
    job = Job(tmp_path / "run", ["run", "--standalone", *FLAGS], paced(hurry))
    run = finish_after(job, hurry, "drain node1", "join node3")
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == paced_reference(tmp_path).summary["params_sha256"]
    assert summary["ledger"] == proved(summary)
    causes = [r["cause"] for r in summary["recoveries"]]
    assert any("drain node1" in cause for cause in causes), causes
    assert any("join node3" in cause for cause in causes), causes
    assert all(r["planned"] and r["microbatches_lost"] == 0 for r in summary["recoveries"])
    assert any("join node3" in r["cause"] and r["nodes_after"] == 3 for r in summary["recoveries"])
    assert any("node3[" in event["text"] for event in run.events if event["kind"] == "plan")
    assert "node1[" not in summary["plan"]


@pytest.mark.chaos
def test_drain_and_join_hardly_pause(tmp_path: Path) -> None:
    """Measures a pause, so it needs a machine without other work."""
    run = elastic_run(tmp_path / "run", FLAGS, [*GPT, *STEPS])
    assert run.code == 0, run.output
    for recovery in run.summary["recoveries"]:
        assert recovery["pause_s"] < microbatch_s(run, recovery) + SLACK_S, recovery
