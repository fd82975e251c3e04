"""One micro-batch, as the layers of a stage see it."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import Described, description

T = TypeVar("T")
FIGURE_NAME = re.compile(r"[\w./-]{1,64}", re.ASCII)
"""Names of figures, which trackers take."""
RESERVED = ("loss", "seconds")
"""Names of what each evaluation has."""


def figure_known(name: str) -> FieldError:
    """Return the error about a figure that two layers report for one micro-batch."""
    remedy = "two layers report it: give each figure a name of its own"
    what = Described("a figure that is known already")
    return FieldError(f"microbatch.report({name!r})", what, remedy)


class _Watched:
    """Tensors shared by the layers of a stage. Notices if one is changed in place."""

    def __init__(self) -> None:
        self._known: dict[str, list[tuple[Tensor, int]]] = {}

    def add(self, name: str, value: object) -> None:
        found = [one for one in tree_leaves(value) if isinstance(one, Tensor)]
        self._known[name] = [(one, one._version) for one in found if not one.is_inference()]

    def add_all(self, fields: Mapping[str, object]) -> None:
        for name, value in fields.items():
            self.add(f"field {name!r}", value)

    def forget(self, name: str) -> None:
        """Drop the tensors of one name."""
        self._known.pop(name, None)

    def mark(self) -> None:
        """Forget all changes up to now."""
        for name, marks in self._known.items():
            self._known[name] = [(one, one._version) for one, _ in marks]

    def changed(self) -> str | None:
        """Return the name of a changed tensor; None: none has changed since `mark` and `add`."""
        for name, marks in self._known.items():
            if any(one._version != version for one, version in marks):
                return name
        return None


@dataclass(frozen=True, slots=True)
class Microbatch:
    """Micro-batch `index` of `step`. Every layer may read its fields.

    In an evaluation, `step` is the number of steps before it.
    """

    step: int
    index: int
    fields: Mapping[str, Tensor]
    figures: dict[str, Tensor | float] | None = field(
        default=None, repr=False, compare=False, kw_only=True
    )
    """Figures that layers reported; None: in training, which keeps none."""
    digest: int = field(default=0, repr=False, compare=False, kw_only=True)
    """Hash of the fields (`elastic.worker.datasets.data_source.digest_of`); 0: unknown."""
    weight: float = field(default=1.0, repr=False, compare=False, kw_only=True)
    """Weight in the mean over the step. The runtime sets it where a micro-batch is read
    (`Trainer(weight=...)`); layers do not see it."""
    _shared: dict[Hashable, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    watched: _Watched = field(default_factory=_Watched, init=False, repr=False, compare=False)
    """What no layer may change: the fields that were read, and the values of `once`."""

    def __post_init__(self) -> None:
        if isinstance(self.fields, LazyFields):
            self.fields.when_read(self.watched.add_all)
        elif isinstance(self.fields, Mapping):  # DataSource refuses anything else
            self.watched.add_all(self.fields)

    @property
    def in_evaluation(self) -> bool:
        """Whether this is a micro-batch of an evaluation, which keeps reported figures."""
        return self.figures is not None

    def report(self, name: str, value: Tensor | float) -> None:
        """Report a figure of this micro-batch, such as its accuracy, in an evaluation.

        The evaluation's figure is the mean over the micro-batches that report it, by their weights
        (`Trainer(weight=...)`). In training nothing happens; `in_evaluation` saves the computation
        there. Raises FieldError if the value is not one number, or if the micro-batch has the
        figure already.
        """
        if self.figures is None:
            return
        what = f"microbatch.report({name!r})"
        if not isinstance(name, str) or not FIGURE_NAME.fullmatch(name):
            raise FieldError(what, name, "a name of 1 to 64 letters, digits, _, -, . and /")
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number and not (isinstance(value, Tensor) and value.numel() == 1):
            raise FieldError(what, description(value), "one number, as .mean() returns")
        if name in RESERVED:
            raise FieldError(what, name, "every evaluation has it: give the figure another name")
        if name in self.figures:
            raise figure_known(name)
        # A clone, because the value may be a small view of a large tensor, which may also change.
        self.figures[name] = value.detach().clone() if isinstance(value, Tensor) else float(value)

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
            self.watched.add(_name_of(key), self._shared[key])
            if not all(map(torch.equal, before, _random_states())):
                what = Described("a function that draws random numbers")
                remedy = "its result would depend on the plan: draw them in a layer's forward"
                raise FieldError(f"microbatch.{_name_of(key)}", what, remedy)
        return cast(T, self._shared[key])

    def forget_shared(self) -> None:
        """Free the values of `once`; they are made again if a layer asks again."""
        for key in self._shared:
            self.watched.forget(_name_of(key))
        self._shared.clear()


def _name_of(key: Hashable) -> str:
    return f"once({key!r})"


def _random_states() -> list[Tensor]:
    """Return the states of the default generators of the CPU and of this process's device."""
    own = [torch.default_generator.get_state()]
    return own + [torch.cuda.get_rng_state(index) for index in _devices()]


class LazyFields(Mapping[str, Tensor]):
    """Fields that `read()` returns, read when the first of them is used.

    The default generators stay as they are: a layer's random numbers may not depend on whether it
    is the first of its stage that reads a field.
    """

    def __init__(self, read: Callable[[], Mapping[str, Tensor]]) -> None:
        self._read = read
        self._found: dict[str, Tensor] | None = None
        self._notify: Callable[[Mapping[str, Tensor]], None] | None = None

    def when_read(self, notify: Callable[[Mapping[str, Tensor]], None]) -> None:
        """Call `notify` with the fields once they are read."""
        self._notify = notify

    def read(self) -> Mapping[str, Tensor]:
        """Read the fields, unless they are read, and return them."""
        if self._found is None:
            with torch.random.fork_rng(devices=_devices()):
                self._found = dict(self._read())
            if self._notify is not None:
                self._notify(self._found)
        return self._found

    def __getitem__(self, name: str) -> Tensor:
        return self.read()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.read())

    def __len__(self) -> int:
        return len(self.read())


def _devices() -> list[int]:
    """Return the CUDA device whose generator this process uses, if there is one."""
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return [torch.cuda.current_device()]
    return []
