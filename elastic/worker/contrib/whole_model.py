"""Layers that are cut out of a whole model: what all such stacks have in common.

A layer is a copy of a part of the model, without memory until it is built. Its parameters get the
values of the given model, or initial values that depend on (seed, layer) alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from typing import Protocol, cast

import torch
from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, LayerSpec
from elastic.worker.model import rng as randomness
from elastic.worker.model.checks import Described, description, whole_number
from elastic.worker.model.layers import (
    LayerStack,
    TensorParallel,
    Tied,
    describe_parameters,
    layer_spec,
    with_tied_values,
)
from elastic.worker.model.meta_modules import with_memory
from elastic.worker.model.optimizer import OptimizerSpec

PLAIN = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
"""Types of numbers that stand for themselves. Others, as float8, have scales beside them."""
Values = Callable[[str], Tensor]
"""Returns the initial value of a parameter of the model, by its name there."""


class StoredValues(Protocol):
    """Values of a checkpoint, by the model's names."""

    def __call__(self, name: str) -> Tensor: ...

    def __contains__(self, name: str) -> bool: ...


def values_of(model: nn.Module) -> Values | None:
    """Return the values of a model; None if it has none, because it is on the meta device. Raises
    FieldError for a model of which a part is there."""
    found = dict(model.named_parameters(remove_duplicate=False))
    absent = [name for name, value in found.items() if value.is_meta]
    if absent and len(absent) < len(found):
        what = Described("a parameter on the meta device, while others have values")
        raise FieldError(f"model, {absent[0]}", what, "make the whole model there, or none of it")
    return None if absent else found.__getitem__


def reset_of(module: nn.Module) -> Callable[[], object] | None:
    """Return the method with which a module draws its initial values. None: it has none."""
    for name in ("reset_parameters", "_reset_parameters"):
        if callable(getattr(type(module), name, None)):
            return cast(Callable[[], object], getattr(module, name))
    return None


