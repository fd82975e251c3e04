"""The model as a list of layers, each of which can be built, placed and moved by itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from elastic.domain.errors import FieldError
from elastic.domain.types import Accumulate, LayerSpec
from elastic.worker.model import rng as randomness
from elastic.worker.model.gradients import DTYPES, FlatLayout
from elastic.worker.model.optimizer import OptimizerSpec

Tied = tuple[tuple[tuple[int, str], ...], ...]
"""Groups of (layer, parameter name) that are one tensor."""
ADAM_BYTES = 8
"""Assumed optimizer bytes per element when no optimizer is given: two float32 moments."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One micro-batch of one step. `fields` are filled on the first and the last stage only."""

    step: int
    index: int
    fields: Mapping[str, Tensor]


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This worker's place in its tensor-parallel group."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None


class LayerStack(ABC):
    """All layers of a model.

    A layer's module has `forward(hidden: Tensor | None, microbatch: Microbatch) -> Tensor`. Layer 0 gets None
    and reads the micro-batch's fields; the last layer returns the scalar mean loss. A parameter that TP ranks
    split carries its dimension as `partition_dim`. Modules keep no state but parameters and constant buffers.
    """

    seed: int
    tied: Tied = ()
    """Each owner of a tied tensor holds a copy, initialised equal; gradients are summed before the update."""

    @property
    @abstractmethod
    def n_layers(self) -> int: ...

    @abstractmethod
    def build(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        """Build layer `index` with its initial values, which depend on (seed, index) alone."""

    def tensor_parallel(self, rank: int, size: int, store_path: str, device: torch.device) -> TensorParallel:
        """Form this worker's tensor-parallel group, once a process. `store_path`: a file of this group's own.

        Stacks whose layers know no tensor parallelism run with size 1 only (FieldError).
        """
        if size != 1:
            raise FieldError("tp", size, "these layers run without tensor parallelism; use 1")
        return TensorParallel()

    def release(self) -> None:  # noqa: B027 - most stacks make nothing
        """Give up what `tensor_parallel` made; nothing is built after it."""

    def build_empty(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        """Build layer `index` as fast as can be; its parameters may hold anything."""
        return self.build(index, device, tp)

    @abstractmethod
    def specs(self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None) -> tuple[LayerSpec, ...]:
        """Describe all layers to the planner, without allocating weights. Times are relative figures."""


class Shape(NamedTuple):
    """A parameter that is not there."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype


def layer_spec(
    parameters: Sequence[Shape],
    accumulate: Accumulate,
    optimizer: OptimizerSpec | None,
    *,
    forward_s: float,
    activation_bytes: int = 0,
    output_bytes: int = 0,
) -> LayerSpec:
    """Describe a layer of these parameters; a backward pass is taken as two forward passes."""
    layout = FlatLayout.of((p.name, torch.empty(p.shape, dtype=p.dtype, device="meta")) for p in parameters)
    elements: dict[torch.dtype, int] = {}
    for slot, parameter in zip(layout.slots, parameters, strict=True):
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + slot.stop - slot.start
    return LayerSpec(
        param_bytes=sum(n * dtype.itemsize for dtype, n in elements.items()),
        state_bytes=sum(
            n * (optimizer.state_bytes_per_element(dtype) if optimizer else ADAM_BYTES)
            for dtype, n in elements.items()
        ),
        gradient_bytes=layout.numel * DTYPES[accumulate].itemsize,
        forward_s=forward_s,
        backward_s=2 * forward_s,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
    )


class ListStack(LayerStack):
    """A user's own layers, one builder each. Builders draw initial values from torch's default generator.

    Without tensor parallelism inside; every builder must build the same module each time it is called.
    """

    def __init__(self, builders: Sequence[Callable[[], nn.Module]], seed: int, tied: Tied = ()) -> None:
        if not builders:
            raise FieldError("builders", builders, "at least one layer is needed")
        self.builders, self.seed, self.tied = tuple(builders), seed, tied
        for layer, name in (owner for group in tied for owner in group):
            if not 0 <= layer < len(builders) or name not in dict(self._meta(layer).named_parameters()):
                raise FieldError("tied", (layer, name), "no such layer or parameter")

    @property
    def n_layers(self) -> int:
        return len(self.builders)

    def build(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        if tp.size != 1:
            raise FieldError("tp", tp.size, "layers given as a list run without tensor parallelism; use 1")
        module = self._initial(index)
        for group in self.tied:
            first = group[0][0]
            for name in (name for layer, name in group[1:] if layer == index):
                source = self._initial(first).get_parameter(group[0][1])
                with torch.no_grad():
                    module.get_parameter(name).copy_(source)
        return module.to(device)

    def build_empty(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        module = self._meta(index) if tp.size == 1 else None
        if module is None or _holds_constants(module):
            return self.build(index, device, tp)
        return module.to_empty(device=device)

    def specs(self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None) -> tuple[LayerSpec, ...]:
        described = []
        for index in range(self.n_layers):
            shapes = [Shape(n, tuple(p.shape), p.dtype) for n, p in self._meta(index).named_parameters()]
            work = sum(p.numel() for p in self._meta(index).parameters()) + 1
            described.append(layer_spec(shapes, accumulate, optimizer, forward_s=2e-9 * work))
        return tuple(described)

    def _initial(self, index: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.named(self.seed, index, ""))
            return self.builders[index]()

    def _meta(self, index: int) -> nn.Module:
        with torch.device("meta"):
            return self.builders[index]()


def _holds_constants(module: nn.Module) -> bool:
    """Whether it has buffers or plain tensor attributes, which only the real builder can fill."""
    plain = (value for part in module.modules() for value in vars(part).values())
    return any(True for _ in module.buffers()) or any(isinstance(value, Tensor) for value in plain)
