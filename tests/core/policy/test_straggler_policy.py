"""Slow nodes: measurements that count, and the decisions that follow."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.health.compute_speed import (
    SAMPLES,
    SAMPLES_UNPROFILED,
    ComputeSpeed,
    calibrate,
    changed_factor,
    observe,
)
from elastic.core.health.diagnosis import FaultClass, Finding, HealthAction, HealthLimits
from elastic.core.job import join_policy, quarantine, stragglers
from elastic.core.job import state as job
from elastic.core.job.state import Cause, CauseKind, JobPhase, JobState, LogEntry, Send
from elastic.core.policy import straggler_policy
from elastic.core.protocol import messages as m
from elastic.domain.types import LayerSpec, Pipeline, Plan, Stage, Unit
from elastic.planning.cost.profile import Device, LayerTimes, Profile
from elastic.planning.search.search import PlanRequest
from tests.core.state_access import plan_of
from tests.core.world.world import World

# ---- one node ----------------------------------------------------------------------------------


def seen(*ratios: float, pace: ComputeSpeed | None = None, profiled: bool = True) -> ComputeSpeed:
    """Speed of a node after steps with these ratios; a first step warms up."""
    pace = pace or observe(ComputeSpeed(profiled=profiled), 1, 0, 9.0)
    for ratio in ratios:
        pace = calibrate(observe(pace, 1, pace.step + 1, ratio), ())
    return pace


def slower(pace: ComputeSpeed, factor: float) -> ComputeSpeed:
    """The speed once plans assume this slow factor."""
    return straggler_policy.with_factor(pace, factor)


def unprofiled(*ratios: float, pace: ComputeSpeed | None = None) -> ComputeSpeed:
    """The same without a profile; each ratio is repeated for as many steps as must agree."""
    return seen(*(r for r in ratios for _ in range(SAMPLES_UNPROFILED)), pace=pace, profiled=False)


@pytest.mark.parametrize(
    ("ratios", "factor"),
    [
        ((1.0, 1.0, 1.0), None),
        ((2.0, 2.0), None),
        ((2.0, 2.0, 2.0), 2.0),
        ((1.0, 2.0, 2.1, 1.9), 2.0),
        ((2.0, 1.0, 2.0), None),
        ((1.19, 1.19, 1.19), None),
        ((1.21, 1.3, 1.25), 1.25),
        ((0.5, 0.5, 0.5), None),
    ],
)
def test_steps_in_a_row_must_agree(ratios: tuple[float, ...], factor: float | None) -> None:
    assert changed_factor(seen(*ratios)) == factor


def test_a_change_is_relative_to_the_assumed_slowdown() -> None:
    """A known slowdown is no change; a return to full speed is one."""
    pace = replace(seen(2.0, 2.0, 2.0), factor=2.0)
    assert changed_factor(pace) is None
    assert changed_factor(seen(2.3, 2.3, 2.3, pace=pace)) is None
    assert changed_factor(seen(1.0, 1.05, 1.0, pace=pace)) == 1.0
    assert changed_factor(seen(1.5, 1.5, 1.5, pace=pace)) == 1.5
    assert changed_factor(seen(4.0, 4.0, 4.0, pace=pace)) == 4.0


def test_the_first_step_of_an_epoch_and_repetitions_do_not_count() -> None:
    pace = seen(2.0, 2.0)
    assert observe(pace, 1, pace.step, 2.0) == pace
    assert observe(pace, 1, pace.step - 1, 2.0) == pace
    fresh = observe(pace, 2, pace.step + 1, 2.0)
    assert fresh.samples == () and fresh.epoch == 2
    assert len(seen(*[2.0] * 9).samples) == SAMPLES


def test_without_a_profile_the_first_steps_are_the_reference() -> None:
    """The script's figures are only proportional: ratio 40 is the usual speed of this node."""
    pace = unprofiled(40.0)
    assert pace.unit == 40.0 and changed_factor(pace) is None
    assert changed_factor(unprofiled(80.0, pace=pace)) == 2.0
    assert changed_factor(seen(80.0, 80.0, 80.0, pace=pace)) is None
    assert changed_factor(unprofiled(56.0, pace=pace)) is None


