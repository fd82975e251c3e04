"""What the coordinator tells of a recovery, however late it hears of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core import job
from elastic.core import messages as m
from elastic.core.coordinator import transition
from elastic.core.job import JobPhase, JobState
from elastic.core.messages import NodePhase
from tests.core.test_coordinator import halt, running, say


def told_late(**changes: Any) -> tuple[JobState, tuple[job.Action, ...], str]:
    """node2's workers died; the others install a plan without it, and node0's next report tells all at once."""
    state, *_ = say(running(), "node2", phase=NodePhase.STARTING, cause="oops")
    state = halt(halt(halt(state, "node0"), "node1"), "node2", NodePhase.STARTING)
    assert state.phase is JobPhase.INSTALLING and state.plan.nodes() == ("node0", "node1")
    state, *_ = say(
        state, "node1", phase=NodePhase.RUNNING, ready=(m.Ready(2, 0.5, 0.25),), resumed_at=0.0, epoch=2
    )
    assert state.phase is JobPhase.INSTALLING
    figures = {"ready": (m.Ready(2, 0.25, 0.5),), "resumed_at": state.ticked + 1.0, "epoch": 2}
    return say(state, "node0", **{"phase": NodePhase.RUNNING, **figures, **changes})


@pytest.mark.parametrize("ended", [{"finished": m.Finished(400, "sha")}, {"failed": m.Failed("oops", 3)}])
def test_a_recovery_is_told_though_the_job_ended_at_the_same_time(ended: dict[str, Any]) -> None:
    """A coordinator that is behind hears of the first micro-batch and of the end at once."""
    after, actions, _ = told_late(**ended)
    assert after.phase in (JobPhase.FINISHED, JobPhase.FAILED) and after.change is None
    (recovered,) = [a for a in actions if isinstance(a, job.Recovered)]
    assert (recovered.transfer_s, recovered.rebuild_s, recovered.nodes_after) == (0.5, 0.5, 2)
    assert recovered.change.lost == ("node2",)
    (finish,) = [a for a in actions if isinstance(a, job.Finish)]
    assert actions.index(recovered) < actions.index(finish), "the summary is written with the end"


def test_a_job_that_ends_in_the_middle_of_a_change_recovered_from_nothing() -> None:
    for resumed_at, epoch in ((0.0, 2), (9.0, 1)):
        _, actions, _ = told_late(resumed_at=resumed_at, epoch=epoch, finished=m.Finished(400, "sha"))
        assert not [a for a in actions if isinstance(a, job.Recovered)]


def test_two_faults_that_are_learned_of_at_once_are_two_recoveries() -> None:
    """Training had gone on between them."""
    state, *_ = told_late(resumed_at=0.0)
    assert state.phase is JobPhase.RUNNING and state.change is not None
    report = replace(state.members["node1"].report, phase=NodePhase.STARTING, cause="again", epoch=2)
    members = {**state.members, "node1": replace(state.members["node1"], report=report)}
    before, actions, _ = transition(state.of(members=members), job.Tick(), state.ticked + 0.01)
    assert before.change.cause == "node2: oops; then node1: again"
    assert not [a for a in actions if isinstance(a, job.Recovered)]
    report = replace(state.members["node0"].report, resumed_at=state.ticked)
    members["node0"] = replace(members["node0"], report=report)
    after, actions, _ = transition(state.of(members=members), job.Tick(), state.ticked + 0.01)
    assert after.change.cause == "node1: again" and after.change.nodes_before == 2
    (recovered,) = [a for a in actions if isinstance(a, job.Recovered)]
    assert recovered.change.cause == "node2: oops"
