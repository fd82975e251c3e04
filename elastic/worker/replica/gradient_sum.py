"""A sum of micro-batch gradients together with its ledger."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field

from torch import Tensor

from elastic.worker.model.gradients import Accumulator
from elastic.worker.model.state_codec import as_bytes


@dataclass(slots=True, eq=False)
class GradientSum:
    """Gradients of one layer, summed over the micro-batches in `ledger`."""

    index: int
    """Index of the layer."""
    accumulator: Accumulator
    ledger: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    """Losses of the micro-batches in the ledger; on the last layer only."""
    copying: Future[None] | None = None
    """Background copy that reads this sum; None: none."""

    @property
    def gradient(self) -> Tensor:
        """The sum: flat, int64 fixed point (exact) or float32 (fast)."""
        return self.accumulator.flat

    @property
    def gradient_nbytes(self) -> int:
        return self.gradient.nbytes

    def write_gradient(self, out: Tensor) -> None:
        """Copy the gradient to `out`, uint8 [gradient_nbytes] in host memory."""
        out.copy_(as_bytes(self.gradient))

    def add(self, total: Tensor, ledger: set[int], losses: Mapping[int, float]) -> None:
        """Add `total`, a flat gradient over the micro-batches `ledger`, all new to this sum."""
        self.settle()
        self.accumulator.merge(total)
        self.ledger |= ledger
        self.losses.update(losses)

    def absorb(self, other: GradientSum) -> None:
        """Add another sum of the same layer, with its ledger and losses."""
        self.accumulator.merge(other.gradient)
        self.ledger |= other.ledger
        self.losses.update(other.losses)

    def settle(self) -> None:
        """Wait for the background copy; call before changing the sum. Raises the copy's error."""
        copying, self.copying = self.copying, None
        if copying is not None:
            copying.result()

    def clear(self) -> None:
        self.settle()
        self.accumulator.clear()
        self.ledger.clear()
        self.losses.clear()
