"""Partial replay gives the same bits as a full run, under every schedule and cut."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from elastic.domain.errors import VaultError
from elastic.domain.types import (
    ACTIVATION,
    COTANGENT,
    Accumulate,
    Assignment,
    Copy,
    PartialRun,
)
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import actions_of
from elastic.worker.backup.activation_log import LoggedMessage, read_message
from elastic.worker.engine.partial import PartialRunner, needed_messages
from elastic.worker.engine.stage import LocalStage, stages_of_rank
from elastic.worker.model.values import Message
from elastic.worker.replica.replica import LayerReplica
from tests.planning.schedule.action_text import one_f_one_b
from tests.worker.engine.models import (
    RecordingHooks,
    data,
    replicas,
    runner,
    single_rank_links,
    stack,
)
from tests.worker.engine.rank_processes import Rank, run_ranks
from tests.worker.engine.test_runner_schedules import N_LAYERS, PIPELINES, M, plan_of

SPANS = ((0, 2, 6), (1, 2, 6), (2, 0, 4), (3, 3, 4), (3, 5, N_LAYERS))
"""(micro-batch, first layer, last layer + 1) of the partial replays."""
WHOLE = (4,)
"""Micro-batches that run through all layers."""
CUTS = {
    **PIPELINES,
    "other cuts": "schedule=1f1b: a[0:1] b[1:4] c[4:8]",
    "alone": "schedule=1f1b: a[0:8]",
}


def copy_of(kind: str, layer: int, index: int) -> Copy:
    return Copy(kind, layer, 0, 0, 1, "x", 1000 * layer + index, 1, "", frozenset({index}))


def runs() -> tuple[PartialRun, ...]:
    return tuple(
        PartialRun(
            0, m, first, last,
            (copy_of(ACTIVATION, first, m),) if first else (),
            (copy_of(COTANGENT, last, m),) if last < N_LAYERS else (),
        )
        for m, first, last in SPANS
    )  # fmt: skip


def skipped() -> dict[int, frozenset[int]]:
    """Layer -> micro-batches that it has already: all but those that will run through it."""
    missing = {layer: set(WHOLE) for layer in range(N_LAYERS)}
    for m, first, last in SPANS:
        for layer in range(first, last):
            missing[layer].add(m)
    return {layer: frozenset(range(M)) - indices for layer, indices in missing.items()}


def expected() -> list[LayerReplica]:
    layers = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.EXACT)
    runner(layers, single_rank_links(), M).run(
        0, one_f_one_b(0, 1, tuple(range(M))), skipped(), RecordingHooks()
    )
    return layers


def logged() -> dict[str, torch.Tensor]:
    """Copies of all messages of a step, from a run in which every layer is a stage."""
    layers, copies = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.FAST), {}

    def keep(kind: str, layer: int, index: int, sent: Message) -> Message:
        message = LoggedMessage(kind, layer, 0, index, Message(sent.spec, sent.tensor.clone()))
        out = torch.empty(message.nbytes, dtype=torch.uint8)
        message.write(out)
        copies[copy_of(kind, layer, index).key] = out
        return message.message

    for index in range(M):
        stages = [LocalStage([layer]) for layer in layers]
        hidden = None
        for local in stages:
            local.ends = local is stages[-1]
            hidden = local.forward(data(0, index), hidden)
            if not local.ends:
                boundary = local.layers[0].index + 1
                hidden = keep(ACTIVATION, boundary, index, hidden)
        gradient: Message | float | None = 1.0 / M
        for local in reversed(stages):
            assert gradient is not None
            gradient = local.backward(index, gradient)
            if gradient is not None:
                gradient = keep(COTANGENT, local.layers[0].index, index, gradient)
    return copies


@dataclass(frozen=True)
class Result:
    gradients: dict[int, torch.Tensor]
    ledgers: dict[int, set[int]]
    losses: dict[int, float]
    actions: list[str]
    started: frozenset[int]


def run_units(rank: Rank, text: str) -> Result:
    plan = plan_of(text)
    ranks = roster(plan)
    layers = replicas(stack(N_LAYERS), ranks.members[rank.rank].layers, Accumulate.EXACT)
    links = single_rank_links() if rank.size == 1 else rank.open(pairs=ranks.pairs())
    hooks, assignment = RecordingHooks(), Assignment(plan, 0, partial=runs())
    everything = logged()
    needed = {
        copy.key: everything[copy.key]
        for copy in needed_messages(assignment, ranks.members[rank.rank])
    }
    part = PartialRunner(assignment, ranks, rank.rank, layers, needed)
    worker = runner(layers, links, M, stages_of_rank(ranks, rank.rank, layers))
    part.run(worker, skipped(), hooks)
    started = frozenset(worker.started)
    assert not part._messages, "a fetched message was not used"
    actions = [str(action) for action in hooks.actions if action.kind.computes]
    worker.run(0, actions_of(plan.pipelines[0], WHOLE)[rank.rank], skipped(), hooks)
    assert all(p.grad is None for layer in layers for p in layer.module.parameters())
    return Result(
        {la.index: la.gradient for la in layers},
        {la.index: la.ledger for la in layers},
        layers[-1].losses,
        actions,
        started,
    )


@pytest.mark.parametrize("name", CUTS)
def test_partial_replay_changes_no_bit(name: str) -> None:
    text = CUTS[name]
    n_units = len({word.split("[")[0] for word in text.split(":", 1)[1].split()})
    results = run_ranks(run_units, n_units, text)
    for layer in expected():
        result = next(r for r in results if layer.index in r.gradients)
        assert result.ledgers[layer.index] == layer.ledger
        assert torch.equal(result.gradients[layer.index], layer.gradient)
    assert results[-1].losses == expected()[-1].losses
    for result in results:
        mine = {
            m
            for m, first, last in SPANS
            if any(first <= layer < last for layer in result.gradients)
        }
        assert result.started == mine
        computed = {
            int("".join(c for c in text.rpartition("F")[2]))
            for text in result.actions
            if "F" in text
        }
        assert computed == mine, "a worker without these layers computed"


@pytest.mark.parametrize("nbytes", [0, 60, 128, 140])
def test_malformed_messages_are_refused(nbytes: int) -> None:
    sent = Message.of(torch.ones(4, dtype=torch.bfloat16))
    whole = LoggedMessage(ACTIVATION, 1, 0, 0, sent)
    out = torch.empty(whole.nbytes, dtype=torch.uint8)
    whole.write(out)
    assert torch.equal(read_message(out).tensor, sent.tensor)
    with pytest.raises(VaultError, match="malformed"):
        read_message(torch.cat((out, out))[:nbytes])
