"""After an update that holders of a layer shared (ZeRO stage 1, Rajbhandari et al. 2020): everybody gets the parameters
that the others updated.

Each of k holders has 1 / k of a layer's optimizer state, and updates that portion of its parameters
(`elastic.worker.optimizer`). A gather over the holders then completes the layer: (k - 1) / k of the parameters' bytes
for each. Until it is over the layer is not `complete`: its portion of the state is whole all the same, and published
before, so that a fault in between costs nothing (docs/backup.md).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from elastic.core.layout import span
from elastic.core.types import WHOLE
from elastic.planning.roster import Roster
from elastic.worker.links import Links, Sum
from elastic.worker.replica import LayerReplica
from elastic.worker.state import as_bytes


class Shards:
    """The gathers of one worker, for one epoch."""

    def __init__(self, replicas: Sequence[LayerReplica], links: Links, roster: Roster, rank: int) -> None:
        self._links, shard = links, roster.members[rank].shard
        shared = [replica for replica in replicas if replica.portion != WHOLE]
        grouped = groupby(shared, key=lambda replica: roster.holders(replica.index, shard))
        self._buckets = [_Bucket(list(layers), ranks) for ranks, layers in grouped]

    def gather(self) -> None:
        """Complete all layers. Raises EpochAbandoned, LinkFailed: then some may not be complete."""
        begun = [(bucket, bucket.begin(self._links)) for bucket in self._buckets]
        for bucket, wait in begun:
            wait()
            bucket.end()


class _Bucket:
    """Layers next to each other with the same holders."""

    def __init__(self, layers: list[LayerReplica], ranks: tuple[int, ...]) -> None:
        self._layers, self._ranks = layers, ranks
        self._mine = layers[0].portion[0]
        self._rows: list[Tensor] = []
        """Of each portion the bytes of all layers; as long as the first, which is the longest."""

    def begin(self, links: Links) -> Sum:
        if not self._rows:
            nbytes = sum(part.numel() for part in self._parts(0))
            device = self._layers[0].device
            self._rows = [torch.empty(nbytes, dtype=torch.uint8, device=device) for _ in self._ranks]
        row, at = torch.zeros_like(self._rows[0]), 0
        for part in self._parts(self._mine):
            row[at : at + part.numel()] = part
            at += part.numel()
        return links.all_gather(self._rows, row, self._ranks)

    def end(self) -> None:
        for index, row in enumerate(self._rows):
            at = 0
            for part in self._parts(index) if index != self._mine else ():
                part.copy_(row[at : at + part.numel()])
                at += part.numel()
        for layer in self._layers:
            layer.complete = True

    def _parts(self, index: int) -> Iterator[Tensor]:
        """Portion `index` of all parameters with dimensions, as bytes in place."""
        portion = index, len(self._ranks)
        for layer in self._layers:
            for parameter in layer.parameters:
                if parameter.ndim:
                    first, last = span(parameter.shape, portion)
                    yield as_bytes(parameter.view(-1)[first:last])
