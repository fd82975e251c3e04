"""Delayed, repeated and simultaneous events lead to the same decisions as timely ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.transitions import apply_rules, record_event, transition
from elastic.core.job import state as job
from elastic.core.job.membership import is_for_former_member
from elastic.core.job.state import Cause, CauseKind, JobPhase, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import StepRecord
from tests.core.coordinator.test_transitions import halt, running, samples, send_report
from tests.core.state_access import assignment_of, change_of, plan_of


def together(state: JobState, *events: Any) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    """Record all events, then decide."""
    told: tuple[job.JobAction, ...] = ()
    for event in events:
        state, actions, _ = record_event(state, event, state.updated_at)
        told += actions
    state, actions, reason = apply_rules(state, state.updated_at)
    return state, (*told, *actions), reason


def reported(state: JobState, node: str, **changes: Any) -> m.NodeReport:
    return replace(state.members[node].report, **changes)


def closed(state: JobState, node: str) -> job.ConnectionClosed:
    return job.ConnectionClosed(node, state.members[node].report.info.incarnation)


def heartbeat(state: JobState, node: str) -> job.Heartbeat:
    return job.Heartbeat(node, state.members[node].report.info.incarnation, 0, 0)


def of_kind(kind: type, actions: tuple[job.JobAction, ...]) -> list[Any]:
    return [action for action in actions if isinstance(action, kind)]


# ---- checkpoints ----

HALVES = (((0, 0), (1, 0)), ((2, 0), (3, 0)))


def test_parts_of_the_next_checkpoint_arrive_during_a_commit() -> None:
    state = running()
    events = [m.CheckpointPart(2, part) for part in HALVES]
    state, actions, _ = together(state, *events, m.CheckpointPart(4, HALVES[0]))
    assert actions == (job.CommitCheckpoint(2),)
    state, _, _ = transition(state, job.CheckpointCommitted("/c/step-2", 2), state.updated_at)
    state, actions, _ = transition(state, m.CheckpointPart(4, HALVES[1]), state.updated_at)
    assert actions == (job.CommitCheckpoint(4),)


def test_repeated_parts_begin_no_second_commit() -> None:
    state, actions, _ = together(running(), *(m.CheckpointPart(2, part) for part in HALVES * 2))
    assert actions == (job.CommitCheckpoint(2),)
    committed = job.CheckpointCommitted("/c/step-2", 2)
    state, actions, _ = together(state, committed, committed)
    assert [note.kind for note in of_kind(job.LogEntry, actions)] == ["checkpoint"]


# ---- steps ----


def stepped(step: int, seconds: float = 0.5) -> m.StepDone:
    return m.StepDone(1, StepRecord(step, 1.0, 1.0, 1.0), seconds, 0.1)


def test_steps_reported_together_keep_their_durations() -> None:
    state = running()
    first = state.logged_step + 1
    state, _, _ = together(state, *(stepped(first + n, 0.5 + n) for n in range(3)))
    assert [seconds for _, seconds in state.durations[-3:]] == [0.5, 1.5, 2.5]
    later, _, _ = record_event(state, stepped(first + 2), state.updated_at + 9.0)
    assert (
        later.durations == state.durations and later.step_finished_at == state.step_finished_at
    ), "said again"


def test_the_time_of_a_step_with_a_local_recovery_is_not_usual() -> None:
    """It includes waits for other pipelines, and for a paused coordinator."""
    state = running()
    first = state.logged_step + 1
    repaired = replace(assignment_of(state), step=first, promised=((0, (0, 1)),))
    before = state.seen.step_s
    state, _, _ = together(state.of(assignment=repaired), stepped(first, before + 17.0))
    assert state.logged_step == first and state.seen.step_s == before
    assert all(seconds < 17.0 for _, seconds in state.durations)
    state, _, _ = together(state, stepped(first + 1, before + 18.0))
    assert state.seen.step_s >= before + 18.0 and state.durations[-1][1] >= 18.0


def test_a_step_of_an_undone_epoch_does_not_count() -> None:
    """A worker of the former epoch finished it, while the others were halted before it."""
    state = running()
    following = replace(plan_of(state), epoch=state.epoch + 1)
    state = state.of(
        epoch=following.epoch,
        plan=following,
        assignment=replace(assignment_of(state), plan=following),
    )
    step = max(assignment_of(state).step, state.newest_step + 1)
    late, *_ = transition(state, stepped(step), state.updated_at)
    assert (late.logged_step, late.record) == (state.logged_step, state.record)
    done = replace(stepped(step), epoch=state.epoch)
    timely, *_ = transition(state, done, state.updated_at)
    assert timely.logged_step == step and timely.record == done.record


def test_a_late_report_of_an_older_epoch_changes_nothing() -> None:
    state = running()
    member = state.members["node0"]
    changes = {"phase": NodePhase.HALTED, "step": 0, "suspects": ("node1",)}
    late = reported(state, "node0", epoch=state.epoch - 1, **changes)
    after, actions, _ = transition(state, late, state.updated_at)
    assert after.members["node0"].report == member.report and not actions
    timely = replace(late, epoch=state.epoch)
    after, *_ = transition(state, timely, state.updated_at)
    assert after.members["node0"].report.phase is NodePhase.HALTED


def test_a_repeated_halt_report_from_before_a_fall_back_is_ignored() -> None:
    """The report arrives after training continued from an earlier step."""
    state = running()
    halted = (m.Halted(state.epoch, 300, record=StepRecord(299, 1.0, 1.0, 1.0)),)
    state, _, _ = transition(state, reported(state, "node0", halted=halted), state.updated_at)
    assert state.record is None or state.record.step < 299


# ---- leaving nodes ----


def test_a_drained_node_is_released_while_it_is_connected() -> None:
    """A node that misses the order would come back and train."""
    state, *_ = transition(running(), job.DrainRequested("node2", 60.0), 4.0)
    for node in state.members:
        state = halt(state, node)
    assert state.phase is JobPhase.INSTALLING and "node2" not in plan_of(state).nodes()
    ready = {
        "phase": NodePhase.RUNNING,
        "resumed_at": 9.0,
        "protected": state.epoch,
        "epoch": state.epoch,
    }
    news = [reported(state, node, **ready) for node in plan_of(state).nodes()]
    gone, actions, _ = together(state, *news)
    assert "node2" not in gone.members and [
        s.node for s in of_kind(job.Send, actions) if isinstance(s.message, m.Stop)
    ]
    away, actions, _ = together(state, *news, closed(state, "node2"))
    assert "node2" in away.members and not [
        n for n in of_kind(job.LogEntry, actions) if n.kind == "drained"
    ]
    back, actions, _ = transition(away, reported(away, "node2"), away.updated_at)
    assert "node2" not in back.members and [
        n for n in of_kind(job.LogEntry, actions) if n.kind == "drained"
    ]


def test_the_end_counts_although_its_reporter_is_gone() -> None:
    state = running()
    ending = reported(state, "node0", finished=m.Finished(400, "sha"))
    state, _, _ = record_event(state, ending, state.updated_at)
    state, _, _ = record_event(state, closed(state, "node0"), state.updated_at)
    late = state.updated_at + state.limits.starved_s
    after, _, reason = apply_rules(state, late)
    assert after.phase is JobPhase.FINISHED and reason == "all 400 steps done"


# ---- losses ----


def test_a_loss_found_during_the_halt_is_part_of_the_recovery() -> None:
    """Neighbours lose contact before the agent knows that its worker has died."""
    state, _, _ = send_report(running(), "node0", suspects=("node2",))
    for _ in range(2):
        state, _, reason = transition(state, job.Tick(), state.updated_at + 0.3)
    assert "contact lost with node2" in reason and change_of(state).lost == ()
    assert change_of(state).causes == (
        Cause(CauseKind.CONTACT, "contact lost with node2", ("node2",)),
    )
    state = halt(halt(halt(state, "node2", NodePhase.STARTING), "node0"), "node1")
    assert state.phase is JobPhase.INSTALLING and change_of(state).lost == ("node2",)


def test_workers_that_restart_before_the_decision_count_as_lost() -> None:
    state = running()
    died = reported(
        state, "node2", phase=NodePhase.STARTING, cause="hang: worker 0", hung=True, detect_s=0.7
    )
    back = reported(
        state, "node2", phase=NodePhase.IDLE, cause="hang: worker 0", hung=True, detect_s=0.7
    )
    after, _, reason = together(state, died, back)
    assert (
        "epoch 2: node2: hang: worker 0" in reason
        and change_of(after).causes[0].kind is CauseKind.HANG
    )
    assert (change_of(after).lost, change_of(after).detect_s) == (("node2",), 0.7)


def test_a_failed_node_does_not_end_an_elastic_job_that_starts() -> None:
    plain = next(state for state in samples()[JobPhase.LAUNCHED] if state.spec is None)
    state, _, _ = send_report(
        plain, "node0", phase=NodePhase.FAILED, cause="oops", elastic=True, restart=plain.restart
    )
    assert state.phase is JobPhase.LAUNCHED and state.ending is None
    restart = plain.restart
    for node in plain.members:
        assert plain.ending is None and plain.restart == restart
        plain, _, _ = send_report(
            plain, node, phase=NodePhase.FAILED, cause="oops", restart=restart
        )
    assert plain.ending is not None or plain.restart == restart + 1, "torchrun's rules"


def test_a_plain_script_restarts_once_more_if_the_store_lost_a_restart() -> None:
    """The nodes restarted, but the saved state does not know it: it would wait for ever."""
    plain = next(state for state in samples()[JobPhase.LAUNCHED] if state.spec is None)
    allowed = plain.policy.max_restarts - plain.restart
    later, actions, reason = send_report(plain, "node0", phase=NodePhase.STARTING, restart=4)
    assert "group restart: the store lost its last writes" in reason
    later, more, _ = transition(later, job.Tick(), later.updated_at + later.policy.last_call_s)
    launched = [send.message for send in of_kind(job.Send, (*actions, *more))]
    assert [launch.restart for launch in launched] == [5] * len(plain.members)
    assert later.policy.max_restarts - later.restart == allowed, "only failures count"


# ---- recoveries in the summary ----


def late_report(**changes: Any) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    """node2's workers died; the report of node0 after the installation arrives late."""
    state, *_ = send_report(running(), "node2", phase=NodePhase.STARTING, cause="oops")
    state = halt(halt(halt(state, "node0"), "node1"), "node2", NodePhase.STARTING)
    assert state.phase is JobPhase.INSTALLING and plan_of(state).nodes() == ("node0", "node1")
    state, *_ = send_report(
        state,
        "node1",
        phase=NodePhase.RUNNING,
        ready=(m.Ready(2, 0.5, 0.25),),
        resumed_at=0.0,
        epoch=2,
    )
    assert state.phase is JobPhase.INSTALLING
    figures = {"ready": (m.Ready(2, 0.25, 0.5),), "resumed_at": state.updated_at + 1.0, "epoch": 2}
    return send_report(state, "node0", **{"phase": NodePhase.RUNNING, **figures, **changes})


