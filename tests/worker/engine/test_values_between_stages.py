"""Layers hand on tensors, tuples and dicts, read fields in every stage, and may vary in shape.

Gradients and losses are those of one worker, bit for bit, under every schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate
from elastic.planning.plan.rank_map import roster
from elastic.planning.schedule.schedule import Action, Kind, actions_of
from elastic.worker.engine.stage import LocalStage, stages_of_rank
from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Message
from elastic.worker.transport import gloo
from elastic.worker.transport.cancellation import LinkFailed
from elastic.worker.transport.interface import BackendGroup
from tests.planning.schedule.action_text import one_f_one_b
from tests.worker.contrib import cut_models
from tests.worker.engine.models import (
    BATCH,
    WIDTH,
    RecordingHooks,
    replicas,
    runner,
    single_rank_links,
    stack,
)
from tests.worker.engine.rank_processes import Rank, Ranks, run_ranks
from tests.worker.engine.test_runner_schedules import PIPELINES, plan_of

N_LAYERS, M = 8, 5
MODELS = ("dict", "tuple", "many", "complex", "frozen")


def data(step: int, index: int) -> Microbatch:
    return fields(step, index, BATCH)


def varying(step: int, index: int) -> Microbatch:
    return fields(step, index, 1 + index % 3)


def fields(step: int, index: int, rows: int) -> Microbatch:
    generator = torch.Generator().manual_seed(1000 * step + index)
    found = {name: torch.randn(rows, WIDTH, generator=generator) for name in ("x", "y", "scale")}
    return Microbatch(step, index, found)


class Begin(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.weight = kind, nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(
        self, hidden: None, microbatch: Microbatch
    ) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        out = microbatch.fields["x"] @ self.weight
        if self.kind == "tuple":  # the last part is not used, the one before has no gradient
            return out, torch.tensor([3, microbatch.index]), out.detach() * 2, out * 0.5
        if self.kind == "complex":
            return torch.complex(out, out + 1)
        extra = {f"a part with a long name {i}": out * i for i in range(self.kind == "many" and 99)}
        return {"hidden": out, "keep": out > 0, "loss": out.square().mean() / 100, **extra}


class Continue(nn.Module):
    """Reads a field in every stage, and a value that the layers of a stage share."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(WIDTH, WIDTH)

    def forward(
        self, hidden: Tensor | tuple[Tensor, ...] | dict[str, Tensor], microbatch: Microbatch
    ) -> Tensor | tuple[Tensor, ...] | dict[str, Tensor]:
        scale = microbatch.once("scale", lambda: microbatch.fields["scale"].sigmoid())
        assert not scale.requires_grad
        if isinstance(hidden, tuple):
            value, numbers, constant, unused = hidden
            assert numbers.tolist() == [3, microbatch.index] and not constant.requires_grad
            return self.add(value + constant / 9, scale), numbers, constant, unused
        if isinstance(hidden, dict):
            value = torch.where(hidden["keep"], hidden["hidden"], hidden["hidden"] / 2)
            if "a part with a long name 98" in hidden:
                value = value + hidden["a part with a long name 98"] / 1000
            out = self.add(value, scale)
            return {**hidden, "hidden": out, "loss": hidden["loss"] + out.square().mean() / 100}
        return hidden * torch.complex(scale, scale) + self.add(hidden.real, scale)

    def add(self, value: Tensor, scale: Tensor) -> Tensor:
        return value + nn.functional.dropout(torch.tanh(self.linear(value * scale)), 0.1)


