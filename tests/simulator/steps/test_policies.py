"""Policies: no time is counted twice, and each policy follows the rules of its system."""

from __future__ import annotations

from dataclasses import replace

import pytest
from elastic_sim.replay.replay import replay, run_one
from elastic_sim.steps.clusters import JOBS, TrainingSetup, node_type_of, training_of
from elastic_sim.steps.physics import (
    ClusterPhysics,
    physics_from_settings,
    usable_trace,
)
from elastic_sim.steps.policies import ORACLES, RIVALS, policy_class, policy_classes
from elastic_sim.steps.policies.ours import SCHEMES
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.generate import Market, generate
from elastic_sim.traces.trace import ADD, REMOVE, Event, build_trace
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.errors import FieldError
from tests.simulator.steps.node_time import node_ms, present_ms
from tests.simulator.steps.policy_runs import QUIET, outcome, run, trace, world

RANDOM = (
    "ours", "ours:log+snapshot", "checkpoint", "varuna", "varuna-no-rollback", "bamboo",
    "oobleck", "parcae", "parcae-fitted", "recycle", "recover", "torchft", "ft-hsdp", "gemini",
    "spares", "oracle", "ceiling",
)  # fmt: skip


@pytest.mark.parametrize("policy", RANDOM)
@settings(max_examples=4)
@given(
    seed=st.integers(0, 10**6),
    mtbf_s=st.floats(60, 3000),
    repair_s=st.sampled_from([0.0, 300.0]),
    notice_s=st.sampled_from([0.0, 30.0, 120.0]),
    slow=st.sampled_from([0.0, 2.0]),
)
def test_nothing_is_counted_twice(
    policy: str, seed: int, mtbf_s: float, repair_s: float, notice_s: float, slow: float
) -> None:
    physics = ClusterPhysics(stragglers_per_node_h=slow, spread_s=30.0)
    market = Market(
        nodes=6, mtbf_s=mtbf_s, repair_s=repair_s, notice_s=notice_s, bulk=((1, 3), (2, 2), (4, 1))
    )
    there = world(physics=physics)
    made = generate(market, 1800.0, seed)
    first, again = (run_one(there, made, policy, seed, keep=True) for _ in range(2))
    found = outcome(first)
    totals = found.account.totals()
    assert (
        sum(totals.values())
        == present_ms(found.account)
        == node_ms(usable_trace(made, physics, seed))
    )
    paid = node_ms(usable_trace(made, replace(physics, boot_s=0.0), seed))
    assert round(1000 * sum(first.time.values())) == paid >= present_ms(found.account)
    assert all(amount >= 0 for amount in totals.values())
    assert found.account.spans == outcome(again).account.spans
    assert (found.samples, found.decisions) == (outcome(again).samples, outcome(again).decisions)
    full = there.samples
    shares = {d.change.setup.samples for d in found.decisions if d.change.setup is not None}
    assert found.samples % full == 0 or policy in ("torchft", "ft-hsdp")
    assert all(0 < share <= full for share in shares)


@settings(max_examples=3)
@given(seed=st.integers(0, 10**6), mtbf_s=st.floats(200, 3000))
def test_no_policy_beats_the_oracle_by_more_than_a_step(seed: int, mtbf_s: float) -> None:
    market = Market(nodes=6, mtbf_s=mtbf_s, repair_s=200.0, bulk=((1, 3), (2, 1)))
    made = generate(market, 1800.0, seed)
    best = run("oracle", made).samples
    for policy in policy_classes():
        if policy != "ceiling":
            assert run(policy, made).samples <= best * 1.005 + world().samples, policy
    assert run("ceiling", made).samples >= best - world().samples


def test_slow_nodes_do_not_slow_the_oracle() -> None:
    slow = replace(QUIET, stragglers_per_node_h=3.0)
    there = trace(6, (1000.0, REMOVE, "n2"), (2000.0, REMOVE, "n3"))
    assert run("oracle", there, physics=slow).samples == run("oracle", there).samples
    assert run("varuna", there, physics=slow).samples < run("varuna", there).samples


