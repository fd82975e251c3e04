"""The script's data function, whose results are checked."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable, Mapping

import torch
import xxhash
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import Described, check_callable, description
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.state_codec import as_memory
from elastic.worker.model.values import can_have_gradient

FUNCTION = (
    "a function data(step, index) that returns a Microbatch of any step and index; "
    "from_dataset, from_stream and from_dataloader make one (docs/guide/data.md)"
)
RESULT = 'data must return Microbatch(step, index, {"x": tensor, ...})'
PURE = (
    "data must depend on step and index alone, because several nodes ask for the same micro-batch: "
    "seed a torch.Generator from both, and keep no cursor"
)


class DataSource:
    """Returns the micro-batches of the script's data function. Raises FieldError for a result that
    is not usable, and if the first one that is asked for is not the same when asked for again.

    A micro-batch with the numbers of another one causes a warning: a function that repeats an epoch
    of n steps may return those of step % n. The caller knows the true numbers.
    """

    def __init__(self, function: Callable[[int, int], Microbatch], name: str = "data") -> None:
        """`name`: what errors call the function."""
        check_callable(name, function, 2, FUNCTION)
        self._function, self._repeated, self._warned = function, False, False
        self._name = name

    def __call__(self, step: int, index: int) -> Microbatch:
        found = self._checked(step, index)
        if not self._repeated:
            self._repeated = True
            if not equal_fields(found.fields, self._checked(step, index).fields):
                what = Described("another micro-batch at the second call")
                raise FieldError(f"{self._name}({step}, {index})", what, PURE)
        return found

    def _checked(self, step: int, index: int) -> Microbatch:
        field, found = f"{self._name}({step}, {index})", self._function(step, index)
        if not isinstance(found, Microbatch):
            raise FieldError(field, description(found), RESULT)
        if not isinstance(found.fields, Mapping):
            raise FieldError(f"{field}.fields", description(found.fields), RESULT)
        for name, value in found.fields.items():
            if not callable(getattr(value, "to", None)):  # packed sequences and graphs have it too
                raise FieldError(f"{field}.fields[{name!r}]", description(value), RESULT)
        if found.weight != 1.0:
            remedy = "leave it out: Trainer(weight=...) weighs micro-batches"
            raise FieldError(f"{field}.weight", description(found.weight), remedy)
        if (found.step, found.index) != (step, index) and not self._warned:
            self._warned = True
            numbers = f"step {found.step} and index {found.index}"
            print(f"elastic: warning: {field} returned a Microbatch of {numbers}", file=sys.stderr)
        return found


def equal_fields(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    """Return whether both have the same fields, bit for bit."""
    return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)


def digest_of(index: int, fields: Mapping[str, Tensor], weight: float = 1.0, *, exact: bool) -> int:
    """Return a 64-bit hash of micro-batch `index` and its weight, which workers compare.

    It covers names, shapes and types, and the bits of whole numbers; with `exact` also the bits of
    floating-point numbers, which may differ between kinds of machines.
    """
    hasher = xxhash.xxh3_64(seed=index)
    hasher.update(struct.pack("<d", weight))
    for name in sorted(fields):
        value = fields[name]
        hasher.update(f"{name} {type(value).__name__}".encode())
        if _has_bits(value):
            hasher.update(f"{tuple(value.shape)} {value.dtype}".encode())
            if exact or not can_have_gradient(value.dtype):
                hasher.update(as_memory(_bits(value.cpu())))
    return int(hasher.intdigest())


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether both have the same bits. Objects without bits to compare, such as sparse and
    quantized tensors, count as the same."""
    if not (_has_bits(one) and _has_bits(other)):
        return type(one) is type(other)
    if (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    return torch.equal(_bits(one), _bits(other))


def _has_bits(value: object) -> bool:
    return (
        isinstance(value, Tensor)
        and value.layout == torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta)
        and type(value).__torch_dispatch__ is Tensor.__torch_dispatch__
    )


def _bits(tensor: Tensor) -> Tensor:
    plain = tensor.detach().as_subclass(Tensor).resolve_conj().resolve_neg()
    return plain.reshape(-1).contiguous().view(torch.uint8)
