"""Accumulated gradients of one layer: one flat tensor, summed over micro-batches.

FAST sums in float32. EXACT sums in fixed point (int64 with 44 fractional bits), so that a sum does
not depend on the order of its terms, nor on their distribution over pipelines, backups and
recoveries.

    resolution   2**-44 = 5.7e-14. A float32 gradient of 2**-20 = 1e-6 or more enters without
                 rounding; smaller ones to within 2.9e-14, as good as float32 addition down to
                 about 1e-7.
    range        |sum| < 2**19. Each element of a micro-batch's gradient, which is divided by the
                 number of micro-batches and multiplied by the weight relative to the expected one,
                 must be below `exact_limit`: 2**13 = 8192, or less with more than 64 micro-batches.
                 Each micro-batch is in a sum at most once, so no sum can overflow.

Two more elements follow those of the parameters. They are added up like them, so they survive sums,
copies and recoveries:

    weight       Sum of the micro-batches' weights (`elastic.worker.datasets.weighting`), on the
                 last layer only. In fixed point with 20 fractional bits.
    spoiled      EXACT: number of micro-batches whose gradient is infinite, NaN or beyond the range
                 in this layer. A fixed-point number cannot hold it, so its values are left out.
                 Each micro-batch is judged alone, so the verdict does not depend on the plan.
                 `norm_sq` returns NaN if the number is not 0. No error is raised here: the commit
                 decides, after it has compared the replicas, because a wrong replica makes such
                 gradients too.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.domain.types import Accumulate

FRACTION_BITS = 44
SCALE = 2.0**FRACTION_BITS
RANGE_BITS = 63 - FRACTION_BITS
MIN_TERM_BITS = 6
"""The limit of one gradient leaves room for at least 2**6 = 64 terms in a sum."""
ALIGN_ELEMENTS = 16
"""Each parameter starts at a multiple of this: at least 64 bytes in float32 and int64. As many
elements follow the parameters."""
WEIGHT, SPOILED = -2, -1
"""Elements of a sum, counted from its end."""
WEIGHT_SCALE = 2.0**20
CHUNK_ELEMENTS = 32768
"""Elements per CPU operation: they stay in the cache, and torch never splits them over threads."""
DTYPES = {Accumulate.FAST: torch.float32, Accumulate.EXACT: torch.int64}


log = logging.getLogger(__name__)


def flat_numel(layout: FlatLayout) -> int:
    """Return the elements of a gradient sum: those of the parameters, weight and count."""
    return layout.numel + ALIGN_ELEMENTS


def exact_limit(n_microbatches: int, tied: Sequence[Sequence[object]] = ()) -> float:
    """Return the limit of each element of one micro-batch's gradient with EXACT.

    `tied`: the owners of each tied tensor, whose sum has a term per micro-batch and owner. The
    limit depends on the job alone, not on the plan.
    """
    n_terms = n_microbatches * max((len(group) for group in tied), default=1)
    return 2.0 ** (RANGE_BITS - max(MIN_TERM_BITS, (n_terms - 1).bit_length()))


def range_text(limit: float) -> str:
    """Return the explanation and the remedy for a gradient that exceeds `limit`."""
    remedy = "lower the learning rate, scale the loss, or use --accumulate fast"
    return f"exact accumulation holds gradients of a micro-batch below {limit:g} ({remedy})"


@dataclass(frozen=True, slots=True)
class ParameterRange:
    """Place of one parameter's gradient in the flat tensor."""

    name: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class FlatLayout:
    """Ranges of one layer's parameters, in the module's order."""

    ranges: tuple[ParameterRange, ...]
    numel: int

    @staticmethod
    def of(parameters: Iterable[tuple[str, Tensor]]) -> FlatLayout:
        """Return the layout of `parameters`: (name, tensor)."""
        ranges, offset = [], 0
        for name, tensor in parameters:
            stop = offset + tensor.numel()
            ranges.append(ParameterRange(name, tuple(tensor.shape), offset, stop))
            offset += -(-tensor.numel() // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
        return FlatLayout(tuple(ranges), offset)

    def views(self, flat: Tensor) -> list[Tensor]:
        """Return views of `flat` [numel], one per parameter, in the parameters' shapes."""
        return [flat[place.start : place.stop].view(place.shape) for place in self.ranges]


class Accumulator:
    """Gradient sum of one layer. `flat` is int64 (exact) or float32 (fast), with zero padding."""

    def __init__(
        self,
        layout: FlatLayout,
        accumulate: Accumulate,
        device: torch.device,
        label: str,
        limit: float,
    ) -> None:
        """`limit`: see `exact_limit`; FAST ignores it."""
        self.layout, self.label, self.limit, self._accumulate = layout, label, limit, accumulate
        self.exact = accumulate is Accumulate.EXACT
        self.flat = torch.zeros(flat_numel(layout), dtype=DTYPES[accumulate], device=device)
        self._parts = [self.flat[place.start : place.stop] for place in layout.ranges]
        largest = max((place.stop - place.start for place in layout.ranges), default=0)
        self._chunk = CHUNK_ELEMENTS if device.type == "cpu" else max(largest, 1)

    def clear(self) -> None:
        self.flat.zero_()

    def new_empty(self) -> Accumulator:
        """Return an empty accumulator of the same layout, type and device."""
        return Accumulator(self.layout, self._accumulate, self.flat.device, self.label, self.limit)

    def add(
        self, gradients: Sequence[Tensor | None], weight: float = 0.0, scale: float = 1.0
    ) -> None:
        """Add one micro-batch's gradients, in parameter order; None counts as zero.

        `weight`: weight of the micro-batch; 0 if this is not the last layer. `scale`: factor by
        which the gradients are too large, a power of two.
        """
        if weight:
            self.flat[WEIGHT] += round(weight * WEIGHT_SCALE) if self.exact else weight
        pairs = [(i, g) for i, g in enumerate(gradients) if g is not None]
        if not pairs:
            return
        if not self.exact:
            flat = [g.reshape(-1) for _, g in pairs]
            torch._foreach_add_([self._parts[i] for i, _ in pairs], flat, alpha=1.0 / scale)
            return
        places = [i for i, _ in pairs]
        peaks = _peaks([g for _, g in pairs]).float() / scale
        fits = (peaks < self.limit).all()  # false for NaN
        self.flat[SPOILED] += (~fits).long()
        on_cpu = self.flat.device.type == "cpu"
        if on_cpu and not fits:
            self._warn(places, peaks)
            return
        for i, gradient in pairs:
            kept = gradient if on_cpu else torch.where(fits, gradient, 0.0)
            self._add_exact(self._parts[i], kept.reshape(-1), SCALE / scale)

    def merge(self, other: Tensor) -> None:
        """Add the flat tensor of another accumulator of the same layout."""
        self.flat += other.to(self.flat.device)

    def _warn(self, places: Sequence[int], peaks: Tensor) -> None:
        """Name the parameter whose gradient is out of range, unless one is not finite."""
        reached = peaks.tolist()
        if all(math.isfinite(peak) for peak in reached):
            worst = max(range(len(reached)), key=reached.__getitem__)
            name = self.layout.ranges[places[worst]].name
            text = "%s: gradient of %s reaches %g; %s"
            log.warning(text, self.label, name, reached[worst], range_text(self.limit))

    def _add_exact(self, target: Tensor, gradient: Tensor, factor: float) -> None:
        size = min(self._chunk, target.numel())
        scaled = torch.empty(size, device=target.device)
        fixed = torch.empty(size, dtype=torch.int64, device=target.device)
        for start in range(0, target.numel(), size or 1):
            piece = gradient[start : start + size]
            n = piece.numel()
            if piece.dtype == torch.float16:
                piece = piece.float()  # its range is too small for the product
            torch.mul(piece, factor, out=scaled[:n])
            fixed[:n].copy_(scaled[:n].round_())
            target[start : start + n] += fixed[:n]


def _peaks(tensors: Sequence[Tensor]) -> Tensor:
    """Return the largest magnitude in each tensor (NaN if it contains NaN), [len(tensors)]."""
    ends = [torch.aminmax(t) if t.numel() else (t.new_zeros(()), t.new_zeros(())) for t in tensors]
    low, high = (torch.stack(list(end)) for end in zip(*ends, strict=True))
    return torch.maximum(low.neg(), high)


def to_flat(reduced: Tensor, factor: float = 1.0) -> Tensor:
    """Return `factor` times `reduced` (flat, int64 or float32) as a new flat float32 tensor.

    Each element is converted and multiplied on its own, so the bits are always the same.
    """
    flat = torch.empty(reduced.numel(), dtype=torch.float32, device=reduced.device)
    flat.copy_(reduced)
    return flat.mul_(factor / SCALE if reduced.dtype == torch.int64 else factor)


def norm_sq(reduced: Tensor, ranges: Iterable[ParameterRange]) -> float:
    """Return the float64 sum of squares over `ranges`, in an order that depends on shapes alone.

    NaN if an exact sum lacks a gradient that was not finite or out of range.
    """
    unit = 1.0 / SCALE if reduced.dtype == torch.int64 else 1.0
    total = torch.zeros((), dtype=torch.float64, device=reduced.device)
    for place in ranges:
        on_cpu = reduced.device.type == "cpu"
        size = CHUNK_ELEMENTS if on_cpu else max(place.stop - place.start, 1)
        for start in range(place.start, place.stop, size):
            chunk = reduced[start : min(start + size, place.stop)]
            total += chunk.double().mul_(unit).square_().sum()
    if reduced.dtype == torch.int64:
        total = torch.where(reduced[SPOILED] == 0, total, torch.nan)
    return float(total.item())


def weight_of(reduced: Tensor) -> float:
    """Return the weight of the micro-batches in a sum of the last layer."""
    unit = 1.0 / WEIGHT_SCALE if reduced.dtype == torch.int64 else 1.0
    return float(reduced[WEIGHT].item()) * unit
