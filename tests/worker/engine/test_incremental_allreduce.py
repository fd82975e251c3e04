"""Incremental all-reduce: all holders get the same gradients.

No micro-batch is lost or counted twice if a round is interrupted.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest
import torch

from elastic.domain.errors import LedgerError
from elastic.domain.types import Accumulate, Plan
from elastic.planning.plan.plan import parse_plan, validate_plan
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.reduction_rounds import rounds_of
from elastic.planning.schedule.schedule import Action, actions_of
from elastic.worker.engine import allreduce
from elastic.worker.engine.incremental_allreduce import IncrementalAllReduce
from elastic.worker.engine.stage import LocalStage, stages_of_rank
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import LinkFailed
from tests.planning.schedule.action_text import one_f_one_b
from tests.worker.engine.models import (
    RecordingHooks,
    replicas,
    runner,
    single_rank_links,
    stack,
    train_on_one_worker,
)
from tests.worker.engine.rank_processes import Rank, Ranks, run_ranks

N_LAYERS, M = 8, 7

PLANS = {
    "equal cuts": ("1f1b: a[0:4] b[4:8]", "1f1b: c[0:4] d[4:8]"),
    "other cuts": ("1f1b: a[0:2] b[2:8]", "zero-bubble: c[0:3] d[3:7] e[7:8]"),
    "several stages per worker": (
        "interleaved: a[0:1] b[1:4] a[4:5] b[5:8]",
        "interleaved: c[0:2] d[2:4] c[4:6] d[6:8]",
    ),
    "three": ("1f1b: a[0:8]", "1f1b: b[0:8]", "1f1b: c[0:5] d[5:8]"),
}


def plan_of(pipelines: tuple[str, ...]) -> Plan:
    """If M is not divisible by the number of pipelines, the last ones run one micro-batch more."""
    lines, first = (
        [f"plan epoch=1 layers={N_LAYERS} microbatches={M} tp=1 backup=reduce+replica"],
        0,
    )
    for p, text in enumerate(pipelines):
        last = first + (M - first) // (len(pipelines) - p) - 1
        lines.append(f"pipeline {p} microbatches={first}-{last} schedule={text}")
        first = last + 1
    plan = parse_plan("\n".join(lines))
    validate_plan(plan)
    return plan


@dataclass(frozen=True)
class Result:
    gradients: dict[int, torch.Tensor]
    losses: dict[int, float]
    rounds: int


class RoundHooks(RecordingHooks):
    """Hooks that notify the rounds, as `elastic.worker.engine.step` does."""

    def __init__(self, common: IncrementalAllReduce) -> None:
        super().__init__()
        self._common = common

    def on_backward(self, index: int) -> None:
        super().on_backward(index)
        self._common.after_microbatch()


@dataclass
class Worker:
    """One rank of a plan, ready to run steps."""

    plan: Plan
    rank: Rank
    accumulate: Accumulate
    every: int

    def __post_init__(self) -> None:
        ranks = roster(self.plan)
        self.member = ranks.members[self.rank.rank]
        self.layers: list[LayerReplica] = replicas(
            stack(N_LAYERS), self.member.layers, self.accumulate
        )
        links = self.rank.open(pairs=ranks.pairs(), holder_sets=ranks.holder_sets())
        self.links = links
        stages: list[LocalStage] = stages_of_rank(ranks, self.rank.rank, self.layers)
        self.runner = runner(self.layers, links, M, stages)
        self.common = IncrementalAllReduce(
            self.layers, links, ranks, self.every, self.runner.agreement
        )
        self.hooks = RoundHooks(self.common)

    def step(
        self, todo: tuple[tuple[int, ...], ...], skip: dict[int, frozenset[int]] | None = None
    ) -> None:
        actions = self.actions(todo)
        self.common.begin(actions, [len(share) for share in todo])
        self.runner.run(0, actions, skip or {}, self.hooks)

    def actions(self, todo: tuple[tuple[int, ...], ...]) -> tuple[Action, ...]:
        p = self.member.pipeline
        return actions_of(self.plan.pipelines[p], todo[p])[self.member.stage]

    @property
    def todo(self) -> tuple[tuple[int, ...], ...]:
        return tuple(pipeline.microbatches for pipeline in self.plan.pipelines)


def two_steps(
    rank: Rank, pipelines: tuple[str, ...], every: int, accumulate: Accumulate, bucket: int
) -> Result:
    allreduce.BUCKET_BYTES = bucket
    worker = Worker(plan_of(pipelines), rank, accumulate, every)
    for _ in range(2):
        for layer in worker.layers:
            layer.clear()
        worker.step(worker.todo)
        completed: list[int] = []
        reduced = worker.common.finish((), completed.append)
    assert completed == list(worker.member.layers)
    parts = worker.common.parts()
    assert all(part.ledger == set(range(M)) for part in parts) and not any(
        la.ledger for la in worker.layers
    )
    gradients = {layer: tensor.clone() for layer, tensor in reduced.items()}
    return Result(gradients, parts[-1].losses, worker.common._joined)


@pytest.mark.parametrize(
    ("name", "every", "accumulate", "bucket", "rounds"),
    [
        ("equal cuts", 1, Accumulate.EXACT, 2**25, 3),
        ("equal cuts", 2, Accumulate.FAST, 1, 2),
        ("other cuts", 1, Accumulate.EXACT, 2500, 3),
        ("several stages per worker", 1, Accumulate.EXACT, 2**25, 3),
        ("several stages per worker", 3, Accumulate.FAST, 1, 2),
        ("three", 2, Accumulate.FAST, 2**25, 2),
    ],
)
def test_all_holders_get_the_sums_of_one_worker(
    name: str, every: int, accumulate: Accumulate, bucket: int, rounds: int
) -> None:
    """Two pipelines share 7 micro-batches as 3 and 4, three as 2, 2 and 3. No share has fewer
    micro-batches than there are rounds."""
    whole, pipelines = train_on_one_worker(stack(N_LAYERS), M, accumulate), PLANS[name]
    size = len(roster(plan_of(pipelines)).members)
    found = run_ranks(two_steps, size, pipelines, every, accumulate, bucket)
    assert {result.rounds for result in found} == {rounds}
    for layer in whole:
        copies = [
            result.gradients[layer.index] for result in found if layer.index in result.gradients
        ]
        assert len(copies) == len(pipelines)
        assert all(torch.equal(copies[0], copy) for copy in copies)
        if accumulate is Accumulate.EXACT:
            assert torch.equal(copies[0], layer.gradient)
        else:
            torch.testing.assert_close(copies[0], layer.gradient, rtol=1e-5, atol=1e-6)
    ends = [result.losses for result in found if N_LAYERS - 1 in result.gradients]
    assert ends == [whole[-1].losses] * len(pipelines)


def step_after_recovery(rank: Rank) -> dict[int, torch.Tensor]:
    """A step after a recovery, which gave gradients to only one holder of each layer.

    Micro-batches 0 to 4 are done: pipeline 0 holds them for layers 0 to 3, pipeline 1 for layers 4
    to 7. Pipeline 0 runs 5 and 6, and layer 3 has 6 already.
    """
    worker = Worker(plan_of(PLANS["equal cuts"]), rank, Accumulate.EXACT, 1)
    held = {layer: frozenset(range(5)) for layer in range(4)}
    held |= {
        3: frozenset((0, 1, 2, 3, 4, 6)),
        **{layer: frozenset((0, 1, 2, 3, 4)) for layer in range(4, 8)},
    }
    holder = {layer: 0 if layer < 4 else 1 for layer in range(8)}
    for layer in worker.layers:
        if holder[layer.index] == worker.member.pipeline:
            whole = train_on_one_worker(stack(N_LAYERS), M, Accumulate.EXACT)[layer.index]
            part = torch.zeros_like(layer.gradient)
            for m in held[layer.index]:
                part += gradients_of(m)[layer.index]
            layer.add_gradient(
                part.view(torch.uint8),
                held[layer.index],
                {m: whole.losses.get(m, 0.0) for m in range(5)},
            )
    worker.step(((5, 6), ()), held)
    worker.common.finish(())
    assert all(part.ledger == set(range(M)) for part in worker.common.parts())
    return {part.index: part.gradient.clone() for part in worker.common.parts()}


def gradients_of(index: int) -> list[torch.Tensor]:
    """Gradients of all layers from one micro-batch."""
    layers = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.EXACT)
    runner(layers, single_rank_links(), M).run(0, one_f_one_b(0, 1, (index,)), {}, RecordingHooks())
    return [layer.gradient for layer in layers]


def test_recovered_gradients_are_common_after_the_first_round() -> None:
    whole = train_on_one_worker(stack(N_LAYERS), M, Accumulate.EXACT)
    for found in run_ranks(step_after_recovery, 4):
        for layer, gradient in found.items():
            assert torch.equal(gradient, whole[layer].gradient)


class PauseAfter(RoundHooks):
    """After `count` micro-batches, reports "paused" and waits to be killed."""

    def __init__(self, common: IncrementalAllReduce, rank: Rank, count: int) -> None:
        super().__init__(common)
        self._rank, self._count = rank, count

    def on_backward(self, index: int) -> None:
        super().on_backward(index)
        if len(self.finished) == self._count:
            self._rank.report("paused")
            self._rank.wait_for_parent()


HeldParts = dict[int, list[tuple[frozenset[int], torch.Tensor]]]


def interrupted_step(rank: Rank, victim: int, at: int, every: int) -> HeldParts:
    """Layer -> (ledger, gradient) of its parts, after the victim's micro-batch number `at`."""
    worker = Worker(plan_of(PLANS["equal cuts"]), rank, Accumulate.EXACT, every)
    if rank.rank == victim:
        worker.hooks = PauseAfter(worker.common, rank, at)
    try:
        worker.step(worker.todo)
        worker.common.finish(())  # the last stages may have received everything
    except LinkFailed:
        worker.links.close()  # as the session does: others may wait for this rank
    for layer in worker.layers:
        layer.cancel_rounds()
    return {
        la.index: [(frozenset(p.ledger), p.gradient.clone()) for p in la.parts]
        for la in worker.layers
    }