def test_without_losses_ours_is_the_oracle() -> None:
    calm = trace(6)
    ours, oracle = run("ours:recompute+replica", calm), run("oracle", calm)
    assert ours.samples >= 0.93 * oracle.samples, "copies of the state to host memory alone"
    assert outcome(ours).account.totals()[Use.LOST] == 0


LOSS = trace(6, (1000.0, REMOVE, "n2"))


def test_a_loss_costs_ours_its_lease_and_less_than_a_step() -> None:
    found = outcome(run("ours", LOSS))
    totals = found.account.totals()
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    assert totals[Use.DETECT] == 5 * 3000
    assert loss.change.setup is not None and loss.change.back_to == -1
    assert 0 < totals[Use.LOST] < 6 * loss.change.setup.step_ms


def test_a_noticed_loss_costs_ours_no_work() -> None:
    noticed = trace(6, (1000.0, REMOVE, "n2"), notice_s=120.0)
    totals = outcome(run("ours", noticed)).account.totals()
    assert totals[Use.LOST] == totals[Use.DETECT] == 0
    assert totals[Use.PLAN] > 0


def test_a_notice_that_is_too_short_is_a_loss_that_is_known() -> None:
    noticed = trace(6, (1000.0, REMOVE, "n2"), notice_s=2.1)
    found = outcome(run("ours", noticed, model="gpt3-2.7b"))
    assert found.account.totals()[Use.DETECT] == 0
    assert any("notice runs out" in d.change.reason for d in found.decisions)


def test_a_new_node_enters_at_the_end_of_a_step() -> None:
    came = trace(5, (1000.0, ADD, "n9"))
    found = outcome(run("ours", came))
    assert found.account.totals()[Use.LOST] == 0
    (entered,) = [d for d in found.decisions if "join" in d.change.reason]
    assert (
        entered.at > 1_000_000
        and entered.change.setup is not None
        and entered.change.setup.nodes == 6
    )


def test_ours_restores_the_checkpoint_only_without_any_copy() -> None:
    """One pipeline: a node and the peer with its copies."""
    whole = outcome(run("ours:log+snapshot", trace(4, (2000.0, REMOVE, "n0")), model="gpt2"))
    assert not any("checkpoint" in d.change.reason for d in whole.decisions)
    many = trace(6, *((2000.0, REMOVE, f"n{i}") for i in range(4)))
    lost = outcome(run("ours:log+snapshot", many, model="gpt3-2.7b"))
    assert any("back to the checkpoint" in d.change.reason for d in lost.decisions)
    assert lost.account.totals()[Use.LOST] > 0


def test_ours_gives_a_slow_node_less_work() -> None:
    physics = replace(QUIET, stragglers_per_node_h=3.0, straggler_factor=3.0, straggler_s=3000.0)
    found = outcome(run_one(world("gpt3-2.7b", physics=physics), trace(6), "ours", 2, keep=True))
    assert any("slow nodes" in d.change.reason for d in found.decisions)
    waiting = run_one(world("gpt3-2.7b", physics=physics), trace(6), "oobleck", 2)
    assert found.samples > 1.1 * waiting.samples


def test_oobleck_repeats_the_step_and_admits_nodes_after_a_step() -> None:
    there = trace(6, (1000.0, ADD, "n9"), (2000.0, REMOVE, "n2"))
    found = outcome(run("oobleck", there))
    _, entered, lost = found.decisions
    assert (
        entered.at > 1_000_000 and not entered.change.lost_ms and "joined" in entered.change.reason
    )
    assert lost.at == 2_000_000 and lost.change.lost_ms >= 2_000_000, (
        "all that was done of the step"
    )
    assert found.account.totals()[Use.DETECT] == 6 * 5000


