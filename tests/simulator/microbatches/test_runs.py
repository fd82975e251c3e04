"""Simulated runs of the micro-batch level under losses, joins and notices."""

from __future__ import annotations

from dataclasses import replace

import pytest
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.worker import EpochRun
from elastic_sim.microbatches.world import AnchoredEvent, MicrobatchWorld
from elastic_sim.traces.trace import ADD, Event
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.planning.cost.predict import predict
from elastic.planning.plan.schemes import schemes_of
from tests.simulator.microbatches.sample_runs import (
    JOB,
    PAIRS,
    MicrobatchJob,
    came,
    lost,
    profile,
    random_trace,
    samples_once,
    simulate,
    steady,
)

EXACT = MicrobatchPhysics(jitter=0.0)


def test_without_failures_a_step_takes_what_the_planner_says() -> None:
    known, job = profile(), replace(JOB, backup="none+none", min_nodes=4, max_nodes=4)
    outcome = simulate(steady(4), known, job, EXACT)
    assert outcome.phase == "finished" and not outcome.recoveries
    world = MicrobatchWorld(job.spec(known), job.policy(known), EXACT, 0)
    world.schedule(steady(4))
    world.clock.run(10.0, lambda: any(run.connected for run in world.runs.values()))
    run: EpochRun = next(iter(world.runs.values()))
    infos = tuple(agent.info for agent in world.agents.values())
    assert outcome.step_s[5] == pytest.approx(
        predict(run.plan, known, infos).step_s, abs=1e-5
    )  # events have five digits
    assert len(outcome.step_s) == 20


def test_costs_of_messages_and_steps_show_in_the_steps() -> None:
    job = replace(JOB, backup="none+none", min_nodes=4, max_nodes=4, pipelines="1")
    bare, step, hop = (
        simulate(steady(4), profile(), job, physics).step_s[5]
        for physics in (EXACT, replace(EXACT, step_s=0.1), replace(EXACT, hop_s=0.01))
    )
    assert step - bare == pytest.approx(0.1)
    assert hop - bare > 6 * 0.01  # through four stages and back


def test_a_lost_node_costs_its_phases_and_no_step() -> None:
    physics = replace(EXACT, closed_s=0.1, leave_s=0.2, plan_s=0.3, install_s=0.4, group_s=0.5)
    outcome = simulate(
        steady(4, 120.0, lost(9.0, 1)), profile(), replace(JOB, steps=40, pipelines="1"), physics
    )
    (found,) = outcome.recoveries
    assert (found["nodes_before"], found["nodes_after"], found["planned"]) == (4, 3, False)
    near = physics.message_s + physics.local_s
    # The port of a dead agent refuses connections, so no other node is asked.
    assert found["detect_s"] == pytest.approx(0.1, abs=1e-3)
    assert found["decide_s"] == pytest.approx(0.2 + 2 * near, abs=1e-2)
    assert 0.4 <= found["transfer_s"] < 1.0
    assert found["rebuild_s"] >= 0.5
    phases = sum(found[name] for name in ("detect_s", "decide_s", "transfer_s", "rebuild_s"))
    assert found["total_s"] > 0.3 + phases - (found["rebuild_s"] - 0.5) - 1e-6
    assert found["state_source"] == "peer" and found["microbatches_lost"] <= 8
    assert outcome.phase == "finished"
    samples_once(outcome)


def test_on_cpus_a_pipeline_that_lost_nothing_goes_on() -> None:
    job, steps = replace(JOB, pipelines="2", steps=8, microbatches=16), {}
    for accelerated in (False, True):
        outcome = simulate(
            steady(4, 200.0, lost(20.0, 3)),
            profile(seconds=0.3),
            job,
            replace(EXACT, plan_s=2.0),
            accelerated=accelerated,
        )
        samples_once(outcome)
        (halt,) = (e for e in outcome.events if e["kind"] == "halt" and e["cause_kind"] == "lost")
        (plan,) = (e for e in outcome.events if e["kind"] == "plan" and e["epoch"] == 2)
        assert ("promised" in plan) == ("outside" in halt) == (not accelerated)
        at = {e["step"]: e["at"] for e in outcome.events if e["kind"] == "step"}
        steps[accelerated] = at[plan["step"]] - at[plan["step"] - 1]
    assert steps[False] < steps[True]


def test_the_last_worker_waits_only_for_its_own_connections() -> None:
    """The last worker connects to the others when they have connected to each other already."""
    job, waits = replace(JOB, steps=40, pipelines="1"), dict[str, list[float]]()
    for name, bytes_per_s in (("at once", 0.0), ("apart", 1e5)):
        for pair_s in (0.0, 0.1):
            physics = replace(EXACT, bytes_per_s=bytes_per_s, pair_s=pair_s)
            (found,) = simulate(steady(4, 120.0, lost(9.0, 1)), profile(), job, physics).recoveries
            waits.setdefault(name, []).append(found["rebuild_s"])
    more = {name: crowded - alone for name, (alone, crowded) in waits.items()}
    assert more["at once"] == pytest.approx(0.3, abs=0.01)
    assert more["apart"] == pytest.approx(0.1, abs=1e-3)


def test_halting_waits_for_the_action_that_is_computed() -> None:
    job = replace(JOB, pipelines="1", steps=4)
    halts = [
        simulate(steady(4, 200.0, lost(at, 3)), profile(seconds=0.6), job, EXACT).recoveries[0][
            "halt_s"
        ]
        for at in (20.0, 20.3, 20.6, 20.9)
    ]
    action_s = 3 * 0.4  # three of eight layers backward, at most
    assert EXACT.leave_s + 0.1 < max(halts) < EXACT.leave_s + action_s + 0.1