@pytest.mark.parametrize(("victim", "at", "every"), [(0, 1, 1), (1, 2, 1), (2, 3, 2), (3, 3, 2)])
def test_survivors_hold_each_microbatch_once_and_the_promised_ones_of_the_lost_rank(
    victim: int, at: int, every: int
) -> None:
    plan = plan_of(PLANS["equal cuts"])
    single = [gradients_of(m) for m in range(M)]
    with Ranks(interrupted_step, 4, victim, at, every) as ranks:
        assert ranks.reports(victim) == ["paused"]
        ranks.signal(victim, signal.SIGKILL)
        others = [r for r in range(4) if r != victim]
        found = dict(zip(others, ranks.reports(*others), strict=True))
    for parts_of in found.values():
        for layer, parts in parts_of.items():
            ledgers = [ledger for ledger, _ in parts]
            assert len(frozenset().union(*ledgers)) == sum(map(len, ledgers))
            for ledger, gradient in parts:
                assert torch.equal(gradient, sum(single[m][layer] for m in ledger))
    lost = set(plan.pipelines[victim // 2].microbatches)
    partner = found[(victim + 2) % 4]
    for parts in partner.values():
        saved = len(lost & frozenset().union(*(ledger for ledger, _ in parts)))
        rounds = rounds_of(plan.pipelines, [len(p.microbatches) for p in plan.pipelines], every)
        assert at <= rounds.most_finished(victim // 2, saved)


def doubled(rank: Rank) -> str:
    worker = Worker(plan_of(PLANS["three"]), rank, Accumulate.EXACT, 9)
    for layer in worker.layers:
        layer.ledger.add(6)
    worker.common.begin((), (0, 0, 0))
    with pytest.raises(LedgerError) as caught:
        worker.common.finish(())
    return str(caught.value)


def test_a_microbatch_contributed_by_several_holders_is_an_error() -> None:
    assert all("layer" in text and "{6: 3}" in text for text in run_ranks(doubled, 4))
