"""Parts, commits and failures of durable checkpoints, as the coordinator keeps them."""

from __future__ import annotations

import functools
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.health import diagnosis
from elastic.core.job import checkpoints
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.core.recovery import lineage
from elastic.domain.codec import dumps, loads
from elastic.domain.types import (
    PARAMETERS,
    STATE,
    Copy,
    Divergence,
    JobSpec,
    LayerSpec,
    Plan,
    SavedModel,
    StepRecord,
)
from tests.core.coordinator.test_transitions import entries, halt, running, samples, send_report
from tests.core.recovery.copies import gradient as gradient_of
from tests.core.recovery.copies import state as copy_of
from tests.core.state_access import assignment_of, change_of, plan_of, spec_of
from tests.core.world.world import World

HALVES = (((0, 0), (1, 0)), ((2, 0), (3, 0)))
ALL = (*HALVES[0], *HALVES[1])


def apply(state: JobState, event: Any) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    return transition(state, event, state.updated_at + 0.01)


def part(step: int, slots: tuple[Any, ...] = ALL, epoch: int = 1, **more: Any) -> m.CheckpointPart:
    return m.CheckpointPart(step, slots, epoch, **more)


def saving(every: int = 100) -> JobState:
    """A running job of 400 steps with checkpoints."""
    state = running()
    return state.of(spec=replace(spec_of(state), checkpoint_every=every))


def finished(
    state: JobState, writing: Collection[str] = ()
) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    """All nodes report that all steps are done, rank 0 last."""
    for node in sorted(state.members, reverse=True):
        done = m.Finished(400, "sha" if node == "node0" else "")
        state, actions, reason = send_report(
            state, node, phase=NodePhase.FINISHED, finished=done, writing=node in writing
        )
    return state, actions, reason


# ---- parts and commits ----


def test_several_checkpoints_are_written_at_the_same_time() -> None:
    """One node is two checkpoints ahead of the other."""
    state = saving()
    actions: tuple[job.JobAction, ...] = ()
    for step in (2, 4, 6):
        state, actions, _ = apply(state, part(step, HALVES[0]))
        assert not actions
    for step in (2, 4, 6):
        state, actions, _ = apply(state, part(step, HALVES[1]))
        assert actions == (job.CommitCheckpoint(step),)
    for step in (4, 2, 6):  # the commits may end in any order
        state, actions, _ = apply(state, job.CheckpointCommitted(f"/c/{step}", step))
        assert [entry["step"] for entry in entries(actions, "checkpoint")] == [step]
    assert state.checkpoint == ("/c/6", 6) and state.checkpoint_parts == ()
    assert state.older_checkpoints == (("/c/4", 4), ("/c/2", 2))
    state, actions, _ = apply(state, part(4, HALVES[0]))
    assert state.checkpoint_parts == () and not actions, "said again after a reconnect"


def test_an_older_checkpoint_may_become_durable_after_a_newer_one() -> None:
    """The only writer of an older checkpoint has a slow disk, and reports its first part late."""
    state, _, _ = apply(saving(), job.CheckpointCommitted("/c/6", 6))
    state, actions, _ = apply(state, part(4))
    assert actions == (job.CommitCheckpoint(4),)
    state, actions, _ = apply(state, job.CheckpointCommitted("/c/4", 4))
    assert [entry["step"] for entry in entries(actions, "checkpoint")] == [4]
    assert state.checkpoint == ("/c/6", 6)


def test_all_due_checkpoints_of_a_finished_job_are_known() -> None:
    state = saving()
    assert checkpoints.due_steps(state) == (100, 200, 300, 400)


def test_parts_of_undone_steps_do_not_count() -> None:
    """Two nodes have written their states of step 6; a loss leads back to an earlier step."""
    state = saving()
    late = state.newest_step + 5
    state, _, _ = apply(state, part(late, HALVES[0]))
    state = after_a_loss(state)
    assert state.checkpoint_parts == () and assignment_of(state).step < late
    state, _, _ = apply(state, part(late, HALVES[0], epoch=1))
    state, actions, _ = apply(state, part(late, HALVES[1], epoch=2))
    assert not actions, "the late part belongs to the epoch before"
    _, actions, _ = apply(state, part(late, HALVES[0], epoch=2))
    assert actions == (job.CommitCheckpoint(late),)


def test_parts_that_an_epoch_before_the_last_has_undone_do_not_count() -> None:
    """A slow disk writes a state of epoch 3 late. Epoch 4 began before it, epoch 5 after it."""
    state = saving().of(epoch=5, starts=((1, 0), (4, 6), (5, 9)))
    after, actions, _ = apply(state, part(8, epoch=3))
    assert after.checkpoint_parts == () and not actions
    _, actions, _ = apply(state, part(8, epoch=4))
    assert actions == (job.CommitCheckpoint(8),)
    assert checkpoints.starts_with(state, 9) == ((1, 0), (4, 6), (5, 9)), "agents do the same"


def test_agents_are_told_the_name_of_the_run() -> None:
    state = saving().of(run="job.1")
    assert assignment_of(after_a_loss(state)).run == "job.1"


def test_parts_of_finished_steps_count_in_later_epochs() -> None:
    state, _, _ = apply(saving(), part(1, HALVES[0]))
    state = after_a_loss(state)
    assert assignment_of(state).step >= 1 and assignment_of(state).checkpointed == -1
    state, actions, _ = apply(state, part(1, HALVES[1], epoch=1))
    assert actions == (job.CommitCheckpoint(1),)


def test_a_whole_checkpoint_is_not_ordered_again() -> None:
    state, _, _ = apply(saving(), part(1))
    assert assignment_of(after_a_loss(state)).checkpointed == 1


def after_a_loss(state: JobState) -> JobState:
    """The workers of node2 crashed, and the next epoch is being installed."""
    state, *_ = send_report(state, "node2", phase=NodePhase.STARTING, cause="oops")
    state = halt(halt(halt(state, "node2", NodePhase.STARTING), "node0"), "node1")
    assert state.phase is JobPhase.INSTALLING and plan_of(state).epoch == 2
    return state


def test_a_checkpoint_that_fails_is_reported_and_its_files_are_removed() -> None:
    state, _, _ = apply(saving(), part(2, HALVES[0]))
    state, actions, reason = apply(state, part(2, (), node="node1", error="no space"))
    assert reason == "no checkpoint of step 2" and state.checkpoint_parts == ()
    assert entries(actions, "checkpoint-lost") == [{"step": 2, "node": "node1", "why": "no space"}]
    removal = job.DropCheckpoint(2, before=2)
    assert removal in actions
    after, actions, _ = apply(state, part(2, HALVES[1]))
    assert after.checkpoint_parts == () and actions == (removal,), "a slow disk wrote it later"
    _, actions, _ = apply(state, part(2, HALVES[1], node="node2", error="no space"))
    assert not actions
    _, actions, _ = apply(state, job.CoordinatorFailover())
    assert removal in actions, "the former coordinator may have ended before the removal"
    state, _, _ = apply(state, part(4))
    _, actions, _ = apply(state, job.CheckpointFailed(4, "no space"))
    assert entries(actions, "checkpoint-lost") == [{"step": 4, "node": "", "why": "no space"}]


