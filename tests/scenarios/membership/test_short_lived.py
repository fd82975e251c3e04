"""A node that will soon leave again stays a spare, and training does not pause for it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.scenarios.harness import DEADLINE_S
from tests.scenarios.jobs import Job
from tests.scenarios.paced import paced
from tests.scenarios.shared import exact, faults


@pytest.mark.chaos  # tests/core/job/test_join_policy.py has the decision
def test_a_short_lived_node_is_left_as_a_spare(tmp_path: Path) -> None:
    """The node has a notice of two seconds, less than the start of its workers may take."""
    flags, hurry = (
        exact("--nnodes", "2:3", "--lifetime", "0,0,2", *faults("join step=1")),
        tmp_path / "hurry",
    )
    job = Job(tmp_path / "run", ["run", "--standalone", *flags], paced(hurry))
    try:
        job.wait("a decision", lambda: job.of("spare"), DEADLINE_S)
        job.await_steps(3)
        hurry.touch()
        run = job.finish()
    finally:
        job.kill()
    assert run.code == 0, run.output
    spares = [event for event in run.events if event["kind"] == "spare"]
    assert spares and all(event["nodes"] == ["node2"] for event in spares), run.output
    # In a plan of its own, or beside one that was due anyway.
    assert re.search("node2 (stay spare|left aside): expected to stay", spares[0]["reason"]), spares
    assert "need" in spares[0]["reason"] and "to pay" in spares[0]["reason"]
    assert not any("join" in recovery["cause"] for recovery in run.summary["recoveries"])
    plans = [event["text"] for event in run.events if event["kind"] == "plan"]
    assert plans and not any("node2[" in text for text in plans)
