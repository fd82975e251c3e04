"""Micro-batches as the batches of a DataLoader."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    TensorDataset,
)

from elastic import from_dataloader
from elastic.domain.errors import FieldError

DATASET = TensorDataset(torch.arange(12.0), torch.arange(12))


def test_batches_are_those_of_the_loader() -> None:
    loader = DataLoader(DATASET, batch_size=3)
    source = from_dataloader(loader, microbatches=2, fields=("x", "y"))
    for number, (x, y) in enumerate(loader):
        fields = source(*divmod(number, 2)).fields
        assert torch.equal(fields["x"], x) and torch.equal(fields["y"], y)


def test_a_shuffled_loader_has_the_order_of_the_seed() -> None:
    def first(seed: int) -> list[int]:
        loader = DataLoader(DATASET, batch_size=12, shuffle=True)
        source = from_dataloader(loader, microbatches=1, seed=seed, fields=("x", "y"))
        return source(0, 0).fields["y"].tolist()

    assert first(1) == first(1) != first(2)
    assert sorted(first(1)) == list(range(12))


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        yield from torch.arange(6.0)


def test_iterable_datasets_are_streams() -> None:
    loader = DataLoader(Stream(), batch_size=2)
    source = from_dataloader(loader, microbatches=1, fields=["x"])
    assert [source(step, 0).fields["x"].tolist() for step in (1, 0)] == [[2.0, 3.0], [0.0, 1.0]]


def test_processes_of_the_loader_read_ahead() -> None:
    loader = DataLoader(DATASET, batch_size=3, num_workers=2)
    source = from_dataloader(loader, microbatches=2, fields=("x", "y"))
    read = [source(step, index).fields["y"].tolist() for step in range(2) for index in range(2)]
    assert read == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        ([1, 2], "a torch DataLoader"),
        (DataLoader(DATASET, batch_size=None), "with a batch_size"),
        (DataLoader(DATASET, sampler=DistributedSampler(DATASET, 2, 0)), "no DistributedSampler"),
        (
            DataLoader(DATASET, sampler=RandomSampler(DATASET, replacement=True)),
            "shuffle=True or False",
        ),
        (DataLoader(DATASET, batch_size=2), "name the parts"),
        (DataLoader(DATASET, batch_sampler=[[0, 1]]), "a batch_sampler"),
        (DataLoader(DATASET, worker_init_fn=print), "loader.worker_init_fn"),
        (
            DataLoader(DATASET, num_workers=1, multiprocessing_context="spawn"),
            "loader.multiprocessing_context",
        ),
        (DataLoader(DATASET, sampler=RandomSampler(DATASET, num_samples=3)), "shuffle=True"),
    ],
)
def test_wrong_use_is_refused_with_a_remedy(loader: Any, text: str) -> None:
    with pytest.raises(FieldError, match=text):
        from_dataloader(loader, microbatches=1)(0, 0)
