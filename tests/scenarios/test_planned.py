"""Nodes that come and nodes that leave with notice: nothing is lost, and training hardly pauses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from tests.scenarios.harness import Run, elastic_run
from tests.scenarios.shared import SCRIPT, exact, faults, median

STEPS = ("--steps", "120", "--hidden", "128", "--seq-len", "128")
SLACK_S = 0.2


def slack_s() -> float:
    """What a change may take besides a micro-batch; more on a machine that others keep busy."""
    return SLACK_S * max(1.0, os.getloadavg()[0] / len(os.sched_getaffinity(0)))


def microbatch_s(run: Run, recovery: dict[str, Any]) -> float:
    """Time of one micro-batch on one stage under the plan before the change, from the job's own steps."""
    events = [e for e in run.events if e["kind"] == "step" and e["epoch"] == recovery["epoch"] - 1]
    plan = next(e for e in run.events if e["kind"] == "plan" and e["epoch"] == recovery["epoch"] - 1)
    depth, m = plan["text"].count("[", 0, plan["text"].index("peers")), 6
    return median([e["seconds"] for e in events[1:]] or [e["seconds"] for e in events]) / (m + depth - 1)


def test_drain_and_join_lose_nothing_and_hardly_pause(tmp_path: Path) -> None:
    """Three nodes: one is drained; another comes and takes its place."""
    slack = slack_s()
    texts = ("drain node=1 step=3 deadline=60", "join step=3")
    flags = exact("--nnodes", "2:3", "--pipelines", "1", *faults(*texts))
    run = elastic_run(tmp_path / "run", flags, [*SCRIPT, *STEPS])
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["ledger"] == {"double": 0, "missing": 0}
    causes = [r["cause"] for r in summary["recoveries"]]
    assert any("drain node1" in cause for cause in causes), causes
    assert any("join node3" in cause for cause in causes), causes
    for recovery in summary["recoveries"]:
        assert recovery["planned"]
        assert recovery["microbatches_lost"] == 0
        assert recovery["pause_s"] < microbatch_s(run, recovery) + slack, recovery
    last = summary["recoveries"][-1]
    assert last["nodes_after"] == 3
    assert "node3[" in summary["plan"] and "node1[" not in summary["plan"]
