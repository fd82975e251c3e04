"""After an update that holders of a layer shared (ZeRO stage 1, Rajbhandari et al. 2020): everybody gets the parameters
that the others updated.

Each of k holders has 1 / k of a layer's optimizer state, and updates that portion of its parameters
(`elastic.worker.model.optimizer`). A gather over the holders then completes the layer: (k - 1) / k of the parameters' bytes
for each. Until it is over the layer is not `complete`: its portion of the state is whole all the same, and published
before, so that a fault in between costs nothing (docs/design/backup.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elastic.domain.state_layout import span
from elastic.domain.types import WHOLE
from elastic.planning.plan.rank_map import Roster
from elastic.worker.engine.allreduce import BUCKET_BYTES
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links, PendingCollective


class ParameterGather:
    """The gathers of one worker, for one epoch."""

    def __init__(self, replicas: Sequence[LayerReplica], links: Links, roster: Roster, rank: int) -> None:
        self._links, shard = links, roster.members[rank].shard
        self._buckets = [
            _GatherBucket(layers, ranks) for layers, ranks in _runs(replicas, roster, shard) if len(ranks) > 1
        ]
        most = max((bucket.nbytes for bucket in self._buckets), default=0)
        self._most, self._device = most, replicas[0].device
        self._buffers: list[Tensor] = []
        """Two, each for a row of every holder: one is filled while the other is emptied."""

    def gather(self) -> None:
        """Complete all layers. Raises EpochAbandoned, LinkFailed: then some may not be complete."""
        before: tuple[_GatherBucket, PendingCollective] | None = None
        for number, bucket in enumerate(self._buckets):
            begun = bucket, bucket.begin(self._links, self._buffer(number % 2, bucket))
            self._end(before)
            before = begun
        self._end(before)

    def _buffer(self, number: int, bucket: _GatherBucket) -> Tensor:
        while len(self._buffers) <= number:
            widest = max(len(other.ranks) + 1 for other in self._buckets)
            self._buffers.append(torch.empty(widest * self._most, dtype=torch.uint8, device=self._device))
        return self._buffers[number][: (len(bucket.ranks) + 1) * bucket.nbytes].view(-1, bucket.nbytes)

    @staticmethod
    def _end(begun: tuple[_GatherBucket, PendingCollective] | None) -> None:
        if begun is not None:
            bucket, wait = begun
            wait()
            bucket.end()


def _runs(
    replicas: Sequence[LayerReplica], roster: Roster, shard: int
) -> Iterator[tuple[list[LayerReplica], tuple[int, ...]]]:
    """Layers whose state is shared, cut where their numbers leave a gap, their holders change, or a bucket is full: the
    same cuts at all holders, each of which has all layers of such a run."""
    layers: list[LayerReplica] = []
    ranks: tuple[int, ...] = ()
    for replica in (r for r in replicas if r.portion != WHOLE):
        holders = roster.holders(replica.index, shard)
        follows = layers and layers[-1].index == replica.index - 1 and holders == ranks
        if layers and not (follows and _nbytes([*layers, replica]) <= BUCKET_BYTES):
            yield layers, ranks
            layers = []
        layers, ranks = [*layers, replica], holders
    if layers:
        yield layers, ranks


def _nbytes(layers: Sequence[LayerReplica]) -> int:
    return sum(parameter.nbytes for layer in layers for parameter in layer.parameters)


class _GatherBucket:
    """Layers next to each other with the same holders."""

    def __init__(self, layers: list[LayerReplica], ranks: tuple[int, ...]) -> None:
        self._layers, self.ranks = layers, ranks
        self._mine = layers[0].portion[0]
        self.nbytes = sum(part.numel() for part in self._parts(0))
        """Of a portion of all layers; of the first, which is the longest."""
        self._rows: tuple[Tensor, ...] = ()

    def begin(self, links: Links, buffer: Tensor) -> PendingCollective:
        """`buffer`: [holders + 1, nbytes]; the last row is what goes out."""
        *rows, mine = buffer.unbind()
        self._rows, at = tuple(rows), 0
        for part in self._parts(self._mine):
            mine[at : at + part.numel()] = part
            at += part.numel()
        return links.all_gather(rows, mine, self.ranks)

    def end(self) -> None:
        for index, row in enumerate(self._rows):
            at = 0
            for part in self._parts(index) if index != self._mine else ():
                part.copy_(row[at : at + part.numel()])
                at += part.numel()
        self._rows = ()
        for layer in self._layers:
            layer.complete = True

    def _parts(self, index: int) -> Iterator[Tensor]:
        """Portion `index` of all parameters with dimensions, as bytes in place."""
        portion = index, len(self.ranks)
        for layer in self._layers:
            for parameter in layer.parameters:
                if parameter.ndim:
                    first, last = span(parameter.shape, portion)
                    yield as_bytes(parameter.view(-1)[first:last])