class End(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(
        self, hidden: Tensor | tuple[Tensor, ...] | dict[str, Tensor], microbatch: Microbatch
    ) -> Tensor:
        loss: Tensor | float = 0.0
        if isinstance(hidden, dict):
            value, loss = hidden["hidden"], hidden["loss"]
        else:
            value = hidden[0] if isinstance(hidden, tuple) else hidden.abs()
        return (value @ self.weight - microbatch.fields["y"]).square().mean() + loss


def model(kind: str, *, varying: bool = False) -> ListStack:
    def begin() -> nn.Module:
        return Begin(kind).requires_grad_(kind != "frozen")

    middle: list[Callable[[], nn.Module]] = [lambda: Continue(kind)] * (N_LAYERS - 2)
    return ListStack([begin, *middle, lambda: End(kind)], seed=5, varying=varying)


Result = tuple[dict[int, Tensor], dict[int, float]]


def run_stages(rank: Rank, pipeline: str, kind: str, vary: bool) -> Result:
    plan = plan_of(pipeline)
    ranks = roster(plan)
    layers = replicas(model(kind), ranks.members[rank.rank].layers, Accumulate.EXACT)
    links = rank.open(pairs=ranks.pairs(), varying=vary)
    stages = stages_of_rank(ranks, rank.rank, layers)
    worker = runner(layers, links, M, stages, varying if vary else data)
    worker.run(0, actions_of(plan.pipelines[0])[rank.rank], {}, RecordingHooks())
    assert all(layer.ledger == set(range(M)) for layer in layers)
    assert all(p.grad is None for layer in layers for p in layer.module.parameters())
    return {layer.index: layer.gradient for layer in layers}, layers[-1].losses


def run_whole(kind: str, vary: bool) -> Result:
    layers = replicas(model(kind), range(N_LAYERS), Accumulate.EXACT)
    worker = runner(layers, single_rank_links(), M, data=varying if vary else data)
    worker.run(0, one_f_one_b(0, 1, tuple(range(M))), {}, RecordingHooks())
    return {layer.index: layer.gradient for layer in layers}, layers[-1].losses


@pytest.mark.parametrize("vary", [False, True])
@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, "dict") for name in PIPELINES),
        *(("zero-bubble", kind) for kind in MODELS[1:]),
        ("1f1b, recomputing", "tuple"),
        ("interleaved on three", "many"),
    ],
)
def test_the_result_does_not_depend_on_the_stages(name: str, kind: str, vary: bool) -> None:
    gradients, losses = run_whole(kind, vary)
    text = PIPELINES[name]
    n_units = len({word.split("[")[0] for word in text.split(":", 1)[1].split()})
    results = run_ranks(run_stages, n_units, text, kind, vary)
    found = {layer: gradient for result in results for layer, gradient in result[0].items()}
    assert found.keys() == gradients.keys()
    for layer, gradient in gradients.items():
        assert torch.equal(gradient, found[layer])
        assert bool(gradient.any()) == (layer > 0 or kind != "frozen")
    assert results[-1][1] == losses


@pytest.mark.parametrize("kind", MODELS)
def test_messages_at_a_boundary_do_not_depend_on_other_boundaries(kind: str) -> None:
    """A partial replay takes messages that were logged under another plan."""
    ways: list[dict[int, tuple[Message, Message]]] = []
    for cuts in ([2], [4], [1, 2, 4, 5], [3, 4, 7]):
        layers = replicas(model(kind), range(N_LAYERS), Accumulate.EXACT)
        ends = [*cuts, N_LAYERS]
        stages = [
            LocalStage(
                layers[a:b], previous=0 if a else None, following=1 if b < N_LAYERS else None
            )
            for a, b in zip([0, *cuts], ends, strict=True)
        ]
        ahead: list[Message | None] = [None]
        for stage in stages:
            ahead.append(stage.forward(data(0, 0), ahead[-1]))
        back: Message | float | None = 1.0
        found: dict[int, tuple[Message, Message]] = {}
        for cut, stage, sent in reversed(list(zip([0, *cuts], stages, ahead[:-1], strict=True))):
            assert back is not None
            back = stage.backward(0, back)
            if cut:
                assert back is not None and sent is not None
                found[cut] = sent, back
        ways.append(found)
    for one, other in combinations(ways, 2):
        for cut in one.keys() & other.keys():
            for message, same in zip(one[cut], other[cut], strict=True):
                assert message.spec == same.spec and torch.equal(message.tensor, same.tensor)