def test_without_a_profile_faster_steps_become_the_reference() -> None:
    pace = unprofiled(80.0, 40.0)
    assert pace.unit == 40.0 and changed_factor(pace) is None
    assert changed_factor(unprofiled(80.0, pace=pace)) == 2.0


def in_epoch(pace: ComputeSpeed, epoch: int, ratio: float) -> ComputeSpeed:
    """The same speed after more steps without a profile, of this epoch and with this ratio."""
    for _ in range(2 * SAMPLES_UNPROFILED):
        pace = calibrate(observe(pace, epoch, pace.step + 1, ratio), ())
    return pace


@pytest.mark.parametrize("slow", [1.5, 3.0])
def test_without_a_profile_a_slowdown_may_end_with_the_epoch(slow: float) -> None:
    """The first steps of the next epoch are as fast as before the slowdown, or still slow."""
    pace = unprofiled(40.0, 40.0 * slow)
    assert changed_factor(pace) == slow
    pace = slower(pace, slow)
    assert changed_factor(in_epoch(pace, 2, 42.0)) == 1.0
    assert changed_factor(in_epoch(pace, 2, 38.0 * slow)) is None
    later = in_epoch(in_epoch(pace, 2, 38.0 * slow), 3, 40.0)
    assert changed_factor(later) == 1.0


def test_without_a_profile_a_node_that_is_tried_again_may_still_be_slow() -> None:
    pace = replace(slower(unprofiled(40.0, 120.0), 3.0), factor=1.0)
    assert changed_factor(in_epoch(pace, 2, 120.0)) == 3.0
    assert changed_factor(in_epoch(pace, 2, 42.0)) is None


def test_without_a_profile_nodes_with_the_same_layers_are_the_reference() -> None:
    """A node that was always slow is found by comparison with two others."""
    others = [unprofiled(40.0), unprofiled(40.0)]
    assert changed_factor(calibrate(unprofiled(80.0), others)) == 2.0
    assert changed_factor(calibrate(unprofiled(80.0), others[:1])) is None


def test_a_node_at_normal_speed_is_no_longer_slow() -> None:
    """Also if its slow factor was hardly above the least change."""
    pace = replace(unprofiled(40.0, 60.0), factor=1.5)
    assert changed_factor(unprofiled(42.0, pace=pace)) == 1.0
    assert changed_factor(unprofiled(46.0, pace=pace)) is None


# ---- the job -----------------------------------------------------------------------------------

TIMES = LayerTimes(1.0, 2.0, 1.0, 1.0)
HALF = LayerTimes(0.5, 1.0, 0.5, 0.5)
LAYER = LayerSpec(8, 16, 8, 1.0, 2.0)


def profile(n: int = 4) -> Profile:
    devices = (Device("a", (TIMES,) * n), Device("b", (HALF,) * n))
    return Profile(model="toy", layers=(LAYER,) * n, devices=devices)


@functools.cache
def world() -> World:
    made = World(5, 2, steps=400, shape="1")
    made.run(limit=4.0)
    return made


def running() -> JobState:
    """Two nodes, one pipeline of two stages with two layers each, profiled."""
    state = world().coordinator.state
    assert (
        state.phase is JobPhase.RUNNING and state.trimmed == state.epoch and state.plan is not None
    )
    state = state.of(policy=replace(state.policy, profile=profile()), paces={})
    stages = (Stage(Unit("node0"), 0, 2), Stage(Unit("node1"), 2, 4))
    plan = replace(
        plan_of(state), pipelines=(Pipeline(stages, tuple(range(plan_of(state).n_microbatches))),)
    )
    return state.of(plan=plan)


def beat(state: JobState, node: str, step: int, seconds: float, rank: int = 0) -> JobState:
    """One heartbeat: `seconds` for a micro-batch, a third of it forward."""
    measured = m.MicrobatchTiming(state.epoch, step, rank, seconds / 3, seconds * 2 / 3)
    incarnation = state.members[node].report.info.incarnation
    event = job.Heartbeat(node, incarnation, step, 0, (measured,))
    return stragglers.observe_speed(state, event)


def slowed(state: JobState, factor: float, node: str = "node1") -> JobState:
    for step in range(3, 8):
        for name in state.members:
            state = beat(state, name, step, 6.0 * (factor if name == node else 1.0))
    return state


