"""Small GPTs for tests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from elastic.domain.types import Accumulate
from elastic.worker.contrib.megatron.gpt import GPTConfig
from elastic.worker.contrib.megatron.stack import GPTStack, MegatronStack
from elastic.worker.engine.stage import LocalStage
from elastic.worker.model.gradients import SCALE
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec, adamw
from elastic.worker.model.split_backward import backward_input
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from tests.worker.model.toy_model import CPU
from tests.worker.passes import forward

MICROBATCHES = 3


def config(**changes: object) -> GPTConfig:
    small: dict[str, object] = {
        "layers": 2,
        "hidden": 32,
        "heads": 4,
        "seq_len": 16,
        "vocab": 64,
        "seed": 11,
    }
    return GPTConfig(**{**small, **changes})  # type: ignore[arg-type]


def microbatch(step: int, index: int, vocab: int = 64) -> Microbatch:
    seeded = torch.Generator().manual_seed(100 * step + index)
    rows = torch.randint(vocab, (2, 17), generator=seeded)
    return Microbatch(
        step, index, {"tokens": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
    )


def build(
    gpt: GPTConfig,
    tp: TensorParallel,
    optimizer: OptimizerSpec | None = None,
    *,
    empty: bool = False,
) -> list[LayerReplica]:
    return build_stack(GPTStack(gpt), tp, optimizer, empty=empty)


def build_stack(
    stack: MegatronStack,
    tp: TensorParallel,
    optimizer: OptimizerSpec | None = None,
    *,
    empty: bool = False,
) -> list[LayerReplica]:
    return [
        build_replica(
            stack, i, tp, optimizer or adamw(0.01), Accumulate.EXACT, stack.seed, CPU, empty=empty
        )
        for i in range(stack.n_layers)
    ]


def run(
    layers: Sequence[LayerReplica],
    step: int,
    index: int,
    data: Callable[[int, int], Microbatch] = microbatch,
) -> float:
    hidden: Any = None
    for replica in layers:
        hidden = replica.forward(hidden, data(step, index))
    assert isinstance(hidden, Tensor)
    torch.autograd.backward(hidden / MICROBATCHES)
    for replica in layers:
        replica.collect(index, skip=False)
    return hidden.item()


def gradients_of(replica: LayerReplica) -> dict[str, Tensor]:
    """Gradients of the parameters by name, float64."""
    views = replica.accumulator.layout.views(replica.gradient)
    names = [name for name, _ in replica.module.named_parameters()]
    return {name: view.double() / SCALE for name, view in zip(names, views, strict=True)}


def parts_and_whole(
    layers: Sequence[LayerReplica], which: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of input and parameters of `layers`, from a whole pass and from two parts."""
    held, found = [layers[i] for i in which], []
    parameters = [p for replica in held for p in replica.module.parameters()]
    gpt_width = layers[0].module.get_parameter("embedding.position_embeddings.weight")
    shape, dtype = (16, 2, gpt_width.shape[1]), gpt_width.dtype
    for split in (False, True):
        hidden = (
            torch.linspace(-1, 1, torch.Size(shape).numel())
            .view(shape)
            .sin()
            .to(dtype)
            .requires_grad_()
        )
        output = hidden
        for replica in held:
            output = forward(replica, output, microbatch(0, 1))
        gradient = torch.full_like(output, 0.25)
        if split:
            backward_input([output], [gradient], [hidden], parameters).run()
        else:
            torch.autograd.backward(output, gradient)
        assert hidden.grad is not None
        found.append([hidden.grad, *(p.grad for p in parameters if p.grad is not None)])
        for parameter in parameters:
            parameter.grad = None
    return found[0], found[1]


def tie(layers: Sequence[LayerReplica], group: Sequence[tuple[int, str]]) -> list[Tensor]:
    """Reduced gradients, with the tied tensor's gradients summed as in the engine."""
    reduced = [replica.gradient.clone() for replica in layers]
    places = [(reduced[layer], layers[layer].gradient_slice(name)) for layer, name in group]
    total = sum(flat[place] for flat, place in places)
    for flat, place in places:
        flat[place] = total
    return reduced


def backward_in_two_parts(
    build_layers: Callable[[], list[LayerReplica]], data: Microbatch
) -> tuple[list[Tensor], list[Tensor]]:
    """Gradients of the blocks and of their input, from a whole backward pass and from two parts.
    The first and the last layer are stages of their own."""
    found = []
    for split in (False, True):
        layers = build_layers()
        first, last = LocalStage(layers[:1], following=1), LocalStage(layers[-1:], previous=1)
        middle = LocalStage(layers[1:-1], previous=0, following=2)
        hidden = first.forward(data, None)
        last.forward(data, middle.forward(data, hidden))
        gradient = last.backward(data.index, 1.0)
        assert gradient is not None
        if split:
            back = middle.backward_input(data.index, gradient)
            middle.backward_weight(data.index)
        else:
            back = middle.backward(data.index, gradient)
        middle.collect(data.index, {})
        assert back is not None
        found.append([back.tensor, *(layer.gradient for layer in layers[1:-1])])
    return found[0], found[1]


def train(
    layers: Sequence[LayerReplica],
    steps: int,
    tied: Sequence[Sequence[tuple[int, str]]] = (),
    data: Callable[[int, int], Microbatch] = microbatch,
) -> list[float]:
    losses = []
    for step in range(steps):
        for replica in layers:
            replica.clear()
        total = sum(run(layers, step, index, data) for index in range(MICROBATCHES))
        losses.append(total / MICROBATCHES)
        reduced = tie(layers, tied[0]) if tied else [replica.gradient for replica in layers]
        for replica, gradient in zip(layers, reduced, strict=True):
            replica.update(gradient, 1.0, 0.01)
    return losses


def state_of(replica: LayerReplica) -> Tensor:
    out = torch.empty(replica.state_nbytes(), dtype=torch.uint8)
    replica.write_state(out)
    return out
