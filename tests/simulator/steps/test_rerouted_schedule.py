"""ReCycle's schedule: peers run the micro-batches of lost workers in bubbles.

In the grid below, a forward pass takes 1 s, and each part of the backward pass 1 s. Three pipelines
of four stages run six micro-batches each: 1F1B takes (6 + 4 - 1) * 3 = 27 s.
"""

from __future__ import annotations

import pytest
from elastic_sim.steps import rerouted_schedule
from elastic_sim.steps.rerouted_schedule import GridStage, rerouted_step_s, spread_losses

from elastic.planning.schedule.schedule import ONE_F_ONE_B
from elastic.planning.schedule.timeline import StageTimes, makespan
from tests.simulator.steps.policy_runs import world

TIMES = StageTimes(forward_s=1, backward_s=2, backward_input_s=1, backward_weight_s=1)
DEPTH, SHARES = 4, [6, 6, 6]
NONE, THIRD = (0, 0, 0, 0), (0, 0, 1, 0)
"""Lost workers per stage."""


def grid(ahead: int = 0, tail_s: float = 0.0, times: StageTimes = TIMES) -> list[GridStage]:
    """Stages that hold `ahead` micro-batches; 0: as many as 1F1B needs."""
    return [
        GridStage(times=times, tail_s=tail_s, ahead=ahead or DEPTH - stage)
        for stage in range(DEPTH)
    ]


def whole(ahead: int = 0, *, lost: tuple[int, ...] = NONE) -> float:
    """Seconds of a step whose backward passes are whole, and whose stages end it together."""
    return rerouted_step_s(grid(ahead), SHARES, lost, decoupled=False, staggered=False)


def test_without_losses_and_optimizations_it_is_1f1b() -> None:
    assert whole() == makespan(ONE_F_ONE_B, DEPTH, 6, [TIMES] * DEPTH) == 27.0


def test_each_optimization_takes_its_part_of_the_slowdown_away() -> None:
    """A lost worker of three: its peers run nine micro-batches in place of six.

    This is 9 * 3 = 27 s of work, as long as 1F1B. The bubbles suffice once both optimizations
    apply, as the abstract says. With neither of them, nothing of the 9 s fits into bubbles.
    """
    stages = grid(ahead=18)
    assert whole(18, lost=THIRD) == 36.0
    assert rerouted_step_s(stages, SHARES, THIRD, staggered=False) == 29.0
    assert rerouted_step_s(stages, SHARES, THIRD) == 27.0


def test_work_that_no_bubble_holds_lengthens_the_step() -> None:
    """Two of three workers of a stage are lost: the third runs 18 micro-batches of 3 s."""
    found = rerouted_step_s(grid(ahead=18), SHARES, (0, 0, 2, 0))
    assert 54.0 <= found <= 57.0


def test_less_memory_leaves_more_bubbles() -> None:
    seconds = [rerouted_step_s(grid(ahead), SHARES, THIRD) for ahead in (4, 6, 18)]
    assert seconds == sorted(seconds, reverse=True) and seconds[0] > seconds[-1]


def test_one_stage_has_no_bubbles() -> None:
    """Of two workers one is lost: 16 micro-batches of 3 s, and the update."""
    stage = GridStage(times=TIMES, tail_s=5.0, ahead=1)
    assert rerouted_step_s([stage], [8, 8], [1]) == 16 * 3 + 5


def test_unknown_parts_are_not_run_apart() -> None:
    unknown = grid(18, times=StageTimes(forward_s=1, backward_s=2))
    assert rerouted_step_s(unknown, SHARES, THIRD, staggered=False) == 36.0


def test_messages_take_time() -> None:
    slow = StageTimes(forward_s=1, backward_s=2, backward_input_s=1, backward_weight_s=1, hop_s=0.5)
    found = rerouted_step_s(grid(times=slow), SHARES, NONE, decoupled=False, staggered=False)
    assert found == makespan(ONE_F_ONE_B, DEPTH, 6, [slow] * DEPTH) > 27.0


@pytest.mark.parametrize("lost", [NONE, THIRD, (1, 1, 1, 1), (2, 1, 1, 1)])
def test_long_steps_are_extrapolated(
    lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    extrapolated = rerouted_step_s(grid(6), [200] * 3, lost)
    monkeypatch.setattr(rerouted_schedule, "MAX_SIMULATED", 1 << 30)
    assert rerouted_step_s(grid(6), [200] * 3, lost) == pytest.approx(extrapolated, rel=0.01)


def test_losses_are_spread_over_the_stages() -> None:
    assert [spread_losses(4, lost) for lost in (0, 1, 6)] == [NONE, (1, 0, 0, 0), (2, 2, 1, 1)]


def test_more_losses_never_shorten_a_step() -> None:
    plan = world().varuna(8)
    assert plan is not None and plan.shape == (2, 4)
    seconds = [world().rerouted_step_s(plan, lost) for lost in range(5)]
    assert seconds[0] == plan.step_s and seconds == sorted(seconds)
    assert seconds[4] > plan.step_s
    assert seconds[4] > world().compute_s / 4, "four workers do all the work"
