"""Wrong data functions: each error names the call, and what it must return."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from elastic.domain.errors import FieldError
from elastic.worker.model.data_source import DataSource
from elastic.worker.model.microbatch import Microbatch
from tests.worker.model.toy_model import microbatch

DATASET = TensorDataset(torch.arange(64.0).reshape(16, 4))
LOADER: DataLoader[Any] = DataLoader(DATASET, batch_size=4)
CURSOR = itertools.cycle(LOADER)


class Picture(torch.Tensor):
    """A subclass of Tensor, as torchvision has for pictures."""


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (LOADER, "an object of type DataLoader"),
        (DATASET, "an object of type TensorDataset"),
        (iter(LOADER), "an object of type _SingleProcessDataLoaderIter"),
        ([microbatch(0, 0)], "an object of type list"),
        (None, "None"),
        (lambda step: microbatch(step, 0), r"<lambda>\(step\)"),
        (lambda step, index, size: microbatch(step, index), r"<lambda>\(step, index, size\)"),
    ],
)
def test_data_is_a_function_of_two_numbers(given: Any, text: str) -> None:
    with pytest.raises(
        FieldError, match=rf"^data: {text} is not usable: a function data\(step, in"
    ):
        DataSource(given)


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ({"x": torch.ones(2)}, r"data\(2, 1\): an object of type dict"),
        ((torch.ones(2), torch.ones(2)), r"data\(2, 1\): an object of type tuple"),
        (torch.ones(2), r"data\(2, 1\): a tensor of shape \(2,\)"),
        (None, r"data\(2, 1\): None"),
        (Microbatch(2, 1, torch.ones(2)), r"data\(2, 1\).fields: a tensor"),  # type: ignore[arg-type]
        (Microbatch(2, 1, {"x": [1.0]}), r"data\(2, 1\).fields\['x'\]: an object of type list"),  # type: ignore[dict-item]
        (Microbatch(2, 1, {"n": 3}), r"data\(2, 1\).fields\['n'\]: 3"),  # type: ignore[dict-item]
    ],
)
def test_data_returns_a_microbatch_of_tensors(result: Any, text: str) -> None:
    with pytest.raises(FieldError, match=rf"^{text} .*data must return Microbatch\(step, index, "):
        DataSource(lambda step, index: result)(2, 1)


@pytest.mark.parametrize(
    "values",
    [
        lambda: torch.randn(4),
        lambda: torch.tensor(random.random()),
        lambda: next(CURSOR)[0],
        lambda: torch.zeros(random.randrange(10**6)),
    ],
)
def test_data_that_changes_between_two_calls_is_refused(values: Callable[[], Any]) -> None:
    source = DataSource(lambda step, index: Microbatch(step, index, {"x": values()}))
    with pytest.raises(
        FieldError, match=r"data\(3, 0\): another .* depend on step and index alone"
    ):
        source(3, 0)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor([float("nan"), -0.0]),
        torch.tensor(True),
        torch.ones(2, 3, dtype=torch.complex64).T,
        torch.empty(0),
        torch.eye(3).to_sparse(),
        torch.ones(2, requires_grad=True),
        torch.tensor([float("nan"), 1.0], dtype=torch.bfloat16),
        torch.ones(2, dtype=torch.complex64).conj(),
        torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8),
        torch.ones(2, device="meta"),
        torch.ones(2).as_subclass(Picture),
        torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged),
    ],
)
def test_equal_data_is_accepted(tensor: torch.Tensor) -> None:
    source = DataSource(lambda step, index: Microbatch(step, index, {"x": tensor.clone()}))
    assert source(0, 0).step == 0


def test_objects_that_move_to_a_device_are_accepted() -> None:
    fields: Any = {"x": torch.nn.utils.rnn.pack_sequence([torch.ones(2), torch.ones(1)])}
    source = DataSource(lambda step, index: Microbatch(step, index, fields))
    assert source(0, 0).fields == fields


def test_a_function_that_repeats_an_epoch_causes_one_warning(
    capsys: pytest.CaptureFixture[str],
) -> None:
    source = DataSource(lambda step, index: microbatch(step % 2, index))
    for step in range(6):
        source(step, 1)
    text = "elastic: warning: data(2, 1) returned a Microbatch of step 0 and index 1\n"
    assert capsys.readouterr().err == text


def test_only_the_first_microbatch_is_asked_for_twice() -> None:
    calls = []

    def data(step: int, index: int) -> Microbatch:
        calls.append((step, index))
        return microbatch(step, index)

    source = DataSource(data)
    source(4, 1)
    source(4, 2)
    assert calls == [(4, 1), (4, 1), (4, 2)]
