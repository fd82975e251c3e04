"""FT-HSDP and ReCoVer: a loss costs its replica, and the others go on.

Twelve A40 nodes train bert-large in four replicas of three (n0 to n2, n3 to n5, ...). A step of 512
samples takes 2,037 ms. At 1,000 s, step 491 has run for 1,870 ms. New groups of k replicas take
0.3 + 0.035 + 0.0393 * (k + 3 + 1) seconds.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from elastic_sim.replay.replay import run_one
from elastic_sim.steps.clusters import node_type_of, training_of
from elastic_sim.steps.engine import DecisionRecord
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import ADD, REMOVE, Trace

from tests.simulator.steps.policy_runs import QUIET, outcome, run, trace, world

STEP_MS, DONE_MS = 2037, 1870
AT = 1000.0


def lose(*names: str, nodes: int = 12, end_s: float = 1200.0) -> Trace:
    return trace(nodes, *((AT, REMOVE, name) for name in names), end_s=end_s)


def after_loss(policy: str, of: Trace, **kwargs: object) -> list[DecisionRecord]:
    found = outcome(run(policy, of, **kwargs))
    return [decision for decision in found.decisions if decision.at >= 1000 * AT]


def test_the_figures_above_are_those_of_the_world() -> None:
    plan = world().varuna(12)
    assert plan is not None and plan.shape == (4, 3)
    assert round(1000 * plan.step_s) == STEP_MS
    assert 1000 * AT % STEP_MS == DONE_MS


# ---- FT-HSDP ----


@pytest.mark.parametrize(("names", "left"), [(("n1",), 3), (("n1", "n2"), 3), (("n1", "n3"), 2)])
def test_ft_hsdp_trains_the_step_again_with_the_other_replicas(
    names: tuple[str, ...], left: int
) -> None:
    of = lose(*names)
    loss, *_ = after_loss("ft-hsdp", of)
    groups_ms = round(1000 * (0.335 + 0.0393 * (left + 4)))
    assert loss.change.pauses == ((Use.DETECT, 5000), (Use.PLAN, groups_ms))
    setup = loss.change.setup
    assert setup is not None
    assert (setup.nodes, setup.step_ms, setup.samples) == (3 * left, STEP_MS, 128 * left)
    assert outcome(run("ft-hsdp", of)).account.totals()[Use.LOST] == 12 * DONE_MS


def test_ft_hsdp_lets_a_replica_catch_up_without_blocking_the_others() -> None:
    """n12 takes the place of n1. The replica restarts in 50 s after the detection of 5 s.

    Meanwhile, 25 steps of 2,037 ms end, the last at 1,056.535 s. The replica joins the all-reduce
    (649 ms for new groups), sends a zero gradient for one step, and counts from the next one on.
    The others never wait for the state.
    """
    loss, begins, ends = after_loss("ft-hsdp", lose("n1", nodes=13))
    resumes = loss.at + sum(length for _, length in loss.change.pauses)
    assert begins.at == resumes + 25 * STEP_MS == 1_056_535
    assert begins.change.pauses == ((Use.PLAN, 649),)
    assert ends.at == begins.at + 649 + STEP_MS and not ends.change.pauses
    setups = [decision.change.setup for decision in (begins, ends)]
    assert [setup.samples for setup in setups if setup is not None] == [384, 512]


def test_ft_hsdp_waits_for_the_part_of_a_fetch_that_is_longer_than_a_step() -> None:
    """A third of 15 GB takes 4 s at 1.25 GB/s."""
    training = training_of("bert-large")
    large = SimulatedWorld(
        replace(training, samples=16 * training.microbatch), (node_type_of("a40"),), QUIET
    )
    large.state_bytes = 15_000_000_000
    found = run_one(large, lose("n1", nodes=13), "ft-hsdp", 0, keep=True)
    (begins,) = [d for d in outcome(found).decisions if "1 replicas begin" in d.change.reason]
    assert dict(begins.change.pauses)[Use.TRANSFER] == pytest.approx(4000 - STEP_MS, abs=1)


def test_ft_hsdp_repeats_the_step_if_a_replica_is_lost_that_catches_up() -> None:
    """n0 fails in the step in which its replica sends a zero gradient."""
    both = trace(13, (AT, REMOVE, "n1"), (1058.0, REMOVE, "n0"), end_s=1200.0)
    _, _, second, *_ = after_loss("ft-hsdp", both)
    assert second.at == 1_058_000 and second.change.reason == "1 replicas lost"
    assert outcome(run("ft-hsdp", both)).account.totals()[Use.LOST] == 12 * DONE_MS + 9 * (
        1_058_000 - 1_056_535 - 649
    )


@pytest.mark.parametrize("name", ["n12", "n0"])
def test_ft_hsdp_goes_on_if_an_idle_or_a_restarting_node_is_lost(name: str) -> None:
    """Two seconds after the loss of n1, n0 restarts with n2 and n12."""
    of = trace(13, (AT, REMOVE, "n1"), (1030.0, REMOVE, name), end_s=1200.0)
    assert [d.at for d in after_loss("ft-hsdp", of)] == [1_000_000]
    assert outcome(run("ft-hsdp", of)).account.totals()[Use.LOST] == 12 * DONE_MS


def test_ft_hsdp_completes_replicas_with_nodes_that_join() -> None:
    of = trace(12, (AT, REMOVE, "n1"), (1100.0, ADD, "m0"), end_s=1300.0)
    _, begins, ends = after_loss("ft-hsdp", of)
    assert begins.at >= 1_150_000, "50 s after it joined"
    assert ends.change.setup is not None and ends.change.setup.samples == 512


@pytest.mark.parametrize("policy", ["ft-hsdp", "recover"])
def test_without_a_replica_all_nodes_read_the_checkpoint(policy: str) -> None:
    """The durable checkpoint began at the first step's end after 600 s: step 295."""
    restart, *_ = after_loss(policy, lose("n0", "n3", "n6", "n9"))
    assert restart.change.back_to == 295
    assert dict(restart.change.pauses)[Use.TRANSFER] == round(1000 * world().checkpoint_s(8))


