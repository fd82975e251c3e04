"""Micro-batches of a dataset whose samples can be read in any order."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from elastic.domain.errors import FieldError
from elastic.worker.datasets.samples import (
    STREAM,
    Collate,
    OwnRandom,
    Samples,
    check_index,
    reseed,
)
from elastic.worker.model.checks import Described, description, whole_number
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.rng import derive_seed

DATASET = (
    "a dataset with len(dataset) and dataset[i], such as a torch Dataset or a datasets.Dataset; "
    "for one that is only iterated over, from_stream"
)


class MapStyle(Protocol):
    """A dataset whose samples have numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> object: ...


def from_dataset(
    dataset: MapStyle,
    *,
    rows: int,
    microbatches: int,
    seed: int = 0,
    shuffle: bool = True,
    fields: Sequence[str] | None = None,
    collate: Collate | None = None,
) -> DatasetSource:
    """Return the micro-batches of a map-style dataset, for `Trainer(data=...)`.

    The samples of all micro-batches, in order, are the dataset again and again. Each pass has an
    order of its own, drawn from `seed`. A dataset may draw random numbers for a sample from Python,
    NumPy or torch: they are seeded by seed, step, micro-batch and row.

    Args:
        rows: samples per micro-batch.
        microbatches: micro-batches per step, as given to `Trainer`.
        seed: seed of the order, and of random numbers that the dataset draws.
        shuffle: False: the order of the dataset in each pass.
        fields: names of a tuple's parts, or the keys of a dict that are used; None: all keys.
        collate: makes the fields from a list of samples; None: one row per sample.

    With `shuffle`, each process keeps the order of two passes, 8 bytes per sample together. Raises
    FieldError for an argument that is not usable.
    """
    return DatasetSource(dataset, rows, microbatches, shuffle, Samples(fields, collate, seed))


class DatasetSource:
    """Function of (step, micro-batch), made by `from_dataset`."""

    def __init__(
        self,
        dataset: MapStyle,
        rows: int,
        microbatches: int,
        shuffle: bool,
        samples: Samples,
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise FieldError("dataset", description(dataset), "give it to from_dataloader")
        indexed = hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")
        if isinstance(dataset, IterableDataset) or not indexed:
            raise FieldError("dataset", description(dataset), DATASET)
        self.dataset, self.count = dataset, len(dataset)
        if self.count == 0:
            what = Described(f"{description(dataset)} without samples")
            raise FieldError("dataset", what, "give one with at least one sample")
        self.rows = whole_number("rows", rows, 1)
        self.microbatches = whole_number("microbatches", microbatches, 1)
        self.shuffle, self._samples = shuffle, samples
        self._order = lru_cache(2)(self._draw_order)
        try:
            with OwnRandom(0):
                dataset[0]
        except (KeyError, TypeError) as error:
            what = Described(f"{description(dataset)} without a sample 0 ({error!r})")
            remedy = "give a dataset whose samples have numbers; of a DatasetDict, one split"
            raise FieldError("dataset", what, remedy) from error

    def numbers(self, step: int, index: int) -> list[int]:
        """Return the numbers of the samples of micro-batch `index` of `step`, in its order.

        Raises FieldError if a step has fewer micro-batches.
        """
        check_index(index, self.microbatches)
        first = (step * self.microbatches + index) * self.rows
        return [self._number(position) for position in range(first, first + self.rows)]

    def _number(self, position: int) -> int:
        epoch, at = divmod(position, self.count)
        return int(self._order(epoch)[at]) if self.shuffle else at

    def _draw_order(self, epoch: int) -> Tensor:
        generator = torch.Generator("cpu").manual_seed(
            derive_seed(self._samples.seed, epoch, 0, STREAM)
        )
        small = self.count < 1 << 31
        kind = torch.int32 if small else torch.int64
        return torch.randperm(self.count, generator=generator, dtype=kind, device="cpu")

    def __call__(self, step: int, index: int) -> Microbatch:
        found: list[object] = []
        with OwnRandom(0):
            for row, number in enumerate(self.numbers(step, index)):
                reseed(self._samples.seed_of(step, index, row))
                found.append(self.dataset[number])
        return Microbatch(step, index, self._samples.fields(found, step, index))
