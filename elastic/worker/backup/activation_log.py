"""The `log` scheme: messages between stages, kept as copies on the sender's node.

A copy has a header and its text (`elastic.worker.transport.value_header`, as on the wire), padding
to a multiple of ALIGNMENT bytes, and the bytes of the message's tensor.
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
from elastic.worker.model.values import Message
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from elastic.worker.transport.value_header import N_WORDS, pack_header, text_nbytes, unpack_header

HEADER_BYTES = 8 * N_WORDS
ALIGNMENT = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LoggedMessage:
    """A message that was sent: the input of layer `layer`, or the gradient of that input."""

    kind: str
    """One of `elastic.domain.types.LOGS`."""
    layer: int
    step: int
    microbatch: int
    message: Message

    @property
    def nbytes(self) -> int:
        """Size of the message's copy in bytes."""
        text = pack_header(self.message.spec)[1]
        return _data_offset(text.numel()) + self.message.tensor.nbytes

    def as_copy(self) -> PendingCopy:
        """Return the copy to be made of this message."""
        ledger = frozenset((self.microbatch,))
        return PendingCopy(self.kind, self.layer, self.step, self.nbytes, self.write, ledger)

    def write(self, out: Tensor) -> None:
        """Write the copy to `out`, uint8 [nbytes] in host memory."""
        header, text = pack_header(self.message.spec)
        begin, offset = HEADER_BYTES + text.numel(), _data_offset(text.numel())
        out[:HEADER_BYTES].copy_(header.view(torch.uint8))
        out[HEADER_BYTES:begin].copy_(text)
        out[begin:offset].zero_()
        out[offset:].copy_(as_bytes(self.message.tensor))


def _data_offset(text_bytes: int) -> int:
    """Return where the tensor's bytes begin, behind a header with a text of `text_bytes`."""
    return -(-(HEADER_BYTES + text_bytes) // ALIGNMENT) * ALIGNMENT


def read_message(data: Tensor) -> Message:
    """Return the message in `data`, a copy's bytes (uint8 [nbytes]), as a view of `data`.

    Raises VaultError if the copy is malformed.
    """
    try:
        header = data[:HEADER_BYTES].clone().view(torch.int64)
        n = text_nbytes(header)
        spec = unpack_header(header, data[HEADER_BYTES : HEADER_BYTES + n])
        dtype, shape = spec.message
        return Message(spec, data[_data_offset(n) :].view(dtype).view(shape))
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
