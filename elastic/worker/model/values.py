"""Values that layers hand to the next layer: a tensor, a tuple of tensors, or a dict of tensors.

A stage sends one `Message` per value: a tensor with a description. A value of one tensor is its own
message; several tensors are packed into one tensor of bytes.

Which parts have a gradient, and in which order it is summed, does not depend on where the model is
cut: a part has one if the graph of the forward pass says so, and `separated` puts into the graph
what a message between stages would do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from elastic.domain.errors import FieldError

Value = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
TENSOR, TUPLE, DICT = "tensor", "tuple", "dict"

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype)
}
SENDABLE = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8")
"""Types that every transport sends. A tensor of another type is sent as bytes."""
_ALIGNMENT = 256
"""Each part of a packed message begins at a multiple of this many bytes, as fresh CUDA memory does:
kernels are chosen by it."""


def parts_of(value: Value) -> list[Tensor]:
    """Return the tensors of `value`, in their order."""
    if isinstance(value, Tensor):
        return [value]
    return list(value.values() if isinstance(value, dict) else value)


def with_parts(value: Value, parts: Sequence[Tensor]) -> Value:
    """Return `parts` in the structure of `value`: a tensor, a tuple, or a dict with its keys."""
    if isinstance(value, Tensor):
        return parts[0]
    if isinstance(value, dict):
        return dict(zip(value, parts, strict=True))
    return tuple(parts)


def nbytes_of(value: Value) -> int:
    """Return the bytes of all tensors of `value`."""
    return sum(part.nbytes for part in parts_of(value))


def sizes_of(value: Value) -> tuple[int, ...]:
    """Return all sizes but the last of the first floating-point matrix or larger tensor of `value`:
    their product is the number of tokens, if the last dimension is that of the features. (): it has
    no such tensor."""
    for part in parts_of(value):
        if part.is_floating_point() and part.ndim > 1:
            return tuple(part.shape[:-1])
    return ()


class _Separate(torch.autograd.Function):
    """Returns its arguments as contiguous tensors. Its way back gives contiguous gradients, zeros
    for arguments that have none."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> tuple[Tensor, ...]:
        return tuple(p.view_as(p) if p.is_contiguous() else p.contiguous() for p in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return tuple(gradient.contiguous() for gradient in gradients)


def separated(value: Value) -> Value:
    """Return `value` with one operation between the layer that made it and those that use it.

    It does what a message between two stages does. Tensors and their gradients are contiguous
    behind it, because kernels may sum in another order for other strides. On the way back it sums
    the gradients of each part before it passes them on, and gives zeros for parts that nobody uses.
    """
    parts = [part if part.requires_grad else part.contiguous() for part in parts_of(value)]
    wanted = [index for index, part in enumerate(parts) if part.requires_grad]
    if not wanted:
        return with_parts(value, parts)
    made = cast(Any, _Separate).apply(*(parts[index] for index in wanted))
    for index, part in zip(wanted, made, strict=True):
        parts[index] = part
    return with_parts(value, parts)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def can_have_gradient(dtype: torch.dtype) -> bool:
    """Return whether tensors of this type can have a gradient."""
    return dtype.is_floating_point or dtype.is_complex


@dataclass(frozen=True, slots=True)
class PartSpec:
    """Type and shape of one tensor of a value."""

    dtype: str
    shape: tuple[int, ...]
    name: str = ""
    """Key in a dict."""
    gradient: bool = False
    """Whether the way back carries its gradient: the graph of the forward pass leads to it."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise FieldError("dtype", self.dtype, "a type of torch")
        if min(self.shape, default=0) < 0:
            raise FieldError("shape", self.shape, "sizes from 0 up")

    @property
    def torch_dtype(self) -> torch.dtype:
        return DTYPES[self.dtype]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.torch_dtype.itemsize


@dataclass(frozen=True, slots=True)
class ValueSpec:
    """Description of a value. Raises FieldError if it describes none."""

    kind: str
    """TENSOR, TUPLE or DICT."""
    parts: tuple[PartSpec, ...]

    def __post_init__(self) -> None:
        if self.kind not in (TENSOR, TUPLE, DICT):
            raise FieldError("kind", self.kind, f"{TENSOR}, {TUPLE} or {DICT}")
        if self.kind == TENSOR and len(self.parts) != 1:
            raise FieldError("parts", len(self.parts), "a tensor is one part")

    @classmethod
    def of(cls, value: Value) -> ValueSpec:
        found = parts_of(value)
        names = list(value) if isinstance(value, dict) else [""] * len(found)
        parts = tuple(
            PartSpec(_name_of(part.dtype), tuple(part.shape), name, part.requires_grad)
            for name, part in zip(names, found, strict=True)
        )
        kind = TENSOR if isinstance(value, Tensor) else DICT if isinstance(value, dict) else TUPLE
        return cls(kind, parts)

    def describe(self) -> str:
        """Return types and shapes as a text for people."""
        return ", ".join(
            f"{f'{part.name} ' if part.name else ''}{part.dtype} {list(part.shape)}"
            for part in self.parts
        )

    @property
    def is_packed(self) -> bool:
        """Whether the message is a tensor of bytes, not the value's only tensor itself."""
        return self.kind != TENSOR or self.parts[0].dtype not in SENDABLE

    @property
    def message(self) -> tuple[torch.dtype, tuple[int, ...]]:
        """Type and shape of the tensor that is sent."""
        if self.is_packed:
            return torch.uint8, (self._size(),)
        return self.parts[0].torch_dtype, self.parts[0].shape

    def pack(self, value: Value, device: torch.device) -> Tensor:
        """Return the tensor that is sent for `value`, which is on `device`."""
        if isinstance(value, Tensor) and not self.is_packed:
            return value.detach().contiguous()
        parts, offsets = parts_of(value), self._offsets()
        out = torch.empty(self._size(), dtype=torch.uint8, device=device)
        for spec, part, begin in zip(self.parts, parts, offsets, strict=False):
            view = out[begin : begin + spec.nbytes].view(spec.torch_dtype).view(spec.shape)
            view.copy_(part.detach())
        for spec, begin, end in zip(self.parts, offsets, offsets[1:], strict=False):
            out[begin + spec.nbytes : end].zero_()
        return out if parts else out.zero_()

    def unpack(self, message: Tensor) -> Value:
        """Return the value in `message`, as views of it."""
        if not self.is_packed:
            return message
        tensors = [
            message[begin : begin + spec.nbytes].view(spec.torch_dtype).view(spec.shape)
            for spec, begin in zip(self.parts, self._offsets(), strict=False)
        ]
        if self.kind == DICT:
            return {spec.name: one for spec, one in zip(self.parts, tensors, strict=True)}
        return tensors[0] if self.kind == TENSOR else tuple(tensors)

    def _size(self) -> int:
        """Return the bytes of a packed message; no message is empty."""
        return max(self._offsets()[-1], 1)

    def _offsets(self) -> list[int]:
        """Return where each part begins, and the end."""
        found = [0]
        for part in self.parts:
            found.append(found[-1] + -(-part.nbytes // _ALIGNMENT) * _ALIGNMENT)
        return found


@dataclass(frozen=True, slots=True)
class Message:
    """A value as it is sent, without its graph."""

    spec: ValueSpec
    tensor: Tensor
    """Tensor of the type and shape `spec.message`."""

    @classmethod
    def of(cls, value: Value, device: torch.device | None = None) -> Message:
        """Pack `value`. Its tensor is on `device`; None: where the first part of the value is."""
        spec, parts = ValueSpec.of(value), parts_of(value)
        if device is None:
            device = parts[0].device if parts else torch.device("cpu")
        return cls(spec, spec.pack(value, device))

    def to(self, device: torch.device) -> Message:
        return Message(self.spec, self.tensor.to(device))

    def value(self) -> Value:
        """Return the value, as views of the message."""
        return self.spec.unpack(self.tensor)

    def leaves(self) -> Value:
        """Return the value for a forward pass: the parts that need a gradient require it."""
        value = self.value()
        parts = parts_of(value)
        for spec, part in zip(self.spec.parts, parts, strict=True):
            part.requires_grad_(spec.gradient)
        return value
