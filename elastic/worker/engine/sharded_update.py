"""All-gather of parameters after a sharded update (ZeRO stage 1, Rajbhandari et al. 2020).

Each of a layer's k holders has 1 / k of the optimizer state and updates that portion of the
parameters (`elastic.worker.model.optimizer`). An all-gather over the holders then completes the
layer; each holder sends (k - 1) / k of the parameters' bytes. Until then the layer is not
`complete`. Its portion of the state is valid already and was published before, so a fault in
between loses nothing (docs/design/backup.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elastic.domain.state_layout import span
from elastic.domain.types import WHOLE
from elastic.planning.plan.rank_map import Roster
from elastic.worker.engine import allreduce
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links, PendingCollective


class ParameterGather:
    """The gathers of one worker's layers, for one epoch."""

    def __init__(
        self, replicas: Sequence[LayerReplica], links: Links, roster: Roster, rank: int
    ) -> None:
        self._links, shard = links, roster.members[rank].shard
        self._buckets = [
            _GatherBucket(layers, ranks)
            for layers, ranks in _group(replicas, roster, shard)
            if len(ranks) > 1
        ]
        self._max_bytes = max((bucket.nbytes for bucket in self._buckets), default=0)
        self._device = replicas[0].device
        self._buffers: list[Tensor] = []
        """Two buffers with a row per holder: one is filled while the other is emptied."""

    def gather(self) -> None:
        """Complete all layers.

        Raises EpochAbandoned or LinkFailed; some layers may be incomplete then.
        """
        previous: tuple[_GatherBucket, PendingCollective] | None = None
        for number, bucket in enumerate(self._buckets):
            begun = bucket, bucket.begin(self._links, self._buffer(number % 2, bucket))
            self._end(previous)
            previous = begun
        self._end(previous)

    def _buffer(self, number: int, bucket: _GatherBucket) -> Tensor:
        """Buffer `number` as uint8 [holders + 1, bytes of the bucket's portion]."""
        while len(self._buffers) <= number:
            rows = max(len(other.ranks) + 1 for other in self._buckets)
            size = rows * self._max_bytes
            self._buffers.append(torch.empty(size, dtype=torch.uint8, device=self._device))
        size = (len(bucket.ranks) + 1) * bucket.nbytes
        return self._buffers[number][:size].view(-1, bucket.nbytes)

    @staticmethod
    def _end(begun: tuple[_GatherBucket, PendingCollective] | None) -> None:
        if begun is not None:
            bucket, wait = begun
            wait()
            bucket.end()


def _group(
    replicas: Sequence[LayerReplica], roster: Roster, shard: int
) -> Iterator[tuple[list[LayerReplica], tuple[int, ...]]]:
    """Group adjacent layers with sharded state and the same holders, up to BUCKET_BYTES.

    The groups are the same at all holders, and each holder has all layers of a group.
    """
    layers: list[LayerReplica] = []
    ranks: tuple[int, ...] = ()
    for replica in (r for r in replicas if r.portion != WHOLE):
        holders = roster.holders(replica.index, shard)
        follows = layers and layers[-1].index == replica.index - 1 and holders == ranks
        if layers and not (follows and _nbytes([*layers, replica]) <= allreduce.BUCKET_BYTES):
            yield layers, ranks
            layers = []
        layers, ranks = [*layers, replica], holders
    if layers:
        yield layers, ranks


def _nbytes(layers: Sequence[LayerReplica]) -> int:
    return sum(parameter.nbytes for layer in layers for parameter in layer.parameters)


class _GatherBucket:
    """Adjacent layers with the same holders, gathered by one collective."""

    def __init__(self, layers: list[LayerReplica], ranks: tuple[int, ...]) -> None:
        self._layers, self.ranks = layers, ranks
        self._portion = layers[0].portion[0]
        self.nbytes = sum(part.numel() for part in self._parts(0))
        """Bytes of portion 0 of all layers; no other portion is larger."""
        self._rows: tuple[Tensor, ...] = ()

    def begin(self, links: Links, buffer: Tensor) -> PendingCollective:
        """Start the gather.

        Args:
            buffer: uint8 [holders + 1, nbytes]; the last row holds the bytes that are sent.
        """
        *rows, sent = buffer.unbind()
        self._rows, at = tuple(rows), 0
        for part in self._parts(self._portion):
            sent[at : at + part.numel()] = part
            at += part.numel()
        return links.all_gather(rows, sent, self.ranks)

    def end(self) -> None:
        """Copy the gathered portions into the parameters and mark the layers complete."""
        for index, row in enumerate(self._rows):
            at = 0
            for part in self._parts(index) if index != self._portion else ():
                part.copy_(row[at : at + part.numel()])
                at += part.numel()
        self._rows = ()
        for layer in self._layers:
            layer.complete = True

    def _parts(self, index: int) -> Iterator[Tensor]:
        """Portion `index` of each parameter, as a view of its bytes. Scalars are not sharded."""
        portion = index, len(self.ranks)
        for layer in self._layers:
            for parameter in layer.parameters:
                if parameter.ndim:
                    first, last = span(parameter.shape, portion)
                    yield as_bytes(parameter.view(-1)[first:last])