def test_systems_with_fixed_grids_grow_if_it_pays_off() -> None:
    """The job begins with two nodes; eight more join."""
    there = trace(2, *((60.0, ADD, f"m{i}") for i in range(8)), end_s=7200.0)
    for policy in (
        "torchft",
        "ft-hsdp",
        "recover",
        "recycle",
        "bamboo",
        "oobleck",
        "spares",
        "gemini",
        "checkpoint",
        "varuna",
    ):
        assert run(policy, there).samples > 0.5 * run("oracle", there).samples, policy


def test_a_loss_during_a_recovery_starts_from_the_state_before_it() -> None:
    """The second lost node was to receive the state of the first, but transfers were unfinished."""
    both = trace(6, (2000.0, REMOVE, "n0"), (2000.5, REMOVE, "n3"))
    found = outcome(run("ours:recompute+replica", both, model="gpt3-2.7b"))
    first, second = [d for d in found.decisions if d.at >= 2_000_000][:2]
    assert (first.at, second.at) == (2_000_000, 2_000_500)
    assert sum(length for _, length in second.change.pauses) > 3000


def test_varuna_goes_back_to_the_tenth_step() -> None:
    found = outcome(run("varuna", LOSS))
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    assert loss.change.back_to >= 0 and loss.change.back_to % 10 == 0
    kept = outcome(run("varuna-no-rollback", LOSS))
    assert kept.account.totals()[Use.LOST] < found.account.totals()[Use.LOST]
    assert kept.samples > found.samples


def test_varuna_writes_a_checkpoint_on_notice() -> None:
    """The regular checkpoint before the loss is that of step 350, at 965.7 s."""
    noticed, sudden = (
        trace(6, (990.0, REMOVE, "n2"), notice_s=notice_s) for notice_s in (120.0, 0.0)
    )
    found = outcome(run("varuna", noticed))
    assert any(d.change.reason.startswith("notice") for d in found.decisions)
    assert found.samples > run("varuna", sudden).samples


def test_bamboo_takes_over_one_loss_and_restarts_after_adjacent_ones() -> None:
    found = outcome(run("bamboo", LOSS))
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    assert "take over" in loss.change.reason
    assert found.account.totals()[Use.REDUNDANT] > 0
    many = trace(6, *((1000.0, REMOVE, f"n{i}") for i in range(4)))
    fatal = outcome(run("bamboo", many))
    assert any("adjacent" in d.change.reason or "few" in d.change.reason for d in fatal.decisions)


def test_bamboo_counts_successive_losses_as_adjacent_until_rebalanced() -> None:
    """The second loss, in the same step, hits the node that took over for the first.

    A step later, after the rebalancing, it is a single loss again.
    """
    at_once = trace(8, (1000.0, REMOVE, "n1"), (1000.2, REMOVE, "n2"))
    fatal = outcome(run("bamboo", at_once, model="bert-large"))
    assert any("adjacent" in d.change.reason for d in fatal.decisions)
    apart = trace(8, (1000.0, REMOVE, "n1"), (2000.0, REMOVE, "n2"))
    found = outcome(run("bamboo", apart, model="bert-large"))
    assert not any("adjacent" in d.change.reason for d in found.decisions)


def test_recycle_keeps_its_grid() -> None:
    """Two pipelines of three stages; a step without one of the six workers fits no bubbles."""
    found = outcome(run("recycle", LOSS))
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    grid = world().varuna(6)
    assert grid is not None and grid.shape == (2, 3)
    assert loss.change.setup is not None and loss.change.back_to == -1
    assert loss.change.setup.nodes == 5
    assert loss.change.setup.step_ms == round(1000 * world().rerouted_step_s(grid, 1))
    assert loss.change.setup.step_ms > round(1000 * grid.step_s)


@pytest.mark.parametrize(("node", "moves"), [("n0", False), ("n1", True), ("n4", False)])
def test_recycle_moves_a_worker_to_spread_losses(node: str, moves: bool) -> None:
    """Two pipelines of four stages: n0 and n4 are the first stage, whose loss moves nobody.

    A moved worker copies a quarter of the state, 5.11 GB, over a link of 1.25 GB/s.
    """
    found = outcome(run("recycle", trace(8, (1000.0, REMOVE, node))))
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    assert dict(loss.change.pauses).get(Use.TRANSFER) == (1023 if moves else None)


