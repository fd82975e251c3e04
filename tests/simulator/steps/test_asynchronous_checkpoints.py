"""Checkpoints of checkpoint, spares and varuna: training waits for the copy alone.

Four A40 nodes take 3,486 ms for a step of bert-large. Its 5.11 GB of state take 128 ms to host
memory (10 GB/s for each of four devices) and 6,557 ms to storage (0.78 GB/s).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from elastic_sim.steps.engine import DecisionRecord
from elastic_sim.steps.time_accounting import Use
from elastic_sim.traces.trace import REMOVE, Trace

from tests.simulator.steps.policy_runs import QUIET, outcome, run, trace, world

STEP_MS, COPY_MS, WRITE_MS = 3486, 128, 6557
COMPLETE_MS = 10 * STEP_MS + COPY_MS + WRITE_MS
"""Completion of the checkpoint of step 10."""


def checkpoints(policy: str, of: Trace, **kwargs: object) -> list[DecisionRecord]:
    decisions = outcome(run(policy, of, **kwargs)).decisions
    return [decision for decision in decisions if decision.change.reason == "checkpoint"]


def test_the_figures_above_are_those_of_the_world() -> None:
    plan = world().varuna(4)
    assert plan is not None
    seconds = (plan.step_s, world().host_copy_s(4), world().checkpoint_s(4))
    assert [round(1000 * s) for s in seconds] == [STEP_MS, COPY_MS, WRITE_MS]


@pytest.mark.parametrize("policy", ["checkpoint", "spares", "varuna", "varuna-no-rollback"])
def test_training_waits_for_the_copy_alone(policy: str) -> None:
    found = checkpoints(policy, trace(4))
    assert found
    assert {decision.change.pauses for decision in found} == {((Use.TRANSFER, COPY_MS),)}


def test_a_copy_every_ten_steps_is_all_that_varuna_pays() -> None:
    """A period of ten steps and a copy takes 34,988 ms; 102 of them end within the hour."""
    found = outcome(run("varuna", trace(4)))
    assert found.account.totals()[Use.TRANSFER] == 4 * 102 * COPY_MS
    assert found.steps == 1020 + (3_600_000 - 102 * 34_988) // STEP_MS


@pytest.mark.parametrize(("early_ms", "back_to"), [(1, 0), (0, 10)])
def test_a_restart_uses_the_newest_complete_checkpoint(early_ms: int, back_to: int) -> None:
    """A loss a millisecond before the end of the write returns to the checkpoint before."""
    at = COMPLETE_MS - early_ms
    found = outcome(run("varuna", trace(4, (at / 1000, REMOVE, "n0"))))
    (loss,) = [decision for decision in found.decisions if decision.at == at]
    assert loss.change.back_to == back_to
    unsaved_ms = at - COPY_MS - back_to * STEP_MS
    assert found.account.totals()[Use.LOST] == 4 * unsaved_ms


def test_a_write_ends_with_the_processes_that_write() -> None:
    """The first loss ends the write of step 10 a millisecond early, so it is never complete.

    The second one comes a millisecond before the next write of step 10 is complete.
    """
    plan = world().varuna(3)
    assert plan is not None
    first = COMPLETE_MS - 1
    resumes = first + 5000 + 50_000 + WRITE_MS
    steps_ms = 10 * round(1000 * plan.step_s)
    second = resumes + steps_ms + round(1000 * world().host_copy_s(3)) + WRITE_MS - 1
    both = trace(4, (first / 1000, REMOVE, "n0"), (second / 1000, REMOVE, "n1"))
    found = outcome(run("varuna", both))
    assert [d.change.back_to for d in found.decisions if d.at in (first, second)] == [0, 0]


def test_one_write_at_a_time() -> None:
    """The write of step 10 takes 50 s, so that step 20 ends before it, and step 30 after it."""
    slow = replace(QUIET, storage_bytes_per_s=world().state_bytes / 50.0)
    found = checkpoints("varuna", trace(4, end_s=200.0), physics=slow)
    assert [d.at for d in found] == [
        10 * STEP_MS,
        30 * STEP_MS + COPY_MS,
        50 * STEP_MS + 2 * COPY_MS,
    ]


def test_youngs_interval_is_that_of_the_copy() -> None:
    """sqrt(2 * 0.1279 s * 3,631 s) = 30.47 s is over at the end of step 9, not of step 8."""
    assert checkpoints("checkpoint", trace(4))[0].at == 9 * STEP_MS


def test_a_checkpoint_on_notice_is_complete_when_the_node_leaves() -> None:
    """It begins copy, write and half a second before: after 992.8 s, in step 284."""
    found = outcome(run("varuna", trace(4, (1000.0, REMOVE, "n0"), notice_s=120.0)))
    (notice,) = [d for d in found.decisions if d.change.reason.startswith("notice")]
    assert notice.at == 1_000_000 - COPY_MS - WRITE_MS - 500
    (loss,) = [d for d in found.decisions if d.at == 1_000_000]
    assert loss.change.back_to == 283
