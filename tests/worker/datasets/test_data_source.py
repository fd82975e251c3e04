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
from elastic.worker.datasets.data_source import DataSource, digest_of
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


def test_data_gives_no_weight() -> None:
    """A weight in a micro-batch would have no effect."""
    heavy = Microbatch(2, 1, {"x": torch.ones(2)}, weight=3.0)
    with pytest.raises(FieldError, match=r"data\(2, 1\).weight: 3.0 .*Trainer\(weight=...\)"):
        DataSource(lambda step, index: heavy)(2, 1)


def test_workers_compare_weights_too() -> None:
    assert digest_of(0, {}, 2.0, exact=True) != digest_of(0, {}, 3.0, exact=True)


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


FIELDS = {"x": torch.arange(4.0), "label": torch.tensor([1, 2]), "mask": torch.tensor([True])}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label", torch.tensor([1, 3])),
        ("label", torch.tensor([[1, 2]])),
        ("label", torch.tensor([1, 2], dtype=torch.int32)),
        ("mask", torch.tensor([False])),
        ("x", torch.arange(5.0)),
        ("x", torch.arange(4.0, dtype=torch.float64)),
        ("other", torch.ones(1)),
    ],
)
def test_another_micro_batch_has_another_hash(name: str, value: torch.Tensor) -> None:
    for exact in (False, True):
        assert digest_of(3, {**FIELDS, name: value}, exact=exact) != digest_of(
            3, FIELDS, exact=exact
        )


def test_the_hash_covers_the_index_and_the_order_of_fields_does_not_matter() -> None:
    mirrored = dict(reversed(FIELDS.items()))
    strided = {**FIELDS, "x": torch.arange(8.0)[::2] / 2}
    for fields in (mirrored, strided):
        assert digest_of(3, fields, exact=True) == digest_of(3, FIELDS, exact=True)
    assert digest_of(4, FIELDS, exact=True) != digest_of(3, FIELDS, exact=True)


def test_numbers_with_a_fraction_are_compared_bit_for_bit_only_if_the_job_is_exact() -> None:
    rounded = {**FIELDS, "x": FIELDS["x"] + 1e-6}
    assert digest_of(3, rounded, exact=False) == digest_of(3, FIELDS, exact=False)
    assert digest_of(3, rounded, exact=True) != digest_of(3, FIELDS, exact=True)


@pytest.mark.parametrize(
    "value",
    [torch.zeros(0), torch.eye(3).to_sparse(), Picture([1.0]), torch.tensor(2.0).bfloat16()],
)
def test_every_kind_of_tensor_has_a_hash(value: torch.Tensor) -> None:
    assert digest_of(0, {"x": value}, exact=True) == digest_of(0, {"x": value}, exact=True)
