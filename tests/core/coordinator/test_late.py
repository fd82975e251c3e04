"""A coordinator that hears late, of several things at once or of one twice, knows and does what one in time does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from elastic.core.coordinator.transitions import apply_rules, record_event, transition
from elastic.core.job import state as job
from elastic.core.job.state import Cause, CauseKind, JobPhase, JobState, NodeReported, StepFinished
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import StepRecord
from tests.core.coordinator.test_transitions import halt, running, samples, say


def together(state: JobState, *events: Any) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    """Learn of all, then decide."""
    told: tuple[job.JobAction, ...] = ()
    for event in events:
        state, actions, _ = record_event(state, event, state.updated_at)
        told += actions
    state, actions, reason = apply_rules(state, state.updated_at)
    return state, (*told, *actions), reason


def reported(state: JobState, node: str, **changes: Any) -> NodeReported:
    return NodeReported(replace(state.members[node].report, **changes))


def closed(state: JobState, node: str) -> job.ConnectionClosed:
    return job.ConnectionClosed(node, state.members[node].report.info.incarnation)


def of(kind: type, actions: tuple[job.JobAction, ...]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


# ---- checkpoints ----

HALVES = (((0, 0), (1, 0)), ((2, 0), (3, 0)))


def test_parts_of_the_next_checkpoint_come_while_the_disk_is_waited_for() -> None:
    state = running()
    events = [job.CheckpointPartWritten(2, part) for part in HALVES]
    state, actions, _ = together(state, *events, job.CheckpointPartWritten(4, HALVES[0]))
    assert actions == (job.CommitCheckpoint(2),)
    state, _, _ = transition(state, job.CheckpointCommitted("/c/step-2", 2), state.updated_at)
    state, actions, _ = transition(state, job.CheckpointPartWritten(4, HALVES[1]), state.updated_at)
    assert actions == (job.CommitCheckpoint(4),)


def test_parts_that_are_said_again_begin_no_second_commit() -> None:
    state, actions, _ = together(running(), *(job.CheckpointPartWritten(2, part) for part in HALVES * 2))
    assert actions == (job.CommitCheckpoint(2),)
    committed = job.CheckpointCommitted("/c/step-2", 2)
    state, actions, _ = together(state, committed, committed)
    assert [note.kind for note in of(job.LogEntry, actions)] == ["checkpoint"]


# ---- steps ----


def stepped(step: int, seconds: float = 0.5) -> StepFinished:
    return StepFinished(StepRecord(step, 1.0, 1.0, 1.0), seconds)


def test_steps_that_are_told_of_at_once_took_as_long_as_they_took() -> None:
    state = running()
    first = state.logged_step + 1
    state, _, _ = together(state, *(stepped(first + n, 0.5 + n) for n in range(3)))
    assert [seconds for _, seconds in state.durations[-3:]] == [0.5, 1.5, 2.5]
    later, _, _ = record_event(state, stepped(first + 2), state.updated_at + 9.0)
    assert later.durations == state.durations and later.step_finished_at == state.step_finished_at, (
        "said again"
    )


def test_what_was_halted_at_before_an_older_checkpoint_is_no_record() -> None:
    """A report of the halt that comes again once training goes on from an earlier step."""
    state = running()
    halted = (m.Halted(state.epoch, 300, record=StepRecord(299, 1.0, 1.0, 1.0)),)
    state, _, _ = transition(state, reported(state, "node0", halted=halted), state.updated_at)
    assert state.record is None or state.record.step < 299


# ---- nodes that leave ----


def test_a_drained_node_is_let_go_when_it_hears_of_it() -> None:
    """Told in vain, it would come back and train."""
    state, *_ = transition(running(), job.DrainRequested("node2", 60.0), 4.0)
    for node in state.members:
        state = halt(state, node)
    assert state.phase is JobPhase.INSTALLING and "node2" not in state.plan.nodes()
    ready = {"phase": NodePhase.RUNNING, "resumed_at": 9.0, "protected": state.epoch, "epoch": state.epoch}
    news = [reported(state, node, **ready) for node in state.plan.nodes()]
    gone, actions, _ = together(state, *news)
    assert "node2" not in gone.members and [
        s.node for s in of(job.Send, actions) if isinstance(s.message, m.Stop)
    ]
    away, actions, _ = together(state, *news, closed(state, "node2"))
    assert "node2" in away.members and not [n for n in of(job.LogEntry, actions) if n.kind == "drained"]
    back, actions, _ = transition(away, reported(away, "node2"), away.updated_at)
    assert "node2" not in back.members and [n for n in of(job.LogEntry, actions) if n.kind == "drained"]


def test_the_end_counts_though_who_told_it_is_gone() -> None:
    state = running()
    ending = reported(state, "node0", finished=m.Finished(400, "sha"))
    state, _, _ = record_event(state, ending, state.updated_at)
    state, _, _ = record_event(state, closed(state, "node0"), state.updated_at)
    late = state.updated_at + state.limits.starved_s
    after, _, reason = apply_rules(state, late)
    assert after.phase is JobPhase.FINISHED and reason == "all 400 steps done"


# ---- losses ----


def test_a_loss_that_becomes_known_while_the_others_halt_is_part_of_the_recovery() -> None:
    """Neighbours lost contact before the agent knew that its worker had died."""
    state, _, _ = say(running(), "node0", suspects=("node2",))
    for _ in range(2):
        state, _, reason = transition(state, job.Tick(), state.updated_at + 0.3)
    assert "contact lost with node2" in reason and state.change.lost == ()
    assert state.change.causes == (Cause(CauseKind.CONTACT, "contact lost with node2", ("node2",)),)
    state = halt(halt(halt(state, "node2", NodePhase.STARTING), "node0"), "node1")
    assert state.phase is JobPhase.INSTALLING and state.change.lost == ("node2",)


def test_workers_that_are_back_before_anybody_looked_were_lost_all_the_same() -> None:
    state = running()
    died = reported(state, "node2", phase=NodePhase.STARTING, cause="hang: worker 0", hung=True, detect_s=0.7)
    back = reported(state, "node2", phase=NodePhase.IDLE, cause="hang: worker 0", hung=True, detect_s=0.7)
    after, _, reason = together(state, died, back)
    assert "epoch 2: node2: hang: worker 0" in reason and after.change.causes[0].kind is CauseKind.HANG
    assert (after.change.lost, after.change.detect_s) == (("node2",), 0.7)


def test_a_node_that_fails_while_the_others_start_fails_no_elastic_job() -> None:
    plain = next(state for state in samples()[JobPhase.LAUNCHED] if state.spec is None)
    state, _, _ = say(
        plain, "node0", phase=NodePhase.FAILED, cause="oops", elastic=True, restart=plain.restart
    )
    assert state.phase is JobPhase.LAUNCHED and state.ending is None
    plain, _, _ = say(plain, "node0", phase=NodePhase.FAILED, cause="oops", restart=plain.restart)
    assert plain.ending is not None or plain.restart == state.restart + 1, "torchrun's rules"