def test_the_oldest_of_too_many_incomplete_checkpoints_is_given_up() -> None:
    """After a delay of the coordinator, or of a connection, the other parts may not be read yet."""
    state = saving()
    for step in range(1, checkpoints.MAX_PENDING + 2):
        state, actions, _ = apply(state, part(step, HALVES[0]))
        assert not actions
    _, actions, _ = apply(state, job.Tick(late_s=10.0))
    assert not entries(actions, "checkpoint-lost")
    _, actions, _ = apply(state.of(adopted_until=state.updated_at + 1.0), job.Tick())
    assert not entries(actions, "checkpoint-lost"), "other nodes may not have reported yet"
    member = replace(state.members["node1"], connected=False)
    _, actions, _ = apply(state.of(members={**state.members, "node1": member}), job.Tick())
    assert not entries(actions, "checkpoint-lost")
    state, actions, _ = apply(state, job.Tick())
    assert [entry["step"] for entry in entries(actions, "checkpoint-lost")] == [1]
    assert [step for step, _ in state.checkpoint_parts] == list(
        range(2, checkpoints.MAX_PENDING + 2)
    )


def test_a_late_part_does_not_revive_a_checkpoint_that_was_given_up() -> None:
    """A disk is so far behind that many checkpoints are given up before it reports their parts."""
    state = saving()
    last = checkpoints.MAX_PENDING + 3 * checkpoints.MAX_OLDER
    for step in range(1, last):
        state, _, _ = apply(state, part(step, HALVES[0]))
        state, _, _ = apply(state, job.Tick())
    assert len(state.lost_checkpoints) > checkpoints.MAX_OLDER
    after, actions, _ = apply(state, part(1, HALVES[1]))
    assert after.checkpoint_parts == state.checkpoint_parts
    assert actions == (job.DropCheckpoint(1, before=2),)


def test_a_checkpoint_lost_during_a_change_leaves_the_files_of_the_new_epoch() -> None:
    """Epoch 2 has begun, but all files so far are of epoch 1."""
    state, _, _ = apply(saving(4), part(8, HALVES[0]))
    state, _, _ = send_report(state, "node2", phase=NodePhase.STARTING, cause="oops")
    assert state.phase is JobPhase.HALTING and state.epoch == 2
    _, actions, _ = apply(state, part(8, (), node="node1", error="no space"))
    assert job.DropCheckpoint(8, before=2) in actions


# ---- the last step ----


def test_the_job_ends_once_its_last_checkpoint_is_durable() -> None:
    state, actions, _ = finished(saving())
    assert state.phase is JobPhase.RUNNING and not actions
    state, actions, _ = apply(state, part(400))
    assert state.phase is JobPhase.RUNNING and actions == (job.CommitCheckpoint(400),)
    state, _, reason = apply(state, job.CheckpointCommitted("/c/400", 400))
    assert (state.phase, reason) == (
        JobPhase.FINISHED,
        "checkpoint of step 400; all 400 steps done",
    )


def test_a_loss_before_the_last_checkpoint_is_durable_is_recovered() -> None:
    """The files of the lost node may be missing."""
    state, _, _ = finished(saving())
    incarnation = state.members["node1"].report.info.incarnation
    state, _, _ = apply(state, job.ConnectionClosed("node1", incarnation))
    state, _, reason = apply(state, job.PortRefused("node1", incarnation))
    assert state.phase is JobPhase.HALTING and "node1 lost" in reason


def test_other_nodes_write_the_last_checkpoint_if_one_cannot() -> None:
    state, _, _ = apply(saving(), part(400, (), node="node1", error="[Errno 5] I/O error"))
    state, actions, reason = finished(state)
    assert state.phase is JobPhase.HALTING and state.health["node1"].quarantined
    assert "node1: [Errno 5] I/O error" in reason
    (found,) = entries(actions, "health")
    assert found["class"] == "storage" and "[Errno 5] I/O error" in found["reason"]
    for node in state.members:
        state = halt(state, node)
    assert state.checkpoint_errors == () and "node1" not in plan_of(state).nodes()


@pytest.mark.parametrize("cut", ["takeover", "resets"])
def test_other_nodes_that_still_reconnect_write_the_last_checkpoint(cut: str) -> None:
    """Rank 0 reconnects first, and cannot write its part."""
    state, _, _ = apply(saving(), part(400, (), node="node0", error="[Errno 5] I/O error"))
    state, _, _ = apply(state, job.CoordinatorFailover()) if cut == "takeover" else closed(state)
    for node in ("node0", "node1", "node2"):
        done = m.Finished(400, "sha" if node == "node0" else "")
        state, _, _ = send_report(state, node, phase=NodePhase.FINISHED, finished=done)
    assert state.phase is JobPhase.HALTING and state.health["node0"].quarantined


def closed(state: JobState) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    """The connections of all nodes break."""
    actions, reason = tuple[job.JobAction, ...](), ""
    for node, member in state.members.items():
        event = job.ConnectionClosed(node, member.report.info.incarnation)
        state, actions, reason = apply(state, event)
    return state, actions, reason


def test_a_failure_of_an_earlier_epoch_does_not_count() -> None:
    """The same states are written again in the present epoch."""
    state = after_a_loss(saving())
    state, actions, _ = apply(state, part(400, (), epoch=1, node="node1", error="I/O error"))
    assert state.checkpoint_errors == () and not actions
    state, _, _ = apply(state, part(400, (), epoch=2, node="node1", error="I/O error"))
    assert state.checkpoint_errors == (("node1", "I/O error"),)


def test_without_the_last_checkpoint_the_job_fails_and_says_why() -> None:
    state = saving()
    for node in state.members:
        state, _, _ = apply(state, part(400, (), node=node, error="[Errno 28] No space"))
    state, actions, reason = finished(state)
    (end,) = [action for action in actions if isinstance(action, job.JobFinished)]
    assert (end.code, end.params_sha256) == (1, "sha")
    assert "all 400 steps done, but the checkpoint of the last step" in end.reason
    assert end.reason in reason
    assert "node0: [Errno 28] No space" in end.reason


def test_a_commit_that_fails_at_the_end_fails_the_job() -> None:
    state, _, _ = apply(saving(), part(400))
    state, _, _ = finished(state)
    state, _, reason = apply(state, job.CheckpointFailed(400, "[Errno 30] Read-only"))
    assert state.phase is JobPhase.FAILED and "[Errno 30] Read-only" in reason