@pytest.mark.parametrize(
    "ended", [{"finished": m.Finished(400, "sha")}, {"failed": m.Failed("oops", 3)}]
)
def test_a_recovery_is_logged_although_the_job_ends_at_the_same_time(ended: dict[str, Any]) -> None:
    """A late coordinator learns of the first micro-batch and of the end together."""
    after, actions, _ = late_report(**ended)
    assert after.phase in (JobPhase.FINISHED, JobPhase.FAILED) and after.change is None
    (recovered,) = [a for a in actions if isinstance(a, job.ChangeCompleted)]
    assert (recovered.transfer_s, recovered.rebuild_s, recovered.nodes_after) == (0.5, 0.5, 2)
    assert recovered.change.lost == ("node2",)
    (finish,) = [a for a in actions if isinstance(a, job.JobFinished)]
    assert actions.index(recovered) < actions.index(finish), "the summary is written with the end"


def test_a_job_that_ends_during_a_change_has_no_recovery() -> None:
    for resumed_at, epoch in ((0.0, 2), (9.0, 1)):
        _, actions, _ = late_report(
            resumed_at=resumed_at, epoch=epoch, finished=m.Finished(400, "sha")
        )
        assert not [a for a in actions if isinstance(a, job.ChangeCompleted)]


def test_two_faults_known_at_once_are_two_recoveries() -> None:
    """Training continued between them."""
    state, *_ = late_report(resumed_at=0.0)
    assert state.phase is JobPhase.RUNNING and state.change is not None
    report = replace(
        state.members["node1"].report, phase=NodePhase.STARTING, cause="again", epoch=2
    )
    members = {**state.members, "node1": replace(state.members["node1"], report=report)}
    before, actions, _ = transition(state.of(members=members), job.Tick(), state.updated_at + 0.01)
    assert change_of(before).cause == "node2: oops; then node1: again"
    assert not [a for a in actions if isinstance(a, job.ChangeCompleted)]
    report = replace(state.members["node0"].report, resumed_at=state.updated_at)
    members["node0"] = replace(members["node0"], report=report)
    after, actions, _ = transition(state.of(members=members), job.Tick(), state.updated_at + 0.01)
    assert change_of(after).cause == "node1: again" and change_of(after).nodes_before == 2
    (recovered,) = [a for a in actions if isinstance(a, job.ChangeCompleted)]
    assert recovered.change.cause == "node2: oops"