def better(
    monkeypatch: pytest.MonkeyPatch, stages: tuple[Stage, ...], without: tuple[Stage, ...] = ()
) -> list[PlanRequest]:
    """Make the planner return one pipeline of these stages. Return its requests.

    `without`: stages of a plan without dead nodes, if they differ.
    """
    asked: list[PlanRequest] = []

    def plan(request: PlanRequest) -> Plan:
        asked.append(request)
        chosen = without if request.dead and without else stages
        microbatches = tuple(range(request.spec.n_microbatches))
        return Plan(request.epoch, 4, len(microbatches), 1, (Pipeline(chosen, microbatches),))

    for module in (join_policy, straggler_policy):
        monkeypatch.setattr(module, "make_plan", plan)
    return asked


REBALANCED = (Stage(Unit("node0"), 0, 3), Stage(Unit("node1"), 3, 4))


def test_a_slow_node_gets_less_at_the_end_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    before = slowed(running(), 2.0)  # without the planner's replacement, which counts its requests
    asked = better(monkeypatch, REBALANCED)
    result = straggler_policy.rebalance_stragglers(before, 10.0)
    assert result is not None
    state, actions, reason = result
    assert asked[0].slow == (("node1", 2.0),) and asked[0].profile == profile()
    assert state.phase is JobPhase.HALTING and state.change is not None and state.change.boundary
    text = "node1 computes 2.0x slower than profiled"
    assert state.change.causes == (Cause(CauseKind.SLOW, text, ("node1",)),)
    assert set(state.members) == {"node0", "node1"} and state.change.lost == ()
    halts = [a.message for a in actions if isinstance(a, Send)]
    assert halts == [m.Halt(state.epoch, True)] * 2
    note = next(a for a in actions if isinstance(a, LogEntry) and a.kind == "pace")
    assert note.data == {
        "node": "node1",
        "slow": 2.0,
        "before": 1.0,
        "steps": {"5": 2.0, "6": 2.0, "7": 2.0},
    }
    assert "s per step instead of" in reason


@pytest.mark.parametrize("profiled", [True, False])
@pytest.mark.parametrize("before", [1.0, 1.3, 2.0])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.99, 1.15, 1.7, 3.0])
def test_a_change_is_found_once(profiled: bool, before: float, ratio: float) -> None:
    """A slowdown that plans assume is not found again."""
    pace = seen(ratio, ratio, ratio) if profiled else unprofiled(ratio)
    pace = replace(pace, unit=1.0, factor=before)
    factor = changed_factor(pace)
    assert factor is None or changed_factor(replace(pace, factor=factor)) is None


def test_the_same_measurements_lead_to_one_decision(monkeypatch: pytest.MonkeyPatch) -> None:
    state = running()
    assert state.plan is not None
    asked = better(monkeypatch, state.plan.pipelines[0].stages)
    result = straggler_policy.rebalance_stragglers(slowed(state, 2.0), 10.0)
    assert result is not None
    state, actions, reason = result
    assert state.phase is JobPhase.RUNNING and not any(isinstance(a, Send) for a in actions)
    assert "the plan stays" in reason
    assert straggler_policy.rebalance_stragglers(state, 10.1) is None
    assert (
        straggler_policy.rebalance_stragglers(beat(state, "node1", 8, 12.0), 10.2) is None
        and len(asked) == 1
    )
    for step in range(8, 11):
        state = beat(state, "node1", step, 6.0)
    result = straggler_policy.rebalance_stragglers(state, 11.0)
    assert result is not None and "node1 is as fast as profiled" in result[2]
    assert stragglers.slowdowns(result[0]) == () and stragglers.slowdowns(state) == (
        ("node1", 2.0),
    )


@pytest.mark.parametrize("factor", [0.3, 1.0, 1.1])
def test_normal_speeds_need_no_plan(monkeypatch: pytest.MonkeyPatch, factor: float) -> None:
    asked = better(monkeypatch, REBALANCED)
    assert straggler_policy.rebalance_stragglers(slowed(running(), factor), 10.0) is None
    assert asked == []


