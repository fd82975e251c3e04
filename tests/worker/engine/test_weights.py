"""Weighted micro-batches: a step has loss and gradient of the mean over all of its rows that count,
under every schedule."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from elastic.domain.types import Accumulate, Plan
from elastic.planning.plan.plan import parse_plan, validate_plan
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import actions_of
from elastic.worker.engine.commit import Commit, commit
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.engine.stage_runner import StageRunner
from elastic.worker.engine.step import StepChecks, judge
from elastic.worker.model.gradients import to_flat
from elastic.worker.model.layers import ListStack
from elastic.worker.model.loss_scale import RunningScale
from elastic.worker.model.microbatch import Microbatch
from tests.worker.engine.models import WIDTH, First, RecordingHooks, replicas
from tests.worker.engine.rank_processes import Rank, run_ranks

M, ROWS, TYPICAL = 4, 6, 4.0
COUNTS = (6, 1, 0, 3)
"""Rows that count, by micro-batch; the mean over none is NaN."""
CLIP = 0.05


class Middle(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


class Last(nn.Module):
    """Returns the mean over the rows that count, by field `counts`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        rows = (hidden @ self.weight - microbatch.fields["y"]).square().mean(1)
        counts = microbatch.fields["counts"]
        return (rows * counts).sum() / counts.sum()


def model() -> ListStack:
    builders: list[Callable[[], nn.Module]] = [First, Middle, Middle, Last]
    return ListStack(builders, seed=5)


def data(step: int, index: int) -> Microbatch:
    generator = torch.Generator().manual_seed(index)
    fields = {name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("x", "y")}
    fields["counts"] = (torch.arange(ROWS) < COUNTS[index]).float()
    return Microbatch(step, index, fields, weight=float(COUNTS[index]))


def plain() -> tuple[float, list[Tensor]]:
    """Loss and gradients of one batch with all rows that count."""
    layers = [one.module for one in replicas(model(), range(4), Accumulate.FAST)]
    total = torch.zeros(())
    for index in range(M):
        microbatch, hidden = data(0, index), None
        if not COUNTS[index]:
            continue
        for layer in layers:
            hidden = layer(hidden, microbatch)
        assert hidden is not None
        total = total + hidden * COUNTS[index]
    loss = total / sum(COUNTS)
    torch.autograd.backward(loss)
    return float(loss.detach()), [
        p.grad for layer in layers for p in layer.parameters() if p.grad is not None
    ]


PLANS = {
    "one": "schedule=1f1b: a[0:4]",
    "1f1b": "schedule=1f1b: a[0:2] b[2:4]",
    "recomputing": "schedule=1f1b: a[0:2]+recompute b[2:4]+recompute",
    "zero-bubble": "schedule=zero-bubble: a[0:1] b[1:4]",
    "zero-bubble, the last layer alone": "schedule=zero-bubble: a[0:3] b[3:4]",
    "interleaved": "schedule=interleaved: a[0:1] b[1:2] a[2:3] b[3:4]",
}


def plan_of(pipeline: str) -> Plan:
    head = f"plan epoch=1 layers=4 microbatches={M} tp=1 backup=none+none"
    plan = parse_plan(f"{head}\npipeline 0 microbatches=0-{M - 1} {pipeline}")
    validate_plan(plan)
    return plan


@dataclass(frozen=True)
class Result:
    agreed: Commit
    updates: dict[int, Tensor]
    """Layer -> gradient of the update."""
    grad_norm: float


def run_rank(rank: Rank, text: str, accumulate: Accumulate) -> Result:
    plan = plan_of(text)
    ranks = roster(plan)
    layers = replicas(model(), ranks.members[rank.rank].layers, accumulate)
    links = rank.open(pairs=ranks.pairs())
    stages = stages_of_rank(ranks, rank.rank, layers)
    runner = StageRunner(stages, links, n_microbatches=M, typical_weight=TYPICAL, data=data)
    runner.run(0, actions_of(plan.pipelines[0])[rank.rank], {}, RecordingHooks())
    norms = {one.index: one.norm_sq(one.gradient) for one in layers}
    weight = layers[-1].weight(layers[-1].gradient)
    agreed = commit(links, ranks, layers, norms, step=0, weight=weight)
    record = judge(
        0, agreed, M * TYPICAL, CLIP, StepChecks(), 1.0, loss_scale=layers[-1].loss_scale
    )
    updates = {one.index: one.update_input(one.gradient, record.clip) for one in layers}
    return Result(agreed, updates, record.grad_norm)


@pytest.mark.parametrize("accumulate", list(Accumulate))
@pytest.mark.parametrize("name", PLANS)
def test_a_step_is_the_mean_over_all_rows(name: str, accumulate: Accumulate) -> None:
    text = PLANS[name]
    units = {word.split("[")[0] for word in text.split(":", 1)[1].split()}
    results = run_ranks(run_rank, len(units), text, accumulate)
    loss, gradients = plain()
    norm = float(torch.stack([g.square().sum() for g in gradients]).sum().sqrt())
    for result in results:
        assert result.agreed.weight == sum(COUNTS)
        assert result.agreed.loss == pytest.approx(loss, rel=1e-6)
        assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    found = {layer: update for one in results for layer, update in one.updates.items()}
    whole = torch.cat([found[layer] for layer in range(4)])
    wanted = torch.cat([to_flat(g.reshape(-1)) for g in gradients]) * (CLIP / (norm + 1e-6))
    torch.testing.assert_close(whole, wanted, rtol=1e-4, atol=1e-8)


def test_a_step_without_any_row_that_counts_has_a_record() -> None:
    agreed = Commit(norm=0.0, weight=0.0, loss=0.0, halt_epoch=-1)
    record = judge(3, agreed, M * TYPICAL, CLIP, StepChecks(), 1.0, loss_scale=RunningScale(None))
    assert (record.loss, record.grad_norm, record.clip) == (0.0, 0.0, 1.0)
