"""The model as a list of layers that can be built, placed and moved one by one."""

from __future__ import annotations

import hashlib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from elastic.domain.errors import FieldError, describe, with_place
from elastic.domain.types import Accumulate, LayerSpec
from elastic.worker.model import rng as randomness
from elastic.worker.model.checks import Described, check_callable, description, whole_number
from elastic.worker.model.gradients import DTYPES, FlatLayout, flat_numel
from elastic.worker.model.layer_checks import check_module
from elastic.worker.model.meta_modules import on
from elastic.worker.model.optimizer import OptimizerSpec

# torch finds the functions that make tensors at the first use of a device context. transformers
# replaces some of them for a while, and those would then be left out.
with torch.device("meta"):
    torch.empty(0)

P = TypeVar("P", bound=Tensor)
Tied = tuple[tuple[tuple[int, str], ...], ...]
"""Groups of (layer, parameter name) that are one tensor."""
BUILDER = "each entry must be a function that builds the layer anew, as lambda: Layer(64, 64)"
TIED = "groups of (layer, parameter name), as (((0, 'weight'), (3, 'weight')),)"
_ON_META = re.compile(r"\bmeta (tensor|device)|\bdevice meta|\bdevices, .*\bmeta\b", re.IGNORECASE)
"""What torch says about an operation that needs the values of a tensor on the meta device."""
FROZEN = "; frozen: "
"""Separates the descriptions of trained and frozen parameters."""
ADAM_BYTES = 8
"""Assumed optimizer bytes per element if no optimizer is given: two float32 moments."""


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """This worker's place in its tensor-parallel group."""

    rank: int = 0
    size: int = 1
    group: ProcessGroup | None = None


def tp_sync(tp: TensorParallel) -> Callable[[bool], bool] | None:
    """Return a function: flag -> maximum over the group. None for a group of one rank."""
    if tp.size == 1:
        return None
    device = torch.device("cpu")
    if dist.get_backend(tp.group) == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())

    def sync(flag: bool) -> bool:
        value = torch.tensor([int(flag)], device=device)
        dist.all_reduce(value, dist.ReduceOp.MAX, group=tp.group)
        return bool(value.item())

    return sync


