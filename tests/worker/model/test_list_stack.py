"""Wrong layers, builders and ties: each error names the entry and says what to write instead."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate
from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.replica.build import build_replica
from tests.worker.model.toy_model import ALONE, CPU, First, Last, Middle, sgd


class Holder(nn.Module):
    """A middle layer around any other module."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:
        out: Tensor = self.inner(hidden)
        return out


class Sized(nn.Linear):
    def forward(self, hidden: Tensor, microbatch: Microbatch) -> Tensor:  # type: ignore[override]
        return super().forward(hidden)


def specs(middle: Callable[..., Any]) -> None:
    """Describe a stack with this builder of its middle layer, as a Trainer does."""
    ListStack([First, middle, Last], seed=0).specs(Accumulate.FAST, sgd())


SHARED = Middle()
TRAINED = nn.Linear(6, 6)
SIZES = itertools.count(1)
WRONG: dict[str, tuple[Callable[..., Any], str]] = {
    "a module": (
        Middle(),
        r"builders\[1\]: an object of type Middle .* as lambda: Layer\(64, 64\)",
    ),
    "a class with arguments": (Sized, r"builders\[1\]: Sized\(in_features: .* lambda: Layer"),
    "a function of the index": (lambda i: Middle(), r"builders\[1\]: <lambda>\(i\)"),
    "nothing built": (lambda: None, "layer 1: None is not usable: build a torch.nn.Module"),
    "a tensor built": (lambda: torch.zeros(3), r"layer 1: a tensor of shape \(3,\)"),
    "one module for all calls": (lambda: SHARED, r"builders\[1\]: the same module at each call"),
    "parameters of one module for all calls": (
        lambda: Holder(TRAINED),
        r"builders\[1\]: the same parameters at each call",
    ),
    "another module at each call": (
        lambda: Holder(nn.Linear(6, next(SIZES))),
        r"builders\[1\]: another module at the second call",
    ),
    "values on the meta device": (
        lambda: Sized(int(torch.ones(6).sum().item()), 6),
        r"builders\[1\]: a builder that reads values of tensors .*meta device",
    ),
    "numbers from the meta device": (
        lambda: Sized(int(torch.linspace(6, 7, 2).numpy()[0]), 6),
        r"builders\[1\]: a builder that reads values .*\(TypeError: .* in <lambda>\)\) is not",
    ),
    "a lazy module": (lambda: Holder(nn.LazyLinear(6)), r"layer 1 \(Holder\), parameter inner.wei"),
    "forward of torch": (
        lambda: nn.Linear(6, 6),
        r"layer 1 \(Linear\): forward\(.*\(hidden, micro",
    ),
    "complex parameters": (
        lambda: Holder(nn.Linear(6, 6, dtype=torch.complex64)),
        r"layer 1 \(Holder\), parameter inner.weight: a tensor of shape \(6, 6\) and type complex",
    ),
    "batch normalization": (
        lambda: Holder(nn.BatchNorm1d(6)),
        r"layer 1 \(Holder\), module inner: BatchNorm1d with running averages .*LayerNorm",
    ),
    "instance normalization with averages": (
        lambda: Holder(nn.Sequential(nn.InstanceNorm1d(6, track_running_stats=True))),
        r"layer 1 \(Holder\), module inner.0: InstanceNorm1d with running averages",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_builder_is_named(case: str) -> None:
    middle, text = WRONG[case]
    with pytest.raises(FieldError, match=text):
        specs(middle)


def unreadable() -> nn.Module:
    raise RuntimeError("cannot read metadata.json")


def test_an_error_of_a_builder_stays_as_it_is() -> None:
    with pytest.raises(RuntimeError, match=r"^cannot read metadata.json$"):
        specs(unreadable)


def test_builders_that_copy_a_trained_module_are_usable() -> None:
    """The description of the layers keeps no second copy of them in memory."""
    stack = ListStack([First, lambda: Holder(copy.deepcopy(TRAINED)), Last], seed=0)
    assert len(stack.specs(Accumulate.FAST, sgd())) == 3
    assert all(tensor.is_meta for _, tensor in stack._parameters(1))
    built = build_replica(stack, 1, ALONE, sgd(), Accumulate.FAST, 0, CPU)
    assert torch.equal(next(iter(built.parameters)), TRAINED.weight)


@pytest.mark.parametrize(
    "norm", [partial(nn.BatchNorm1d, 6, track_running_stats=False), partial(nn.LayerNorm, 6)]
)
def test_a_normalization_without_averages_is_usable(norm: Callable[[], nn.Module]) -> None:
    specs(lambda: Holder(norm()))


@pytest.mark.parametrize(
    "given", [3, None, nn.Sequential(First(), Last()), nn.ModuleList([First()])]
)
def test_builders_are_a_list(given: Any) -> None:
    with pytest.raises(
        FieldError, match=r"builders: .* a list of builders: each entry must be a fun"
    ):
        ListStack(given, seed=0)


@pytest.mark.parametrize("seed", ["a", 1.5, None, True])
def test_the_seed_is_a_whole_number(seed: Any) -> None:
    with pytest.raises(FieldError, match=r"seed: .* is not usable: a whole number$"):
        ListStack([First, Last], seed)


@pytest.mark.parametrize("tied", [((0, "weight"), (2, "weight")), 3, (((0,),),), "weight"])
def test_ties_are_groups_of_layers_and_names(tied: Any) -> None:
    with pytest.raises(FieldError, match=r"tied: .* groups of \(layer, parameter name\)"):
        ListStack([First, Last], 0, tied)


def test_tied_parameters_are_frozen_together() -> None:
    def frozen() -> nn.Module:
        return First().requires_grad_(False)

    name = next(name for name, p in First().named_parameters() if p.ndim == 2)
    group = ((0, name), (1, name))
    with pytest.raises(FieldError, match="tied: a parameter that is frozen in one layer and"):
        ListStack([First, frozen], 0, (group,))
    assert ListStack([First, First], 0, (group,)).tied_trained == (group,)
    both = ListStack([frozen, frozen], 0, (group,))
    assert both.tied == (group,) and both.tied_trained == ()


def test_tied_parameters_have_one_shape() -> None:
    ties = (((0, "inner.weight"), (1, "inner.bias")),)
    with pytest.raises(FieldError, match=r"tied: .* these have the shapes \(6, 6\) and \(6,\)"):
        ListStack([First, Last], 0, ties)


def test_a_stack_of_the_user_is_checked_when_a_layer_is_built() -> None:
    class Own(ListStack):
        def build(self, *args: Any) -> Any:
            return nn.BatchNorm1d(6)

    with pytest.raises(FieldError, match=r"layer 0 \(BatchNorm1d\)"):
        build_replica(Own([First, Last], 0), 0, ALONE, sgd(), Accumulate.FAST, 0, CPU)
