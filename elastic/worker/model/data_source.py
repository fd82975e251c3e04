"""The script's data function, whose results are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import Described, check_callable, description
from elastic.worker.model.layers import Microbatch

FUNCTION = (
    "a function data(step, index) that returns a Microbatch of any step and index; "
    "a DataLoader or iterator cannot: index a Dataset instead"
)
RESULT = 'data must return Microbatch(step, index, {"x": tensor, ...})'
PURE = (
    "data must depend on step and index alone, because several nodes ask for the same micro-batch: "
    "seed a torch.Generator from both, and keep no cursor"
)


class DataSource:
    """Returns the micro-batches of the script's data function. Raises FieldError for a result that
    is not usable, and if the first one that is asked for is not the same when asked for again."""

    def __init__(self, function: Callable[[int, int], Microbatch]) -> None:
        check_callable("data", function, 2, FUNCTION)
        self._function, self._repeated = function, False

    def __call__(self, step: int, index: int) -> Microbatch:
        found = self._checked(step, index)
        if not self._repeated:
            self._repeated = True
            if not _equal(found.fields, self._checked(step, index).fields):
                what = Described("another micro-batch at the second call")
                raise FieldError(f"data({step}, {index})", what, PURE)
        return found

    def _checked(self, step: int, index: int) -> Microbatch:
        field, found = f"data({step}, {index})", self._function(step, index)
        if not isinstance(found, Microbatch):
            raise FieldError(field, description(found), RESULT)
        if (found.step, found.index) != (step, index):
            what = Described(f"a Microbatch of step {found.step} and index {found.index}")
            raise FieldError(field, what, RESULT)
        if not isinstance(found.fields, Mapping):
            raise FieldError(f"{field}.fields", description(found.fields), RESULT)
        for name, tensor in found.fields.items():
            if not isinstance(tensor, Tensor):
                raise FieldError(f"{field}.fields[{name!r}]", description(tensor), RESULT)
        return found


def _equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(_same(one[name], other[name]) for name in one)


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether both have the same bits. Sparse and nested tensors count as the same."""
    if (one.dtype, one.layout) != (other.dtype, other.layout) or one.layout != torch.strided:
        return (one.dtype, one.layout) == (other.dtype, other.layout)
    if one.is_nested or one.shape != other.shape:
        return bool(one.is_nested)
    bits = (tensor.detach().reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other))
    return torch.equal(*bits)