class LayerStack(ABC):
    """All layers of a model.

    A layer's module has `forward(hidden: Value | None, microbatch: Microbatch) -> Value`, where a
    value is a tensor, a tuple or a dict of tensors. Layer 0 gets None. Every layer may read the
    fields of the micro-batch. The last layer returns the scalar mean loss. A parameter that TP
    ranks split has the split dimension as attribute `partition_dim`. Modules keep no state except
    parameters and constant buffers.
    """

    seed: int
    varying: bool = False
    """Whether the shapes of the values between layers differ from micro-batch to micro-batch."""
    tied: Tied = ()
    """Groups of parameters that are one tensor. Each owner holds an equal copy of the tensor, and
    the owners' gradients are summed before the update."""

    @property
    @abstractmethod
    def n_layers(self) -> int: ...

    @property
    def tied_trained(self) -> Tied:
        """The groups of `tied` whose tensor is trained. Frozen ones need no sum of gradients."""
        return self.tied

    @abstractmethod
    def build(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        """Build layer `index`. Its initial values depend on nothing but (seed, index)."""

    def tensor_parallel(
        self, rank: int, size: int, store_path: str, device: torch.device
    ) -> TensorParallel:
        """Form this worker's tensor-parallel group. Called once per process.

        `store_path` names a file that only this group uses. Raises FieldError if the layers do not
        support the size; this default supports 1 only.
        """
        if size != 1:
            raise FieldError("tp", size, "these layers run without tensor parallelism; use 1")
        return TensorParallel()

    def release(self) -> None:  # noqa: B027 - most stacks have nothing to release
        """Release the resources of `tensor_parallel`; nothing is built afterwards."""

    def build_empty(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        """Build layer `index` as fast as possible, with arbitrary parameter values."""
        return self.build(index, device, tp)

    @abstractmethod
    def specs(
        self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        """Describe all layers for the planner without allocating weights. Times are relative."""

    def training_flops(self, tokens: int) -> float:
        """Return the floating-point operations of the forward and backward pass of a micro-batch
        of so many tokens; 0: unknown."""
        return 0.0

    def contents(self) -> tuple[str, ...]:
        """Describe the parameters of each layer in a short text (`describe_parameters`), by which a
        checkpoint of another model is recognized; (): only the number of layers is compared."""
        return ()


def trained(parameters: Iterable[tuple[str, P]]) -> list[tuple[str, P]]:
    """Return those of the `parameters` (name, parameter) that change. The others are frozen: every
    worker builds them with their initial values, and no copy or checkpoint has them."""
    return [(name, parameter) for name, parameter in parameters if not is_frozen(parameter)]


def is_frozen(parameter: Tensor) -> bool:
    """Return whether training leaves a parameter as it is. A plain tensor that describes one, as
    those on the meta device, does not tell, and counts as trained."""
    return isinstance(parameter, nn.Parameter) and not parameter.requires_grad


def describe_parameters(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return number, elements and types of a layer's `parameters`, and a hash of their names and
    shapes. Parameters that TP ranks split must be whole."""
    named = list(parameters)
    changing = trained(named)
    text = _described(changing)
    if len(changing) < len(named):
        text += f"{FROZEN}{_described(one for one in named if is_frozen(one[1]))}"
    return text


def _described(parameters: Iterable[tuple[str, Tensor]]) -> str:
    rows = sorted(
        (name, str(p.dtype).removeprefix("torch."), tuple(p.shape)) for name, p in parameters
    )
    elements: dict[str, int] = {}
    for _, dtype, shape in rows:
        elements[dtype] = elements.get(dtype, 0) + math.prod(shape)
    sizes = " and ".join(f"{n:,} {dtype} elements" for dtype, n in sorted(elements.items()))
    digest = hashlib.sha256(repr(rows).encode()).hexdigest()[:8]
    return f"{len(rows)} parameters of {sizes or 'no elements'} ({digest})"


def layer_spec(
    parameters: Iterable[tuple[str, Tensor]],
    accumulate: Accumulate,
    optimizer: OptimizerSpec | None,
    *,
    forward_s: float,
    activation_bytes: int = 0,
    output_bytes: int = 0,
) -> LayerSpec:
    """Return the spec of a layer with `parameters`: (name, parameter on the meta device).

    A backward pass counts as two forward passes, or as one for frozen parameters.
    """
    named = list(parameters)
    changing = trained(named)
    elements: dict[torch.dtype, int] = {}
    for _, parameter in changing:
        elements[parameter.dtype] = elements.get(parameter.dtype, 0) + parameter.numel()
    whole, count = (sum(p.numel() for _, p in some) for some in (named, changing))
    nbytes, changing_bytes = (
        sum(p.numel() * p.dtype.itemsize for _, p in some) for some in (named, changing)
    )
    return LayerSpec(
        param_bytes=changing_bytes,
        state_bytes=sum(
            n * (optimizer.state_bytes_per_element(dtype) if optimizer else ADAM_BYTES)
            for dtype, n in elements.items()
        ),
        gradient_bytes=flat_numel(FlatLayout.of(changing)) * DTYPES[accumulate].itemsize,
        forward_s=forward_s,
        backward_s=(1 + (count / whole if whole else 1)) * forward_s,
        activation_bytes=activation_bytes,
        output_bytes=output_bytes,
        frozen_bytes=nbytes - changing_bytes,
    )


def with_tied_values(tied: Tied, initial: Callable[[int], nn.Module], index: int) -> nn.Module:
    """Return `initial(index)`, where tied parameters have the values of their first owner."""
    module = initial(index)
    for (first, first_name), *others in tied:
        for name in (name for layer, name in others if layer == index):
            with torch.no_grad():
                source = initial(first).get_parameter(first_name)
                module.get_parameter(name).copy_(source)
    return module


class ListStack(LayerStack):
    """The user's own layers, one builder function per layer, without tensor parallelism.

    Builders draw initial values from torch's default generator. A builder must build a new, equal
    module on each call, also on the meta device. Raises FieldError for an entry that is no builder
    and for a wrong `tied`.
    """

    def __init__(
        self,
        builders: Sequence[Callable[[], nn.Module]],
        seed: int,
        tied: Tied = (),
        *,
        varying: bool = False,
    ) -> None:
        if isinstance(builders, nn.Module) or not isinstance(builders, Iterable):
            raise FieldError("builders", description(builders), f"a list of builders: {BUILDER}")
        self.builders = tuple(builders)
        if not self.builders:
            raise FieldError("builders", builders, "at least one layer is needed")
        for index, builder in enumerate(self.builders):
            if isinstance(builder, nn.Module):
                raise FieldError(f"builders[{index}]", description(builder), BUILDER)
            check_callable(f"builders[{index}]", builder, 0, BUILDER)
        self.seed, self.varying = whole_number("seed", seed), bool(varying)
        self._described: dict[int, list[tuple[str, nn.Parameter]]] = {}
        self.tied = tied
        self._check_tied()

    @property
    def n_layers(self) -> int:
        return len(self.builders)

    @property
    def tied_trained(self) -> Tied:
        return tuple(
            group
            for group in self.tied
            if dict(self._parameters(group[0][0]))[group[0][1]].requires_grad
        )

    def build(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        return with_tied_values(self.tied, self._initial, index).to(device)

    def build_empty(self, index: int, device: torch.device, tp: TensorParallel) -> nn.Module:
        module = self._on_meta(index)
        if _holds_constants(module):
            return self.build(index, device, tp)
        return module.to_empty(device=device)

    def specs(
        self, accumulate: Accumulate, optimizer: OptimizerSpec | None = None
    ) -> tuple[LayerSpec, ...]:
        described = []
        for index in range(self.n_layers):
            parameters = self._parameters(index)
            forward_s = 2e-9 * (sum(p.numel() for _, p in parameters) + 1)
            described.append(layer_spec(parameters, accumulate, optimizer, forward_s=forward_s))
        return tuple(described)

    def contents(self) -> tuple[str, ...]:
        return tuple(describe_parameters(self._parameters(index)) for index in range(self.n_layers))

    def _check_tied(self) -> None:
        """Raise FieldError unless each group of `tied` names equal parameters of these layers."""
        groups = self.tied if isinstance(self.tied, Sequence) else None
        if groups is None or not all(_is_tied_group(group) for group in groups):
            raise FieldError("tied", self.tied, TIED)
        for group in groups:
            shapes, frozen = set(), set()
            for layer, name in group:
                known = dict(self._parameters(layer)) if 0 <= layer < self.n_layers else {}
                if name not in known:
                    raise FieldError("tied", (layer, name), "no such layer or parameter")
                shapes.add((tuple(known[name].shape), known[name].dtype))
                frozen.add(not known[name].requires_grad)
            if len(frozen) > 1:
                what = Described("a parameter that is frozen in one layer and trained in another")
                raise FieldError("tied", what, "tied parameters are one tensor: freeze all or none")
            if len(shapes) > 1:
                found = " and ".join(sorted(str(shape) for shape, _ in shapes))
                remedy = "tied parameters need the same shape and type"
                raise FieldError("tied", group, f"{remedy}: these have the shapes {found}")

    def _parameters(self, index: int) -> list[tuple[str, nn.Parameter]]:
        """Return names and parameters of layer `index` on the meta device, without values. Raises
        FieldError if its module is not usable, or if the builder does not build an equal one."""
        if index not in self._described:
            module, again = self._on_meta(index), self._on_meta(index)
            field = f"builders[{index}]"
            check_module(index, module)
            known = {id(parameter) for parameter in module.parameters()}
            if module is again or any(id(parameter) in known for parameter in again.parameters()):
                what = "module" if module is again else "parameters"
                raise FieldError(field, Described(f"the same {what} at each call"), BUILDER)
            # A builder that copies a trained module gives real tensors: do not keep them.
            found = [(n, on(p, "meta")) for n, p in module.named_parameters()]
            if describe_parameters(found) != describe_parameters(again.named_parameters()):
                remedy = "each call must build the same parameters, because any node may call it"
                raise FieldError(field, Described("another module at the second call"), remedy)
            self._described[index] = found
        return self._described[index]

    def _initial(self, index: int) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(randomness.derive_parameter_seed(self.seed, index, ""))
            return self.builders[index]()

    def _on_meta(self, index: int) -> nn.Module:
        try:
            with torch.device("meta"):
                return self.builders[index]()
        except (RuntimeError, TypeError) as error:
            if not _ON_META.search(str(error)):
                raise
            remedy = "it also runs on the meta device, where tensors have no values: compute sizes"
            cause = with_place(describe(error), error)
            what = Described(f"a builder that reads values of tensors ({cause})")
            raise FieldError(f"builders[{index}]", what, f"{remedy} without tensors") from error


def _is_tied_group(group: object) -> bool:
    """Return whether `group` is a sequence of (layer, parameter name)."""
    return isinstance(group, Sequence) and all(
        isinstance(owner, Sequence)
        and len(owner) == 2
        and isinstance(owner[0], int)
        and isinstance(owner[1], str)
        for owner in group
    )


def _holds_constants(module: nn.Module) -> bool:
    """Return whether `module` has buffers or tensor attributes, which only the builder can fill."""
    attributes = (value for part in module.modules() for value in vars(part).values())
    return any(True for _ in module.buffers()) or any(isinstance(v, Tensor) for v in attributes)