def test_recycle_repeats_the_micro_batches_of_the_lost_worker() -> None:
    """Step 415 of 2,412 ms is 1,432 ms old. Each pipeline has finished 8 * 0.594 micro-batches.

    Both share those of one pipeline: 8 * 0.594 * 188.5 ms / 2 = 448 ms. Refilling takes 750 ms.
    """
    found = outcome(run("recycle", trace(8, (1000.0, REMOVE, "n0"))))
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    assert loss.change.lost_ms == 750 + 448
    assert found.account.totals()[Use.LOST] == 8 * 1198


def test_recycle_restarts_if_a_stage_has_lost_all_its_workers() -> None:
    """n1 and n5 are the two workers of a stage. After the loss of n1, n0 takes its place.

    Four losses one after another leave one worker to each stage.
    """
    at_once = trace(8, (1000.0, REMOVE, "n1"), (1000.0, REMOVE, "n5"))
    found = outcome(run("recycle", at_once))
    assert any("lost all its peers" in d.change.reason for d in found.decisions)
    names = ("n1", "n5", "n2", "n3", "n7")
    apart = trace(8, *((1000.0 + 60 * i, REMOVE, name) for i, name in enumerate(names)))
    reasons = [d.change.reason for d in outcome(run("recycle", apart)).decisions[1:6]]
    survived = [f"{i} of 8 workers are missing" for i in range(1, 5)]
    assert reasons == [*survived, "a stage lost all its peers"]


def test_torchft_discards_the_step_and_shrinks_the_batch() -> None:
    found = outcome(run("torchft", LOSS))
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    assert loss.change.setup is not None and loss.change.setup.samples < world().samples
    assert found.account.totals()[Use.DETECT] == 5 * 4900


def test_gemini_loses_the_running_step_alone() -> None:
    found = outcome(run("gemini", LOSS))
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    steps = 1_000_000 // found.decisions[0].change.setup.step_ms  # type: ignore[union-attr]
    assert loss.change.back_to == steps


def test_gemini_reads_the_checkpoint_if_a_node_and_its_peer_are_lost() -> None:
    pair, others = (
        outcome(run("gemini", trace(8, (2000.0, REMOVE, "n2"), (2000.5, REMOVE, second))))
        for second in ("n3", "n4")
    )
    assert any("no node has the state" in d.change.reason for d in pair.decisions)
    assert not any("no node has the state" in d.change.reason for d in others.decisions)
    assert pair.account.totals()[Use.LOST] > others.account.totals()[Use.LOST]
    assert pair.samples < others.samples


@pytest.mark.parametrize("policy", RANDOM[:-2])
def test_state_does_not_survive_the_loss_of_all_nodes(policy: str) -> None:
    """All nodes are lost at once; later ones read durable storage or Parcae's servers."""
    went = [(2000.0, REMOVE, f"n{i}") for i in range(6)]
    came = [(2600.0, ADD, f"m{i}") for i in range(6)]
    found = outcome(run(policy, trace(6, *went, *came)))
    totals, read_s = found.account.totals(), world().checkpoint_s(6)
    assert totals[Use.TRANSFER] >= 6 * 1000 * read_s - 6
    assert totals[Use.LOST] > 0 or policy.startswith(("parcae", "varuna-no-rollback"))


def test_spares_replace_lost_nodes() -> None:
    found = outcome(run("spares", trace(10, (1000.0, REMOVE, "n2"), (2000.0, REMOVE, "n3"))))
    assert found.account.totals()[Use.IDLE] > 0
    setups = [decision.change.setup for decision in found.decisions]
    assert {setup.nodes for setup in setups if setup is not None} == {8}, "the plan stays as large"


