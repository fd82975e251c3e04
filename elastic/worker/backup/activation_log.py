"""Messages between stages as copies: what the `log` scheme keeps on the sender's node.

A copy is a header (int64 words, as on the wire: `elastic.worker.transport.tensor_header`) padded to
DATA_OFFSET bytes, and the tensor's bytes.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from itertools import groupby

import torch
from torch import Tensor

from elastic.domain.errors import ElasticError, VaultError, VaultFull
from elastic.worker.backup.publisher import Publisher
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from elastic.worker.transport.tensor_header import MAX_DIMS, pack_header, spec_of, unpack_header

HEADER_BYTES = 8 * (2 + MAX_DIMS)
DATA_OFFSET = 128

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Logged:
    """A message that was sent: the input of layer `layer`, or its gradient."""

    kind: str
    """One of `elastic.domain.types.LOGS`."""
    layer: int
    step: int
    microbatch: int
    tensor: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of its copy."""
        return DATA_OFFSET + self.tensor.nbytes

    def write(self, out: Tensor) -> None:
        """Write the copy to `out`, uint8 [nbytes] in host memory."""
        out[:HEADER_BYTES].copy_(pack_header(spec_of(self.tensor)).view(torch.uint8))
        out[HEADER_BYTES:DATA_OFFSET].zero_()
        out[DATA_OFFSET:].copy_(as_bytes(self.tensor))


def read(data: Tensor) -> Tensor:
    """The message in a copy's bytes, uint8 [nbytes]; a view. Raises VaultError if it is malformed."""
    try:
        dtype, shape = unpack_header(data[:HEADER_BYTES].clone().view(torch.int64), 0)
        return data[DATA_OFFSET:].view(dtype).view(shape)
    except (ElasticError, RuntimeError, ValueError) as error:
        raise VaultError(f"a logged message of {data.numel()} bytes is malformed: {error}") from error


class BoundaryLog:
    """The log of one worker in one epoch. What is kept is written and announced at the next `flush`, all at once.

    Until then tensors are only held; they do not change (`Links.send`). In host memory they are held for two steps, and
    written when the epoch ends: a worker that dies takes its own messages along, but its stage's inputs and gradients
    are those that its neighbours sent. Where memory is short, no more is kept in this epoch, and training goes on:
    such micro-batches run through more layers if a stage is lost.
    """

    def __init__(self, publisher: Publisher, epoch: int, *, held: bool = False) -> None:
        """`held`: nothing is written before the epoch ends."""
        self._publisher, self._epoch, self._held = publisher, epoch, held
        self._pending: list[Logged] = []
        self._full = False

    def keep(self, logged: Logged) -> None:
        """Have `logged` written soon, or when the epoch ends."""
        if self._held and self._pending and self._pending[-1].step < logged.step:
            self._pending = [other for other in self._pending if other.step >= logged.step - 1]
        if not self._full:
            self._pending.append(logged)

    def flush(self, abandon: AbandonSignal | None) -> None:
        """Write and announce what was kept; None: the epoch has ended. Waits for slots as `Publisher` does. Raises
        EpochAbandoned."""
        if self._held and abandon is not None:
            return
        pending, self._pending = self._pending, []
        if not pending:
            return
        try:
            steps = [list(messages) for _, messages in groupby(pending, key=lambda logged: logged.step)]
            for messages in reversed(
                steps
            ):  # the running step first; a bundle has at most one of a ring of slots
                self._publisher.publish_logs(messages, self._epoch, abandon)
        except EpochAbandoned:
            self._pending = pending
            raise
        except VaultFull as error:
            self._full = True
            log.warning("messages are not logged any more in this epoch, training goes on: %s", error)
