"""Holders of a layer disagree: the step runs again without the wrong replica."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

from elastic.core.coordinator.transitions import transition
from elastic.core.health.diagnosis import NodeHealth
from elastic.core.job import state as job
from elastic.core.job.state import CauseKind, JobPhase, JobState, ProgressWatch
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.core.recovery.divergence import Distrust
from elastic.domain.errors import EXIT_UNRECOVERABLE
from elastic.domain.types import GRADIENT, PARAMETERS, STATE, Copy, Divergence, StepRecord
from tests.core.coordinator.test_transitions import entries, send_report
from tests.core.state_access import assignment_of, change_of, on_gpus, plan_of
from tests.core.world.world import World

STEP = 9


@functools.cache
def running(spares: int = 0) -> JobState:
    """Two nodes, each with all layers, in the middle of a long job; and spares with none."""
    world = World(5, 2 + spares, steps=400, shape="2")
    world.run(limit=4.0 + 2.0 * spares)
    state = world.coordinator.state
    assert state.phase is JobPhase.RUNNING and state.trimmed == state.epoch == 1
    assert len(nodes_of(state)) == 2 and len(state.members) == 2 + spares
    return on_gpus(state.of(start_s=3600.0))


def nodes_of(state: JobState) -> list[str]:
    return [unit.node for unit in plan_of(state).holders(0)]


def evidence(state: JobState, node: str, sound: bool) -> m.Diverged:
    """Report of the worker on `node`: the holders of layer 0 have other parameters."""
    values = tuple((node, f"value-of-{node}") for node in nodes_of(state))
    found = (Divergence(0, 0, PARAMETERS, values),)
    return m.Diverged(1, STEP, found, ((node, 0, 0, sound),))


def copies(state: JobState, node: str) -> tuple[Copy, ...]:
    """States of version STEP and gradients of that step, of all layers of the node."""
    plan, found = plan_of(state), []
    for _, _, stage in plan.stages():
        for layer in stage.layers if stage.unit.node == node else ():
            for n, (kind, held) in enumerate(((STATE, frozenset[int]()), (GRADIENT, {0}))):
                losses = ((0, 1.0),) if held else ()
                found.append(
                    Copy(
                        kind, layer, 0, STEP, state.trimmed, node, 100 * layer + n + 1, 8, "",
                        frozenset(held), losses, node,
                    )
                )  # fmt: skip
    return tuple(found)


def halted(
    state: JobState, node: str, **changes: Any
) -> tuple[JobState, tuple[job.JobAction, ...]]:
    state, actions, _ = send_report(
        state,
        node,
        phase=NodePhase.HALTED,
        epoch=state.epoch,
        inventory=copies(state, node),
        halted=(m.Halted(state.epoch, STEP, record=StepRecord(STEP - 1, 1.0, 1.0, 1.0)),),
        **changes,
    )
    return state, actions


def protected(state: JobState) -> JobState:
    """The first copies of the installed epoch are whole at their peers."""
    state = state.of(phase=JobPhase.RUNNING, change=None, trained=True, watch=ProgressWatch())
    for node in plan_of(state).nodes():
        state, _, _ = send_report(
            state, node, phase=NodePhase.RUNNING, epoch=state.epoch, protected=state.epoch
        )
    assert state.trimmed == state.epoch
    return state


def diverged(
    sound: dict[str, bool],
) -> tuple[JobState, JobState, tuple[job.JobAction, ...]]:
    """The state before, and state and actions after all nodes have halted and reported."""
    before = running()
    first, *_ = nodes_of(before)
    report = (evidence(before, first, sound[first]),)
    state, _, reason = send_report(before, first, diverged=report)
    assert change_of(state).causes[0].kind is CauseKind.DIVERGENCE
    assert f"step {STEP}: layer 0 (TP rank 0): parameters differ: {first} has value" in reason
    actions: tuple[job.JobAction, ...] = ()
    for node in plan_of(before).nodes():
        state, actions = halted(state, node, diverged=(evidence(before, node, sound[node]),))
    return before, state, actions


def test_the_wrong_replica_is_loaded_anew_and_the_step_runs_again() -> None:
    wrong, right = nodes_of(running())
    before, after, actions = diverged({wrong: False, right: True})
    assignment = assignment_of(after)
    assert after.phase is JobPhase.INSTALLING and assignment.step == STEP
    assert after.distrusted == (Distrust(1, STEP, ((wrong, 0, 0),)),)
    assert assignment.reload == ((wrong, 0, 0),)
    recipes = {(node, recipe.layer): recipe for node, recipe in assignment.recipes}
    owners = {at: [copy.owner for copy in recipe.states] for at, recipe in recipes.items()}
    assert owners.pop((wrong, 0)) == [right], "its own copy is no source"
    assert all(found == [node] for (node, _), found in owners.items())
    assert not any(recipe.gradients for recipe in recipes.values())
    everything = set(range(plan_of(before).n_microbatches))
    assert {index for share in assignment.todo for index in share} == everything
    (entry,) = entries(actions, "divergence")
    assert entry["wrong"] == [[wrong, 0, 0]] and entry["step"] == STEP and not entry["fatal"]
    assert f"{wrong} does not equal its own copy" in entry["reason"]


def test_evidence_that_comes_after_the_order_to_halt_counts() -> None:
    """One worker found the difference; another one lost contact with it and reported first."""
    wrong, right = nodes_of(running())
    state, _, _ = send_report(running(), right, suspects=(wrong,))
    state, _, _ = transition(state, job.Tick(), state.updated_at + 60.0)
    while state.phase is JobPhase.RUNNING:
        state, _, _ = transition(state, job.Tick(), state.updated_at + 0.5)
    assert change_of(state).causes[0].kind is not CauseKind.DIVERGENCE
    state, _ = halted(state, right)
    state, _ = halted(state, wrong, diverged=(evidence(running(), wrong, False),))
    assert assignment_of(state).reload == ((wrong, 0, 0),)


def test_without_evidence_the_job_ends_with_the_values() -> None:
    first, second = nodes_of(running())
    _, after, actions = diverged({first: True, second: True})
    assert after.phase is JobPhase.FAILED and after.ending is not None
    assert after.ending.code == EXIT_UNRECOVERABLE
    for text in (f"step {STEP}", "layer 0", f"{first} has value-of-{first}", f"{second} has value"):
        assert text in after.ending.reason
    assert entries(actions, "divergence")[0]["fatal"]


def test_holders_of_a_shared_state_load_its_copies_if_nobody_is_proven_wrong() -> None:
    """The coordinator asks all of them to load the layer anew, and uses their copies."""
    state = running()
    holders = nodes_of(state)
    reports = [
        replace(evidence(state, node, True), portions=((node, 0, 0, i, 2),))
        for i, node in enumerate(holders)
    ]
    state, actions, _ = send_report(state, holders[0], diverged=(reports[0],))
    for node, report in zip(holders, reports, strict=True):
        state, actions = halted(state, node, diverged=(report,))
    suspects = tuple((node, 0, 0) for node in holders)
    assert state.phase is JobPhase.INSTALLING
    assert state.distrusted == (Distrust(1, STEP, (), suspects),)
    assignment = assignment_of(state)
    assert assignment.step == STEP and assignment.reload == suspects
    assert all(recipe.states for _, recipe in assignment.recipes)
    (entry,) = entries(actions, "divergence")
    assert entry["wrong"] == [] and not entry["fatal"]
    assert "all of them load their right copies" in entry["reason"]
    assert not protected(state).distrusted[0].suspects


def test_old_evidence_is_not_judged_again() -> None:
    """A node repeats its report until its workers install; a fault may come before."""
    wrong, right = nodes_of(running())
    _, after, _ = diverged({wrong: False, right: True})
    again, _, _ = send_report(after, right, phase=NodePhase.STARTING, cause="crash")
    assert again.epoch == after.epoch + 1
    for node in (wrong, right):
        again, _ = halted(again, node, diverged=(evidence(running(), node, False),))
    assert again.distrusted == after.distrusted
    assert assignment_of(again).reload == ((wrong, 0, 0),), "its workers may not have loaded it"
    later, _, _ = send_report(protected(again), right, phase=NodePhase.STARTING, cause="crash")
    for node in (wrong, right):
        later, _ = halted(later, node)
    assert assignment_of(later).reload == ()


def test_a_spare_loads_its_wrong_replica_anew_when_it_is_used_again() -> None:
    """The workers of a spare keep their layers, also while an epoch without them is protected."""
    before = running(spares=1)
    wrong, right = nodes_of(before)
    (spare,) = before.members.keys() - {wrong, right}
    # The second divergence of this node: the next plan leaves it out.
    before = before.of(health={**before.health, wrong: NodeHealth(divergences=1)})
    reports = {
        wrong: (evidence(before, wrong, False),),
        right: (evidence(before, right, True),),
        spare: (),
    }
    state, _, _ = send_report(before, wrong, diverged=reports[wrong])
    for node, found in reports.items():
        state, _ = halted(state, node, diverged=found)
    without = assignment_of(state)
    assert set(without.plan.nodes()) == {right, spare} and without.step == STEP

    state = protected(state)
    members = {node: member for node, member in state.members.items() if node != spare}
    state, _, _ = transition(state.of(members=members), job.Tick(), state.updated_at + 0.01)
    crashed = {"phase": NodePhase.STARTING, "able": False, "cause": "crash"}
    kept = copies(state, right)
    state, _, _ = send_report(state, right, epoch=state.epoch, inventory=kept, **crashed)
    state, _ = halted(state, wrong)
    again = assignment_of(state)
    assert again.plan.nodes() == (wrong,) and again.step == STEP
    assert again.reload == ((wrong, 0, 0),)
