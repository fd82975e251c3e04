"""The `log` scheme: messages between stages, kept as copies on the sender's node.

A copy has a header (int64 words as on the wire, `elastic.worker.transport.tensor_header`), padding
up to DATA_OFFSET bytes, and the tensor's bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from elastic.domain.errors import ElasticError, VaultError, VaultFull
from elastic.worker.backup.items import PendingCopy
from elastic.worker.backup.publisher import Publisher
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from elastic.worker.transport.tensor_header import MAX_DIMS, pack_header, spec_of, unpack_header

HEADER_BYTES = 8 * (2 + MAX_DIMS)
DATA_OFFSET = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """A message that was sent: the input of layer `layer`, or the gradient of that input."""

    kind: str
    """One of `elastic.domain.types.LOGS`."""
    layer: int
    step: int
    microbatch: int
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        """Size of the message's copy in bytes."""
        return DATA_OFFSET + self.tensor.nbytes

    def as_copy(self) -> PendingCopy:
        """Return the copy to be made of this message."""
        ledger = frozenset((self.microbatch,))
        return PendingCopy(self.kind, self.layer, self.step, self.nbytes, self.write, ledger)

    def write(self, out: Tensor) -> None:
        """Write the copy to `out`, uint8 [nbytes] in host memory."""
        out[:HEADER_BYTES].copy_(pack_header(spec_of(self.tensor)).view(torch.uint8))
        out[HEADER_BYTES:DATA_OFFSET].zero_()
        out[DATA_OFFSET:].copy_(as_bytes(self.tensor))


def read_message(data: Tensor) -> Tensor:
    """Return the message in `data`, a copy's bytes (uint8 [nbytes]), as a view of `data`.

    Raises VaultError if the copy is malformed.
    """
    try:
        dtype, shape = unpack_header(data[:HEADER_BYTES].clone().view(torch.int64), 0)
        return data[DATA_OFFSET:].view(dtype).view(shape)
    except (ElasticError, RuntimeError, ValueError) as error:
        size = data.numel()
        raise VaultError(f"a logged message of {size} bytes is malformed: {error}") from error


class ActivationLog:
    """Logs the messages that one worker sends in one epoch.

    `keep` holds a message without copying its tensor, which does not change after `Links.send`. The
    next `flush` writes and announces all held messages. If memory is short, logging ends for this
    epoch and training goes on. If a stage is lost then, its micro-batches repeat more layers.
    """

    def __init__(self, publisher: Publisher, epoch: int, *, in_memory: bool = False) -> None:
        """`in_memory`: hold the messages of two steps, and write them when the epoch ends.

        A worker that dies loses its own messages, but the neighbours have the messages that its
        stage needs.
        """
        self._publisher, self._epoch, self._in_memory = publisher, epoch, in_memory
        self._pending: list[LoggedMessage] = []
        self._full = False

    def keep(self, message: LoggedMessage) -> None:
        """Hold `message` for the next write."""
        new_step = self._pending and self._pending[-1].step < message.step
        if self._in_memory and new_step:
            self._pending = [old for old in self._pending if old.step >= message.step - 1]
        if not self._full:
            self._pending.append(message)

    def flush(self, abandon: AbandonSignal | None) -> None:
        """Write and announce the held messages; with `in_memory`, only when the epoch has ended.

        `abandon`: None if the epoch has ended. Waits for slots as `Publisher.publish` does. If
        EpochAbandoned is raised, the messages are still held.
        """
        if self._in_memory and abandon is not None:
            return
        pending, self._pending = self._pending, []
        if not pending:
            return
        steps = [list(messages) for _, messages in groupby(pending, key=lambda m: m.step)]
        try:
            # One bundle per step, the running step first: a bundle uses one slot per ring at most.
            for messages in reversed(steps):
                copies = [message.as_copy() for message in messages]
                self._publisher.publish(copies, self._epoch, "", abandon)
        except EpochAbandoned:
            self._pending = pending
            raise
        except VaultFull as error:
            self._full = True
            log.warning(
                "messages are not logged any more in this epoch, training goes on: %s", error
            )