def test_parcae_with_a_perfect_forecast_loses_no_step() -> None:
    found = outcome(run("parcae", LOSS))
    assert found.account.totals()[Use.LOST] == 0
    assert outcome(run("parcae-fitted", LOSS)).account.totals()[Use.LOST] > 0


def test_replay_measures_against_the_oracle() -> None:
    found = replay(world(), lambda seed: LOSS, ("ours", "varuna", "oracle"), (0, 1, 2))
    values = {one.policy: one.goodput.value for one in found}
    assert values["oracle"] == 1.0 and 0 < values["varuna"] < values["ours"] <= 1.005
    assert all(len(one.runs) == 3 and sum(one.time.values()) == pytest.approx(1.0) for one in found)


def test_cost_includes_booting_nodes() -> None:
    there = trace(2, (1800.0, REMOVE, "n0"), (1800.0, ADD, "n5"))
    found = run("ours", there)
    assert found.cost == pytest.approx(node_type_of("a40").spot * 2)


def test_every_policy_names_its_source() -> None:
    found = policy_classes()
    assert len(found) == len(SCHEMES) + len(RIVALS) + len(ORACLES), "no name twice"
    assert all(len(kind.about.source) > 20 and kind.about.what for kind in found.values())


@pytest.mark.parametrize("name", ["nobody", "ours:", "ours:stream", "ours:stream+nothing", ""])
def test_unknown_policies_are_refused(name: str) -> None:
    with pytest.raises(FieldError):
        policy_class(name)


@pytest.mark.parametrize("job", JOBS, ids=lambda job: job.model)
def test_every_job_has_a_plan_on_large_nodes(job: TrainingSetup) -> None:
    there = SimulatedWorld(job, (node_type_of("p5.48xlarge"),), QUIET)
    found = there.varuna(32)
    assert found is not None and 0 < found.step_s < 24 * 3600
    assert there.compute_s / 32 <= found.step_s, (
        "nobody is faster than all nodes computing all the time"
    )


@pytest.mark.parametrize(
    "settings_",
    [
        ["boot_s"],
        ["boot_s=x"],
        ["nothing=1"],
        ["boot_s=-1"],
        ["straggler_factor=0.5"],
        ["noise=nan"],
        ["noise=1000"],
    ],
)
def test_invalid_physics_are_refused(settings_: list[str]) -> None:
    with pytest.raises(FieldError):
        physics_from_settings(settings_)


def test_nodes_are_usable_after_boot() -> None:
    found = usable_trace(
        trace(2, (100.0, ADD, "a"), (120.0, REMOVE, "a"), (200.0, ADD, "b")), ClusterPhysics(), 0
    )
    assert [(e.seconds, e.node) for e in found.events if e.seconds > 0] == [(245.0, "b")]


def test_booting_nodes_are_idle() -> None:
    came = trace(2, (100.0, ADD, "a"), (120.0, REMOVE, "a"), (200.0, ADD, "b"))
    booting, ready = (
        run_one(world(physics=ClusterPhysics(boot_s=s)), came, "ours", 0).time for s in (45.0, 0.0)
    )
    assert (
        sum(booting.values())
        == pytest.approx(sum(ready.values()), abs=1e-6)
        == node_ms(came) / 1000
    )
    assert booting["idle"] >= 20.0 + 45.0


def test_mixed_clusters_need_equal_device_counts() -> None:
    with pytest.raises(FieldError, match="number of devices"):
        SimulatedWorld(
            training_of("gpt2"), (node_type_of("a40"), node_type_of("p5.48xlarge")), QUIET
        )
    training = replace(training_of("bert-large"), samples=256)
    mixed = SimulatedWorld(training, (node_type_of("a40"), node_type_of("p3.2xlarge")), QUIET)
    there = build_trace(
        [Event(0.0, ADD, f"n{i}", type=("V100" if i % 2 else "a40")) for i in range(4)], 3600.0
    )
    assert run_one(mixed, there, "ours", 0).samples > 0