def test_checkpoints_that_lack_reports_at_the_end_are_tried() -> None:
    """A node may have been lost after it wrote its files. If not, the failure is reported."""
    state, _, _ = apply(saving(), part(398, HALVES[0]))
    state, _, _ = apply(state, part(400))
    state, _, _ = apply(state, job.CheckpointCommitted("/c/400", 400))
    state, actions, _ = finished(state)
    assert state.phase is JobPhase.FINISHED
    assert job.CommitCheckpoint(398) in actions and not entries(actions, "checkpoint-lost")
    ended, actions, _ = apply(state, job.CheckpointFailed(398, "layer 2 is missing"))
    assert [entry["step"] for entry in entries(actions, "checkpoint-lost")] == [398]
    assert tries_of_a_successor(state) == [398] and not tries_of_a_successor(ended)


def tries_of_a_successor(state: JobState) -> list[int]:
    """The steps that the next coordinator tries to commit before it repeats the end of the job."""
    state = loads(JobState, dumps(state))
    _, actions, _ = apply(state, job.CoordinatorFailover())
    end = [isinstance(action, job.JobFinished) for action in actions].index(True)
    return [action.step for action in actions[:end] if isinstance(action, job.CommitCheckpoint)]


def test_the_end_waits_for_older_checkpoints_while_a_node_writes() -> None:
    state, _, _ = apply(saving(), part(300, HALVES[0]))
    state, _, _ = apply(state, part(400))
    state, _, _ = apply(state, job.CheckpointCommitted("/c/400", 400))
    state, actions, reason = finished(state, writing=["node1"])
    assert state.phase is JobPhase.RUNNING and "older checkpoints are written" in reason
    assert [entry["step"] for entry in entries(actions, "checkpoint-late")] == [100, 200, 300]
    ended, _, _ = send_report(state, "node1", writing=False)
    assert ended.phase is JobPhase.FINISHED
    began, limit_s = state.finished_at, state.limits.disk_s
    for waited_s, phase in ((limit_s - 1.0, JobPhase.RUNNING), (limit_s, JobPhase.FINISHED)):
        later, _, _ = apply(state.of(finished_at=began - waited_s), job.Tick())
        assert later.phase is phase


@pytest.mark.parametrize("cut", ["takeover", "resets"])
def test_the_end_waits_for_a_writer_that_reconnects(cut: str) -> None:
    """It has its usual time to return, unless its agent has ended."""
    state, _, _ = apply(saving(), part(300, HALVES[0]))
    state, _, _ = apply(state, part(400))
    state, _, _ = apply(state, job.CheckpointCommitted("/c/400", 400))
    state, _, _ = finished(state, writing=["node1"])
    if cut == "resets":
        state, actions, _ = closed(state)
    else:  # the time without a coordinator does not count
        away_s = 2 * state.limits.disk_s
        state, actions, _ = transition(state, job.CoordinatorFailover(), state.updated_at + away_s)
    assert state.phase is JobPhase.RUNNING and not entries(actions, "checkpoint-lost")
    back, _, _ = send_report(state, "node1")
    assert back.phase is JobPhase.RUNNING
    ended, _, _ = send_report(back, "node1", writing=False)
    assert ended.phase is JobPhase.FINISHED
    incarnation = state.members["node1"].report.info.incarnation
    gone, _, _ = apply(state, job.PortRefused("node1", incarnation))
    assert gone.phase is JobPhase.FINISHED
    silent, waited_s = state, 0.0
    while silent.phase is JobPhase.RUNNING:
        silent, waited_s = apply(silent, job.Tick())[0], waited_s + 0.01
    assert waited_s == pytest.approx(state.limits.lease_s, rel=0.4)


# ---- a checkpoint of another history ----


def fallen_back(complete_in: int) -> tuple[JobState, int]:
    """Epoch 2 went back behind a checkpoint, computed its version again, and lost layer 3. The
    files were complete in the epoch `complete_in`. Return the state and the step."""
    state = saving(4)
    step = state.newest_step + 5
    if complete_in == 1:
        state, _, _ = apply(state, part(step))
    state = after_a_loss(state)
    assert assignment_of(state).step < step
    if complete_in == 2:
        state, _, _ = apply(state, part(step, epoch=2))
    state, _, _ = apply(state, job.CheckpointCommitted("/c/v", step))
    for node in state.members:
        state, _, _ = send_report(state, node, phase=NodePhase.RUNNING, epoch=2)
    state, _, _ = apply(state, part(step + 4, HALVES[0], epoch=2))
    return _without_layer_3(state, step), step


def _without_layer_3(state: JobState, step: int) -> JobState:
    """All workers crash in the step after `step`; copies of three layers are left."""
    crashed = plan_of(state).nodes()[0]
    state, _, _ = send_report(state, crashed, phase=NodePhase.STARTING, cause="oops", able=False)
    assert state.phase is JobPhase.HALTING
    epoch = state.epoch
    for node in state.members:
        copies = [copy_of(layer, step, node, epoch=epoch - 1) for layer in range(3)]
        copies += [gradient_of(layer, step, {0}, node, epoch=epoch - 1) for layer in range(3)]
        found, halted = tuple(copies), (m.Halted(epoch, step),)
        phase = NodePhase.HALTED
        state, _, _ = send_report(
            state, node, phase=phase, epoch=epoch, inventory=found, halted=halted, able=True
        )
    assert state.phase is JobPhase.INSTALLING and assignment_of(state).step == step
    return state


def _from_checkpoint(state: JobState) -> set[int]:
    return {one.layer for _, one in assignment_of(state).recipes if one.checkpoint}


def test_a_checkpoint_of_the_same_history_gives_the_layers_that_are_lost() -> None:
    state, step = fallen_back(2)
    assignment = assignment_of(state)
    assert _from_checkpoint(state) == {3} and not assignment.reload
    assert assignment.covered[0] == (0, frozenset({0})), "the survivors' gradients count"
    assert assignment.starts[-1] == (3, step)


def test_a_checkpoint_of_another_history_is_not_mixed_with_copies() -> None:
    """Epoch 1 completed it. The bits of its version may differ from those of epoch 2."""
    state, step = fallen_back(1)
    assignment = assignment_of(state)
    assert _from_checkpoint(state) == {0, 1, 2, 3}
    places = {(node, one.layer, one.shard) for node, one in assignment.recipes}
    assert set(assignment.reload) == places, "no worker keeps its live state"
    assert not any(one.states or one.gradients for _, one in assignment.recipes)
    assert not any(indices for _, indices in assignment.covered)
    assert "all layers are read from it" in assignment.plan.reason
    undone = [copy_of(0, step, epoch=2), gradient_of(0, step, {0}, epoch=2)]
    assert all(lineage.is_undone(copy, assignment.starts) for copy in undone)
    assert not lineage.is_undone(copy_of(0, step, epoch=3), assignment.starts)
    assert state.starts == assignment.starts