class Convolution(nn.Module):
    """Keeps images in channels_last, and hands on a transposed tensor."""

    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.inner = nn.Conv2d(channels, 6, 3, padding=1)
        self.norm = nn.GroupNorm(2, 6)

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        if hidden is None:
            hidden = microbatch.fields["x"].view(-1, 3, 4, 4).to(memory_format=torch.channels_last)
        else:
            hidden = hidden.transpose(2, 3)
        return torch.relu(self.norm(self.inner(hidden))).transpose(2, 3)


class Mean(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        return (hidden.mean((2, 3)) * self.weight).square().mean()


def test_strides_do_not_depend_on_the_cuts() -> None:
    """Kernels may sum in another order for other strides."""
    stack_ = ListStack([lambda: Convolution(3), Convolution, Convolution, Mean], seed=1)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(4, 48, generator=generator)
    found = []
    for cuts in ([], [1], [2], [1, 2, 3]):
        layers = cut_models.replicas(stack_)
        loss = cut_models.run(layers, cuts, Microbatch(0, 0, {"x": x}))
        found.append((loss, torch.cat([layer.gradient.flatten() for layer in layers])))
    assert all(loss == found[0][0] and torch.equal(g, found[0][1]) for loss, g in found)


def send_late(rank: Rank) -> list[float]:
    """Rank 0 sends after rank 1 has asked whether its peer is there."""
    links, probe = rank.open(), gloo._probe
    if rank.rank == 1:

        def report_question(group: BackendGroup, peer: int) -> None:
            probe(group, peer)
            gloo._probe = probe
            rank.report("asked")

        gloo._probe = report_question
        value = links.recv(0).message().value()
        assert isinstance(value, dict)
        return [part.sum().item() for part in value.values()]
    rank.wait_for_parent()
    links.send(Message.of({"a": torch.ones(2), "b": torch.ones(3)}), 1)
    links.flush()
    return []


def test_a_value_may_come_late() -> None:
    with Ranks(send_late, 2) as ranks:
        assert ranks.reports(1) == ["asked"]
        ranks.send("send", 0)
        assert ranks.reports(1) == [[2.0, 3.0]]


def change_shape(rank: Rank) -> str:
    plan = plan_of(PIPELINES["1f1b, recomputing"])
    ranks = roster(plan)
    layers = replicas(model("dict"), ranks.members[rank.rank].layers, Accumulate.EXACT)
    links = rank.open(pairs=ranks.pairs())
    worker = runner(layers, links, M, stages_of_rank(ranks, rank.rank, layers), varying)
    try:
        worker.run(0, actions_of(plan.pipelines[0])[rank.rank], {}, RecordingHooks())
    except (FieldError, LinkFailed) as error:
        links.close()  # the other stage waits
        return str(error)
    return "finished"


def test_a_changed_shape_names_the_flag() -> None:
    error = run_ranks(change_shape, 2)[0]
    assert "hidden float32 [2, 16]" in error and "hidden float32 [1, 16]" in error
    assert error.endswith("unless the stack is made with varying=True")


def test_a_stage_without_readers_of_fields_asks_for_no_data() -> None:
    asked: list[int] = []

    def counted(step: int, index: int) -> Microbatch:
        asked.append(index)
        return data(step, index)

    plain, whole = torch.ones(BATCH, WIDTH), torch.ones(BATCH, WIDTH, dtype=torch.complex64)
    for stack_, value, expected in ((stack(4), plain, []), (model("complex"), whole, [0])):
        stage = LocalStage(replicas(stack_, (1, 2), Accumulate.FAST), previous=0, following=2)
        worker = runner(stage.layers, single_rank_links(), M, [stage], counted)
        given = {Action(Kind.RECV_F, 0): Message.of(value)}
        worker.run(0, [Action(Kind.F, 0)], {}, RecordingHooks(), given)
        assert asked == expected
