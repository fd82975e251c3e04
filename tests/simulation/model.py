"""The training that simulated workers do: layers whose state shows what was added, and how often.

The gradient of micro-batch i of step s in layer l is a number that only this triple has, at index
i of a vector. A sum therefore shows every micro-batch that is missing, doubled or of another step.
The state of a layer is a hash chain over the sums of all steps, so the final state shows any
difference to a run without failures.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from elastic.domain.errors import LedgerError, VaultError
from elastic.domain.state_layout import plan_layout, read_header
from elastic.domain.types import WHOLE, JobSpec, Portion, StepRecord
from elastic.worker.model.state_codec import as_memory
from elastic.worker.replica.export import params_sha256
from elastic.worker.replica.replica import SKIPPED

STATE_BYTES = 3000
"""Bytes of the parameters of a layer."""


def gradient_of(step: int, layer: int, index: int) -> int:
    return 1 + index + 100 * layer + 10_000 * step + 1_000_000_000


def whole_gradient(spec: JobSpec, step: int, layer: int) -> Tensor:
    """Return the sum over all micro-batches of a step."""
    return torch.tensor([gradient_of(step, layer, i) for i in range(spec.n_microbatches)])


def initial(layer: int) -> bytes:
    return hashlib.blake2b(f"layer {layer}".encode()).digest()


def updated(value: bytes, gradient: Tensor) -> bytes:
    return hashlib.blake2b(value + bytes(as_memory(gradient.contiguous()))).digest()


def digest_of(value: bytes) -> int:
    return int.from_bytes(value[:8], "little")


def run_of(version: int, value: bytes) -> bytes:
    """Return a state as the bytes of `elastic.domain.state_layout`."""
    row = ("param/w", "uint8", (STATE_BYTES,), -1)
    text, header, nbytes = plan_layout(version, [row], {})
    data = bytearray(nbytes)
    data[: len(text)] = text
    entry = header.tensors[0]
    repeated = (value * (STATE_BYTES // len(value) + 1))[:STATE_BYTES]
    data[entry.offset : entry.offset + entry.nbytes] = repeated
    return bytes(data)


@functools.lru_cache(maxsize=16)
def _values(spec: JobSpec, layer: int) -> tuple[bytes, ...]:
    """Return the value of a layer after each number of steps, in a run without failures."""
    values = [initial(layer)]
    for step in range(spec.n_steps):
        values.append(updated(values[-1], whole_gradient(spec, step, layer)))
    return tuple(values)


def expected_run(spec: JobSpec, step: int, layer: int) -> bytes:
    """Return the state of a layer after `step` steps, in a run without failures."""
    return run_of(step, _values(spec, layer)[step])


def expected_sha256(spec: JobSpec) -> str:
    """Return the hash of the parameters after a run without failures."""
    runs = (expected_run(spec, spec.n_steps, layer) for layer in range(spec.n_layers))
    return params_sha256([[memoryview(run)] for run in runs])


def loss_of(digest: int, index: int) -> float:
    """Return the loss of micro-batch `index` of an evaluation of the last layer with this state,
    or what another layer reports of it."""
    return float(digest % 100_003 + index)


def figure_of(layer: int) -> str:
    """Return the name of the figure that a layer reports."""
    return f"layer {layer}"


def expected_figures(spec: JobSpec, version: int) -> dict[str, float]:
    """Return the figures of the evaluation after `version` steps, in a run without failures. The
    figure of the last layer is the loss."""
    indices = range(spec.evaluation_microbatches)
    found = {}
    for layer in range(spec.n_layers):
        digest = digest_of(_values(spec, layer)[version])
        values = [loss_of(digest, index) for index in indices]
        found[figure_of(layer)] = sum(values) / len(values)
    return found


class ModelSum:
    """Interface of `elastic.worker.replica.gradient_sum.GradientSum`."""

    def __init__(self, layer: int, gradient: Tensor) -> None:
        self.index, self.gradient = layer, gradient
        self.ledger: set[int] = set()
        self.losses: dict[int, float] = {}
        self.copying: Any = None

    @property
    def gradient_nbytes(self) -> int:
        return self.gradient.nbytes

    def write_gradient(self, out: Tensor) -> None:
        out.copy_(self.gradient.view(torch.uint8))

    def clear(self) -> None:
        self.gradient.zero_()
        self.ledger.clear()
        self.losses.clear()


class ModelReplica(ModelSum):
    """Interface of `elastic.worker.replica.replica.LayerReplica`."""

    shard, tp_size, complete, common = 0, 1, True, None
    portion: Portion = WHOLE
    record: StepRecord | None = None

    def __init__(self, spec: JobSpec, layer: int, owner: str) -> None:
        super().__init__(layer, torch.zeros(spec.n_microbatches, dtype=torch.int64))
        self.spec, self.owner = spec, owner
        self.version, self.value = 0, initial(layer)
        self.device = torch.device("cpu")

    def fill_frozen(self) -> None:
        """Nothing is frozen."""

    def frozen_intact(self) -> bool:
        return True

    # ---- gradients ----

    @property
    def parts(self) -> tuple[ModelSum, ...]:
        return (self,) if self.ledger else ()

    def collect(self, index: int) -> None:
        """Add the gradient of a micro-batch."""
        self._refuse_doubled({index})
        self.gradient[index] += gradient_of(self.version, self.index, index)
        self.ledger.add(index)
        if self.index == self.spec.n_layers - 1:
            self.losses[index] = float(index)

    def add_gradient(
        self,
        data: Tensor,
        microbatches: Iterable[int],
        losses: Mapping[int, float] | Iterable[tuple[int, float]],
    ) -> None:
        added = set(microbatches)
        self._refuse_doubled(added)
        if data.numel() != self.gradient_nbytes:
            raise VaultError(f"layer {self.index}: gradient of {data.numel()} bytes")
        self.gradient += data.clone().view(torch.int64)
        self.ledger |= added
        self.losses.update(dict(losses))

    def keep(self, ledgers: Iterable[frozenset[int]]) -> None:
        if frozenset(self.ledger) not in set(ledgers):
            self.clear()

    def set_aside(self, reuse: ModelSum | None = None) -> ModelSum:
        final = ModelSum(self.index, self.gradient.clone())
        final.ledger, final.losses = set(self.ledger), dict(self.losses)
        self.clear()
        return final

    def cancel_rounds(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def _refuse_doubled(self, added: set[int]) -> None:
        if self.ledger & added:
            doubled = sorted(self.ledger & added)
            raise LedgerError(f"layer {self.index} already holds micro-batches {doubled}")

    # ---- the state ----

    def digest(self) -> int:
        return digest_of(self.value)

    def state_run(self) -> Tensor:
        data = np.frombuffer(run_of(self.version, self.value), dtype=np.uint8)
        return torch.from_numpy(data.copy())

    def state_nbytes(self) -> int:
        return len(run_of(self.version, self.value))

    def write_state(self, out: Tensor) -> None:
        out.copy_(self.state_run())

    def read_state(self, run: Tensor) -> None:
        view = as_memory(run)
        header = read_header(view)
        entry = header.tensors[0]
        self.version, self.record = header.version, None
        self.value = bytes(view[entry.offset : entry.offset + len(self.value)])
        self.clear()

    def update(self, reduced: Tensor, clip: float, lr: float) -> None:
        self.value = updated(self.value, reduced)
        self.version += 1

    def skip_update(self) -> None:
        self.version += 1

    @property
    def update_nbytes(self) -> int:
        return self.gradient.nbytes

    def update_input(self, reduced: Tensor, clip: float) -> Tensor:
        return reduced.clone()

    def apply_update(self, data: Tensor, lr: float) -> None:
        assert bytes(data[:2].numpy()) != SKIPPED
        self.update(data.clone().view(torch.int64), 1.0, lr)
