"""Modules whose parameters have no memory, and how they get some.

A model is built once with its parameters on torch's meta device, and keeps its buffers, which are
small and often computed. Each layer is a copy of a part of it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.overrides import TorchFunctionMode

M = TypeVar("M", bound=nn.Module)
MAX_KEPT_NUMEL = 1 << 16
"""Largest parameter whose value is kept when its memory is taken away."""


class _MarkEmpty(TorchFunctionMode):
    """Fills small new tensors that have arbitrary values with NaN, so that none passes for one."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in _ARBITRARY and out.numel() <= MAX_KEPT_NUMEL and out.is_floating_point():
            out.fill_(torch.nan)
        return out


_ARBITRARY = (torch.empty, torch.empty_like, torch.empty_strided, Tensor.new_empty)


class RegisteredValues:
    """Values with which modules registered their small parameters; NaN where they gave none."""

    def __init__(self) -> None:
        self._values: dict[int, tuple[Parameter, Tensor]] = {}

    def keep(self, empty: Parameter, value: Tensor) -> None:
        if value.numel() <= MAX_KEPT_NUMEL:
            self._values[id(empty)] = empty, value.detach()

    def of(self, model: nn.Module) -> dict[str, Tensor]:
        """Return the values by the names of the parameters in `model`."""
        named = model.named_parameters(remove_duplicate=False)
        return {name: self._values[id(p)][1] for name, p in named if id(p) in self._values}


@contextmanager
def parameters_on_meta() -> Iterator[RegisteredValues]:
    """Inside the block, new modules keep their parameters on the meta device."""
    register, known = nn.Module.register_parameter, RegisteredValues()

    def register_on_meta(module: nn.Module, name: str, parameter: Parameter | None) -> None:
        register(module, name, parameter)
        if parameter is not None and not parameter.is_meta:
            empty = module._parameters[name] = on(parameter, "meta")
            known.keep(empty, parameter)

    setattr(nn.Module, "register_parameter", register_on_meta)  # noqa: B010 - a method, for mypy
    try:
        with _MarkEmpty():
            yield known
    finally:
        setattr(nn.Module, "register_parameter", register)  # noqa: B010


def on(parameter: Parameter, device: torch.device | str) -> Parameter:
    """Return a parameter like `parameter`, with arbitrary values on `device`."""
    made = torch.empty_like(parameter, device=device)
    return Parameter(made, requires_grad=parameter.requires_grad)


def without_memory(module: M) -> M:
    """Return a copy of `module` whose parameters are on the meta device."""
    known = {id(p): on(p, "meta") for p in module.parameters()}
    return copy.deepcopy(module, dict(known))


def with_memory(module: M, device: torch.device) -> M:
    """Give the parameters of `module` memory with arbitrary values on `device`, where its buffers
    go too; return `module`. Parameters that are one tensor stay one."""
    made: dict[int, Parameter] = {}
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None:
                fresh = made.get(id(parameter))
                if fresh is None:
                    fresh = made[id(parameter)] = on(parameter, device)
                    made[id(fresh)] = fresh
                part._parameters[name] = fresh
        for name, buffer in part._buffers.items():
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    return module
