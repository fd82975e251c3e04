"""A backward pass in two parts gives the same bits as a whole pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.worker.contrib.megatron.linear import linear
from elastic.worker.model import rng as randomness
from elastic.worker.model.layers import TensorParallel
from elastic.worker.model.split_backward import backward_input
from tests.worker.contrib.gpt_models import build, config, microbatch, parts_and_whole
from tests.worker.model.toy_model import CPU
from tests.worker.passes import forward

Pass = Callable[[Tensor], Tensor]


def both_ways(
    forward: Pass, source: Tensor, parameters: list[nn.Parameter]
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """Gradients of input and parameters from a whole pass, and from a pass in two parts."""
    found = []
    for split in (False, True):
        hidden = source.clone().requires_grad_()
        output = forward(hidden)
        gradient = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
        if split:
            rest = backward_input([output], [gradient], [hidden], parameters)
            assert all(p.grad is None for p in parameters)
            rest.run()
        else:
            torch.autograd.backward(output, gradient)
        found.append([hidden.grad, *(p.grad for p in parameters)])
        for parameter in parameters:
            parameter.grad = None
    return found[0], found[1]


def same(whole: list[Tensor | None], parts: list[Tensor | None]) -> bool:
    return all(
        a is b is None or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(whole, parts, strict=True)
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layers", [(1, 2), (2, 3), (1, 2, 3)])
def test_megatron_layers(layers: tuple[int, ...], dtype: str, alone: TensorParallel) -> None:
    """Transformer layers with dropout, and the head, give the same bits."""
    whole, parts = parts_and_whole(build(config(dropout=0.2, dtype=dtype), alone), layers)
    assert len(whole) == len(parts) > 12
    assert all(torch.equal(a, b) for a, b in zip(whole, parts, strict=True))


class Shared(nn.Module):
    """A matrix that is used three times, and an unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.randn(8, 8) / 3)
        self.bias = nn.Parameter(torch.randn(8))
        self.unused = nn.Parameter(torch.randn(2))

    def forward(self, hidden: Tensor) -> Tensor:
        turned = self.matrix.t() * 0.5
        hidden = torch.tanh(hidden @ self.matrix) @ turned + self.bias
        return hidden * torch.sigmoid(hidden @ self.matrix)


def test_a_parameter_used_several_times_is_summed_in_one_order() -> None:
    torch.manual_seed(0)
    module = Shared()
    whole, parts = both_ways(module, torch.randn(5, 8), list(module.parameters()))
    assert same(whole, parts)
    assert whole[1] is not None and whole[3] is None


class Convolved(nn.Module):
    """Normalisation, branches, a parameter with an operation of its own, and a frozen parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv1d(3, 6, 3, padding=1), nn.GroupNorm(2, 6)
        self.second, self.scale = nn.Conv1d(6, 3, 1, bias=False), nn.Parameter(torch.randn(3, 1))
        self.frozen = nn.Parameter(torch.randn(3, 1), requires_grad=False)

    def forward(self, hidden: Tensor) -> Tensor:
        branch = self.second(nn.functional.gelu(self.norm(self.first(hidden))))
        out: Tensor = hidden * self.frozen + branch * torch.exp(self.scale)
        return out


def test_branches_and_parameters_behind_operations() -> None:
    torch.manual_seed(0)
    module = Convolved()
    whole, parts = both_ways(module, torch.randn(2, 3, 9), list(module.parameters()))
    assert same(whole, parts)
    assert sum(gradient is not None for gradient in whole) == 7


class Counting(torch.autograd.Function):
    """hidden * weight; records each backward call."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, calls: list[str]) -> Tensor:
        ctx.save_for_backward(hidden, weight)
        ctx.calls = calls
        return hidden * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        hidden, weight = ctx.saved_tensors
        ctx.calls.append("both")
        return gradients[0] * weight, gradients[0] * hidden, None


def test_a_result_that_depends_on_parameters_alone() -> None:
    """The parameter is also used on the way of the input."""
    weight = nn.Parameter(torch.randn(4))
    found = []
    for split in (False, True):
        hidden = torch.linspace(-1, 1, 4).requires_grad_()
        bias = weight.tanh()
        outputs, gradients = [hidden * bias, bias], [torch.ones(4), torch.arange(4.0)]
        if split:
            backward_input(outputs, gradients, [hidden], [weight]).run()
        else:
            torch.autograd.backward(outputs, gradients)
        found.append((weight.grad, hidden.grad))
        weight.grad = None
    assert all(
        a is not None and b is not None and torch.equal(a, b) for a, b in zip(*found, strict=True)
    )


def test_functions_without_split_backward_run_in_each_part() -> None:
    weight, calls = nn.Parameter(torch.randn(4)), list[str]()
    whole, parts = both_ways(
        lambda h: Counting.apply(h, weight, calls),  # type: ignore[no-untyped-call]
        torch.randn(4),
        [weight],
    )
    assert same(whole, parts)
    assert calls == ["both"] * 3


@pytest.mark.parametrize("bias", [False, True])
def test_linear_equals_megatrons_function(bias: bool) -> None:
    from megatron.core.tensor_parallel.layers import LinearWithGradAccumulationAndAsyncCommunication

    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(12, 8))
    offset = nn.Parameter(torch.randn(12)) if bias else None
    parameters = [weight] + ([offset] if offset is not None else [])

    def theirs(hidden: Tensor) -> Tensor:
        out: Tensor = LinearWithGradAccumulationAndAsyncCommunication.apply(
            hidden, weight, offset, False, False, False, None, None, None
        )
        return out

    source = torch.randn(5, 3, 8)
    expected, _ = both_ways(theirs, source, parameters)
    whole, parts = both_ways(lambda hidden: linear(hidden, weight, offset), source, parameters)
    assert same(expected, whole) and same(expected, parts)
    assert torch.equal(theirs(source), linear(source, weight, offset))


def test_linear_computes_only_the_requested_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each part does one matrix product; a whole pass does both."""
    products: list[tuple[int, ...]] = []
    real = Tensor.matmul

    def recorded(a: Tensor, b: Tensor) -> Tensor:
        products.append(tuple(b.shape))
        return real(a, b)

    monkeypatch.setattr(Tensor, "matmul", recorded)
    weight = nn.Parameter(torch.randn(12, 8))
    hidden = torch.randn(5, 8, requires_grad=True)
    output = linear(hidden, weight)
    products.clear()
    rest = backward_input([output], [torch.ones_like(output)], [hidden], [weight])
    assert products == [(12, 8)]
    rest.run()
    assert products == [(12, 8), (5, 8)]


def test_a_repeated_pass_draws_the_same_dropout(alone: TensorParallel) -> None:
    """A stage that recomputes needs equal dropout, regardless of passes in between."""
    replica = build(config(dropout=0.5), alone)[1]
    source = torch.randn(16, 2, 32)
    one = forward(replica, source, microbatch(3, 1))
    randomness.seed_forward(9, 9, 9, 9, CPU)
    assert torch.equal(one, forward(replica, source, microbatch(3, 1)))