def test_a_fault_known_with_the_end_of_the_installation_is_a_new_recovery() -> None:
    """The coordinator does not know yet that all nodes were ready."""
    state, *_ = send_report(running(), "node2", phase=NodePhase.STARTING, cause="oops")
    state = halt(halt(halt(state, "node0"), "node1"), "node2", NodePhase.STARTING)
    assert state.phase is JobPhase.INSTALLING
    reports = (
        replace(state.members["node0"].report, phase=NodePhase.RUNNING, resumed_at=9.0, epoch=2),
        replace(
            state.members["node1"].report,
            phase=NodePhase.STARTING,
            resumed_at=0.0,
            cause="again",
            epoch=2,
        ),
    )
    for report in reports:
        state, _, _ = record_event(state, report, state.updated_at)
    after, actions, _ = apply_rules(state, state.updated_at)
    (recovered,) = [a for a in actions if isinstance(a, job.ChangeCompleted)]
    assert (recovered.change.cause, change_of(after).cause) == ("node2: oops", "node1: again")
    assert change_of(after).nodes_before == 2 and after.recovered_at == 9.0 and after.trained


def test_a_recovery_knows_the_time_of_the_one_before() -> None:
    """Faults that were injected before that time are no part of this recovery."""
    state, *_ = late_report()
    assert state.recovered_at > 0
    first = state.recovered_at
    state, *_ = send_report(state, "node1", phase=NodePhase.STARTING, cause="again")
    state = halt(
        halt(halt(state, "node0"), "node1", NodePhase.STARTING), "node2", NodePhase.STARTING
    )
    _, actions, _ = send_report(
        state, "node0", phase=NodePhase.RUNNING, epoch=3, resumed_at=first + 9.0
    )
    (recovered,) = [a for a in actions if isinstance(a, job.ChangeCompleted)]
    assert recovered.since == first


