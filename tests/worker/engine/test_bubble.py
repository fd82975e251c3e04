"""Measured pipeline bubbles equal the literature's formulas, on four workers with emulated layers.

Disturbances only make a step longer, so the shortest of several steps counts. The machine must be
otherwise idle. `test_timeline_agreement` shows the same with counted clocks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from statistics import mean

import pytest
import torch

from elastic.domain.types import Accumulate, LayerSpec
from elastic.planning.cost.profile import Device, LayerTimes, Profile
from elastic.planning.plan.plan import parse_plan, validate_plan
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import Action, actions_of
from elastic.planning.schedule.timeline import StageTimes, simulate
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.profiling.emulated import EmulatedStack
from tests.worker.engine.models import RecordingHooks, replicas, runner
from tests.worker.engine.rank_processes import Rank, run_ranks

D, M, V = 4, 8, 2
N_LAYERS = D * V
FORWARD_S, INPUT_S, WEIGHT_S = 0.06, 0.06, 0.02
"""Seconds per layer; a unit has V layers."""

PIPELINES = {
    "1f1b": "a[0:2] b[2:4] c[4:6] d[6:8]",
    "zero-bubble": "a[0:2] b[2:4] c[4:6] d[6:8]",
    "interleaved": "a[0:1] b[1:2] c[2:3] d[3:4] a[4:5] b[5:6] c[6:7] d[7:8]",
}
UNIT_S = V * (FORWARD_S + INPUT_S + WEIGHT_S)
BUBBLES = {
    "1f1b": (D - 1) * UNIT_S,
    "zero-bubble": (D - 1) * V * (FORWARD_S + INPUT_S - WEIGHT_S),
    "interleaved": (D - 1) * UNIT_S / V,
}
"""(D-1)(f+b); Qi et al. 2023: (D-1)(f+bi-bw); Narayanan et al. 2021: (D-1)(f+b)/v."""


def profile() -> Profile:
    spec = LayerSpec(
        param_bytes=64, state_bytes=0, gradient_bytes=64, forward_s=FORWARD_S,
        backward_s=INPUT_S + WEIGHT_S, activation_bytes=64, output_bytes=64,
    )  # fmt: skip
    times = LayerTimes(FORWARD_S, INPUT_S + WEIGHT_S, INPUT_S, WEIGHT_S)
    device = Device("waiting", (times,) * N_LAYERS)
    return Profile(model="equal layers", layers=(spec,) * N_LAYERS, devices=(device,))


class Waits(RecordingHooks):
    """Adds up the seconds that a worker waits for its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds, self._since = 0.0, 0.0

    def before(self, action: Action) -> None:
        now = time.monotonic()
        if self.actions and self.actions[-1].kind.receives:
            self.seconds += now - self._since
        self._since = now
        super().before(action)


def run_steps(rank: Rank, text: str, n_steps: int) -> list[tuple[float, float, float]]:
    """Per step: its begin and end by the machine's clock, and the seconds spent waiting."""
    plan = parse_plan(text)
    ranks = roster(plan)
    stack = EmulatedStack(profile(), "waiting", seed=1)
    layers = replicas(stack, ranks.members[rank.rank].layers, Accumulate.EXACT)
    links = rank.open(pairs=ranks.pairs())
    stages = stages_of_rank(ranks, rank.rank, layers)
    worker = runner(layers, links, M, stages, data=lambda s, i: Microbatch(s, i, {}))
    actions, found = actions_of(plan.pipelines[0])[rank.rank], []
    for step in range(n_steps):
        links.gather(torch.zeros(1))
        began, waits = time.monotonic(), Waits()
        worker.run(step, actions, {}, waits)
        found.append((began, time.monotonic(), waits.seconds))
        for layer in layers:
            layer.clear()
    return found


def bubble_of(step: Sequence[tuple[float, float, float]]) -> float:
    """Idle seconds in a step, averaged over the units."""
    whole = max(ended for _, ended, _ in step) - min(began for began, _, _ in step)
    return whole - mean(ended - began - waited for began, ended, waited in step)


N_STEPS = 6


@pytest.mark.chaos
@pytest.mark.parametrize("schedule", PIPELINES)
def test_the_bubble_equals_the_formula(schedule: str) -> None:
    text = (
        f"plan epoch=1 layers={N_LAYERS} microbatches={M} tp=1 backup=none+none\n"
        f"pipeline 0 microbatches=0-{M - 1} schedule={schedule}: {PIPELINES[schedule]}"
    )
    plan = parse_plan(text)
    validate_plan(plan)
    steps = zip(*run_ranks(run_steps, D, text, N_STEPS), strict=True)
    assert min(map(bubble_of, steps)) == pytest.approx(BUBBLES[schedule], rel=0.05)
    part = V * D / len(plan.pipelines[0].stages)
    times = StageTimes(
        forward_s=part * FORWARD_S,
        backward_s=part * (INPUT_S + WEIGHT_S),
        backward_input_s=part * INPUT_S,
        backward_weight_s=part * WEIGHT_S,
    )
    timeline = simulate(plan.pipelines[0], [times] * len(plan.pipelines[0].stages))
    assert timeline.makespan_s - max(timeline.busy_s) == pytest.approx(BUBBLES[schedule])
