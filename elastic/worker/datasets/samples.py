"""Puts samples together as the fields of a micro-batch, and makes random changes repeatable."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import Described, check_callable, description, whole_number
from elastic.worker.model.rng import derive_seed

Collate = Callable[[list[object]], Mapping[str, Tensor]]
COLLATE = "a function collate(samples) that returns a dict of tensors"
NAMES = "name the parts of a sample, as fields=('x', 'y')"
EQUAL = (
    "all samples of a micro-batch need one shape: pad them in collate=, or pack documents with "
    "PackedDocuments"
)
STREAM = 1 << 33
"""Used in place of a layer's index, so that samples and layers never share a seed."""


class Samples:
    """Makes the fields of a micro-batch from its samples.

    Args:
        fields: the names of a tuple's parts, or the keys of a dict that are used; None: all keys.
        collate: makes the fields instead; None: one row per sample.
        seed: seed of random numbers that a dataset or `collate` draws.

    Raises FieldError for an argument that is not usable.
    """

    def __init__(self, fields: Sequence[str] | None, collate: Collate | None, seed: int) -> None:
        if isinstance(fields, str):
            raise FieldError("fields", fields, "a list of names, as fields=('x', 'y')")
        if collate is not None:
            check_callable("collate", collate, 1, COLLATE)
        self._names = None if fields is None else tuple(fields)
        self._collate, self.seed = collate, whole_number("seed", seed)

    def seed_of(self, step: int, index: int, row: int) -> int:
        """Return the seed for sample `row` of a micro-batch; row -1: for the whole."""
        return derive_seed(self.seed, step, index, STREAM, 1 + row)

    def fields(self, samples: list[object], step: int, index: int) -> Mapping[str, Tensor]:
        """Return the fields of micro-batch `index` of `step`. Raises FieldError."""
        if self._collate is None:
            return stack_samples(samples, self._names)
        with OwnRandom(self.seed_of(step, index, -1)):
            found = self._collate([copy.copy(sample) for sample in samples])
        if not isinstance(found, Mapping):
            raise FieldError("collate(samples)", description(found), COLLATE)
        return found


def stack_samples(samples: Sequence[object], names: Sequence[str] | None) -> dict[str, Tensor]:
    """Return a tensor per field, with one row per sample.

    Samples are dicts, tuples or single values. Values are tensors, arrays, numbers, or lists of
    numbers; numbers with a fraction become torch's default type. `names` as in `Samples`. Raises
    FieldError for samples that do not fit.
    """
    named = [_named(sample, names) for sample in samples]
    keys = named[0].keys()
    for other in named:
        if other.keys() != keys:
            what = Described(f"one with {sorted(keys)} and one with {sorted(other)}")
            raise FieldError("samples of a micro-batch", what, "give all samples the same fields")
    return {name: _stacked(name, [sample[name] for sample in named]) for name in keys}


def _named(sample: object, names: Sequence[str] | None) -> dict[str, object]:
    if isinstance(sample, Mapping):
        missing = [name for name in names or () if name not in sample]
        if missing:
            what = Described(f"one without {missing}, but with {sorted(map(str, sample))}")
            raise FieldError("sample", what, "name fields that it has in fields=")
        return {name: sample[name] for name in (sample if names is None else names)}
    if names is None:
        raise FieldError("fields", None, NAMES)
    parts = sample if isinstance(sample, tuple | list) else (sample,)
    if len(parts) != len(names):
        what = Described(f"one of {len(parts)} parts for the fields {list(names)}")
        raise FieldError("sample", what, NAMES)
    return dict(zip(names, parts, strict=True))


def _stacked(name: str, values: list[object]) -> Tensor:
    tensors = []
    for value in values:
        try:
            tensors.append(torch.as_tensor(value))
        except (TypeError, ValueError, RuntimeError) as error:
            remedy = "convert it to numbers in the dataset, or leave it out of fields="
            raise FieldError(
                f"sample[{name!r}]", description(value), f"{remedy}: {error}"
            ) from None
    shapes = {tuple(tensor.shape) for tensor in tensors}
    if len(shapes) > 1:
        what = Described(f"shapes {', '.join(map(str, sorted(shapes)[:3]))}")
        raise FieldError(f"sample[{name!r}]", what, EQUAL)
    return torch.stack(tensors)


def check_index(index: int, microbatches: int) -> None:
    """Raise FieldError if a step has no micro-batch `index`."""
    if index >= microbatches:
        what = Described(f"{microbatches}, but micro-batch {index} is asked for")
        raise FieldError("microbatches", what, "give the source the number that Trainer gets")


class OwnRandom:
    """Random numbers of Python, NumPy and torch for a block, apart from those of the process.

    They begin with `seed`, and go on in the next block where they were. After a block the
    generators of the process are as before.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._own: _States | None = None

    def __enter__(self) -> None:
        self._outer = _states()
        if self._own is None:
            reseed(self._seed)
        else:
            _restore(self._own)

    def __exit__(self, *error: object) -> None:
        self._own = _states()
        _restore(self._outer)


_States = tuple[tuple[Any, ...], Any, Tensor]


def _states() -> _States:
    return random.getstate(), np.random.get_state(), torch.default_generator.get_state()


def _restore(states: _States) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.default_generator.set_state(states[2])


def reseed(seed: int) -> None:
    """Seed Python, NumPy and torch."""
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
    torch.default_generator.manual_seed(seed)
