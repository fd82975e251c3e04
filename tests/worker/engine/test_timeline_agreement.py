"""The engine agrees with the planned timeline: real workers and messages, with counted clocks.

A worker's clock advances by an action's seconds when the action is done. A message carries the
clock of its sender, and the receiver's clock advances to at least that value. So the result does
not depend on the speed of this machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch

from elastic.domain.types import Accumulate
from elastic.planning.plan.plan import parse_plan, validate_plan
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import Action, actions_of
from elastic.planning.schedule.timeline import StageTimes
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.model.values import Message
from elastic.worker.transport.links import Links, Receive
from tests.planning.schedule.message_simulation import finish_times
from tests.worker.engine.models import RecordingHooks, replicas, runner, stack
from tests.worker.engine.rank_processes import Rank, run_ranks

N_LAYERS, M = 8, 8
STAGES = {
    "1f1b": "a[0:2] b[2:4] c[4:6] d[6:8]",
    "zero-bubble": "a[0:2] b[2:4] c[4:6] d[6:8]",
    "interleaved": "a[0:1] b[1:2] c[2:3] d[3:4] a[4:5] b[5:6] c[6:7] d[7:8]",
}
EQUAL = (2.0, 3.0, 1.0)
"""Seconds of a unit's forward pass and of the input and weight part of its backward pass."""
BUBBLES = {
    "1f1b": 3 * (2 + 3 + 1),
    "zero-bubble": 3 * (2 + 3 - 1),
    "interleaved": 3 * (2 + 3 + 1) / 2,
}
"""(D-1)(f+b); Qi et al. 2023: (D-1)(f+bi-bw); Narayanan et al. 2021: (D-1)(f+b)/v."""


class CountedClock(RecordingHooks):
    """A worker's clock. It replaces the runner's hooks and links."""

    def __init__(self, links: Links, times: Sequence[StageTimes], unit: int) -> None:
        super().__init__()
        self.now, self._pending = 0.0, 0.0
        self._links, self._times, self._unit = links, times, unit
        self.device = links.device

    def before(self, action: Action) -> None:
        super().before(action)
        self.now += self._pending
        self._pending = self._times[self._unit if action.stage < 0 else action.stage].of(
            action.kind
        )

    def send(self, message: Message, dst: int, tag: int = 0) -> None:
        stamped = torch.cat([message.tensor.flatten(), torch.tensor([self.now])])
        self._links.send(stamped, dst, tag)

    def recv(self, src: int, tag: int = 0) -> Receive:
        return cast(Receive, _Stamped(self, self._links.recv(src, tag)))

    def check(self) -> None:
        self._links.check()

    def flush(self) -> None:
        self.now, self._pending = self.now + self._pending, 0.0
        self._links.flush()


class _Stamped:
    """A receive that advances the clock to the sender's."""

    def __init__(self, clock: CountedClock, receive: Receive) -> None:
        self._clock, self._receive = clock, receive

    def message(self) -> Message:
        tensor = self._receive.wait()
        self._clock.now = max(self._clock.now, float(tensor[-1]))
        return Message.of(tensor[:-1].view(-1, 16).requires_grad_())


def run_on_a_clock(rank: Rank, text: str, times: Sequence[StageTimes]) -> float:
    plan = parse_plan(text)
    ranks, links = roster(plan), rank.open()
    layers = replicas(stack(N_LAYERS), ranks.members[rank.rank].layers, Accumulate.FAST)
    clock = CountedClock(links, times, rank.rank)
    worker = runner(layers, links, M, stages_of_rank(ranks, rank.rank, layers))
    worker._links = cast(Links, clock)
    worker.run(0, actions_of(plan.pipelines[0])[rank.rank], {}, clock)
    return clock.now


def text_of(schedule: str) -> str:
    text = (
        f"plan epoch=1 layers={N_LAYERS} microbatches={M} tp=1 backup=none+none\n"
        f"pipeline 0 microbatches=0-{M - 1} schedule={schedule}: {STAGES[schedule]}"
    )
    validate_plan(parse_plan(text))
    return text


def times_of(f: float, bi: float, bw: float) -> StageTimes:
    return StageTimes(forward_s=f, backward_s=bi + bw, backward_input_s=bi, backward_weight_s=bw)


@pytest.mark.parametrize("schedule", STAGES)
def test_bubbles_of_equal_stages(schedule: str) -> None:
    n_stages = len(STAGES[schedule].split())
    times = [times_of(*(4 * seconds / n_stages for seconds in EQUAL))] * n_stages
    finished = run_ranks(run_on_a_clock, 4, text_of(schedule), times)
    assert max(finished) == M * sum(EQUAL) + BUBBLES[schedule]


@pytest.mark.parametrize("schedule", STAGES)
def test_uneven_stages_finish_when_the_timeline_says(schedule: str) -> None:
    text = text_of(schedule)
    pipeline = parse_plan(text).pipelines[0]
    times = [times_of(1 + s % 3, 2 + s % 2, 1 + (s + 1) % 3) for s in range(len(pipeline.stages))]
    finished = run_ranks(run_on_a_clock, 4, text, times)
    assert tuple(finished) == finish_times(actions_of(pipeline), times)
