"""Micro-batches of map-style datasets."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from elastic import from_dataset
from elastic.domain.errors import FieldError
from elastic.worker.datasets.data_source import DataSource


class Numbers(Dataset[dict[str, object]]):
    """Samples with their own numbers as "x"."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"x": index, "half": index / 2, "pair": [index, index + 1]}


def test_each_pass_has_each_sample_once_in_its_own_order() -> None:
    source = from_dataset(Numbers(10), rows=3, microbatches=4, seed=5)
    read = [int(x) for step in range(5) for i in range(4) for x in source(step, i).fields["x"]]
    passes = [read[first : first + 10] for first in range(0, 60, 10)]
    assert all(sorted(one) == list(range(10)) for one in passes)
    assert len({tuple(one) for one in passes}) == len(passes)


def test_the_order_is_a_function_of_the_seed_alone() -> None:
    def read(seed: int, steps: list[int]) -> list[list[int]]:
        source = from_dataset(Numbers(1000), rows=2, microbatches=3, seed=seed)
        return [source.numbers(step, index) for step in steps for index in range(3)]

    steps = [0, 1, 400, 401]
    assert read(1, steps) == read(1, steps)
    assert read(1, steps[::-1])[-3:] == read(1, steps)[:3]
    assert read(1, steps) != read(2, steps)


def test_without_shuffle_the_order_is_that_of_the_dataset() -> None:
    source = from_dataset(Numbers(4), rows=3, microbatches=1, shuffle=False)
    assert [source.numbers(step, 0) for step in range(4)] == [
        [0, 1, 2],
        [3, 0, 1],
        [2, 3, 0],
        [1, 2, 3],
    ]


def test_values_of_dicts_become_rows() -> None:
    fields = from_dataset(Numbers(4), rows=2, microbatches=1, shuffle=False)(0, 0).fields
    assert fields["x"].tolist() == [0, 1] and fields["x"].dtype == torch.int64
    assert fields["half"].tolist() == [0.0, 0.5] and fields["half"].dtype == torch.float32
    assert fields["pair"].tolist() == [[0, 1], [1, 2]]


def test_parts_of_tuples_get_names() -> None:
    dataset = TensorDataset(torch.arange(6.0).view(3, 2), torch.arange(3))
    fields = from_dataset(dataset, rows=2, microbatches=1, shuffle=False, fields=("x", "y"))(
        0, 0
    ).fields
    assert fields["x"].tolist() == [[0.0, 1.0], [2.0, 3.0]] and fields["y"].tolist() == [0, 1]


def test_keys_can_be_chosen() -> None:
    source = from_dataset(Numbers(4), rows=2, microbatches=1, fields=["pair"])
    assert list(source(0, 0).fields) == ["pair"]


class Noisy(Numbers):
    """Samples with random numbers of each of the three generators."""

    def __getitem__(self, index: int) -> dict[str, object]:
        return {"noise": [random.random(), float(np.random.rand()), float(torch.rand(()))]}


def test_random_numbers_of_a_sample_are_repeatable_and_leave_the_generators_alone() -> None:
    source = from_dataset(Noisy(8), rows=2, microbatches=2, seed=3)
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    wanted = random.random(), np.random.rand(), torch.rand(()).item()
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    first = source(4, 1).fields["noise"]
    assert (random.random(), np.random.rand(), torch.rand(()).item()) == wanted
    assert torch.equal(source(4, 1).fields["noise"], first)
    assert len(set(first.flatten().tolist())) == 6
    assert not torch.equal(source(4, 0).fields["noise"], first)


class Forgetful(Numbers):
    """A dataset with hidden state: the number of its calls."""

    calls = 0

    def __getitem__(self, index: int) -> dict[str, object]:
        self.calls += 1
        return {"x": self.calls}


def test_a_dataset_with_hidden_state_is_refused() -> None:
    source = DataSource(from_dataset(Forgetful(8), rows=2, microbatches=2))
    with pytest.raises(FieldError, match="another micro-batch at the second call"):
        source(0, 0)


def padded(samples: list[object]) -> dict[str, Tensor]:
    rows = [torch.ones(int(sample["x"])) for sample in samples]  # type: ignore[index]
    return {"ones": torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)}


def test_a_function_of_ones_own_makes_the_fields() -> None:
    source = from_dataset(Numbers(4), rows=4, microbatches=1, shuffle=False, collate=padded)
    assert source(0, 0).fields["ones"].sum(1).tolist() == [0.0, 1.0, 2.0, 3.0]


class Ragged(Numbers):
    def __getitem__(self, index: int) -> dict[str, object]:
        return {"ids": list(range(index + 1))}


class Texts(Numbers):
    def __getitem__(self, index: int) -> dict[str, object]:
        return {"text": "words"}


class Uneven(Numbers):
    def __getitem__(self, index: int) -> dict[str, object]:
        return {"x": 1} if index else {"y": 1}


@pytest.mark.parametrize(
    ("dataset", "given", "text"),
    [
        (iter([1]), {}, "from_stream"),
        (DataLoader(Numbers(4)), {}, "from_dataloader"),
        ({"train": Numbers(4)}, {}, "of a DatasetDict, one split"),
        (Numbers(0), {}, "at least one sample"),
        (Numbers(4), {"rows": 0}, "rows"),
        (Numbers(4), {"microbatches": 1.5}, "microbatches"),
        (Numbers(4), {"seed": "one"}, "seed"),
        (Numbers(4), {"fields": "x"}, "a list of names"),
        (Numbers(4), {"fields": ["z"]}, "with .'half', 'pair', 'x'."),
        (Numbers(4), {"collate": 3}, "collate"),
        (Numbers(4), {"collate": lambda samples: samples}, "dict of tensors"),
        (TensorDataset(torch.ones(3)), {}, "name the parts"),
        (TensorDataset(torch.ones(3)), {"fields": ("x", "y")}, "1 parts for the fields"),
        (Ragged(4), {}, "one shape: pad them"),
        (Texts(4), {}, "leave it out of fields="),
        (Uneven(4), {"shuffle": False}, "the same fields"),
    ],
)
def test_wrong_use_is_refused_with_a_remedy(
    dataset: object, given: dict[str, object], text: str
) -> None:
    with pytest.raises(FieldError, match=text):
        from_dataset(dataset, **({"rows": 2, "microbatches": 2} | given))(0, 0)  # type: ignore[arg-type]


def test_more_micro_batches_than_the_source_was_made_for_are_refused() -> None:
    with pytest.raises(FieldError, match="2, but micro-batch 2 is asked for"):
        from_dataset(Numbers(4), rows=1, microbatches=2)(0, 2)
