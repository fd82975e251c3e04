"""Evaluations: the same result under every plan, and no effect on the training."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError, LedgerError
from elastic.domain.types import Accumulate, EvaluationResult, Figure, Plan
from elastic.planning.plan.plan import parse_plan
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import actions_of
from elastic.worker.engine import evaluation_runner
from elastic.worker.engine.evaluation_runner import (
    Contribution,
    EvaluationRunner,
    combined,
    evaluating,
    gather_texts,
    shares,
)
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.engine.stage_runner import GroupAgreement
from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.transport.links import Links
from tests.worker.engine.models import (
    WIDTH,
    First,
    Last,
    Middle,
    RecordingHooks,
    data,
    replicas,
    runner,
    single_rank_links,
)
from tests.worker.engine.rank_processes import Rank, Ranks, run_ranks

N_LAYERS, M, E, ROWS = 6, 5, 7, 4
HEAD = f"plan epoch=1 layers={N_LAYERS} microbatches={M} tp=1 backup=none+none"
PLANS = {
    "one worker": "pipeline 0 microbatches=0-4: a[0:6]",
    "two pipelines": "pipeline 0 microbatches=0-2: a[0:2] b[2:6]\n"
    "pipeline 1 microbatches=3-4: c[0:5] d[5:6]",
    "interleaved": "pipeline 0 microbatches=0-4 schedule=interleaved: a[0:1] b[1:2] a[2:4] b[4:6]",
    "zero-bubble": "pipeline 0 microbatches=0-4 schedule=zero-bubble: "
    "a[0:2]+recompute b[2:3] c[3:6]",
}


class Head(Last):
    """Reports a figure for most micro-batches. Another layer reports one, too."""

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        if not self.training and microbatch.index != 2:
            microbatch.report("largest", hidden.max())
        return super().forward(hidden, microbatch)


class Odd(Middle):
    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        microbatch.report("index", microbatch.index)
        out = super().forward(hidden, microbatch)
        return out if self.training else out * 1.5


def model() -> ListStack:
    return ListStack([First, Odd, *[Middle] * (N_LAYERS - 3), Head], seed=5)


def evaluation_data(version: int, index: int) -> Microbatch:
    """Micro-batches of another shape than those of the training."""
    generator = torch.Generator().manual_seed(index)
    fields = {name: torch.randn(ROWS, WIDTH, generator=generator) for name in ("x", "y")}
    return Microbatch(version, index, fields, figures={})


def plan_of(text: str) -> Plan:
    return parse_plan(f"{HEAD}\n{text}\n")


def evaluations(
    text: str, links: Links, forwards: list[int]
) -> tuple[EvaluationRunner, RecordingHooks]:
    plan = plan_of(text)
    ranks = roster(plan)
    layers = replicas(model(), ranks.members[links.rank].layers, Accumulate.EXACT)
    made = EvaluationRunner(
        microbatches=E,
        data=evaluation_data,
        plan=plan,
        roster=ranks,
        replicas=layers,
        links=links,
        agreement=GroupAgreement(None, links.abandon),
        before=lambda version, kind, index: None,
        after=lambda seconds: forwards.append(1),
    )
    return made, RecordingHooks()


def timeless(result: EvaluationResult) -> EvaluationResult:
    return replace(result, seconds=0.0)


def evaluate(rank: Rank, text: str) -> tuple[EvaluationResult, dict[int, Tensor], int]:
    """Evaluate, train a step on the same links, and evaluate again."""
    plan, forwards = plan_of(text), list[int]()
    ranks = roster(plan)
    made, hooks = evaluations(text, rank.open(pairs=ranks.pairs()), forwards)
    first = made.run(3, None)
    layers, stages = made.replicas, stages_of_rank(ranks, rank.rank, made.replicas)
    trained = runner(layers, made.links, M, stages)
    member = ranks.members[rank.rank]
    actions = actions_of(plan.pipelines[member.pipeline])[member.stage]
    trained.run(3, actions, {}, hooks)
    gradients = {layer.index: layer.gradient.clone() for layer in layers}
    again = made.run(3, None)
    assert timeless(again) == timeless(first)
    assert trained.started == set(plan.pipelines[member.pipeline].microbatches)
    assert all(layer.ledger == trained.started for layer in layers)
    assert all(torch.equal(layer.gradient, gradients[layer.index]) for layer in layers)
    before = len(forwards)
    assert timeless(made.run(3, first if rank.rank else None)) == timeless(first)
    return timeless(first), gradients, len(forwards) - before


def expected() -> EvaluationResult:
    """The result by plain calls of the modules, without the runtime's engine."""
    layers = [layer.module for layer in replicas(model(), range(N_LAYERS), Accumulate.EXACT)]
    total, largest = 0.0, 0.0
    for layer in layers:
        layer.eval()
    with torch.no_grad():
        for index in range(E):
            microbatch, hidden = evaluation_data(3, index), None
            for layer in layers[:-1]:
                torch.manual_seed(7)
                hidden = layer(hidden, microbatch)
            total += float(layers[-1](hidden, microbatch))
            largest += float((microbatch.figures or {}).get("largest", 0.0))
    figures = (Figure("index", sum(range(E)) / E), Figure("largest", largest / (E - 1)))
    return EvaluationResult(3, 1, total / E, E, 0.0, figures)


