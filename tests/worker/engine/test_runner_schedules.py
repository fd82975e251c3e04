"""Stage runners under every schedule.

Gradients are the same, bit for bit, and ledgers match the gradients after a fault.
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, Plan
from elastic.planning.plan.plan import parse_plan, validate_plan
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import actions_of
from elastic.worker.engine.stage import LocalStage
from elastic.worker.engine.step import stages_of_rank
from elastic.worker.transport.cancellation import LinkFailed
from tests.planning.schedule.action_text import parse_actions
from tests.worker.engine.models import (
    PauseBefore,
    RecordingHooks,
    data,
    replicas,
    runner,
    single_rank_links,
    stack,
    train_on_one_worker,
)
from tests.worker.engine.rank_processes import Rank, Ranks, run_ranks

N_LAYERS, M = 8, 5

PIPELINES = {
    "zero-bubble": "schedule=zero-bubble: a[0:3] b[3:5] c[5:8]",
    "zero-bubble, recomputing": (
        "schedule=zero-bubble: a[0:3]+recompute b[3:5]+recompute c[5:8]+recompute"
    ),
    "interleaved on two": "schedule=interleaved: a[0:1] b[1:4] a[4:5] b[5:6] a[6:7] b[7:8]",
    "interleaved on three": (
        "schedule=interleaved: a[0:1] b[1:2] c[2:4] a[4:5] b[5:7]+recompute c[7:8]"
    ),
    "1f1b, recomputing": "schedule=1f1b: a[0:4]+recompute b[4:8]+recompute",
}


def plan_of(pipeline: str) -> Plan:
    head = f"plan epoch=1 layers={N_LAYERS} microbatches={M} tp=1 backup=none+none"
    plan = parse_plan(f"{head}\npipeline 0 microbatches=0-{M - 1} {pipeline}")
    validate_plan(plan)
    return plan


@dataclass(frozen=True)
class Result:
    gradients: dict[int, torch.Tensor]
    losses: dict[int, float]
    finished: list[int]
    sent: set[int]


def run_units(rank: Rank, text: str, accumulate: Accumulate) -> Result:
    plan = plan_of(text)
    ranks = roster(plan)
    layers = replicas(stack(N_LAYERS), ranks.members[rank.rank].layers, accumulate)
    worker = runner(
        layers, rank.open(pairs=ranks.pairs()), M, stages_of_rank(ranks, rank.rank, layers)
    )
    hooks, actions = RecordingHooks(), actions_of(plan.pipelines[0])[rank.rank]
    for _ in range(2):
        for layer in layers:
            layer.clear()
        hooks.finished.clear()
        worker.run(0, actions, {}, hooks)
    assert worker.started == set(range(M))
    assert all(layer.ledger == set(range(M)) for layer in layers)
    assert all(p.grad is None for layer in layers for p in layer.module.parameters())
    return Result(
        {la.index: la.gradient for la in layers}, layers[-1].losses, hooks.finished, worker.sent
    )


@pytest.mark.parametrize("accumulate", [Accumulate.FAST, Accumulate.EXACT])
@pytest.mark.parametrize("name", PIPELINES)
def test_gradients_do_not_depend_on_the_schedule(name: str, accumulate: Accumulate) -> None:
    whole = train_on_one_worker(stack(N_LAYERS), M, accumulate)
    text = PIPELINES[name]
    n_units = len({word.split("[")[0] for word in text.split(":", 1)[1].split()})
    results = run_ranks(run_units, n_units, text, accumulate)
    found = {layer: gradient for result in results for layer, gradient in result.gradients.items()}
    for layer in whole:
        assert torch.equal(layer.gradient, found[layer.index])
    assert results[-1].losses == whole[-1].losses
    stages = len(text.split(":", 1)[1].split()) // n_units
    assert all(sorted(result.finished) == sorted(stages * list(range(M))) for result in results)
    assert results[0].sent == set(range(M))


def lose_a_unit(rank: Rank, text: str, at: str) -> tuple[dict[int, set[int]], set[int], set[int]]:
    """The last rank is killed before `at`; the ledgers of the others must match."""
    plan = plan_of(text)
    ranks = roster(plan)
    layers = replicas(stack(N_LAYERS), ranks.members[rank.rank].layers, Accumulate.EXACT)
    worker = runner(
        layers, rank.open(pairs=ranks.pairs()), M, stages_of_rank(ranks, rank.rank, layers)
    )
    actions, last = actions_of(plan.pipelines[0])[rank.rank], rank.rank == rank.size - 1
    with pytest.raises(LinkFailed) as caught:
        worker.run(0, actions, {}, PauseBefore(rank, at) if last else RecordingHooks())
    assert caught.value.ranks == (rank.size - 1,)
    for place in ranks.places(rank.rank):
        ledgers = [layer.ledger for layer in layers if layer.index in place.stage.layers]
        assert all(ledger == ledgers[0] for ledger in ledgers)
    return {layer.index: layer.ledger for layer in layers}, worker.started, worker.sent


@pytest.mark.parametrize(
    ("name", "at"),
    [
        ("zero-bubble", "W1"),
        ("zero-bubble", "I3"),
        ("interleaved on two", "3B2"),
        ("interleaved on two", "1F3"),
    ],
)
def test_ledgers_match_after_losing_a_unit(name: str, at: str) -> None:
    text = PIPELINES[name]
    size = 3 if name == "zero-bubble" else 2
    with Ranks(lose_a_unit, size, text, at) as ranks:
        ranks.reports(size - 1)
        ranks.signal(size - 1, signal.SIGKILL)
        for ledgers, started, sent in ranks.reports(*range(size - 1)):
            assert all(ledger <= sent <= started for ledger in ledgers.values())


@pytest.mark.parametrize("recompute", [False, True])
def test_backward_parts_of_several_microbatches_may_interleave(recompute: bool) -> None:
    """`.grad` and ledgers change only in the weight part, with the result of a whole pass."""
    whole = train_on_one_worker(stack(N_LAYERS), M, Accumulate.FAST)
    layers = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.FAST)
    first, rest = (
        LocalStage(layers[:3], following=1),
        LocalStage(layers[3:], previous=0, recompute=recompute),
    )
    parameters = [p for layer in layers for p in layer.module.parameters()]

    def input_part(m: int) -> None:
        rest.forward(data(0, m), first.forward(data(0, m), None))
        gradient = rest.backward_input(m, 1.0 / M)
        assert all(p.grad is None for p in parameters)
        assert m not in layers[-1].ledger
        assert gradient is not None
        assert first.backward(m, gradient) is None
        first.collect(m, {})

    def weight_part(m: int) -> None:
        rest.backward_weight(m)
        rest.collect(m, {})

    for m in range(M):
        input_part(m)
        if m >= 2:
            weight_part(m - 2)
    weight_part(M - 2)
    weight_part(M - 1)
    for layer, expected in zip(layers, whole, strict=True):
        assert torch.equal(layer.gradient, expected.gradient)
        assert layer.losses == expected.losses


def test_actions_for_other_workers_stages_are_refused() -> None:
    worker = runner([], single_rank_links(), M, [LocalStage([], number=3)])
    with pytest.raises(FieldError, match=r"\[3\]"):
        worker.run(0, parse_actions("2F0"), {}, RecordingHooks())