class WholeModel(LayerStack):
    """A stack whose layers are parts of one model. Raises FieldError for a wrong seed."""

    def __init__(
        self, model: nn.Module, seed: int, *, values: Values | None, varying: bool
    ) -> None:
        """`model`: without memory. `values`: initial values of its parameters by name; None: each
        layer makes its own."""
        self._model, self.values = model, values
        self.seed, self.varying = whole_number("seed", seed), bool(varying)
        self._empty = [self.empty_layer(index) for index in range(self.n_layers)]
        self.tied = self._find_tied()

    @property
    def tied_trained(self) -> Tied:
        return tuple(
            group
            for group in self.tied
            if self._empty[group[0][0]].get_parameter(group[0][1]).requires_grad
        )

    def take_values(self, values: StoredValues) -> None:
        """Let the layers begin with the values of a checkpoint.

        Buffers that it has get their values at once, parameters when a layer is built.

        Raises FieldError for a buffer of another shape.
        """
        self.values = values
        kept = self._model.state_dict()
        for name, buffer in self._model.named_buffers():
            if name in kept and name in values:
                if buffer.is_meta:
                    what = Described("a buffer on the meta device")
                    raise FieldError(f"model, {name}", what, "make the model on the CPU")
                self._copy(buffer, name)

    def other_names(self) -> set[str]:
        """Return the names that a checkpoint of the model may have beside `parameter_names`."""
        return {*self._model.state_dict(), *(name for name, _ in self._model.named_buffers())}

    def parameter_names(self) -> list[str]:
        """Return the model's names of all parameters; of those that are tied, the first one's."""
        copies = self._copies()
        return [
            self.name_of(index, name)
            for index, module in enumerate(self._empty)
            for name, _ in module.named_parameters()
            if (index, name) not in copies and not self.is_added(name)
        ]

    @abstractmethod
    def empty_layer(self, index: int) -> nn.Module:
        """Return layer `index` without memory."""

    @abstractmethod
    def name_of(self, layer: int, name: str) -> str:
        """Return the model's name of parameter `name` of a layer."""

    def is_added(self, name: str) -> bool:
        """Return whether a parameter is beside those of the model for which values are given."""
        return False

    @abstractmethod
    def initialise(self, module: nn.Module) -> None:
        """Give the parameters of a layer initial values from torch's default generator. Modules
        whose values it leaves out draw them themselves, if they can (`reset_of`)."""

    def left_out(self, name: str) -> Tensor | None:
        """Return the initial value of a parameter that `initialise` leaves out; None: unknown."""
        return None

    def build(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        return with_tied_values(self.tied, self._initial, index).to(device)

    def build_empty(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        return with_memory(self.empty_layer(index), device)

    def specs(
        self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        return tuple(
            layer_spec(
                module.named_parameters(),
                accumulate,
                optimizer,
                forward_s=2e-9 * (1 + sum(p.numel() for p in multiplied(module))),
            )
            for module in self._empty
        )

    def contents(self) -> tuple[str, ...]:
        return tuple(describe_parameters(module.named_parameters()) for module in self._empty)

    def _initial(self, index: int) -> nn.Module:
        """Return layer `index` with its initial values, on the CPU."""
        module = with_memory(self.empty_layer(index), torch.device("cpu"))
        if self.values is not None:
            copied = self._copies()
            with torch.no_grad():
                for name, parameter in module.named_parameters():
                    if (index, name) not in copied and not self.is_added(name):
                        self._copy(parameter, self.name_of(index, name))
            return module
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(torch.nan if parameter.is_floating_point() else 0)
            torch.manual_seed(randomness.derive_parameter_seed(self.seed, index, ""))
            self.initialise(module)
            if any(bool(p.isnan().any()) for p in module.parameters()):
                for part in reversed(list(module.modules())):  # a module changes its children's
                    reset = reset_of(part)
                    if reset is not None:
                        reset()
                self.initialise(module)
            for name, parameter in module.named_parameters():
                if parameter.isnan().any():
                    self._fill_left_out(parameter, self.name_of(index, name))
        return module

    def _copies(self) -> set[tuple[int, str]]:
        """Return (layer, name) of the parameters that get the value of one they are tied to."""
        return {copy for group in self.tied for copy in group[1:]}

    def _fill_left_out(self, parameter: Tensor, name: str) -> None:
        value = self.left_out(name)
        if value is None or value.isnan().any():
            what = Described("a parameter without an initial value")
            raise FieldError(f"model, {name}", what, "give the model with its values")
        parameter.copy_(value)

    def _copy(self, parameter: Tensor, name: str) -> None:
        """Copy the given value of `name` to a parameter or buffer. Raises FieldError if its shape
        differs, or if only one of the two has floating-point numbers."""
        assert self.values is not None
        value = self.values(name)
        if value.shape != parameter.shape:
            remedy = f"the model has {name} of shape {tuple(parameter.shape)}"
            raise FieldError("weights", description(value), remedy)
        if value.is_floating_point() and value.dtype not in PLAIN:
            remedy = f"{name} needs float32, bfloat16, float16 or float64: numbers without scales"
            raise FieldError("weights", Described(f"a tensor of {value.dtype}"), remedy)
        if value.is_floating_point() != parameter.is_floating_point():
            remedy = f"the model has {name} of type {parameter.dtype}"
            raise FieldError("weights", Described(f"a tensor of {value.dtype}"), remedy)
        with torch.no_grad():
            parameter.copy_(value)

    def _find_tied(self) -> tuple[tuple[tuple[int, str], ...], ...]:
        """Return the parameters of several layers that are one tensor of the model."""
        names: dict[int, list[str]] = {}
        for name, parameter in self._model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        owners: dict[str, tuple[int, str]] = {}
        for index, module in enumerate(self._empty):
            for name, _ in module.named_parameters():
                owners[self.name_of(index, name)] = (index, name)
        groups = []
        for same in names.values():
            found = dict(owners[name] for name in same if name in owners)
            if len(found) > 1:
                groups.append(tuple(sorted(found.items())))
        return tuple(sorted(groups))


def multiplied(module: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters that a forward pass multiplies with; an embedding only looks up."""
    tables = {id(part.weight) for part in module.modules() if isinstance(part, nn.Embedding)}
    yield from (p for p in module.parameters() if id(p) not in tables)