class NoDropout(Middle):
    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        return hidden + torch.tanh(self.linear(hidden))


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_every_plan_gives_the_result_of_one_worker(text: str) -> None:
    """The training beside it has the gradients that it has without evaluations, a result that one
    worker knows is not computed again, and the values are those of plain calls."""
    size = roster(plan_of(text)).size
    found = run_ranks(evaluate, size, text)
    alone = single(PLANS["one worker"])
    for result, _, _ in found:
        assert result == alone
    if size > 1:
        assert [forwards for _, _, forwards in found] == [0] * size


def single(text: str) -> EvaluationResult:
    made, _ = evaluations(text, single_rank_links(), [])
    return timeless(made.run(3, None))


def test_the_values_are_those_of_plain_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Middle, "forward", NoDropout.forward)
    assert single(PLANS["one worker"]) == expected()


def test_an_evaluation_leaves_the_training_as_it_is() -> None:
    """Gradients are those of a worker that never evaluates."""
    ((_, gradients, _),) = run_ranks(evaluate, 1, PLANS["one worker"])
    layers = replicas(model(), range(N_LAYERS), Accumulate.EXACT)
    plan = plan_of(PLANS["one worker"])
    runner(layers, single_rank_links(), M).run(
        3, actions_of(plan.pipelines[0])[0], {}, RecordingHooks()
    )
    assert all(torch.equal(gradients[layer.index], layer.gradient) for layer in layers)


def lose_a_rank(rank: Rank, text: str) -> str:
    made, _ = evaluations(text, rank.open(pairs=roster(plan_of(text)).pairs()), [])
    made.run(1, None)
    if rank.rank == 1:
        rank.report("evaluated")
        rank.wait_for_parent()
    try:
        made.run(2, None)
    except Exception as error:  # noqa: BLE001 - the test compares its name
        return type(error).__name__
    return "no error"


def test_a_lost_rank_ends_the_evaluation_of_the_others() -> None:
    with Ranks(lose_a_rank, 4, PLANS["two pipelines"]) as ranks:
        assert ranks.reports(1) == ["evaluated"]
        ranks.processes[1].kill()
        assert ranks.reports(0, 2, 3) == ["LinkFailed"] * 3


def test_each_part_has_its_former_mode_afterwards() -> None:
    module = nn.Sequential(nn.Dropout(), nn.Sequential(nn.Dropout()).eval())
    with pytest.raises(ValueError, match="stop"), evaluating([module]):
        assert not any(part.training for part in module.modules())
        raise ValueError("stop")
    assert [part.training for part in module.modules()] == [True, True, False, False]


@pytest.mark.parametrize("count", [1, 2, 5, 7, 64])
@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_each_micro_batch_has_one_pipeline(text: str, count: int) -> None:
    plan = plan_of(text)
    found = shares(plan, count)
    assert sorted(index for part in found for index in part) == list(range(count))
    for part, pipeline in zip(found, plan.pipelines, strict=True):
        assert abs(len(part) - count * len(pipeline.microbatches) / M) < 1


def unweighted(losses: dict[int, float]) -> tuple[tuple[int, float, float], ...]:
    return tuple((index, loss, 1.0) for index, loss in losses.items())