def test_finished_microbatches_are_not_run_again_where_their_gradients_are_kept() -> None:
    again = {}
    for backup in ("stream+snapshot", "recompute+snapshot"):
        job = replace(JOB, microbatches=32, pipelines="1", backup=backup)
        outcome = simulate(steady(4, 120.0, lost(10.0, 1)), profile(), job, EXACT)
        again[backup] = outcome.recoveries[0]["microbatches_rerun"]
    assert again["stream+snapshot"] < again["recompute+snapshot"]


def test_a_node_with_a_notice_leaves_at_the_end_of_a_step_and_loses_nothing() -> None:
    outcome = simulate(
        steady(4, 120.0, lost(40.0, 1, 30.0)), profile(), replace(JOB, steps=50), EXACT
    )
    (found,) = outcome.recoveries
    assert found["planned"] and found["cause"] == "drain node1"
    assert found["microbatches_lost"] == 0 and found["microbatches_rerun"] == 0
    assert found["pause_s"] > 0


def test_a_newcomer_enters_once_its_processes_have_started() -> None:
    physics = replace(EXACT, spawn_s=4.0)
    job = replace(JOB, steps=60, min_nodes=3)
    outcome = simulate(steady(3, 120.0, came(8.0, 3)), profile(), job, physics)
    (found,) = outcome.recoveries
    assert (found["nodes_before"], found["nodes_after"]) == (3, 4)
    halt = next(
        event for event in outcome.events if event["kind"] == "halt" and event["epoch"] == 2
    )
    assert 12.0 < halt["at"] < 13.0


def test_events_may_follow_steps() -> None:
    gone = AnchoredEvent(Event(0.0, "remove", "node1"), step=7, after_s=0.1)
    new = AnchoredEvent(Event(0.0, ADD, "node9"), step=9, after_s=0.2, ready=True)
    outcome = simulate(
        steady(4), profile(), replace(JOB, steps=30, max_nodes=4), EXACT, 0, (gone, new)
    )
    first, second = outcome.recoveries
    assert first["step"] == 7 and second["cause"] == "join node9" and second["step"] in (10, 11)


def test_an_unrecoverable_loss_ends_the_job_with_a_reason() -> None:
    gone = [lost(9.0, 0), lost(9.0, 1), lost(9.0, 2)]
    outcome = simulate(
        steady(4, 60.0, *gone), profile(), replace(JOB, min_nodes=4, pipelines="1"), EXACT
    )
    assert outcome.phase == "failed" and "there is no durable checkpoint" in outcome.reason
    with_one = replace(JOB, min_nodes=4, pipelines="1", checkpoint_every=4, steps=40)
    outcome = simulate(steady(4, 200.0, *gone), profile(), with_one, EXACT)
    assert outcome.phase == "finished" and outcome.recoveries[0]["state_source"] == "checkpoint"
    assert any(event["kind"] == "lost-steps" for event in outcome.events)
    samples_once(outcome)


def test_without_enough_nodes_the_job_waits() -> None:
    outcome = simulate(steady(2, 30.0), profile(), replace(JOB, min_nodes=3), EXACT)
    assert outcome.phase == "waiting" and not outcome.step_s


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(PAIRS), st.sampled_from((0, 5)), st.booleans())
def test_any_pair_survives_any_trace_or_says_why_not(
    seed: int, pair: str, every: int, accelerated: bool
) -> None:
    """Results are consistent; the simulator checks the ledgers at every commit."""
    trace = random_trace(seed)
    job = replace(JOB, backup=pair, checkpoint_every=every, steps=30)
    outcome = simulate(trace, profile(), job, MicrobatchPhysics(), seed, accelerated=accelerated)
    samples_once(outcome)
    if outcome.phase == "failed":
        assert (not every and "lay" in outcome.reason) or "no durable checkpoint" in outcome.reason
    else:
        assert outcome.phase in ("finished", "paused", "waiting"), outcome.phase
    for found in outcome.recoveries:
        assert found["total_s"] > 0 and 0 <= found["microbatches_lost"] <= 8


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(PAIRS))
def test_the_same_seed_gives_the_same_bytes(seed: int, pair: str) -> None:
    trace, job = random_trace(seed, 3), replace(JOB, backup=pair, steps=12)
    one, two = (simulate(trace, profile(), job, MicrobatchPhysics(), seed) for _ in range(2))
    assert one == two


def test_another_seed_gives_other_times() -> None:
    trace = steady(4, 60.0, lost(9.0, 1))
    one, two = (simulate(trace, profile(), JOB, MicrobatchPhysics(), seed) for seed in (1, 2))
    assert one.recoveries[0]["total_s"] != two.recoveries[0]["total_s"]


def test_every_pair_of_the_list_is_legal() -> None:
    assert len({schemes_of(pair) for pair in PAIRS}) == len(PAIRS)


def test_schedules() -> None:
    for schedule in ("1f1b", "interleaved", "zero-bubble"):
        job = replace(JOB, schedule=schedule, pipelines="auto", steps=12, max_nodes=4)
        outcome = simulate(steady(4, 120.0, lost(8.0, 2)), profile(), job, MicrobatchPhysics(), 3)
        assert outcome.phase == "finished" and len(outcome.recoveries) == 1, schedule


def test_job_defaults() -> None:
    assert MicrobatchJob(microbatches=1, steps=1).backup == "auto"
    outcome = simulate(steady(1, 30.0), profile(2), MicrobatchJob(microbatches=2, steps=3), EXACT)
    assert outcome.phase == "finished"