def test_expected_by_device_type_schedule_and_recomputation() -> None:
    """Type b is twice as fast; recomputation adds a forward pass; zero-bubble splits backward."""
    state = running()
    info = replace(state.members["node1"].report.info, device="b")
    member = replace(
        state.members["node1"], report=replace(state.members["node1"].report, info=info)
    )
    assert state.plan is not None
    first, last = state.plan.pipelines[0].stages
    pipe = Pipeline((replace(first, recompute=True), last), (0, 1, 2), "zero-bubble")
    state = state.of(
        members={**state.members, "node1": member}, plan=replace(state.plan, pipelines=(pipe,))
    )
    for step in range(5):
        state = beat(beat(state, "node0", step, 2 * (1.0 + 1.0 + 2.0)), "node1", step, 2 * 1.5)
    assert [stragglers.speed_of(state, n).ratio for n in ("node0", "node1")] == pytest.approx(
        [1.0, 1.0]
    )


def test_other_epochs_and_idle_workers_do_not_count() -> None:
    state = running()
    before = beat(state.of(epoch=state.epoch + 1), "node0", 3, 60.0)
    assert before.paces == {}
    assert beat(state, "node0", 3, 6.0, rank=5).paces == {}


def test_a_node_is_as_slow_as_its_slowest_worker() -> None:
    state = running()
    assert state.plan is not None
    stages = (Stage(Unit("node0", 0), 0, 2), Stage(Unit("node0", 1), 2, 4))
    state = state.of(plan=replace(state.plan, pipelines=(Pipeline(stages, (0, 1, 2)),)))
    incarnation = state.members["node0"].report.info.incarnation
    for step in range(5):
        both = tuple(
            m.MicrobatchTiming(state.epoch, step, rank, 2.0 + 2 * rank, 4.0 + 4 * rank)
            for rank in (0, 1)
        )
        state = stragglers.observe_speed(state, job.Heartbeat("node0", incarnation, step, 0, both))
    assert stragglers.speed_of(state, "node0").ratio == pytest.approx(2.0)