@pytest.mark.parametrize("policy", ["ft-hsdp", "recover"])
def test_a_loss_during_a_restart_begins_it_again(policy: str) -> None:
    of = trace(
        12, *((AT, REMOVE, name) for name in ("n0", "n3", "n6", "n9")), (1020.0, REMOVE, "n1")
    )
    first, second, *_ = after_loss(policy, of)
    assert (first.at, second.at) == (1_000_000, 1_020_000)
    assert dict(second.change.pauses)[Use.PLAN] == dict(first.change.pauses)[Use.PLAN] == 50_000


# ---- ReCoVer ----


@pytest.mark.parametrize(("names", "left"), [(("n1",), 3), (("n1", "n2"), 3), (("n1", "n3"), 2)])
def test_recover_keeps_the_batch_and_the_work_of_the_survivors(
    names: tuple[str, ...], left: int
) -> None:
    """What the lost replicas had done of the step is lost, and nothing else."""
    loss, *_ = after_loss("recover", lose(*names))
    smaller = world().grid(3 * left, 3)
    assert smaller is not None and loss.change.setup is not None
    assert loss.change.setup.samples == 512 and loss.change.setup.nodes == 3 * left
    assert loss.change.setup.step_ms == round(1000 * smaller.step_s)
    assert loss.change.lost_ms == round(DONE_MS * (4 - left) / 4)


def test_recover_waits_for_the_detection_only_at_the_end_of_a_step() -> None:
    """167 ms of the step are left at the loss, so survivors wait 5,000 - 167 ms."""
    loss, *_ = after_loss("recover", lose("n1"))
    assert loss.change.pauses == ((Use.DETECT, 4833), (Use.PLAN, 610))
    early = trace(16, (1004.0, REMOVE, "n1"))
    hidden, *_ = after_loss("recover", early, model="gpt3-2.7b")
    assert Use.DETECT not in dict(hidden.change.pauses), "6.5 s of 7.2 s are left"


def test_recover_finishes_the_step_with_the_micro_batches_of_all() -> None:
    """Three quarters of 1,870 / 2,037 are done; the rest takes 2,429 ms per step of three."""
    done_ms = (DONE_MS - round(DONE_MS / 4)) * 2429 // STEP_MS
    end_ms = 1_000_000 + 4833 + 610 + 2429 - done_ms
    steps = [
        outcome(run("recover", lose("n1", end_s=(end_ms + off) / 1000))).steps for off in (-1, 0)
    ]
    assert steps == [490, 491]


def test_recover_ignores_the_nodes_of_failed_replicas_and_new_ones() -> None:
    """n0 belongs to the failed replica. One node more allows no larger grid that pays off."""
    of = trace(12, (AT, REMOVE, "n1"), (1001.0, REMOVE, "n0"), (1002.0, ADD, "m0"), end_s=1003.0)
    assert [decision.at for decision in after_loss("recover", of)] == [1_000_000]


def test_recover_loses_the_share_of_the_work_done_so_far_at_each_loss() -> None:
    """At the second loss, three replicas have 1,870 * 3 / 4 of the step's old length."""
    of = trace(12, (AT, REMOVE, "n1"), (1002.0, REMOVE, "n3"), end_s=1003.0)
    first, second = after_loss("recover", of)
    left_ms = (DONE_MS - first.change.lost_ms) * 2429 // STEP_MS
    assert second.change.lost_ms == round(left_ms / 3)