def test_copies_that_were_made_of_a_checkpoint_are_of_its_history() -> None:
    """Epoch 3 began with the checkpoint alone, so its copies and the checkpoint go together."""
    state, step = fallen_back(1)
    for node in state.members:
        state, _, _ = send_report(state, node, phase=NodePhase.RUNNING, epoch=3)
    state = _without_layer_3(state, step)
    assert _from_checkpoint(state) == {3} and not assignment_of(state).reload


# ---- states of lost nodes ----


def rescued(state: JobState, step: int, *without: str) -> tuple[Copy, ...]:
    """Copies that are written in an epoch whose plan has the members except `without`."""
    reported = (copy for mb in state.members.values() for copy in mb.report.inventory)
    return checkpoints.copies_to_rescue(state, _plan(state, *without), step, reported)


def _plan(state: JobState, *without: str) -> Plan:
    """The present plan without the pipelines of lost nodes and of `without`."""
    absent = {*plan_of(state).nodes(), *without} - {n for n in state.members if n not in without}
    pipelines = tuple(
        pipeline
        for pipeline in plan_of(state).pipelines
        if not absent & {stage.unit.node for stage in pipeline.stages}
    )
    return replace(plan_of(state), epoch=2, pipelines=pipelines)


def _lost(state: JobState, due: int, slots: tuple[Any, ...]) -> JobState:
    """The first holder of layer 3 is lost after a peer got its states of step `due`. `slots` are on
    disk."""
    lost = plan_of(state).holders(3)[0].node
    keeper = next(node for node in state.members if node != lost)
    if slots:
        state, _, _ = apply(state, part(due, slots))
    incarnation = state.members[lost].report.info.incarnation
    state, _, _ = apply(state, job.ConnectionClosed(lost, incarnation))
    state, _, _ = apply(state, job.PortRefused(lost, incarnation))
    assert state.phase is JobPhase.HALTING and lost not in state.members
    report = state.members[keeper].report
    kept = tuple(
        Copy(STATE, layer, 0, due, 1, lost, 10**9 + layer, 8, "x", node=keeper)
        for layer in range(4)
    )
    members = dict(state.members)
    members[keeper] = replace(members[keeper], report=replace(report, inventory=kept))
    return state.of(members=members)


