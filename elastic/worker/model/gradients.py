"""Accumulated gradients of one layer: one flat tensor, summed over micro-batches.

FAST sums in float32. EXACT sums in fixed point, int64 with 44 fractional bits, so that a sum does not
depend on the order of its terms, nor on how they are spread over pipelines, backups and recoveries.

    resolution   2**-44 = 5.7e-14: a float32 gradient of 2**-20 = 1e-6 or more enters without any rounding,
                 smaller ones to within 2.9e-14, as good as float32 addition itself down to 1e-7 or so
    range        |sum| < 2**19. Each accumulator refuses more than 2**13 = 8192, counted as the sum of the
                 micro-batches' largest elements, so that up to 64 of them add up without overflow

A gradient that is infinite, NaN or beyond the range raises GradientError, naming layer and parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from elastic.domain.errors import ElasticError
from elastic.domain.types import Accumulate

FRACTION_BITS = 44
SCALE = 2.0**FRACTION_BITS
LIMIT = 2.0 ** (63 - FRACTION_BITS - 6)
ALIGN_ELEMENTS = 16
"""Every parameter starts at a multiple of this: 64 bytes or more in float32 and int64."""
CHUNK_ELEMENTS = 32768
"""CPU work goes in pieces that stay in the cache and that torch never splits over threads."""
DTYPES = {Accumulate.FAST: torch.float32, Accumulate.EXACT: torch.int64}


class GradientError(ElasticError):
    """A gradient is not finite, or outgrew what the accumulator can hold."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one parameter's gradient lies in the flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Slots of one layer's parameters, in the module's order."""

    slots: tuple[Slot, ...]
    numel: int

    @staticmethod
    def of(parameters: Iterable[tuple[str, Tensor]]) -> FlatLayout:
        """Lay out tensors given as (name, tensor)."""
        slots, offset = [], 0
        for name, tensor in parameters:
            slots.append(Slot(name, tuple(tensor.shape), offset, offset + tensor.numel()))
            offset += -(-tensor.numel() // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        return FlatLayout(tuple(slots), offset)

    @cached_property
    def by_name(self) -> dict[str, Slot]:
        return {slot.name: slot for slot in self.slots}

    def views(self, flat: Tensor) -> list[Tensor]:
        """Split `flat` [numel] into views in the parameters' shapes."""
        return [flat[slot.start : slot.stop].view(slot.shape) for slot in self.slots]


class Accumulator:
    """The gradient sum of one layer. `flat` is int64 (exact) or float32 (fast), padding always zero."""

    def __init__(self, layout: FlatLayout, accumulate: Accumulate, device: torch.device, label: str) -> None:
        self.layout, self.label = layout, label
        self.exact = accumulate is Accumulate.EXACT
        self.flat = torch.zeros(layout.numel, dtype=DTYPES[accumulate], device=device)
        self._parts = [self.flat[slot.start : slot.stop] for slot in layout.slots]
        self._peaks = torch.zeros(len(layout.slots), device=device)
        largest = max((slot.stop - slot.start for slot in layout.slots), default=0)
        self._chunk = CHUNK_ELEMENTS if device.type == "cpu" else max(largest, 1)

    def clear(self) -> None:
        self.flat.zero_()
        self._peaks.zero_()

    def sibling(self) -> Accumulator:
        """An empty one of the same form."""
        kind = Accumulate.EXACT if self.exact else Accumulate.FAST
        return Accumulator(self.layout, kind, self.flat.device, self.label)

    def absorb(self, other: Accumulator) -> None:
        """Add another accumulator of the same layout, with what it has used of the range."""
        self._peaks += other._peaks
        self.flat += other.flat

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Add one micro-batch's gradients, in slot order; None is zero. On the CPU bad values raise here."""
        pairs = [(i, g) for i, g in enumerate(gradients) if g is not None]
        if not pairs:
            return
        if not self.exact:
            torch._foreach_add_([self._parts[i] for i, _ in pairs], [g.reshape(-1) for _, g in pairs])
            return
        self._peaks[[i for i, _ in pairs]] += _peaks([g for _, g in pairs]).to(self._peaks)
        if self.flat.device.type == "cpu":
            self.check()
        for i, gradient in pairs:
            self._add_exact(self._parts[i], gradient.reshape(-1))

    def merge(self, other: Tensor) -> None:
        """Add another accumulator's flat tensor of the same layout."""
        if self.exact:
            tops = _peaks([other[slot.start : slot.stop] for slot in self.layout.slots])
            self._peaks += (tops.double() / SCALE).to(self._peaks)
            self.check()
        self.flat += other.to(self.flat.device)

    def check(self) -> None:
        """Raise GradientError if a gradient added since `clear` was not finite or the range is used up."""
        if not self.exact or bool((self._peaks < LIMIT).all()):
            return
        worst = next(i for i, peak in enumerate(self._peaks.tolist()) if not peak < LIMIT)
        name = self.layout.slots[worst].name
        raise GradientError(
            f"{self.label}: gradient of {name} reaches {self._peaks[worst].item():g}; "
            f"exact accumulation holds finite values up to {LIMIT:g} "
            "(lower the learning rate, scale the loss, or use --accumulate fast)"
        )

    def _add_exact(self, target: Tensor, gradient: Tensor) -> None:
        size = min(self._chunk, target.numel())
        scaled = torch.empty(size, device=target.device)
        fixed = torch.empty(size, dtype=torch.int64, device=target.device)
        for start in range(0, target.numel(), size or 1):
            piece = gradient[start : start + size]
            n = piece.numel()
            torch.mul(piece, SCALE, out=scaled[:n])
            fixed[:n].copy_(scaled[:n].round_())
            target[start : start + n] += fixed[:n]


def _peaks(tensors: Sequence[Tensor]) -> Tensor:
    """Largest magnitude in each tensor, NaN if one is in it. [len(tensors)]"""
    ends = [torch.aminmax(t) if t.numel() else (t.new_zeros(()), t.new_zeros(())) for t in tensors]
    low, high = (torch.stack(list(end)) for end in zip(*ends, strict=True))
    return torch.maximum(low.neg(), high)


def to_flat(reduced: Tensor, factor: float = 1.0) -> Tensor:
    """Return `factor` times `reduced` (flat, int64 or float32) as a new flat float32 tensor.

    Each element is converted and multiplied by itself, so the bits are always the same.
    """
    flat = torch.empty(reduced.numel(), dtype=torch.float32, device=reduced.device)
    flat.copy_(reduced)
    return flat.mul_(factor / SCALE if reduced.dtype == torch.int64 else factor)


def norm_sq(reduced: Tensor, slots: Iterable[Slot]) -> float:
    """Sum of squares over `slots` in float64, in an order that depends on the shapes alone."""
    unit = 1.0 / SCALE if reduced.dtype == torch.int64 else 1.0
    total = torch.zeros((), dtype=torch.float64, device=reduced.device)
    for slot in slots:
        step = CHUNK_ELEMENTS if reduced.device.type == "cpu" else max(slot.stop - slot.start, 1)
        for start in range(slot.start, slot.stop, step):
            total += reduced[start : min(start + step, slot.stop)].double().mul_(unit).square_().sum()
    return float(total.item())
