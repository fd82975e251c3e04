"""Builds the lists of copies to be made of a worker's layers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from elastic.domain.types import GRADIENT, LOGS, REDUCED, STATE, UPDATE, WHOLE, Portion, StepRecord
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.replica.gradient_sum import GradientSum
from elastic.worker.replica.replica import SKIPPED, LayerReplica

RingKey = tuple[str, int, frozenset[int]]
"""(kind, layer, ledger) of a ring of slots; the ledger is empty unless the kind is a log."""


@dataclass(slots=True, eq=False)
class PendingCopy:
    """A copy that is to be made."""

    kind: str
    layer: int
    step: int
    nbytes: int
    write: Callable[[Tensor], None]
    """Writes the copy to a uint8 tensor [nbytes] in host memory."""
    microbatches: frozenset[int] = frozenset()
    losses: tuple[tuple[int, float], ...] = ()
    portion: Portion = WHOLE
    record: StepRecord | None = None
    """As `Copy.record`."""
    source: GradientSum | None = None
    """The data that `write` reads; None if no later micro-batch or update changes the data."""

    @property
    def ring(self) -> RingKey:
        """Key of the ring of slots in which this copy is written."""
        return self.kind, self.layer, self.microbatches if self.kind in LOGS else frozenset()

    @property
    def content(self) -> tuple[int, frozenset[int]]:
        return self.step, self.microbatches


def gradients(sums: Iterable[GradientSum], step: int) -> list[PendingCopy]:
    """Return the copies to be made of those `sums` that are not empty."""
    return [
        PendingCopy(
            GRADIENT,
            part.index,
            step,
            part.gradient_nbytes,
            part.write_gradient,
            frozenset(part.ledger),
            tuple(sorted(part.losses.items())),
            source=part,
        )
        for part in sums
        if part.ledger
    ]


def reduced_gradients(
    replicas: Iterable[LayerReplica], reduced: Mapping[int, Tensor], step: int
) -> list[PendingCopy]:
    """Return the copies to be made of `reduced`: layer -> flat gradient for its update."""
    copies = []
    for replica in replicas:
        source = reduced[replica.index]
        ledger = frozenset(index for part in replica.parts for index in part.ledger)
        write = partial(_copy, source)
        copies.append(PendingCopy(REDUCED, replica.index, step, source.nbytes, write, ledger))
    return copies


def skipped_updates(replicas: Iterable[LayerReplica]) -> list[PendingCopy]:
    """Return the copies that stand for updates that are left out."""
    return [
        PendingCopy(
            UPDATE,
            r.index,
            r.version,
            len(SKIPPED),
            _write_skipped,
            portion=r.portion,
            record=record_of(r, r.version),
        )
        for r in replicas
    ]


def record_of(replica: LayerReplica, step: int) -> StepRecord | None:
    """Return the record of `step` if the replica has it."""
    record = replica.record
    return record if record is not None and record.step == step else None


def updates(
    replicas: Iterable[LayerReplica], reduced: Mapping[int, Tensor], clip: float
) -> list[PendingCopy]:
    """Return the copies to be made of the inputs of the next updates.

    On a GPU the gradients in `reduced` are converted at once, because they may change before the
    copies are written. On a CPU each is converted when it is written, so that one input at a time
    is in memory.
    """
    copies = []
    for replica in replicas:
        source, size, version = reduced[replica.index], replica.update_nbytes, replica.version
        write = partial(_write_update, replica, source, clip)
        if replica.device.type == "cuda":
            write = partial(_copy, replica.update_input(source, clip))
        portion, record = replica.portion, record_of(replica, version)
        copy = PendingCopy(
            UPDATE, replica.index, version, size, write, portion=portion, record=record
        )
        copies.append(copy)
    return copies


def states(replicas: Iterable[LayerReplica]) -> list[PendingCopy]:
    return [
        PendingCopy(
            STATE,
            replica.index,
            replica.version,
            replica.state_nbytes(),
            replica.write_state,
            portion=replica.portion,
            record=record_of(replica, replica.version - 1),
            source=replica,
        )
        for replica in replicas
    ]


def _write_skipped(out: Tensor) -> None:
    out.copy_(torch.frombuffer(bytearray(SKIPPED), dtype=torch.uint8))


def _write_update(replica: LayerReplica, reduced: Tensor, clip: float, out: Tensor) -> None:
    """Write the input of the replica's next update to `out`, uint8 [nbytes] in host memory."""
    _copy(replica.update_input(reduced, clip), out)


def _copy(source: Tensor, out: Tensor) -> None:
    """Copy `source` to `out`, uint8 [nbytes] in host memory."""
    out.copy_(as_bytes(source))
