"""One micro-batch, as the layers of a stage see it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import Described

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Micro-batch `index` of `step`. Every layer may read its fields."""

    step: int
    index: int
    fields: Mapping[str, Tensor]
    _shared: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """Return `make()`, which runs once for all layers of a stage, without gradients.

        Use it for what layers derive from the fields alone, such as a mask. `make` may not draw
        random numbers: which layer asks first depends on the plan, and the results may not. Raises
        FieldError if it does.
        """
        if key not in self._shared:
            before = _random_states()
            with torch.no_grad():
                self._shared[key] = make()
            if not all(map(torch.equal, before, _random_states())):
                what = Described("a function that draws random numbers")
                remedy = "its result would depend on the plan: draw them in a layer's forward"
                raise FieldError(f"microbatch.once({key!r})", what, remedy)
        return cast(T, self._shared[key])


def _random_states() -> list[Tensor]:
    """Return the states of the default generators of this process's devices."""
    found = [torch.default_generator.get_state()]
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found.append(torch.cuda.get_rng_state())
    return found


class LazyFields(Mapping[str, Tensor]):
    """Fields that `read()` returns, read when the first of them is used."""

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._read, self._found = read, dict[str, Tensor]()
        self._is_read = False

    def _fields(self) -> Mapping[str, Tensor]:
        if not self._is_read:
            self._found, self._is_read = dict(self._read()), True
        return self._found

    def __getitem__(self, name: str) -> Tensor:
        return self._fields()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._fields())

    def __len__(self) -> int:
        return len(self._fields())