def test_states_that_are_not_reported_to_be_on_disk_are_written() -> None:
    state = saving(2)
    begins = 2 * (state.newest_step // 2) + 3
    due = begins - 1
    for written in ((), ALL[:1], ALL[1:], ALL):
        found = rescued(_lost(state, due, written), begins)
        assert tuple(copy.slot for copy in found) == tuple(s for s in ALL if s not in written)
    assert rescued(_lost(state, due, ()), due) == (), "it is written again"


def copied(state: JobState, slots: tuple[Any, ...], *nodes: str, step: int = 8) -> JobState:
    """`nodes` have copies of the states of `slots`."""
    members = dict(state.members)
    for number, node in enumerate(nodes):
        copies = tuple(
            Copy(STATE, slot[0], slot[1], step, 1, node, 10**9 + 100 * number + i, 8, "", node=node)
            if len(slot) == 2
            else Copy(STATE, slot[0], slot[1], step, 1, node, i, 8, "", node=node, portion=slot[2:])
            for i, slot in enumerate(slots, 1)
        )
        report = replace(members[node].report, inventory=copies)
        members[node] = replace(members[node], report=report)
    return state.of(members=members)


def replicated() -> JobState:
    """Three pipelines of one node each. Training is at step 9; checkpoint 8 is being written."""
    world = World(5, 3, steps=400, shape="3")
    world.run(limit=4.0)
    state = world.coordinator.state
    assert [unit.node for unit in plan_of(state).holders(0)] == ["node0", "node1", "node2"]
    return state.of(spec=replace(spec_of(state), checkpoint_every=4), checkpoint=("/c/4", 4))


def rescuing(state: JobState, found: tuple[Copy, ...], plan: Plan | None = None) -> JobState:
    """Epoch 2 begins at step 9, and nodes write the copies `found`."""
    plan = plan or replace(plan_of(state), epoch=2)
    assignment = replace(assignment_of(state), plan=plan, step=9, rescued=found)
    state = checkpoints.began_epoch(state, assignment)
    return state.of(epoch=2, assignment=assignment, plan=plan)


def _sources(copies: tuple[Copy, ...]) -> list[tuple[str, Any]]:
    return [(copy.node, copy.slot) for copy in copies]


def test_the_initial_state_is_no_checkpoint() -> None:
    state = saving()
    node = plan_of(state).nodes()[0]
    copy = Copy(STATE, 0, 0, 0, state.epoch, node, 1, 8, "", node=node)
    assert checkpoints.copies_to_rescue(state, plan_of(state), 1, [copy]) == ()


def test_the_node_that_was_to_write_a_state_is_preferred() -> None:
    state = copied(replicated(), ALL[:1], "node1", "node0", "node2")
    assert _sources(rescued(state, 9)) == [("node0", (0, 0))], "it may have it in its queue"
    assert _sources(rescued(state, 9, "node0")) == [("node1", (0, 0)), ("node2", (0, 0))]
    assert _sources(rescued(state, 9, "node0", "node1")) == [
        ("node2", (0, 0)),
        ("node0", (0, 0)),
    ], "nodes outside of the plan may drop their copies first"


def test_a_restarted_agent_does_not_write_what_its_vault_has_lost() -> None:
    """Its name is that of the node that was to write the states."""
    state = copied(replicated(), ALL[:1], "node1", "node2")
    assert _sources(rescued(state, 9)) == [("node1", (0, 0)), ("node2", (0, 0))]


def test_states_are_rescued_again_after_a_second_loss() -> None:
    """The new plan names another first holder, which was not to write the states."""
    state = copied(replicated(), ALL[:1], "node2")
    state = state.of(plan=_plan(state, "node0"))
    assert _sources(rescued(state, 9, "node1")) == [("node2", (0, 0))]


def test_portions_are_rescued() -> None:
    halves = ((0, 0, 0, 2), (0, 0, 1, 2))
    state = copied(replicated(), halves, "node1")
    assert [copy.slot for copy in rescued(state, 9)] == list(halves)
    state, _, _ = apply(state, part(8, halves[:1]))
    assert [copy.slot for copy in rescued(state, 9)] == [halves[1]]
    state = copied(state, halves[:1], "node1")
    assert rescued(state, 9) == (), "the other half is lost"


def test_a_checkpoint_is_given_up_only_if_nobody_writes_a_state() -> None:
    """node0 was to write it; node1 and node2 write their copies in its place."""
    state = copied(replicated(), ALL[:2], "node1", "node2")
    state = rescuing(state, rescued(state, 9, "node0"))
    nodes = ("node1", "node2", "node0")
    failed = [part(8, ALL[:1], 2, node=node, error="gone") for node in nodes]
    state, _, _ = apply(state, part(8, ALL[1:], node="node0"))
    for other, report in zip(nodes[1:], failed, strict=False):
        state, actions, _ = apply(state, report)
        assert not actions and 8 in dict(state.checkpoint_parts)
        _, actions, _ = apply(state, part(8, ALL[:1], node=other))
        assert actions == (job.CommitCheckpoint(8),)
    state, actions, _ = apply(state, failed[2])
    assert job.DropCheckpoint(8, before=3) in actions and 8 in state.lost_checkpoints


@pytest.mark.parametrize("leaves", ["stays", "drains", "is lost", "joins again"])
def test_the_node_that_was_to_write_a_state_may_have_it_in_its_queue(leaves: str) -> None:
    """Its replicas made the copies that were dropped. A node that drains writes them, too, but a
    node that has gone does not."""
    state = replicated()
    found = tuple(
        Copy(STATE, 0, 0, 8, 1, owner, n, 8, "", node=keeper)
        for n, (owner, keeper) in enumerate((("node2", "node1"), ("node1", "node2")), 1)
    )
    plan = _plan(state, "node0") if leaves != "stays" else None
    state = loads(JobState, dumps(rescuing(state, found, plan)))
    state, _, _ = apply(state, part(8, ALL[1:], node="node0"))
    members, info = dict(state.members), state.members["node0"].report.info
    if leaves == "is lost":
        del members["node0"]
    if leaves == "joins again":
        report = replace(members["node0"].report, info=replace(info, incarnation="another"))
        members["node0"] = replace(members["node0"], report=report)
    state = state.of(members=members)
    for node in ("node1", "node2"):
        state, actions, _ = apply(state, part(8, ALL[:1], 2, node=node, error="gone"))
    assert bool(entries(actions, "checkpoint-lost")) == (leaves in ("is lost", "joins again"))
    _, actions, _ = apply(state, part(8, ALL[:1], node="node0"))
    assert (job.CommitCheckpoint(8) in actions) == (leaves in ("stays", "drains"))


def test_a_queue_outlives_a_second_change() -> None:
    state = replicated()
    copy = Copy(STATE, 0, 0, 8, 1, "node0", 1, 8, "", node="node1")
    state = rescuing(rescuing(state, (copy,), _plan(state, "node0")), (copy,))
    assert set(state.queued_writers) == {
        (8, (0, 0), state.members[node].report.info.incarnation) for node in ("node1", "node0")
    }, "node1 is the first holder in the second plan"
    assert rescuing(state, ()).queued_writers == ()


def test_a_copy_that_was_dropped_before_its_rescue_gives_up_nothing() -> None:
    """The vault of node1 had the only copy in the inventories; node0, which made the state, has it
    in its queue."""
    state = copied(replicated(), ALL[:1], "node1")
    members, member = dict(state.members), state.members["node1"]
    inventory = tuple(replace(copy, owner="node0") for copy in member.report.inventory)
    members["node1"] = replace(member, report=replace(member.report, inventory=inventory))
    state = state.of(members=members)
    found = rescued(state, 9)
    assert _sources(found) == [("node1", (0, 0))]
    state = rescuing(state, found)
    state, _, _ = apply(state, part(8, ALL[1:], state.epoch, node="node0"))
    state, actions, _ = apply(state, part(8, ALL[:1], state.epoch, node="node1", error="gone"))
    assert not actions and 8 in dict(state.checkpoint_parts)
    _, actions, _ = apply(state, part(8, ALL[:1], state.epoch, node="node0"))
    assert actions == (job.CommitCheckpoint(8),)
    _, actions, _ = apply(state, part(8, ALL[:1], state.epoch, node="node0", error="full"))
    assert job.DropCheckpoint(8, before=3) in actions, "nobody is left who may write it"


def test_two_nodes_that_dropped_each_other_s_copies_give_up_nothing() -> None:
    """Each was to write the states whose copies the other rescues, and has them in its queue."""
    state = pipeline()
    keepers = {"node0": "node1", "node1": "node0"}
    found = tuple(
        Copy(STATE, slot[0], slot[1], 8, 1, owner, 10 + slot[0], 8, "", node=keeper)
        for owner, keeper in keepers.items()
        for slot in slots_of(state, owner)
    )
    state = rescuing(state, found)
    state, _, _ = apply(state, part(8, slots_of(state, "node2"), node="node2"))
    for owner, keeper in keepers.items():
        failed = part(8, slots_of(state, owner), 2, node=keeper, error="gone")
        state, actions, _ = apply(state, failed)
        assert not actions and 8 in dict(state.checkpoint_parts)
    state, _, _ = apply(state, part(8, slots_of(state, "node0"), node="node0"))
    _, actions, _ = apply(state, part(8, slots_of(state, "node1"), node="node1"))
    assert actions == (job.CommitCheckpoint(8),)


# ---- divergence ----


def _diverged(state: JobState, wrong: str) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """The commit of step 8 finds that the replica of node `wrong` differs."""
    nodes = [unit.node for unit in plan_of(state).holders(0)]
    values = tuple((node, "bad" if node == wrong else "good") for node in nodes)
    found = (Divergence(0, 0, PARAMETERS, values),)
    report = m.Diverged(1, 8, found, tuple((node, 0, 0, True) for node in nodes))
    state, actions, _ = send_report(state, nodes[1], diverged=(report,))
    more = list(actions)
    state = copied(state, ALL, *nodes)
    for node in nodes:
        state, actions, _ = send_report(
            state,
            node,
            phase=NodePhase.HALTED,
            epoch=state.epoch,
            halted=(m.Halted(state.epoch, 8, record=StepRecord(7, 1.0, 1.0, 1.0)),),
            diverged=(report,),
        )
        more += actions
    assert state.phase is JobPhase.INSTALLING and assignment_of(state).step == 8
    return state, tuple(more)


@pytest.mark.parametrize("progress", ["incomplete", "complete", "committed"])
def test_a_checkpoint_with_a_diverged_state_is_written_again(progress: str) -> None:
    state, _, _ = apply(replicated(), part(8, ALL[:1], node="node0"))
    if progress != "incomplete":
        state, _, _ = apply(state, part(8, ALL[1:], node="node1"))
    if progress == "committed":
        state, _, _ = apply(state, job.CheckpointCommitted("/c/8", 8))
    state, actions = _diverged(state, "node0")
    assert job.DropCheckpoint(8, before=2, committed=True) in actions
    assert state.checkpoint == ("/c/4", 4) and state.checkpoint_parts == ()
    assert assignment_of(state).checkpointed == 4
    assert assignment_of(state).starts == ((1, 0), (2, 8), (2, 7)), "agents forget their parts"
    for late in (part(8, node="node0"), job.CheckpointCommitted("/c/8", 8)):
        state, _, _ = apply(state, late)
        assert state.checkpoint == ("/c/4", 4) and state.checkpoint_parts == ()
    state, actions, _ = apply(state, part(8, epoch=2, node="node0"))
    assert tuple(actions) == (job.CommitCheckpoint(8),)
    state, _, _ = apply(state, job.CheckpointCommitted("/c/8", 8))
    assert state.checkpoint == ("/c/8", 8)


def test_a_checkpoint_of_other_nodes_outlives_a_divergence() -> None:
    """Also the one that a job has resumed."""
    state, _, _ = apply(replicated(), part(8, node="node1"))
    state, _, _ = apply(state, job.CheckpointCommitted("/c/8", 8))
    state, actions = _diverged(state, "node0")
    assert state.checkpoint == ("/c/8", 8) and assignment_of(state).checkpointed == 8
    assert not any(isinstance(action, job.DropCheckpoint) for action in actions)


@pytest.mark.parametrize("ends", [False, True])
def test_a_successor_repeats_the_removal_of_a_diverged_checkpoint(ends: bool) -> None:
    """The coordinator was lost after it had saved the verdict, and before it removed the files."""
    state, _, _ = apply(replicated(), part(8, node="node0"))
    state, _, _ = apply(state, job.CheckpointCommitted("/c/8", 8))
    state, _ = _diverged(state, "node0")
    end = job.JobFinished(1, "error")
    state = state.of(ending=end) if ends else state
    removal = job.DropCheckpoint(8, before=2, committed=True)
    _, actions, _ = apply(state, job.CoordinatorFailover())
    assert actions.count(removal) == 1
    assert not ends or actions.index(removal) < actions.index(end)


def test_a_successor_removes_no_checkpoint_that_stays() -> None:
    """Its files are of other nodes, or of the epoch after the divergence."""
    whole, _, _ = apply(replicated(), part(8, node="node1"))
    durable, _, _ = apply(whole, job.CheckpointCommitted("/c/8", 8))
    again, _ = _diverged(apply(replicated(), part(8, node="node0"))[0], "node0")
    again, _, _ = apply(again, part(8, epoch=2, node="node0"))
    older = _diverged(durable, "node0")[0]
    for step in range(12, 12 + 4 * checkpoints.MAX_OLDER + 8, 4):
        older, _, _ = apply(older, job.CheckpointCommitted(f"/c/{step}", step))
    assert 8 not in checkpoints.durable_steps(older), "it is durable, but forgotten"
    for state in (_diverged(whole, "node0")[0], _diverged(durable, "node0")[0], again, older):
        assert state.rewritten == ((2, 7),)
        _, actions, _ = apply(state, job.CoordinatorFailover())
        assert not any(isinstance(action, job.DropCheckpoint) for action in actions)


def test_a_commit_of_other_nodes_files_outlives_a_divergence() -> None:
    state, _, _ = apply(replicated(), part(8, node="node1"))
    state, actions = _diverged(state, "node0")
    assert job.CommitCheckpoint(8) in actions
    assert not any(isinstance(action, job.DropCheckpoint) for action in actions)
    part_of_epoch_1 = m.CheckpointPart(8, (), 1)
    assert not lineage.is_undone(part_of_epoch_1, checkpoints.starts_of_files(state, 8))
    assert lineage.is_undone(part_of_epoch_1, assignment_of(state).starts)


# ---- commits under way ----


def test_a_checkpoint_that_becomes_whole_during_a_change_stays_whole() -> None:
    """Its last part comes after epoch 2 has begun, and before its first step is known."""
    state = saving(4)
    late = state.newest_step + 5
    state, _, _ = send_report(state, "node0", phase=NodePhase.STARTING, cause="oops")
    assert state.phase is JobPhase.HALTING and state.epoch == 2
    state, _, _ = apply(state, part(late))
    assert state.phase is JobPhase.HALTING
    for node in state.members:
        state = halt(state, node)
    assert assignment_of(state).checkpointed == late
    assert checkpoints.starts_of_files(state, late) == ((1, 0),)


def test_files_count_whose_epoch_the_store_has_lost() -> None:
    """The saved assignment is of epoch 1; the node that wrote the files was in epoch 2 already."""
    state = saving(4)
    late = state.newest_step + 5
    for slots in (ALL[2:], ALL[:2]):
        state, actions, _ = apply(state, part(late, slots, epoch=2 if slots == ALL[2:] else 1))
    assert actions == (job.CommitCheckpoint(late),) and assignment_of(state).plan.epoch == 1
    counts = [checkpoints.file_counts(state, late, epoch) for epoch in (1, 2, 3)]
    assert counts == [True, True, False]


def test_a_commit_under_way_survives_a_return_to_an_earlier_step() -> None:
    state = saving(4)
    late = state.newest_step + 5
    state, actions, _ = apply(state, part(late))
    assert actions == (job.CommitCheckpoint(late),)
    state = after_a_loss(state)
    assert assignment_of(state).step < late == assignment_of(state).checkpointed
    assert checkpoints.commits_to_repeat(state) == (job.CommitCheckpoint(late),), "by a successor"
    assert checkpoints.starts_of_files(state, late) == ((1, 0),), "files of epoch 1 still count"
    counts = [checkpoints.file_counts(state, late, epoch) for epoch in (0, 1, 2)]
    assert counts == [True, True, False]
    after, _, _ = apply(state, job.CheckpointCommitted("/c/late", late))
    assert after.checkpoint == ("/c/late", late) and after.epoch == 2
    state, actions, reason = apply(state, job.CheckpointFailed(late, "I/O error"))
    assert state.phase is JobPhase.HALTING and "could not be committed" in reason
    assert not entries(actions, "checkpoint-lost")
    for node in ("node0", "node1", "node2"):
        state = halt(state, node)
    assert assignment_of(state).checkpointed == -1, "the agents write it"
    assert checkpoints.starts_of_files(state, late) == state.starts, "and now they do not"
    state, _, _ = apply(state, part(late, epoch=3))
    assert checkpoints.starts_of_files(state, late) == state.starts
    state, actions, _ = apply(state, job.CheckpointFailed(late, "I/O error"))
    assert entries(actions, "checkpoint-lost") and state.epoch == 3, "no endless loop"


# ---- the checkpoint that a job resumes ----

SPEC = JobSpec((LayerSpec(1, 1, 1, 1.0, 1.0),) * 2, 4, 8, contents=("a", "b"), optimizer="AdamW")


@pytest.mark.parametrize(
    ("saved", "problem"),
    [
        (SavedModel("/c", 2, ("a", "b"), "AdamW"), ""),
        (SavedModel("/c", 2), ""),
        (SavedModel("/c", 2, (), "AdamW"), ""),
        (SavedModel("/c", 3), "it has 3 layers, and this job has 2"),
        (SavedModel("/c", 2, ("a", "c"), "AdamW"), "its layer 1 has c, and this job has b"),
        (SavedModel("/c", 2, ("a", "b"), "SGD"), "its optimizer is SGD, and this job has AdamW"),
    ],
)
def test_a_checkpoint_of_another_model_is_recognized(saved: SavedModel, problem: str) -> None:
    found = checkpoints.mismatch(saved, SPEC)
    assert found.endswith(problem) and bool(found) == bool(problem)
    assert not found or "--resume: '/c' is not usable" in found
    assert checkpoints.mismatch(saved, replace(SPEC, contents=(), optimizer="")) == (
        found if saved.n_layers == 3 else ""
    )


def test_a_job_ends_at_once_if_it_resumes_another_model() -> None:
    launched = next(state for state in samples()[JobPhase.LAUNCHED] if state.spec is None)
    spec = spec_of(running())
    for n_layers in (spec.n_layers, 9):
        state = launched.of(resumed=SavedModel("/c", n_layers), checkpoint=("/c", 2))
        state, actions, _ = send_report(state, "node0", elastic=True, spec=spec)
        ends = [action for action in actions if isinstance(action, job.JobFinished)]
        assert bool(ends) == (n_layers == 9)
        if ends:
            assert ends[0].code == 2 and "it has 9 layers" in ends[0].reason
        else:
            assert state.resumed is None and state.spec == spec


def _unreadable(*older: tuple[str, int], **more: Any) -> tuple[JobState, Any, str]:
    """The newest checkpoint is damaged, as a worker finds while it installs the plan."""
    state = after_a_loss(saving()).of(checkpoint=("/c/6", 6), older_checkpoints=older, **more)
    report = m.CheckpointUnreadable(state.epoch, "/c/6", "layer-0002 is corrupt")
    return send_report(state, "node0", phase=NodePhase.INSTALLING, epoch=2, unreadable=report)


def test_an_older_checkpoint_replaces_a_damaged_one() -> None:
    state, actions, reason = _unreadable(("/c/4", 4), ("/c/2", 2))
    assert state.checkpoint == ("/c/4", 4) and state.older_checkpoints == (("/c/2", 2),)
    assert state.phase is JobPhase.HALTING
    assert "layer-0002 is corrupt; continuing from the checkpoint of step 4" in reason
    (entry,) = entries(actions, "checkpoint-unusable")
    assert entry == {"path": "/c/6", "step": 6, "why": "layer-0002 is corrupt"}
    again, _, _ = send_report(state, "node1", unreadable=state.members["node0"].report.unreadable)
    assert again.checkpoint == ("/c/4", 4), "two nodes found the same"


@pytest.mark.parametrize(("trained", "code"), [(False, 2), (True, 3)])
def test_without_an_older_checkpoint_the_job_ends(trained: bool, code: int) -> None:
    state, actions, _ = _unreadable(trained=trained)
    (end,) = [action for action in actions if isinstance(action, job.JobFinished)]
    assert (state.phase, end.code) == (JobPhase.FAILED, code)
    assert end.reason == "layer-0002 is corrupt; there is no older checkpoint"


def test_a_node_that_does_not_see_the_checkpoint_is_left_out() -> None:
    """Also if the others still reconnect to a new coordinator."""
    state = after_a_loss(saving()).of(checkpoint=("/c/6", 6))
    found = m.CheckpointUnreadable(state.epoch, "/c/6", "no such file", missing=True)
    report = {"phase": NodePhase.INSTALLING, "epoch": 2, "unreadable": found}
    adopted, _, _ = apply(state, job.CoordinatorFailover())
    for before in (state, adopted):
        after, _, reason = send_report(before, "node0", **report)
        assert after.phase is JobPhase.HALTING and after.checkpoint == ("/c/6", 6)
        assert after.health["node0"].quarantined and "node0 cannot read the checkpoint" in reason


# ---- keepers ----


def test_a_vault_that_stores_nothing_is_no_peer_of_the_next_plan() -> None:
    state = running()
    owner, keeper = plan_of(state).peers[0]
    note = m.BackupNote(m.KEEPER_FAILED, owner, keeper, "cannot create a slot (/dev/shm: ...)")
    state, actions, reason = apply(state, note)
    assert entries(actions, "keeper-failed")[0]["detail"] == note.detail
    (finding,) = entries(actions, "health")
    assert finding["class"] == "storage" and note.detail in finding["reason"]
    assert note.detail in reason and change_of(state).boundary, "at the end of the step"
    for node in state.members:
        state = halt(state, node)
    assert keeper not in [peer for _, peer in plan_of(state).peers]
    assert {node for node, _ in plan_of(state).peers} == {"node0", "node1", "node2"}
    after, actions, _ = apply(state, note)
    assert after.rebalance == "" and not entries(actions, "health"), "no second change of plan"


def test_a_note_about_a_former_vault_does_not_blame_the_new_one() -> None:
    state = running()
    owner, keeper = plan_of(state).peers[0]
    vault = state.members[keeper].report.info.vault
    note = m.BackupNote(m.KEEPER_FAILED, owner, keeper, "no slot", "former:1")
    after, actions, _ = apply(state, note)
    assert not after.poor_keepers and not after.rebalance and after.phase is JobPhase.RUNNING
    assert entries(actions, "keeper-failed"), "people may want to know"
    after, _, _ = apply(state, replace(note, vault=vault))
    assert after.poor_keepers == (state.members[keeper].report.info.incarnation,)


@pytest.mark.parametrize("short", [True, False])
def test_a_vault_that_stored_nothing_is_tried_again_after_a_pause(short: bool) -> None:
    """Memory may be free again. Of two nodes no other can keep the copies."""
    state = running()
    owner, keeper = plan_of(state).peers[0]
    state, _, _ = apply(state, m.BackupNote(m.KEEPER_FAILED, owner, keeper, "no slot"))
    record, incarnation = state.health[keeper], state.members[keeper].report.info.incarnation
    first_s = record.keeps_after - state.updated_at
    again = diagnosis.record_keeper_failure(record, state.updated_at, state.policy.health)
    assert first_s > 0 and again.keeps_after - state.updated_at > 1.5 * first_s

    plan = plan_of(running())
    plan = replace(plan, peers=tuple(pair for pair in plan.peers if not short or pair[0] != owner))
    until = state.updated_at + 0.5
    health = {keeper: replace(record, keeps_after=until)}
    state = running().of(plan=plan, poor_keepers=(incarnation,), health=health)
    state, actions, _ = transition(state, job.Tick(), until - 0.1)
    assert state.poor_keepers and not entries(actions, "health")
    state, actions, _ = transition(state, job.Tick(), until + 0.1)
    (note,) = entries(actions, "health")
    assert note["evidence"] == {"well": True} and "may keep copies" in note["reason"]
    assert state.poor_keepers == ()
    state, _, _ = transition(state, job.Tick(), until + 0.2)
    assert (state.phase is JobPhase.HALTING and change_of(state).boundary) is short


# ---- the end with an error ----

ERROR = m.Failed("step 3: the gradient norm is nan", 7)


@functools.cache
def pipeline() -> JobState:
    """A running job of one pipeline: each of three nodes writes a part of each checkpoint."""
    world = World(5, 3, steps=400, shape="1", backup="stream+snapshot")
    world.run(limit=4.0)
    state = world.coordinator.state
    assert state.phase is JobPhase.RUNNING and state.trimmed == state.epoch == 1
    assert all(slots_of(state, node) for node in state.members)
    return state.of(start_s=3600.0)


def due() -> tuple[JobState, int]:
    """A running job, and the step of the checkpoint that is due after its newest step."""
    state = pipeline()
    step = state.newest_step + 1
    assert step > 1
    return state.of(spec=replace(spec_of(state), checkpoint_every=step)), step


def fail(
    state: JobState, node: str = "node1", failed: m.Failed = ERROR
) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    return send_report(state, node, failed=failed)


def pass_time(state: JobState, seconds: float) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """Let the time pass, up to the end of the job, in ticks without a delay. No node is heard."""
    taken: tuple[job.JobAction, ...] = ()
    until = state.updated_at + seconds
    while state.updated_at < until and state.ending is None:
        state, actions, _ = transition(state, job.Tick(), state.updated_at + 0.4)
        taken += actions
    return state, taken


def check_end(
    state: JobState,
    actions: tuple[job.JobAction, ...],
    lost: tuple[int, ...] = (),
    tried: tuple[int, ...] = (),
) -> None:
    """The job ended with the first error. It reports the lost checkpoints, and tries to complete
    those without reports."""
    (end,) = [action for action in actions if isinstance(action, job.JobFinished)]
    assert (end.code, end.reason) == (7, "node1: step 3: the gradient norm is nan")
    assert state.phase is JobPhase.FAILED and state.ending == end
    assert {a.node for a in actions if isinstance(a, job.Send)} >= set(state.members)
    assert tuple(entry["step"] for entry in entries(actions, "checkpoint-lost")) == lost
    assert tuple(a.step for a in actions if isinstance(a, job.CommitCheckpoint)) == tried
    assert tuple(tries_of_a_successor(state)) == tried


def lose(state: JobState, node: str) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """The node's agent ends."""
    incarnation = state.members[node].report.info.incarnation
    state, _, _ = apply(state, job.ConnectionClosed(node, incarnation))
    state, actions, _ = apply(state, job.PortRefused(node, incarnation))
    return state, actions


def slots_of(state: JobState, node: str) -> tuple[Any, ...]:
    """The files of a checkpoint that the node writes."""
    return tuple(slot for slot in ALL if plan_of(state).holders(slot[0])[0].node == node)


def commit(state: JobState, step: int) -> tuple[JobState, tuple[job.JobAction, ...]]:
    state, actions, _ = apply(state, job.CheckpointCommitted(f"/c/{step}", step))
    return state, actions


def test_a_job_with_an_error_waits_for_the_checkpoint_that_is_due() -> None:
    """Nothing else counts: later errors, crashed workers, lost contact, silence, a new node."""
    state, step = due()
    state, actions, reason = fail(state)
    assert reason.endswith(f"the gradient norm is nan; waiting for the checkpoint of step {step}")
    state, more, _ = fail(state, "node0", m.Failed("another text", 3))
    state, crash, _ = send_report(
        state, "node2", phase=NodePhase.FAILED, crash_count=9, cause="oops", suspects=("node1",)
    )
    info = replace(state.members["node1"].report.info, node="node9", incarnation="n9")
    state, joined, _ = apply(state, m.NodeReport(info, NodePhase.EMPTY, 0))
    state, late = pass_time(state, state.limits.save_s / 2)
    before = (*actions, *more, *crash, *joined, *late)
    assert not [action for action in before if isinstance(action, job.Send | job.JobFinished)]
    assert (state.phase, state.epoch) == (JobPhase.RUNNING, 1)
    state, actions, _ = apply(state, part(step, HALVES[0]))
    assert not actions
    state, actions, _ = apply(state, part(step, HALVES[1]))
    assert actions == (job.CommitCheckpoint(step),)
    check_end(*commit(state, step))


def test_the_wait_for_the_checkpoint_has_a_limit() -> None:
    for written in ((), HALVES[0]):
        state, step = due()
        state, _, _ = fail(state)
        if written:
            state, _, _ = apply(state, part(step, written))
        state, actions = pass_time(state, state.limits.save_s - 1.0)
        assert state.ending is None and not actions
        check_end(*pass_time(state, 2.0), tried=(step,))


def test_a_checkpoint_that_cannot_be_written_ends_the_wait() -> None:
    state, step = due()
    state, _, _ = fail(state)
    state, actions, _ = apply(state, part(step, (), node="node0", error="no space"))
    check_end(state, actions, lost=(step,))
    state, step = due()
    state, _, _ = apply(state, part(step, (), node="node0", error="no space"))
    state, actions, _ = fail(state)
    check_end(state, actions)


def test_the_next_coordinator_waits_for_the_checkpoint_too() -> None:
    """The node that failed does not return; another node has an error."""
    state, step = due()
    state, _, _ = apply(state, part(step, slots_of(state, "node1")))
    state, _, _ = fail(state)
    state, _ = pass_time(state, 1.0)
    state, later = loads(JobState, dumps(state)), 2 * state.limits.save_s
    state, _, _ = transition(state, job.CoordinatorFailover(), state.updated_at + later)
    state, actions, _ = fail(state, "node0", m.Failed("another text", 3))
    assert state.ending is None and not actions, "the time without a coordinator does not count"
    state, _, _ = apply(state, part(step, slots_of(state, "node0")))
    state, actions, _ = apply(state, part(step, slots_of(state, "node2")))
    assert actions == (job.CommitCheckpoint(step),)
    check_end(*commit(state, step))


def test_the_error_stays_if_its_node_is_lost() -> None:
    state, step = due()
    state, _, _ = fail(state)
    check_end(*lose(state, "node1"), tried=(step,))
    state, _, _ = fail(due()[0])
    state, _, _ = apply(state, part(step, slots_of(state, "node1")))
    state, actions = lose(state, "node1")
    assert state.ending is None and not actions, "the others write the rest"
    state, _, _ = apply(state, part(step, ALL))
    check_end(*commit(state, step))


def test_a_job_with_an_error_ends_at_once_if_no_checkpoint_is_due() -> None:
    state, step = due()
    never, later = (
        state.of(spec=replace(spec_of(state), checkpoint_every=n)) for n in (0, step + 1)
    )
    unsaved = state.of(plan=replace(plan_of(state), state="none"))
    for ready in (
        never,
        later,
        unsaved,
        commit(state, step)[0],
        state.of(assignment=None, plan=None),
    ):
        check_end(*fail(ready)[:2])
    check_end(*fail(state, failed=replace(ERROR, version=step - 1))[:2])
    state, actions, _ = fail(later, failed=replace(ERROR, version=step + 1))
    assert state.ending is None and not actions, "the report of the step is late"
