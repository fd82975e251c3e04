"""Micro-batches of a torch DataLoader, read by number instead of one after the other."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, RandomSampler, SequentialSampler

from elastic.domain.errors import FieldError
from elastic.worker.datasets.map_style import DatasetSource, from_dataset
from elastic.worker.datasets.prefetch import Prefetch, prefetch
from elastic.worker.datasets.samples import NAMES, Collate
from elastic.worker.datasets.stream import StreamSource, from_stream
from elastic.worker.model.checks import Described, description

LOADER = "a torch DataLoader, or a StatefulDataLoader of torchdata, with a batch_size"
SAMPLER = (
    "a DataLoader with shuffle=True or False, whose order is drawn from seed here; for a part of "
    "the data use torch.utils.data.Subset. Micro-batches are divided among nodes by their numbers, "
    "so no DistributedSampler is needed"
)


_UNUSED: dict[str, Callable[[Any], bool]] = {
    "worker_init_fn": lambda given: given is not None,
    "multiprocessing_context": lambda given: (
        getattr(given, "get_start_method", lambda: "fork")() != "fork"
    ),
}
"""Arguments of a loader that cannot be followed: which of their values are refused."""


def from_dataloader(
    loader: DataLoader[Any],
    *,
    microbatches: int,
    seed: int = 0,
    fields: Sequence[str] | None = None,
) -> DatasetSource | StreamSource | Prefetch:
    """Return micro-batches as the batches of `loader`, for `Trainer(data=...)`.

    Dataset, batch size and collate function are those of `loader`, and for a dataset that can be
    indexed the number of worker processes, too. Its iterator is not used, since any node may need
    any batch at any time. So the order of a shuffled loader is drawn from `seed`, incomplete
    batches are filled with samples of the next pass, and drop_last, pin_memory, timeout and
    generator have no effect.

    Args:
        loader: a torch DataLoader, or a StatefulDataLoader of torchdata.
        microbatches: micro-batches per step, as given to `Trainer`.
        seed: seed of the order, and of random numbers that dataset or collate function draw.
        fields: names of the parts, if the batches are tuples.

    Raises FieldError for a loader whose order cannot be repeated.
    """
    if not isinstance(loader, DataLoader):
        raise FieldError("loader", description(loader), LOADER)
    if loader.batch_size is None:
        what = Described("without a batch_size, or with a batch_sampler")
        raise FieldError("loader", what, LOADER)
    for name, needed in _UNUSED.items():
        if needed(getattr(loader, name, None)):
            what = description(getattr(loader, name))
            raise FieldError(f"loader.{name}", what, "make the loader without it")
    collate = _named(loader.collate_fn, fields)
    if isinstance(loader.dataset, IterableDataset) or not hasattr(loader.dataset, "__getitem__"):
        return from_stream(
            cast(Iterable[object], loader.dataset),
            rows=loader.batch_size,
            microbatches=microbatches,
            seed=seed,
            collate=collate,
        )
    shuffle = _is_shuffled(loader)
    if not shuffle and not isinstance(loader.sampler, SequentialSampler):
        raise FieldError("loader.sampler", description(loader.sampler), SAMPLER)
    source = from_dataset(
        cast(Any, loader.dataset),
        rows=loader.batch_size,
        microbatches=microbatches,
        seed=seed,
        shuffle=shuffle,
        collate=collate,
    )
    if loader.num_workers == 0:
        return source
    ahead = loader.num_workers * (loader.prefetch_factor or 1)
    return prefetch(source, processes=loader.num_workers, ahead=ahead)


def _is_shuffled(loader: DataLoader[Any]) -> bool:
    """Return whether `loader` was made with shuffle=True."""
    own = sys.modules.get("torchdata.stateful_dataloader.sampler")  # of a StatefulDataLoader
    kinds = (RandomSampler,) if own is None else (RandomSampler, own.RandomSampler)
    if not isinstance(loader.sampler, kinds):
        return False
    sampler = cast(Any, loader.sampler)
    return not sampler.replacement and len(sampler) == len(cast(Any, loader.dataset))


def _named(collate: Callable[[list[object]], object], fields: Sequence[str] | None) -> Collate:
    """Return `collate` with a dict as its result."""

    def collate_fields(samples: list[object]) -> Mapping[str, Tensor]:
        batch = collate(samples)
        if isinstance(batch, Mapping):
            missing = [name for name in fields or () if name not in batch]
            if missing:
                what = Described(f"one without {missing}, but with {sorted(map(str, batch))}")
                raise FieldError("batch", what, "name fields that it has in fields=")
            return batch if fields is None else {name: batch[name] for name in fields}
        parts = list(batch) if isinstance(batch, tuple | list) else [batch]
        if fields is None or len(fields) != len(parts):
            what = Described(f"one of {len(parts)} parts for fields={fields}")
            raise FieldError("batch", what, NAMES)
        return dict(zip(fields, cast(list[Tensor], parts), strict=True))

    return collate_fields
