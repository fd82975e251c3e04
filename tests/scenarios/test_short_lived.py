"""A node that will not stay long comes, and is left as a spare: training goes on without a pause."""

from __future__ import annotations

import re
from pathlib import Path

from tests.scenarios.harness import elastic_run
from tests.scenarios.shared import SCRIPT, exact, faults


def test_a_short_lived_node_is_left_as_a_spare(tmp_path: Path) -> None:
    """It says that it goes after two seconds, when it may not even have started its workers."""
    flags = exact("--nnodes", "2:3", "--lifetime", "0,0,2", *faults("join step=1"))
    run = elastic_run(
        tmp_path / "run", flags, [*SCRIPT, "--steps", "120", "--hidden", "128", "--seq-len", "128"]
    )
    assert run.code == 0, run.output
    spares = [event for event in run.events if event["kind"] == "spare"]
    assert spares and all(event["nodes"] == ["node2"] for event in spares), run.output
    # In a plan of its own, or beside one that was due anyway.
    assert re.search("node2 (stay spare|left aside): expected to stay", spares[0]["reason"]), spares
    assert "need" in spares[0]["reason"] and "to pay" in spares[0]["reason"]
    assert not any("join" in recovery["cause"] for recovery in run.summary["recoveries"])
    plans = [event["text"] for event in run.events if event["kind"] == "plan"]
    assert plans and not any("node2[" in text for text in plans)
