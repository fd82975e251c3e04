"""Checks that a layer's module follows the rules of `LayerStack`.

`check_module` finds what a built module shows; `LayerChecks` watches its forward passes, because
only they show what a layer returns and whether it changes its buffers.
"""

from __future__ import annotations

import sys
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parameter import is_lazy

from elastic.domain.errors import FieldError
from elastic.worker.model.checks import Described, check_callable, description
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.values import Value, can_have_gradient, parts_of

FORWARD = "its forward must accept (hidden, microbatch): derive a class from it, or wrap it in one"
LAZY = "lazy modules have no shapes yet: give their sizes, as nn.Linear(64, 64)"
IN_PLACE = "a forward pass that changes "
NOT_IN_PLACE = (
    "the layer before, or its stage, still needs it: use nn.ReLU() without inplace=True, and "
    "hidden + x instead of hidden += x"
)
NOT_SHARED = "other layers use it too: change a copy of it, made by clone()"
LOSS = "forward of the last layer must return the mean loss, one number, as .mean() does"
VALUE = (
    "forward must return the input of the next layer: a floating-point tensor, or a tuple or dict "
    "of tensors with at least one such"
)
_VIEW = "_Separate is a view"
"""In torch's message about a change of an input that is a part of a value (`separated`)."""
STATE = "a layer that moves to another node, or is exported, loses it"
CHANGED = "a value that training changes"


def layer_name(index: int, module: object) -> str:
    """Return how errors name a layer."""
    return f"layer {index} ({type(module).__name__})"


def check_module(index: int, module: object) -> None:
    """Raise FieldError if `module`, in training mode, cannot be layer `index`."""
    name = layer_name(index, module)
    if not isinstance(module, nn.Module):
        raise FieldError(f"layer {index}", description(module), "build a torch.nn.Module")
    lazy = [key for key, parameter in module.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise FieldError(f"{name}, parameter {lazy[0]}", Described("a lazy parameter"), LAZY)
    for key, parameter in module.named_parameters():
        if parameter.is_complex():
            remedy = "gradients are summed as real numbers: use torch.view_as_complex in forward"
            raise FieldError(f"{name}, parameter {key}", description(parameter), remedy)
    check_callable(name, module.forward, 2, FORWARD)
    for key, part in module.named_modules():
        if isinstance(part, _NormBase) and part.training and part.track_running_stats:
            what = Described(f"{type(part).__name__} with running averages")
            remedy = f"{STATE}: use LayerNorm or GroupNorm, or track_running_stats=False"
            raise FieldError(f"{name}, module {key}" if key else name, what, remedy)


class LayerChecks:
    """Checks the forward passes of one layer. `last`: it returns the loss."""

    def __init__(self, index: int, module: nn.Module, *, last: bool) -> None:
        self._name, self._last = layer_name(index, module), last
        self._trains = any(parameter.requires_grad for parameter in module.parameters())
        self._buffers = [
            (f"{prefix}.{key}" if prefix else key, part, key)
            for prefix, part in module.named_modules()
            for key in part._buffers
        ]
        self._frozen = [(n, p) for n, p in module.named_parameters() if not p.requires_grad]
        self._before: list[tuple[int, int]] = []
        self._versions: list[int] = []
        self._frozen_versions: list[int] = []

    def begin(self, hidden: Value | None, microbatch: Microbatch) -> None:
        """Called before each forward pass of `hidden`."""
        microbatch.watched.mark()
        self._versions = [] if hidden is None else [part._version for part in parts_of(hidden)]
        self._frozen_versions = [parameter._version for _, parameter in self._frozen]
        if self._buffers:
            self._before = self._marks()

    def translated(self, error: RuntimeError) -> Exception:
        """Return an error of the forward pass, in the runtime's words if it is one of its rules."""
        text = str(error)
        if ("leaf" in text and "in-place operation" in text) or _VIEW in text:
            return FieldError(self._name, Described(f"{IN_PLACE}its input"), NOT_IN_PLACE)
        return error

    def end(self, hidden: Value | None, microbatch: Microbatch, out: object) -> Value:
        """Return `out`, the result of a forward pass of `hidden`. Raises FieldError if it is not
        usable, or if the pass has changed a buffer that belongs to the module's state."""
        parts = self._parts(out)
        inputs = [] if hidden is None else parts_of(hidden)
        if self._versions != [part._version for part in inputs]:
            raise FieldError(self._name, Described(f"{IN_PLACE}its input"), NOT_IN_PLACE)
        shared = microbatch.watched.changed()
        if shared is not None:
            raise FieldError(self._name, Described(f"{IN_PLACE}{shared}"), NOT_SHARED)
        depends = self._trains or any(part.requires_grad for part in inputs)
        has_graph = any(part.requires_grad for part in parts)
        if (depends or self._last) and torch.is_grad_enabled() and not has_graph:
            remedy = "it must depend on its input and parameters: leave out detach and no_grad"
            everything = "" if depends else ", and do not freeze all layers"
            what = Described("a result without gradient")
            raise FieldError(self._name, what, f"{remedy}{everything}")
        if self._buffers:
            self._check_buffers()
        for (name, parameter), version in zip(self._frozen, self._frozen_versions, strict=True):
            if parameter._version != version:
                field, what = f"{self._name}, parameter {name}", Described(CHANGED)
                remedy = "it is frozen, and only parameters that the optimizer updates may change"
                raise FieldError(field, what, remedy)
        return cast(Value, out)

    def _parts(self, out: object) -> list[Tensor]:
        """Return the tensors of a result. Raises FieldError if it is not a value, or no loss."""
        if self._last:
            if not isinstance(out, Tensor) or out.numel() != 1 or not can_have_gradient(out.dtype):
                raise FieldError(self._name, description(out), LOSS)
            return [out]
        if isinstance(out, dict):
            named = {f"[{key!r}]": part for key, part in out.items()}
            if not all(isinstance(key, str) for key in out):
                raise FieldError(self._name, description(out), f"{VALUE}; keys are texts")
        elif isinstance(out, tuple) and not hasattr(out, "_fields"):
            named = {f"[{index}]": part for index, part in enumerate(out)}
        else:
            named = {"": out}
        for place, part in named.items():
            if not isinstance(part, Tensor):
                what = f"{self._name}, result{place}" if place else self._name
                raise FieldError(what, description(part), VALUE)
        parts = cast(list[Tensor], list(named.values()))
        if not any(can_have_gradient(part.dtype) for part in parts):
            raise FieldError(self._name, description(out), VALUE)
        return parts

    def _marks(self) -> list[tuple[int, int]]:
        """Return identity and number of changes of each buffer."""
        found = (part._buffers.get(key) for _, part, key in self._buffers)
        return [(id(buffer), 0 if buffer is None else buffer._version) for buffer in found]

    def _check_buffers(self) -> None:
        """Raise FieldError if the pass changed a buffer; warn if the module does not save it."""
        after = self._marks()
        changed = [i for i, mark in enumerate(after) if mark != self._before[i]]
        for key, part, own in (self._buffers[i] for i in changed):
            field, what = f"{self._name}, buffer {key}", Described(CHANGED)
            if own not in part._non_persistent_buffers_set:
                raise FieldError(field, what, f"{STATE}: only constant buffers are possible")
            print(f"elastic: warning: {field} is changed by training: {STATE}", file=sys.stderr)
        if changed:
            self._buffers = [one for i, one in enumerate(self._buffers) if i not in changed]
