"""Weights of micro-batches: counting labels, and wrong results of a script's function."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from elastic.domain.errors import FieldError
from elastic.worker.datasets.weighting import MOST_WEIGHT, checked_weight, label_count, weight_of

LABELS = torch.tensor([[-100, 4, 5, 6], [7, -100, -100, 8]])
MASK = torch.tensor([[1.0, 1.0, 0.5, 0.0], [0.25, 1.0, 1.0, 1.0]])


@pytest.mark.parametrize(
    ("arguments", "wanted"),
    [
        ({}, 5.0),
        ({"shifted": True}, 4.0),
        ({"mask": "loss_mask"}, 2.75),
        ({"mask": "loss_mask", "shifted": True}, 2.5),
    ],
)
def test_labels_are_counted(arguments: dict[str, Any], wanted: float) -> None:
    assert label_count(**arguments)({"labels": LABELS, "loss_mask": MASK}) == wanted


def test_a_large_mask_is_added_up_without_loss() -> None:
    ones = torch.ones(2**24 + 1, dtype=torch.float32)
    labels = torch.zeros(2**24 + 1, dtype=torch.int8)
    assert label_count(mask="m")({"labels": labels, "m": ones}) == 2**24 + 1


def test_a_missing_field_is_named() -> None:
    with pytest.raises(FieldError, match=r"label_count: 'labels' .*: it gives ids, mask"):
        label_count()({"mask": MASK, "ids": LABELS})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (3, 3.0),
        (0, 0.0),
        (2.5, 2.5),
        (torch.tensor(7), 7.0),
        (torch.tensor([4.5]), 4.5),
        (np.int64(6), 6.0),
        (np.float32(0.5), 0.5),
        (MOST_WEIGHT, MOST_WEIGHT),
    ],
)
def test_numbers_are_weights(given: object, wanted: float) -> None:
    assert checked_weight(given, "data(0, 0)") == wanted


@pytest.mark.parametrize(
    ("given", "text"),
    [
        (-1, "-1.0"),
        (math.nan, "nan"),
        (math.inf, "inf"),
        (2 * MOST_WEIGHT, "8388608.0"),
        (None, "None"),
        (True, "True"),
        (np.bool_(True), "an object of type bool"),
        (torch.tensor(True), r"a tensor of shape \(\) and type bool"),
        (torch.tensor(1j), r"a tensor of shape \(\) and type complex64"),
        (torch.empty((), device="meta"), r"a tensor of shape \(\) and type float32"),
        (np.ones(3), "an object of type ndarray"),
        (10**400, "1000.*"),
        (label_count, "the function label_count"),
        ("4", "'4'"),
        (LABELS, r"a tensor of shape \(2, 4\) and type int64"),
    ],
)
def test_other_results_are_refused(given: object, text: str) -> None:
    wanted = rf"^weight of data\(4, 1\): {text} is not usable: .* one number from 0 to 4,194,304"
    with pytest.raises(FieldError, match=wanted):
        weight_of(lambda fields: given, {}, "data(4, 1)")


def test_without_a_function_all_micro_batches_count_equally() -> None:
    assert weight_of(None, {}, "data(4, 1)") == 1.0


def test_a_weight_is_what_exact_sums_hold() -> None:
    assert checked_weight(0.1, "data(0, 0)") == round(0.1 * 2**20) / 2**20
    assert checked_weight(1e-9, "data(0, 0)") == 0.0