def test_messages_that_came_during_a_stall_have_time_to_be_read() -> None:
    """The messages of another member are read first."""
    state = running()
    seen = state.updated_at - state.limits.lease_s + 0.01
    members = {n: replace(mb, seen=state.updated_at) for n, mb in state.members.items()}
    members["node2"] = replace(members["node2"], seen=seen)
    state = state.of(members=members)
    awake = state.updated_at + 20.0
    state, _, _ = transition(state, heartbeat(state, "node0"), awake)
    assert "node2" in state.members, "its messages wait behind those of node0"
    back, _, _ = transition(state, heartbeat(state, "node2"), awake + 0.1)
    assert "node2" in back.members
    state, _, _ = transition(state, job.Tick(late_s=19.0), awake + 0.01)
    assert "node2" in state.members
    state, _, _ = transition(state, job.Tick(), awake + 0.3)
    assert "node2" not in state.members, "it was really lost"


def test_an_order_is_not_for_the_next_incarnation_of_a_node() -> None:
    """While the store is away, orders are held back. A lost node may have joined again by then."""
    state = running()
    without = state.of(members={n: mb for n, mb in state.members.items() if n != "node2"})
    report = reported(state, "node2")
    info = replace(report.info, incarnation="node2.2")
    member = replace(state.members["node2"], report=replace(report, info=info))
    again = state.of(members={**state.members, "node2": member})
    assert is_for_former_member("node2", without, again), "it fences the former one"
    assert is_for_former_member("node2", state, again)
    assert not is_for_former_member("node2", state, state)
    assert not is_for_former_member("node2", state, without), "it must still hear of it"
    assert not is_for_former_member("node2", without, without)
