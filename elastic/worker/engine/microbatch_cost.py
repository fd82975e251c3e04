"""Expected cost of micro-batches of different sizes: the operations that a stage needs for them.

Products with weights need equally many operations for each token. Attention needs more per token
if the sequence is longer. So the operations per token are a constant, plus a slope for each size of
the values between layers, without that of the features. Attention is the slope of the length. The
slope of the rows is 0, and without attention so is that of the length.

Constant and slopes are fitted to counted operations, for any kind of model. The forward pass of a
few micro-batches of different sizes runs once more, and `OperationCount` adds up the operations of
its products, convolutions and attention. It does not know other kernels. Products with weights and
those between tokens are counted apart, so micro-batches of one size suffice for a first estimate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Sizes = tuple[int, ...]
"""Sizes of a value between layers without the last one, that of the features."""
MOST_COUNTED = 8
"""Largest number of micro-batches whose operations a stage counts."""
ALIKE = 1.25
"""Sizes count as alike up to this factor. Of alike micro-batches, one is counted."""
NOTHING = 1e-6
"""A smaller part of the operations is a rounding error."""


@dataclass(frozen=True, slots=True)
class TypicalSize:
    """Size of the micro-batch to which others are compared."""

    tokens: int = 0
    """0: unknown; then all micro-batches cost the same."""
    length: int = 0
    """Tokens of one sequence; 0: so few that attention costs nothing."""


UNKNOWN_SIZE = TypicalSize()


class StageCost:
    """Expected cost of a stage's micro-batches. Until it has counted, tokens alone decide."""

    def __init__(self) -> None:
        self._counted: dict[Sizes, tuple[float, float]] = {}
        """Sizes -> operations per token: with weights, between tokens."""
        self._constant, self._slopes = 0.0, np.zeros(0)
        self._most = MOST_COUNTED

    def lacks(self, sizes: Sizes) -> bool:
        """Return whether the operations of a micro-batch of these sizes should be counted."""
        full = len(self._counted) >= self._most or 0 in sizes
        return not full and not any(_alike(sizes, known) for known in self._counted)

    def add(self, sizes: Sizes, with_weights: int, between_tokens: int) -> None:
        """Add the counted operations of a micro-batch."""
        tokens = math.prod(sizes)
        self._counted[sizes] = with_weights / tokens, between_tokens / tokens
        operations = np.array(list(self._counted.values()))
        constant = operations[:, 0].mean()
        # Of all solutions the smallest one: a large size, as the length, explains more than rows.
        points = np.array([(1, *known) for known in self._counted])
        rest = np.linalg.lstsq(points, operations.sum(axis=1) - constant, rcond=None)[0]
        self._constant, self._slopes = float(constant + rest[0]), rest[1:]

    def give_up(self) -> None:
        """Count no further micro-batches."""
        self._most = 0

    def relative(self, sizes: Sizes, typical: TypicalSize) -> float:
        """Return the cost of a micro-batch of these sizes, relative to one of typical size."""
        tokens = math.prod(sizes)
        if not sizes or not tokens or not typical.tokens:
            return 1.0
        share = tokens / typical.tokens
        if len(sizes) != len(self._slopes):
            return share
        per_token = self._constant + float(self._slopes @ np.array(sizes))
        usual = self._constant + float(self._slopes.sum()) * typical.length
        return share * per_token / usual if usual > NOTHING * per_token > 0 else share


def _alike(one: Sizes, other: Sizes) -> bool:
    """Return whether two sizes are alike. Those of another number of dimensions pass for it,
    because slopes fit one number only."""
    pairs = zip(one, other, strict=False)
    return len(one) != len(other) or all(max(p) <= ALIKE * min(p) for p in pairs)


class OperationCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the floating-point operations of what runs inside the block, forward passes only.

    Attention counts all pairs of tokens. Whether a kernel skips those that a mask leaves out does
    not depend on the sizes alone: models of transformers ask for causal attention, which skips
    half of them, only where no token of a micro-batch is padding.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.with_weights = self.between_tokens = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Otherwise torch loads its compiler at the first use: 2 s of CPU time."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = getattr(func, "_overloadpacket", None)
        if packet in _WITH_WEIGHTS:
            self.with_weights += _WITH_WEIGHTS[packet](args, out)
        elif packet in _BETWEEN_TOKENS:
            self.between_tokens += _BETWEEN_TOKENS[packet](args, out)
        return out


def _product(args: Sequence[Any], out: Tensor) -> int:
    return 2 * out.numel() * int(args[0].shape[-1])


def _product_and_sum(args: Sequence[Any], out: Tensor) -> int:
    return _product(args[1:], out)


def _convolution(args: Sequence[Any], out: Tensor) -> int:
    weight: Tensor = args[1]
    return 2 * out.numel() * (weight.numel() // max(weight.shape[0], 1))


def _attention(args: Sequence[Any], out: object) -> int:
    query, key, value = args[:3]
    pairs = int(math.prod(query.shape[:-1]) * key.shape[-2])
    return 2 * pairs * int(query.shape[-1] + value.shape[-1])


_aten = torch.ops.aten
_WITH_WEIGHTS: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    _aten.mm: _product,
    _aten._grouped_mm: _product,
    _aten._scaled_mm: _product,
    _aten.addmm: _product_and_sum,
    _aten.convolution: _convolution,
}
"""Operation of torch -> its formula: (arguments, result) -> floating-point operations."""
_BETWEEN_TOKENS: dict[Any, Callable[[Sequence[Any], Any], int]] = {
    _aten.bmm: _product,
    _aten.baddbmm: _product_and_sum,
    _aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    _aten._scaled_dot_product_flash_attention: _attention,
    _aten._scaled_dot_product_efficient_attention: _attention,
    _aten._scaled_dot_product_cudnn_attention: _attention,
    _aten._scaled_dot_product_fused_attention_overrideable: _attention,
}
"""The same. Some products of batches are with weights, too; a second size shows it."""
