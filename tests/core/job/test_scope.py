"""Scopes: which nodes stay outside an epoch change, and when all must halt after all."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.job import scope
from elastic.core.job import state as job
from elastic.core.job.state import Cause, CauseKind, JobPhase, JobState
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.codec import dumps, loads
from elastic.domain.types import Assignment, StepRecord
from tests.core.coordinator.test_transitions import entries, running, send_report, sent, world
from tests.core.state_access import assignment_of, change_of, on_gpus, plan_of

GONE, OUTSIDE = "node2", ("node0", "node1")


def crashed(state: JobState | None = None) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """The workers of node2 crash. Each node is a pipeline of its own."""
    state = state or running(gpus=False)
    state, actions, _ = send_report(state, GONE, phase=NodePhase.STARTING, able=False, cause="oops")
    return state, actions


def promise(
    state: JobState, node: str, **changes: Any
) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """The workers of the node promise to halt."""
    made = m.Promise(state.epoch, plan_epoch(state), state.newest_step + 1)
    state, actions, _ = send_report(
        state,
        node,
        phase=NodePhase.HALTING,
        epoch=state.epoch,
        promises=(replace(made, **changes),),
        inventory=world().agents[node].inventory(),
    )
    return state, actions


def plan_epoch(state: JobState) -> int:
    old = change_of(state).old_plan
    assert old is not None
    return old.epoch


def restarted(state: JobState) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """The workers of node2 are attached again."""
    inventory = world().agents[GONE].inventory()
    state, actions, _ = send_report(
        state, GONE, phase=NodePhase.HALTED, epoch=state.epoch, able=True, inventory=inventory
    )
    return state, actions


def arrive(
    state: JobState, node: str, **changes: Any
) -> tuple[JobState, tuple[job.JobAction, ...]]:
    """The workers of the node halt at the meeting point."""
    step = scope.promised_step(state)
    halted = replace(m.Halted(state.epoch, step, complete=True), **changes)
    state, actions, _ = send_report(state, node, phase=NodePhase.HALTED, halted=(halted,))
    return state, actions


def installing() -> JobState:
    """The plan is sent to node2; the others still compute."""
    state, _ = crashed()
    for node in OUTSIDE:
        state, _ = promise(state, node)
    state, _ = restarted(state)
    assert state.phase is JobPhase.INSTALLING
    return state


def all_halt(state: JobState, epoch: int = 3) -> bool:
    """Whether a change has begun for which all nodes halt at once."""
    change = change_of(state)
    return (state.phase, state.epoch) == (JobPhase.HALTING, epoch) and not change.outside


def test_other_pipelines_stay_outside() -> None:
    state, actions = crashed()
    assert change_of(state).outside == OUTSIDE
    assert sent(actions, m.Halt) == [m.Halt(2, outside=OUTSIDE)] * 3, "its vault lives"
    assert entries(actions, "halt")[0]["outside"] == list(OUTSIDE)


def test_the_plan_is_sent_when_all_others_have_promised() -> None:
    state, _ = crashed()
    state, _ = restarted(state)
    state, _ = promise(state, "node0")
    assert state.phase is JobPhase.HALTING
    state, actions = promise(state, "node1")
    assert state.phase is JobPhase.INSTALLING
    orders = [a for a in actions if isinstance(a, job.Send) and isinstance(a.message, m.Install)]
    assert [order.node for order in orders] == [GONE], "the others have not halted"
    assignment = assignment_of(state)
    assert assignment.step == state.newest_step + 1
    assert assignment.promised == ((0, (0,)), (1, (1,)))
    assert {node for node, _ in assignment.recipes} == {GONE}, "the others keep their layers"
    (todo,) = (set(part) for part in assignment.todo if part) if any(assignment.todo) else (set(),)
    for _, recipe in assignment.recipes:
        held = {index for copy in recipe.gradients for index in copy.microbatches}
        assert held | todo == {2} and not held & todo, "once in each layer"


def test_each_node_outside_gets_its_order_when_it_has_halted() -> None:
    state = installing()
    state, _, _ = send_report(state, GONE, phase=NodePhase.RUNNING)
    for node in OUTSIDE:
        state, actions = arrive(state, node)
        assert len(sent(actions, m.Install)) == 1
        assert state.phase is JobPhase.INSTALLING
        state, _, _ = send_report(state, node, phase=NodePhase.RUNNING)
    assert state.phase is JobPhase.RUNNING and state.change is None
    assert not scope.is_any_awaited(state)


def test_the_change_lasts_until_all_have_entered() -> None:
    """A fault before that ends the epoch, although micro-batches of it were computed."""
    state = installing()
    state, _, _ = send_report(state, GONE, phase=NodePhase.RUNNING, resumed_at=state.updated_at)
    state, _, _ = send_report(state, GONE, phase=NodePhase.STARTING, able=False, cause="again")
    assert all_halt(state)
    change = change_of(state)
    assert len(change.causes) == 2 and change.old_plan is not None and change.old_plan.epoch == 1


@pytest.mark.parametrize(
    "changes",
    [{"step": 99}, {"ran_in": 0}],
)
def test_promises_that_differ(changes: dict[str, int]) -> None:
    state, _ = crashed()
    state, _ = promise(state, "node0")
    state, _ = promise(state, "node1", **changes)
    assert all_halt(state)
    assert [cause.text for cause in change_of(state).causes] == ["node2: oops"]


@pytest.mark.parametrize("when", ["halting", "installing"])
def test_a_node_that_does_not_keep_its_promise(when: str) -> None:
    state = installing() if when == "installing" else promise(crashed()[0], "node0")[0]
    assert all_halt(arrive(state, "node0", complete=False)[0])


@pytest.mark.parametrize("when", ["halting", "installing"])
def test_workers_outside_that_crash(when: str) -> None:
    state = installing() if when == "installing" else promise(crashed()[0], "node0")[0]
    state, _, _ = send_report(state, "node0", phase=NodePhase.STARTING, able=False, cause="too")
    assert all_halt(state)
    assert set(change_of(state).lost) == {GONE, "node0"}


def test_a_node_outside_that_halts_without_a_promise() -> None:
    state, _ = crashed()
    halted = m.Halted(2, state.newest_step + 1)
    state, _, _ = send_report(state, "node0", phase=NodePhase.HALTED, epoch=2, halted=(halted,))
    assert all_halt(state)


def test_a_step_that_was_committed_somewhere() -> None:
    state, _ = crashed()
    for node in OUTSIDE:
        state, _ = promise(state, node)
    record = StepRecord(state.newest_step + 1, 1.0, 1.0, 1.0)
    halted = m.Halted(2, record.step + 1, record=record)
    state, _, _ = send_report(
        state,
        GONE,
        phase=NodePhase.HALTED,
        epoch=2,
        able=True,
        halted=(halted,),
        inventory=world().agents[GONE].inventory(),
    )
    assert all_halt(state)


def test_a_new_coordinator_halts_all() -> None:
    state, _ = crashed()
    state, _, _ = transition(state, job.CoordinatorFailover(), state.updated_at + 1)
    assert all_halt(state)


def test_a_new_coordinator_waits_for_those_outside() -> None:
    state = loads(JobState, dumps(installing()))
    state, _, _ = transition(state, job.CoordinatorFailover(), state.updated_at + 1)
    assert state.phase is JobPhase.INSTALLING and change_of(state).outside == OUTSIDE


def test_a_notice_that_ends_before_the_step() -> None:
    state = installing()
    member = replace(state.members["node1"], drain_deadline=state.updated_at + 0.001, draining=True)
    state = state.of(members={**state.members, "node1": member})
    state, _, _ = transition(state, job.Tick(), state.updated_at + 0.01)
    assert all_halt(state)


def test_a_lost_pipeline_may_go() -> None:
    """node2 is a pipeline of its own. The others go on, and take over its micro-batch."""
    state = running(gpus=False)
    incarnation = state.members[GONE].report.info.incarnation
    at = state.updated_at
    state, _, _ = transition(state, job.ConnectionClosed(GONE, incarnation), at)
    state, actions, _ = transition(state, job.PortRefused(GONE, incarnation), at + 0.01)
    assert sent(actions, m.Halt) == [m.Halt(2, outside=OUTSIDE, lost=(GONE,))] * 2
    for node in OUTSIDE:
        state, _ = promise(state, node)
    assignment = assignment_of(state)
    assert state.phase is JobPhase.INSTALLING and len(plan_of(state).pipelines) == 2
    assert sorted(sum(assignment.todo, ())) == [2] and not assignment.recipes


# ---- changes without a scope ----


def outside(state: JobState, kind: CauseKind = CauseKind.WORKER) -> tuple[str, ...]:
    return scope.outside_nodes(state, Cause(kind, "x", (GONE,)), (GONE,))


def test_only_damage_leaves_nodes_outside() -> None:
    state = running(gpus=False)
    allowed = {kind for kind in CauseKind if outside(state, kind)}
    assert allowed == {CauseKind.LOST, CauseKind.WORKER, CauseKind.HANG}
    cause = Cause(CauseKind.LOST, "x", ("keeper",))
    assert not scope.outside_nodes(state, cause, ()), "it only kept copies"


def test_all_halt_on_gpus() -> None:
    assert outside(running(gpus=False)) and not outside(on_gpus(running(gpus=False)))


@pytest.mark.parametrize(
    "schemes", [("reduce", "replica"), ("reduce:4", "snapshot"), ("stream", "none")]
)
def test_schemes_that_need_all_pipelines(schemes: tuple[str, str]) -> None:
    state = running(gpus=False)
    plan = replace(plan_of(state), gradients=schemes[0], state=schemes[1])
    assert not outside(state.of(plan=plan))


def test_a_step_that_a_recovery_has_begun() -> None:
    """Some workers have sums of micro-batches that their own pipeline did not compute."""
    state = running(gpus=False)
    whole = assignment_of(state)
    begun = replace(whole, step=state.newest_step + 1)
    assert outside(state.of(assignment=begun)), "nothing was there before"
    parts: list[dict[str, Any]] = [
        {"todo": ((0,), (), (2,))},
        {"promised": ((0, (0,)),), "todo": begun.todo},
    ]
    for part in parts:
        recovered: Assignment = replace(begun, **part)
        assert not outside(state.of(assignment=recovered))


def test_a_node_with_idle_workers_has_nothing_to_promise() -> None:
    state = running(gpus=False)
    member = state.members["node1"]
    info = replace(member.report.info, workers=2)
    two = replace(member, report=replace(member.report, info=info))
    assert outside(state.of(members={**state.members, "node1": two})) == ("node0",)


def test_a_node_of_two_pipelines_joins_them() -> None:
    state = running(gpus=False)
    plan = plan_of(state)
    first, second, third = plan.pipelines
    shared = replace(
        first, stages=(replace(first.stages[0], last=2), replace(third.stages[0], first=2))
    )
    assert outside(state.of(plan=replace(plan, pipelines=(shared, second, third)))) == ("node1",)


def test_no_scope_while_a_change_is_under_way() -> None:
    state, _ = crashed()
    assert not outside(state)


def test_all_halt_without_a_second_failure_or_wait() -> None:
    state, _ = crashed()
    change = replace(change_of(state), wait_until=state.updated_at + 60.0)
    state, _ = promise(state.of(change=change), "node0")
    state, _ = arrive(state, "node0", complete=False)
    assert all_halt(state) and change_of(state).continued
    assert change_of(state).wait_until == change.wait_until and state.watch.attempts == 1


def test_the_gradients_of_a_worker_that_goes_on_are_not_used() -> None:
    """It writes those of the next micro-batches into the same slots."""
    state = installing()
    for _, recipe in assignment_of(state).recipes:
        for copy in (*recipe.gradients, *recipe.replay):
            assert copy.node not in OUTSIDE or copy.owner != copy.node


def test_no_pause_of_pipelines_that_go_on() -> None:
    state = installing()
    state, _, _ = send_report(state, GONE, phase=NodePhase.RUNNING, resumed_at=state.updated_at)
    pause_s = state.members[GONE].report.resumed_at - change_of(state).began
    for node in OUTSIDE:
        state, _ = arrive(state.of(updated_at=state.updated_at + 5.0), node)
        state, _, _ = send_report(state, node, phase=NodePhase.RUNNING)
    assert state.change is None and state.pauses[-1] == pytest.approx(pause_s)
