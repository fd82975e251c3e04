"""A small model of three plain torch layers, for tests without megatron."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from elastic.domain.types import Accumulate
from elastic.worker.model.layers import ListStack, TensorParallel
from elastic.worker.model.learning_rate import constant
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec, without_compiler
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from tests.worker.passes import forward

CPU = torch.device("cpu")
ALONE = TensorParallel()
WIDTH = 6


class First(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.drop = nn.Dropout(0.5)

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        out: Tensor = self.drop(torch.tanh(self.inner(microbatch.fields["x"])))
        return out


class Middle(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH, dtype=dtype)
        self.unused = nn.Parameter(torch.ones(3, dtype=dtype))

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        out: Tensor = self.inner(hidden.to(self.inner.weight.dtype))
        return hidden + out.to(hidden.dtype)


class Last(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((1,), 2.0), persistent=False)

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        error: Tensor = self.scale * self.inner(hidden) - microbatch.fields["x"]
        return error.square().mean()


def toy_stack(
    seed: int = 1, *, tied: bool = False, dtype: torch.dtype = torch.float32
) -> ListStack:
    pair = (((0, "inner.weight"), (2, "inner.weight")),) if tied else ()
    return ListStack([First, lambda: Middle(dtype), Last], seed, pair)


def sgd(lr: float = 0.1, momentum: float = 0.9) -> OptimizerSpec:
    kind = without_compiler(torch.optim.SGD)
    return OptimizerSpec(
        factory=lambda groups: kind(groups, lr=lr, momentum=momentum), lr=constant(lr)
    )


def microbatch(step: int, index: int) -> Microbatch:
    seeded = torch.Generator().manual_seed(1000 * step + index)
    return Microbatch(step, index, {"x": torch.randn(4, WIDTH, generator=seeded)})


def replicas(
    stack: ListStack | None = None,
    optimizer: OptimizerSpec | None = None,
    accumulate: Accumulate = Accumulate.EXACT,
    *,
    empty: bool = False,
) -> list[LayerReplica]:
    stack = stack or toy_stack()
    return [
        build_replica(stack, i, ALONE, optimizer or sgd(), accumulate, 7, CPU, empty=empty)
        for i in range(stack.n_layers)
    ]


def run(
    layers: list[LayerReplica], step: int, index: int, *, skip: bool = False, count: int = 4
) -> float:
    """Run forward and backward of one micro-batch through all layers; return its loss."""
    hidden: Tensor | None = None
    for replica in layers:
        hidden = forward(replica, hidden, microbatch(step, index))
    assert hidden is not None
    torch.autograd.backward(hidden / count)
    for replica in layers:
        replica.collect(index, skip=skip)
    layers[-1].losses[index] = hidden.item()
    return hidden.item()


def train(layers: list[LayerReplica], steps: int, order: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    for _ in range(steps):
        step = layers[0].version
        for replica in layers:
            replica.clear()
        for index in order:
            run(layers, step, index)
        for replica in layers:
            replica.update(replica.gradient.clone(), 0.5, 0.1)


def state_of(replica: LayerReplica) -> Tensor:
    return replica.state_run()


def values(layers: list[LayerReplica]) -> list[Tensor]:
    return [p.detach().clone() for replica in layers for p in replica.module.parameters()]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
