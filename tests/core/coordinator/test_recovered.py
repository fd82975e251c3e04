"""What the coordinator tells of a recovery, however late it hears of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.transitions import apply_rules, record_event, transition
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from tests.core.coordinator.test_transitions import halt, running, say


def told_late(**changes: Any) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    """node2's workers died; the others install a plan without it, and node0's next report tells all at once."""
    state, *_ = say(running(), "node2", phase=NodePhase.STARTING, cause="oops")
    state = halt(halt(halt(state, "node0"), "node1"), "node2", NodePhase.STARTING)
    assert state.phase is JobPhase.INSTALLING and state.plan.nodes() == ("node0", "node1")
    state, *_ = say(
        state, "node1", phase=NodePhase.RUNNING, ready=(m.Ready(2, 0.5, 0.25),), resumed_at=0.0, epoch=2
    )
    assert state.phase is JobPhase.INSTALLING
    figures = {"ready": (m.Ready(2, 0.25, 0.5),), "resumed_at": state.updated_at + 1.0, "epoch": 2}
    return say(state, "node0", **{"phase": NodePhase.RUNNING, **figures, **changes})


@pytest.mark.parametrize("ended", [{"finished": m.Finished(400, "sha")}, {"failed": m.Failed("oops", 3)}])
def test_a_recovery_is_told_though_the_job_ended_at_the_same_time(ended: dict[str, Any]) -> None:
    """A coordinator that is behind hears of the first micro-batch and of the end at once."""
    after, actions, _ = told_late(**ended)
    assert after.phase in (JobPhase.FINISHED, JobPhase.FAILED) and after.change is None
    (recovered,) = [a for a in actions if isinstance(a, job.ChangeCompleted)]
    assert (recovered.transfer_s, recovered.rebuild_s, recovered.nodes_after) == (0.5, 0.5, 2)
    assert recovered.change.lost == ("node2",)
    (finish,) = [a for a in actions if isinstance(a, job.JobFinished)]
    assert actions.index(recovered) < actions.index(finish), "the summary is written with the end"


def test_a_job_that_ends_in_the_middle_of_a_change_recovered_from_nothing() -> None:
    for resumed_at, epoch in ((0.0, 2), (9.0, 1)):
        _, actions, _ = told_late(resumed_at=resumed_at, epoch=epoch, finished=m.Finished(400, "sha"))
        assert not [a for a in actions if isinstance(a, job.ChangeCompleted)]


def test_two_faults_that_are_learned_of_at_once_are_two_recoveries() -> None:
    """Training had gone on between them."""
    state, *_ = told_late(resumed_at=0.0)
    assert state.phase is JobPhase.RUNNING and state.change is not None
    report = replace(state.members["node1"].report, phase=NodePhase.STARTING, cause="again", epoch=2)
    members = {**state.members, "node1": replace(state.members["node1"], report=report)}
    before, actions, _ = transition(state.of(members=members), job.Tick(), state.updated_at + 0.01)
    assert before.change.cause == "node2: oops; then node1: again"
    assert not [a for a in actions if isinstance(a, job.ChangeCompleted)]
    report = replace(state.members["node0"].report, resumed_at=state.updated_at)
    members["node0"] = replace(members["node0"], report=report)
    after, actions, _ = transition(state.of(members=members), job.Tick(), state.updated_at + 0.01)
    assert after.change.cause == "node1: again" and after.change.nodes_before == 2
    (recovered,) = [a for a in actions if isinstance(a, job.ChangeCompleted)]
    assert recovered.change.cause == "node2: oops"


def test_a_fault_that_is_learned_of_with_the_end_of_installing_is_one_of_its_own() -> None:
    """The coordinator had not even heard that all were ready."""
    state, *_ = say(running(), "node2", phase=NodePhase.STARTING, cause="oops")
    state = halt(halt(halt(state, "node0"), "node1"), "node2", NodePhase.STARTING)
    assert state.phase is JobPhase.INSTALLING
    reports = (
        replace(state.members["node0"].report, phase=NodePhase.RUNNING, resumed_at=9.0, epoch=2),
        replace(
            state.members["node1"].report, phase=NodePhase.STARTING, resumed_at=0.0, cause="again", epoch=2
        ),
    )
    for report in reports:
        state, _, _ = record_event(state, job.NodeReported(report), state.updated_at)
    after, actions, _ = apply_rules(state, state.updated_at)
    (recovered,) = [a for a in actions if isinstance(a, job.ChangeCompleted)]
    assert (recovered.change.cause, after.change.cause) == ("node2: oops", "node1: again")
    assert after.change.nodes_before == 2 and after.recovered_at == 9.0 and after.trained


def test_a_recovery_knows_of_the_one_before() -> None:
    """Faults that were carried out before it are no part of this one, whichever coordinator tells of it."""
    state, *_ = told_late()
    assert state.recovered_at > 0
    first = state.recovered_at
    state, *_ = say(state, "node1", phase=NodePhase.STARTING, cause="again")
    state = halt(halt(halt(state, "node0"), "node1", NodePhase.STARTING), "node2", NodePhase.STARTING)
    _, actions, _ = say(state, "node0", phase=NodePhase.RUNNING, epoch=3, resumed_at=first + 9.0)
    (recovered,) = [a for a in actions if isinstance(a, job.ChangeCompleted)]
    assert recovered.since == first
