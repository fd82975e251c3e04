"""A layer that breaks the rules of `LayerStack` in its forward pass is named, with what it did."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate
from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.replica.build import build_replica
from tests.worker.model.toy_model import ALONE, CPU, First, microbatch, sgd


class Odd(nn.Module):
    """A layer whose result is `change(result of a linear layer)`."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = nn.Linear(6, 6), change

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Any:
        return self.change(self.inner(hidden))


class Counting(nn.Module):
    """A layer with a buffer that each forward pass changes in place, or replaces."""

    def __init__(self, *, replaced: bool = False, persistent: bool = True) -> None:
        super().__init__()
        self.inner, self.replaced = nn.Linear(6, 6), replaced
        self.register_buffer("seen", torch.zeros(()), persistent=persistent)
        self.seen: Tensor

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        if self.replaced:
            self.seen = self.seen + 1
        else:
            self.seen += 1
        out: Tensor = self.inner(hidden)
        return out


class Spectral(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        out: Tensor = self.inner(hidden)
        return out


def forward(layer: Callable[[], nn.Module], *, last: bool = False, times: int = 1) -> None:
    """Run forward passes of `layer` as the last or the middle layer of a stack."""
    middle = [layer] if last else [layer, First]
    stack = ListStack([First, *middle], seed=0)
    replica = build_replica(stack, 1, ALONE, sgd(), Accumulate.FAST, 0, CPU)
    for index in range(times):
        replica.forward(torch.ones(4, 6, requires_grad=True), microbatch(0, index))


VALUE = "forward must return the input of the next layer: a floating-point tensor, or a tuple or "
LOSS = "forward of the last layer must return the mean loss, one number, as .mean"
Pair = namedtuple("Pair", ("first", "second"))
RESULTS: list[tuple[Callable[[Tensor], Any], str]] = [
    (lambda out: [out], ": an object of type list"),
    (lambda out: None, ": None"),
    (lambda out: out.mean().item(), ": -?[0-9]"),
    (lambda out: (out, [out]), r", result\[1\]: an object of type list"),
    (lambda out: (out, None), r", result\[1\]: None"),
    (lambda out: {"a": out, "b": {}}, r", result\['b'\]: an object of type dict"),
    (lambda out: {0: out}, ": an object of type dict"),
    (lambda out: (), ": an object of type tuple"),
    (lambda out: {"ids": out.long()}, ": an object of type dict"),
    (lambda out: Pair(out, out), ": an object of type Pair"),
    (lambda out: out.long(), r": a tensor of shape \(4, 6\) and type int64"),
]


@pytest.mark.parametrize(("change", "found"), RESULTS)
def test_a_layer_returns_a_value(change: Callable[[Tensor], Any], found: str) -> None:
    with pytest.raises(FieldError, match=rf"layer 1 \(Odd\){found}.* is not usable: {VALUE}"):
        forward(lambda: Odd(change))
    with pytest.raises(FieldError, match=rf"layer 1 \(Odd\): .* is not usable: {LOSS}"):
        forward(lambda: Odd(change), last=True)


@pytest.mark.parametrize(
    "change", [lambda out: (out, out.long()), lambda out: {"a": out, "b": out.detach()}]
)
def test_a_layer_returns_several_tensors(change: Callable[[Tensor], Any]) -> None:
    forward(lambda: Odd(change))
    with pytest.raises(FieldError, match=rf"layer 1 \(Odd\): .* is not usable: {LOSS}"):
        forward(lambda: Odd(change), last=True)


class Changing(nn.Module):
    """A layer that changes what it gets."""

    def __init__(self, key: str = "") -> None:
        super().__init__()
        self.inner, self.key = nn.Linear(6, 6), key

    def forward(self, hidden: Any, microbatch: Microbatch) -> Any:
        part = hidden[self.key] if self.key else hidden
        part.add_(1.0)
        return self.inner(part)


@pytest.mark.parametrize("leaf", [True, False])
@pytest.mark.parametrize("key", ["", "a"])
def test_a_layer_may_not_change_its_input(key: str, leaf: bool) -> None:
    """Whether torch refuses it depends on whether the layer is the first of its stage."""
    stack = ListStack([First, lambda: Changing(key), First], seed=0)
    replica = build_replica(stack, 1, ALONE, sgd(), Accumulate.FAST, 0, CPU)
    given = torch.ones(4, 6, requires_grad=True)
    hidden = given if leaf else given * 2
    with pytest.raises(FieldError, match=r"layer 1 \(Changing\): .* changes its input .* inplace"):
        replica.forward({"a": hidden} if key else hidden, microbatch(0, 0))


class ChangingShared(nn.Module):
    """A layer that changes what other layers of its stage may use."""

    def __init__(self, *, field: bool) -> None:
        super().__init__()
        self.inner, self.field = nn.Linear(6, 6), field

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        mask = microbatch.once("mask", lambda: torch.zeros(6))
        (microbatch.fields["x"] if self.field else mask).add_(1)
        out: Tensor = self.inner(hidden + mask)
        return out


@pytest.mark.parametrize(("field", "name"), [(True, "field 'x'"), (False, r"once\('mask'\)")])
def test_a_layer_may_not_change_what_layers_share(field: bool, name: str) -> None:
    with pytest.raises(FieldError, match=rf"layer 1 \(.*\): .* changes {name} .* made by clone"):
        forward(lambda: ChangingShared(field=field))


@pytest.mark.parametrize("change", [lambda out: out, lambda out: out.mean(1)])
def test_the_last_layer_returns_one_number(change: Callable[[Tensor], Any]) -> None:
    with pytest.raises(FieldError, match=rf"a tensor of shape .* is not usable: {LOSS}"):
        forward(lambda: Odd(change), last=True)


@pytest.mark.parametrize("last", [False, True])
def test_a_result_without_gradient_is_refused(last: bool) -> None:
    with pytest.raises(FieldError, match=r"without gradient .* leave out detach and no_grad"):
        forward(lambda: Odd(lambda out: out.mean().detach()), last=last)


def test_a_model_of_frozen_layers_is_refused() -> None:
    def frozen() -> nn.Module:
        return Odd(torch.mean).requires_grad_(False)

    replica = build_replica(
        ListStack([First, frozen], seed=0), 1, ALONE, sgd(), Accumulate.FAST, 0, CPU
    )
    replica.forward(torch.ones(4, 6, requires_grad=True), microbatch(0, 0))
    with pytest.raises(FieldError, match=r"without gradient .* do not freeze all layers"):
        replica.forward(torch.ones(4, 6), microbatch(0, 0))


@pytest.mark.parametrize("change", [torch.mean, lambda out: out.mean().reshape(1)])
def test_one_number_is_a_loss(change: Callable[[Tensor], Any]) -> None:
    forward(lambda: Odd(change), last=True)


@pytest.mark.parametrize(
    ("layer", "buffer"),
    [
        (Counting, "seen"),
        (lambda: Counting(replaced=True), "seen"),
        (Spectral, r"inner.parametrizations.weight.0._u"),
    ],
)
def test_a_buffer_that_training_changes_is_refused(
    layer: Callable[[], nn.Module], buffer: str
) -> None:
    with pytest.raises(FieldError, match=rf"layer 1 \(\w+\), buffer {buffer}: .* loses it"):
        forward(layer)


def test_a_buffer_that_the_module_does_not_save_causes_one_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    forward(lambda: Counting(persistent=False), times=3)
    warnings = capsys.readouterr().err.splitlines()
    assert len(warnings) == 1 and "layer 1 (Counting), buffer seen is changed" in warnings[0]