def test_the_mean_does_not_depend_on_who_computed_what() -> None:
    losses = {index: 0.1 * (index + 1) ** 3 for index in range(5)}
    first = unweighted({index: losses[index] for index in (4, 1)})
    second = unweighted({index: losses[index] for index in (0, 2, 3)})
    parts = [Contribution(first, (("a", 1, 2.0),), 3.0)]
    parts.append(Contribution(second, (("a", 0, 4.0),)))
    total = 0.0
    for loss in losses.values():
        total += loss
    figures = (Figure("a", 3.0),)
    for order in (parts, parts[::-1]):
        assert combined(9, 2, order, 5) == EvaluationResult(9, 2, total / 5, 5, 3.0, figures)


def test_losses_and_figures_are_means_by_weight() -> None:
    losses = ((0, 2.0, 1.0), (1, 5.0, 3.0), (2, math.nan, 0.0))
    figures = (("a", 0, 1.0), ("a", 1, 0.0), ("a", 2, math.nan), ("b", 2, 7.0))
    found = combined(9, 2, [Contribution(losses, figures)], 3)
    assert found.loss == 17.0 / 4.0
    assert found.figures == (Figure("a", 0.25), Figure("b", 0.0))


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([Contribution(unweighted({0: 1.0}))], "missing: 1-2"),
        (
            [
                Contribution(unweighted(dict.fromkeys(range(3), 1.0))),
                Contribution(unweighted({1: 1.0})),
            ],
            "doubled: 1",
        ),
    ],
)
def test_a_micro_batch_that_is_missing_or_doubled_is_an_error(
    parts: list[Contribution], text: str
) -> None:
    with pytest.raises(LedgerError, match=f"evaluation after step 4: micro-batches {text}"):
        combined(4, 1, parts, 3)


@pytest.mark.parametrize("apart", [False, True], ids=["one stage", "two stages"])
def test_a_figure_of_two_layers_is_named_under_every_plan(apart: bool) -> None:
    whole = unweighted(dict.fromkeys(range(3), 1.0))
    parts = [Contribution(whole, (("a", 2, 1.0),)), Contribution((), (("a", 2, 1.0),))]
    if not apart:
        parts = [Contribution(whole, tuple(f for part in parts for f in part.figures))]
    with pytest.raises(FieldError, match=r"microbatch.report\('a'\).*two layers report it"):
        combined(4, 1, parts, 3)


@pytest.mark.parametrize("text", PLANS.values(), ids=PLANS)
def test_pieces_give_the_same_result(text: str) -> None:
    size = roster(plan_of(text)).size
    found = run_ranks(evaluate_in_pieces, size, text)
    assert found == [single(PLANS["one worker"])] * size


def evaluate_in_pieces(rank: Rank, text: str) -> EvaluationResult:
    evaluation_runner.PIECE = 2
    made, _ = evaluations(text, rank.open(pairs=roster(plan_of(text)).pairs()), [])
    return timeless(made.run(3, None))


def test_texts_of_a_single_rank() -> None:
    links = single_rank_links()
    assert gather_texts(links, "") == [""] and gather_texts(links, "straße ") == ["straße "]


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("a b", 1.0, "'a b' is not usable: a name of 1 to 64 letters"),
        ("", 1.0, "'' is not usable: a name of 1 to 64"),
        ("loss", 1.0, "'loss' is not usable: every evaluation has it"),
        ("seconds", 1.0, "'seconds' is not usable: every evaluation has it"),
        ("accuracy", torch.ones(2), r"a tensor of shape \(2,\).* one number"),
        ("accuracy", "high", "'high' is not usable: one number"),
        ("accuracy", True, "True is not usable: one number"),
    ],
)
def test_a_wrong_figure_is_named(name: str, value: object, text: str) -> None:
    microbatch = Microbatch(1, 0, {}, figures={})
    with pytest.raises(FieldError, match=text):
        microbatch.report(name, value)  # type: ignore[arg-type]


def test_a_figure_does_not_follow_later_changes() -> None:
    microbatch, large = Microbatch(1, 0, {}, figures={}), torch.ones(1000)
    microbatch.report("first", large[0])
    large.zero_()
    assert microbatch.figures is not None
    found = microbatch.figures["first"]
    assert isinstance(found, Tensor) and float(found) == 1.0
    assert found.untyped_storage().nbytes() == 4


def test_a_figure_is_reported_once_and_not_in_training() -> None:
    microbatch = Microbatch(1, 0, {}, figures={})
    microbatch.report("accuracy", torch.tensor([[0.5]]))
    with pytest.raises(FieldError, match=r"'accuracy'.*two layers report it"):
        microbatch.report("accuracy", 1)
    training = data(0, 0)
    training.report("accuracy", 1.0)
    assert training.figures is None
