"""Parts, commits and failures of durable checkpoints, as the coordinator keeps them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.job import checkpoints
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import STATE, Copy, JobSpec, LayerSpec, SavedModel
from tests.core.coordinator.test_transitions import entries, halt, running, samples, send_report
from tests.core.state_access import assignment_of, change_of, plan_of, spec_of

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


def finished(state: JobState) -> tuple[JobState, tuple[job.JobAction, ...], str]:
    """Rank 0 reports that all steps are done."""
    return send_report(state, "node0", phase=NodePhase.FINISHED, finished=m.Finished(400, "sha"))


# ---- parts and commits ----


def test_several_checkpoints_are_written_at_the_same_time() -> None:
    """One node is two checkpoints ahead of the other."""
    state, actions = saving(), ()
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


def test_parts_of_undone_steps_do_not_count() -> None:
    """Two nodes have written their states of step 6; a loss leads back to an earlier step."""
    state = saving()
    late = state.newest_step + 5
    state, _, _ = apply(state, part(late, HALVES[0]))
    state = _after_a_loss(state)
    assert state.checkpoint_parts == () and assignment_of(state).step < late
    state, _, _ = apply(state, part(late, HALVES[0], epoch=1))
    state, actions, _ = apply(state, part(late, HALVES[1], epoch=2))
    assert not actions, "the late part belongs to the epoch before"
    _, actions, _ = apply(state, part(late, HALVES[0], epoch=2))
    assert actions == (job.CommitCheckpoint(late),)


def test_parts_of_finished_steps_count_in_later_epochs() -> None:
    state, _, _ = apply(saving(), part(1, HALVES[0]))
    state = _after_a_loss(state)
    assert assignment_of(state).step >= 1 and assignment_of(state).checkpointed == -1
    state, actions, _ = apply(state, part(1, HALVES[1], epoch=1))
    assert actions == (job.CommitCheckpoint(1),)


def test_a_whole_checkpoint_is_not_ordered_again() -> None:
    state, _, _ = apply(saving(), part(1))
    assert assignment_of(_after_a_loss(state)).checkpointed == 1


def _after_a_loss(state: JobState) -> JobState:
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
    assert job.DropCheckpoint(2) in actions
    after, actions, _ = apply(state, part(2, HALVES[1]))
    assert after.checkpoint_parts == () and not actions
    state, _, _ = apply(state, part(4))
    _, actions, _ = apply(state, job.CheckpointFailed(4, "no space"))
    assert entries(actions, "checkpoint-lost") == [{"step": 4, "node": "", "why": "no space"}]


def test_the_oldest_of_too_many_incomplete_checkpoints_is_given_up() -> None:
    state, actions = saving(), ()
    for step in range(1, checkpoints.MAX_PENDING + 2):
        assert not actions
        state, actions, _ = apply(state, part(step, HALVES[0]))
    assert [entry["step"] for entry in entries(actions, "checkpoint-lost")] == [1]
    assert [step for step, _ in state.checkpoint_parts] == list(
        range(2, checkpoints.MAX_PENDING + 2)
    )


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


def test_a_failure_of_an_earlier_epoch_does_not_count() -> None:
    """The same states are written again in the present epoch."""
    state = _after_a_loss(saving())
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


def test_checkpoints_that_are_incomplete_at_the_end_are_reported() -> None:
    state, _, _ = apply(saving(), part(398, HALVES[0]))
    state, _, _ = apply(state, part(400))
    state, _, _ = apply(state, job.CheckpointCommitted("/c/400", 400))
    state, actions, _ = finished(state)
    assert state.phase is JobPhase.FINISHED
    assert [entry["step"] for entry in entries(actions, "checkpoint-lost")] == [398]


# ---- states of lost nodes ----


def rescued(state: JobState, step: int) -> tuple[Copy, ...]:
    reported = (copy for mb in state.members.values() for copy in mb.report.inventory)
    return checkpoints.copies_to_rescue(state, step, reported)


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


def test_peers_write_the_states_of_a_lost_node() -> None:
    state = saving(2)
    begins = 2 * (state.newest_step // 2) + 3
    due, plan = begins - 1, plan_of(state)
    lost = plan.holders(3)[0].node
    mine = tuple(slot for slot in ALL if plan.holders(slot[0])[0].node == lost)
    others = tuple(slot for slot in ALL if slot not in mine)
    for written, missing in (((), mine), (others, mine), (mine[:1], mine[1:]), (ALL, ())):
        found = rescued(_lost(state, due, written), begins)
        assert tuple((copy.layer, copy.shard) for copy in found) == missing
    assert rescued(_lost(state, due, ()), due) == (), "it is written again"


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
    state = _after_a_loss(saving()).of(checkpoint=("/c/6", 6), older_checkpoints=older, **more)
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
