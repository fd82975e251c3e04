"""A gradient sum with its ledger: of a layer under `reduce`, beside the one that the layer itself adds to."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from elastic.worker.model.gradients import Accumulator
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.replica.publishing import Waiting


@dataclass(slots=True)
class Part:
    """Gradients of the micro-batches in `ledger`, with the losses of those that ran through the last layer."""

    index: int
    """The layer."""
    accumulator: Accumulator
    ledger: set[int] = field(default_factory=set)
    losses: dict[int, float] = field(default_factory=dict)
    copying: Waiting | None = None

    @property
    def gradient(self) -> Tensor:
        """Flat, int64 fixed point (exact) or float32 (fast)."""
        return self.accumulator.flat

    @property
    def gradient_nbytes(self) -> int:
        return self.gradient.nbytes

    def write_gradient(self, out: Tensor) -> None:
        """Copy the gradient to `out`, uint8 [gradient_nbytes] in host memory."""
        self.accumulator.check()
        out.copy_(as_bytes(self.gradient))

    def add(self, total: Tensor, ledger: set[int], losses: Mapping[int, float]) -> None:
        """Sum in a flat gradient of micro-batches that are not in the ledger yet."""
        self.settle()
        self.accumulator.merge(total)
        self.ledger |= ledger
        self.losses.update(losses)

    def settle(self) -> None:
        """Wait for a copy that is being written: the sum is about to change."""
        copying, self.copying = self.copying, None
        if copying is not None:
            copying.wait()

    def clear(self) -> None:
        self.settle()
        self.accumulator.clear()
        self.ledger.clear()
        self.losses.clear()