def test_through_the_whole_transition(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats alone lead to the decision."""
    better(monkeypatch, REBALANCED)
    state, reasons = running(), []
    for step in range(3, 8):
        for node, member in state.members.items():
            seconds = 12.0 if node == "node1" else 6.0
            measured = m.MicrobatchTiming(state.epoch, step, 0, seconds / 3, seconds * 2 / 3)
            event = job.Heartbeat(node, member.report.info.incarnation, step, 0, (measured,))
            state, _actions, reason = transition(state, event, state.updated_at + 0.1)
            reasons.append(reason)
        if state.phase is not JobPhase.RUNNING:
            break
    assert state.phase is JobPhase.HALTING and step == 6
    told: list[Any] = [reason for reason in reasons if "2.0x slower" in reason]
    assert len(told) == 1


# ---- a slow node without layers ----------------------------------------------------------------


def left_out() -> tuple[World, str]:
    """A job with a profile, and the name of a node that no longer has layers: it was slow for three
    steps in a row."""
    limits = HealthLimits(quarantine_s=10.0)
    made = World(5, 3, steps=4000, shape="auto", min_nodes=3, max_nodes=9, health=limits)
    made.run(limit=4.0)
    state = made.coordinator.state
    assert state.phase is JobPhase.RUNNING and len(plan_of(state).nodes()) == 3
    node = plan_of(state).nodes()[1]
    made.coordinator.state = slow_for_three_steps(
        state.of(policy=replace(state.policy, profile=profile())), node
    )
    made.run(limit=8.0)
    assert node not in plan_of(made.coordinator.state).nodes()
    return made, node


def slow_for_three_steps(state: JobState, node: str) -> JobState:
    steps = tuple((state.newest_step + number, 2.0) for number in range(SAMPLES))
    pace = ComputeSpeed(plan_of(state).epoch, steps, (1.0, 2.0, 3.0), steps[-1][0], unit=1.0)
    return state.of(paces={state.members[node].report.info.incarnation: pace})


def test_a_slow_node_without_layers_is_tried_again_after_growing_pauses() -> None:
    made, node = left_out()
    for number in range(2):
        slow_at = made.now
        while node not in plan_of(made.coordinator.state).nodes() and made.now < slow_at + 300.0:
            made.run(limit=made.now + 1.0)
        pause_s = 10.0 * 2.0**number
        assert pause_s - 5.0 < made.now - slow_at < pause_s + 5.0, number
        assert stragglers.slowdowns(made.coordinator.state) == ()
        made.run(limit=made.now + 5.0)
        made.coordinator.state = slow_for_three_steps(made.coordinator.state, node)
        made.run(limit=made.now + 3.0)
        assert node not in plan_of(made.coordinator.state).nodes()


# ---- class and action --------------------------------------------------------------------------


def health_notes(result: Any) -> list[dict[str, Any]]:
    return [a.data for a in result[1] if isinstance(a, LogEntry) and a.kind == "health"]


def test_a_slow_node_gets_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    better(monkeypatch, REBALANCED)
    (note,) = health_notes(straggler_policy.rebalance_stragglers(slowed(running(), 2.0), 10.0))
    assert (note["node"], note["class"], note["action"]) == ("node1", "host", "rebalance")
    assert note["evidence"] == {
        "slow": 2.0,
        "before": 1.0,
        "step_5": 2.0,
        "step_6": 2.0,
        "step_7": 2.0,
    }


def test_a_spare_replaces_a_slow_node_if_that_is_better(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stages = (Stage(Unit("node0"), 0, 2), Stage(Unit("node9"), 2, 4))
    asked = better(monkeypatch, REBALANCED, stages)
    state = slowed(running(), 3.0)
    member = state.members["node0"]
    info = replace(member.report.info, node="node9", incarnation="node9.1")
    spare = replace(member, report=replace(member.report, info=info))
    state = state.of(members={**state.members, "node9": spare})
    result = straggler_policy.rebalance_stragglers(state, 10.0)
    assert result is not None and any(request.dead == {"node1"} for request in asked)
    (note,) = health_notes(result)
    assert (note["node"], note["class"], note["action"]) == ("node1", "host", "replace")
    state = result[0]
    assert state.health["node1"].quarantined and state.phase is JobPhase.HALTING
    assert state.change is not None and state.change.boundary and "node1" in state.members


def test_an_equal_slowdown_of_all_nodes_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine below all nodes: no plan helps, so none is requested."""
    asked = better(monkeypatch, REBALANCED)
    state = running()
    for step in range(3, 8):
        state = beat(beat(state, "node0", step, 6.0 * 1.9), "node1", step, 6.0 * 2.0)
    result = straggler_policy.rebalance_stragglers(state, 10.0)
    assert result is not None and asked == []
    state, actions, _ = result
    assert [a.kind for a in actions if isinstance(a, LogEntry)] == ["profile-wrong"]
    assert state.phase is JobPhase.RUNNING and stragglers.slowdowns(state) == ()
    assert straggler_policy.rebalance_stragglers(state, 10.1) is None, "it is found once"
    state = steps_of(state, 8, 3, node0=1.0, node1=2.0)
    assert straggler_policy.rebalance_stragglers(state, 11.0) is not None, (
        "it is still slow when the others are quick again"
    )


def steps_of(state: JobState, first: int, count: int, **ratios: float) -> JobState:
    """Heartbeats of `count` steps, two seconds apart, with a ratio per node."""
    for step in range(first, first + count):
        state = state.of(updated_at=100.0 + 2.0 * step)
        for node, ratio in ratios.items():
            state = beat(state, node, step, 6.0 * ratio)
    return state


@pytest.mark.parametrize("ratios", [(5.3, 5.1), (3.4, 67.0), (1.6, 2.9)])
def test_a_profile_that_was_measured_alone_puts_no_node_aside(
    monkeypatch: pytest.MonkeyPatch, ratios: tuple[float, float]
) -> None:
    """Several processes share the cores that one had for itself. Nodes are slow only if they are
    slower than they were."""
    asked = better(monkeypatch, REBALANCED)
    one, other = ratios
    state = steps_of(running(), 3, 4, node0=one, node1=other)
    result = straggler_policy.rebalance_stragglers(state, 10.0)
    assert result is not None and result[0].phase is JobPhase.RUNNING
    state = steps_of(result[0], 7, 20, node0=1.2 * one, node1=0.9 * other)
    assert straggler_policy.rebalance_stragglers(state, 11.0) is None and asked == []
    state = steps_of(state, 27, 8, node0=1.2 * one, node1=2.0 * other)
    slow = straggler_policy.rebalance_stragglers(state, 12.0)
    assert slow is not None and "node1 computes 2.2x slower than before" in slow[2]


def test_one_node_that_is_as_fast_as_profiled_confirms_the_profile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    better(monkeypatch, REBALANCED)
    state = steps_of(running(), 3, 4, node0=1.0, node1=5.0)
    result = straggler_policy.rebalance_stragglers(state, 10.0)
    assert result is not None and "node1 computes 5.0x slower than profiled" in result[2]


def test_no_node_is_judged_before_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = better(monkeypatch, REBALANCED)
    state = steps_of(running(), 3, 4, node1=5.0)
    state = steps_of(state, 5, 2, node0=5.0)
    assert straggler_policy.rebalance_stragglers(state, 10.0) is None and asked == []


def test_the_first_sample_of_a_node_is_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has begun the epoch, and its next step may show that the profile is wrong."""
    asked = better(monkeypatch, REBALANCED)
    state = steps_of(running(), 3, 4, node1=5.0)
    state = steps_of(state, 6, 1, node0=5.0)
    assert straggler_policy.rebalance_stragglers(state, 10.0) is None and asked == []


def test_a_wrong_profile_ends_what_it_had_led_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """The work of a node that counted as slow is shared anew, and no finding is left."""
    state = steps_of(running(), 3, 4, node0=1.0, node1=1.0)
    pace = replace(stragglers.speed_of(state, "node1"), factor=2.0)
    finding = Finding(FaultClass.HOST, HealthAction.REBALANCE, "2.0x slower")
    incarnation = state.members["node1"].report.info.incarnation
    state = state.of(paces={**state.paces, incarnation: pace})
    state, _ = quarantine.add_finding(state, "node1", finding)
    state = steps_of(state, 7, 4, node0=2.0, node1=2.1)
    asked = better(monkeypatch, REBALANCED)
    result = straggler_policy.rebalance_stragglers(state, 11.0)
    assert result is not None and stragglers.slowdowns(result[0]) == ()
    assert asked[0].slow == () and "all nodes are slower than profiled" in result[2]
    (note,) = health_notes(result)
    assert note["node"] == "node1" and note["evidence"] == {"well": True}


def test_a_node_without_layers_is_still_tried_again_if_the_profile_is_wrong() -> None:
    state = steps_of(running(), 3, 4, node0=2.0, node1=2.1)
    aside = replace(stragglers.speed_of(state, "node1"), factor=2.0)
    member = state.members["node1"]
    info = replace(member.report.info, node="node2", incarnation="node2.1")
    members = {**state.members, "node2": replace(member, report=replace(member.report, info=info))}
    paces = {**state.paces, "node2.1": aside}
    state = state.of(members=members, paces=paces, considered=("node2.1",))
    record = replace(quarantine.record_of(state, "node2"), slow_until=300.0)
    state = quarantine.with_record(state, "node2", record)
    result = straggler_policy.rebalance_stragglers(state, 11.0)
    assert result is not None and result[0].profile_error == 2.0
    assert stragglers.slowdowns(result[0]) == (("node2", 2.0),)
    result = straggler_policy.rebalance_stragglers(result[0], 300.0)
    assert result is not None and "node2: it was 2.0x slower, and is tried again" in result[2]
    assert stragglers.slowdowns(result[0]) == () and result[0].considered == ()


@pytest.mark.parametrize(
    ("apart_s", "steps", "factor"),
    [(0.1, 8, None), (2.0, 8, 2.0), (0.1, 98, None), (0.1, 120, 2.0), (0.9, 16, 2.0)],
)
def test_without_a_profile_steps_count_that_span_ten_seconds(
    apart_s: float, steps: int, factor: float | None
) -> None:
    """Eight steps of 0.1 s are too short a time; a hundred of them are not."""
    pace = replace(unprofiled(40.0), times=())
    for number in range(steps):
        pace = observe(pace, 1, pace.step + 1, 80.0, 100.0 + number * apart_s)
    assert changed_factor(pace) == factor


def test_short_steps_of_which_some_are_fast_are_no_slowdown() -> None:
    """Every second in which the machine was busy is followed by one in which it was not."""
    pace = replace(unprofiled(40.0), times=())
    for number in range(600):
        ratio = 80.0 if number // 10 % 2 else 40.0
        pace = calibrate(observe(pace, 1, pace.step + 1, ratio, 100.0 + number * 0.1), ())
        assert changed_factor(pace) is None
