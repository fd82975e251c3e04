"""A model that calls its parts one after the other, as a list of layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, cast

from torch import Tensor, nn

from elastic.domain.errors import FieldError
from elastic.worker.contrib.weights import take_weights
from elastic.worker.contrib.whole_model import WholeModel, reset_of, values_of
from elastic.worker.model.checks import Described, check_callable, description
from elastic.worker.model.meta_modules import without_memory
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Value

MODEL = "an nn.Sequential, an nn.ModuleList, or a list of modules, each of which takes one argument"
LOSS = (
    "a function loss(output, microbatch) that returns one number, as lambda output, microbatch: "
    "nn.functional.cross_entropy(output, microbatch.fields['y'])"
)
RESET = (
    "give it a method reset_parameters() that draws initial values, or make the model with values, "
    "not on the meta device"
)
Loss = Callable[[Any, Microbatch], Tensor]


def from_sequential(
    model: nn.Sequential | nn.ModuleList | Sequence[nn.Module],
    *,
    loss: Loss,
    inputs: str = "x",
    weights: str | Path | None = None,
    seed: int = 0,
    varying: bool = False,
) -> SequentialModel:
    """Return the layers of a model that calls its parts one after the other.

    Each part with parameters begins a layer, and parts without parameters belong to the layer
    before them. Parameters of several parts that are one tensor stay one.

    Args:
        model: its parts. With values: they are the initial ones, and each worker holds the whole
            model in host memory. Made under `torch.device("meta")`: each layer gets its initial
            values from the `reset_parameters` methods of its modules, seeded by `seed` and layer.
        loss: loss(output of the last part, micro-batch) -> scalar.
        inputs: field of the micro-batch that the first part gets.
        weights: folder with initial values, under the names of nn.Sequential's parameters:
            safetensors files, or a checkpoint of torch.distributed.checkpoint.
        seed: seed of initial values.
        varying: whether shapes differ from micro-batch to micro-batch.

    Raises FieldError for a model or an argument that is not usable.
    """
    return SequentialModel(model, loss, inputs, seed, varying, weights)


class SequentialModel(WholeModel):
    """Layers of a sequence of modules, made by `from_sequential`."""

    def __init__(
        self,
        model: object,
        loss: Loss,
        inputs: str,
        seed: int,
        varying: bool,
        weights: str | Path | None,
    ) -> None:
        parts = _parts(model)
        check_callable("loss", loss, 2, LOSS)
        if not isinstance(inputs, str):
            raise FieldError("inputs", description(inputs), "the name of a field, as 'x'")
        self._loss, self._inputs = loss, inputs
        begins = [index for index, part in enumerate(parts) if _has_parameters(part)]
        if not begins:
            raise FieldError("model", Described("a model without parameters"), MODEL)
        begins[0] = 0
        self._ranges = list(zip(begins, [*begins[1:], len(parts)], strict=True))
        given = nn.ModuleList(parts)
        values = values_of(given)
        self._parts = without_memory(given).train()
        if values is None and weights is None:
            _check_initialisation(given)
        super().__init__(self._parts, seed, values=values, varying=varying)
        if weights is not None:
            take_weights(self, weights)

    @property
    def n_layers(self) -> int:
        return len(self._ranges)

    def empty_layer(self, index: int) -> nn.Module:
        first, last = self._ranges[index]
        return _Layer(
            without_memory(nn.Sequential(*self._parts[first:last])),
            self._inputs if index == 0 else None,
            self._loss if index == self.n_layers - 1 else None,
        )

    def name_of(self, layer: int, name: str) -> str:
        _, part, rest = name.split(".", 2)
        return f"{self._ranges[layer][0] + int(part)}.{rest}"

    def initialise(self, module: nn.Module) -> None:
        for part in reversed(list(module.modules())):  # a module changes its children's
            reset = reset_of(part)
            if reset is not None:
                reset()


class _Layer(nn.Module):
    """Some parts of the sequence. `inputs`: of the first layer; `loss`: of the last one."""

    def __init__(self, parts: nn.Sequential, inputs: str | None, loss: Loss | None) -> None:
        super().__init__()
        self.parts = parts
        self.__dict__.update(inputs=inputs, loss=loss)

    def forward(self, hidden: Value | None, microbatch: Microbatch) -> Value:
        inputs, loss = self.__dict__["inputs"], self.__dict__["loss"]
        value = hidden if inputs is None else self._field(inputs, microbatch)
        out = self.parts(value)
        return cast(Value, out if loss is None else loss(out, microbatch))

    @staticmethod
    def _field(name: str, microbatch: Microbatch) -> Tensor:
        if name not in microbatch.fields:
            known = ", ".join(microbatch.fields)
            raise FieldError("inputs", name, f"a field that data gives: it gives {known}")
        return microbatch.fields[name]


def _parts(model: object) -> list[nn.Module]:
    """Return the modules of a sequence. Raises FieldError for anything else."""
    ordered = isinstance(model, nn.Sequential | nn.ModuleList)
    if not ordered and (isinstance(model, nn.Module) or not isinstance(model, Iterable)):
        raise FieldError("model", description(model), MODEL)
    parts: list[nn.Module] = []
    for index, part in enumerate(cast(Iterable[object], model)):
        if not isinstance(part, nn.Module):
            raise FieldError(f"model[{index}]", description(part), "a torch.nn.Module")
        check_callable(f"model[{index}]", part.forward, 1, MODEL)
        parts.append(part)
    return parts


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _check_initialisation(model: nn.Module) -> None:
    """Raise FieldError unless each module with parameters can draw their initial values."""
    for name, part in model.named_modules():
        own = any(True for _ in part.parameters(recurse=False))
        if own and reset_of(part) is None:
            what = Described(f"a {type(part).__name__} without initial values")
            raise FieldError(f"model, module {name}", what, RESET)
