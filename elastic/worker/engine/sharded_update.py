"""All-gather of parameters after a sharded update (ZeRO stage 1, Rajbhandari et al. 2020).

Each of a layer's k holders has 1 / k of the optimizer state and updates that portion of the
parameters (`elastic.worker.model.optimizer`). Then an all-gather over the holders completes the
layer; each holder sends (k - 1) / k of the parameters' bytes. Until then the layer is not
`complete`, but its portion of the state is valid and published, so a fault before the all-gather
loses nothing (docs/design/backup.md). "Sharded" means: in portions; `shard` is a TP rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from elastic.domain.state_layout import span
from elastic.domain.types import WHOLE
from elastic.planning.plan.rank_map import Roster
from elastic.worker.engine.allreduce import buckets
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links, PendingCollective


class ParameterGather:
    """Gathers the updated parameters of one worker's sharded layers, in one epoch."""

    def __init__(self, replicas: Sequence[LayerReplica], links: Links, roster: Roster) -> None:
        self._links, shard = links, roster.members[links.rank].shard

        def holders(replica: LayerReplica) -> tuple[int, ...]:
            return roster.holders(replica.index, shard)

        sharded = [r for r in replicas if r.portion != WHOLE and _parameter_bytes(r)]
        self._without = [r for r in replicas if r.portion != WHOLE and not _parameter_bytes(r)]
        self._buckets = [
            _GatherBucket(layers, holders(layers[0]))
            for layers in buckets(sharded, holders, _parameter_bytes)
            if len(holders(layers[0])) > 1
        ]

    def gather(self) -> None:
        """Complete all layers.

        Raises EpochAbandoned or LinkFailed; some layers may be incomplete then.
        """
        for replica in self._without:
            replica.complete = True
        previous: tuple[_GatherBucket, PendingCollective] | None = None
        for bucket in self._buckets:
            begun = bucket, bucket.begin(self._links)
            self._end(previous)
            previous = begun
        self._end(previous)

    @staticmethod
    def _end(begun: tuple[_GatherBucket, PendingCollective] | None) -> None:
        if begun is not None:
            bucket, wait = begun
            wait()
            bucket.end()


def _parameter_bytes(replica: LayerReplica) -> int:
    return sum(parameter.nbytes for parameter in replica.parameters)


class _GatherBucket:
    """Adjacent layers with the same holders, gathered by one collective."""

    def __init__(self, layers: list[LayerReplica], ranks: tuple[int, ...]) -> None:
        self._layers, self.ranks = layers, ranks
        self._portion = layers[0].portion[0]
        self._rows: list[Tensor] = []

    def begin(self, links: Links) -> PendingCollective:
        """Start the gather. Portion 0 is the largest one, so it gives the size of the messages."""
        nbytes = sum(part.numel() for part in self._parts(0))
        size = len(self.ranks) + 1, nbytes
        *self._rows, sent = torch.empty(size, dtype=torch.uint8, device=links.device).unbind()
        at = 0
        for part in self._parts(self._portion):
            sent[at : at + part.numel()] = part
            at += part.numel()
        return links.all_gather(self._rows, sent, self.ranks)

    def end(self) -> None:
        """Copy the gathered portions into the parameters and mark the layers complete."""
        for index, row in enumerate(self._rows):
            at = 0
            for part in self._parts(index) if index != self._portion else ():
                part.copy_(row[at : at + part.numel()])
                at += part.numel()
        self._rows = []
        for layer in self._layers:
            layer.complete = True

    def _parts(self, index: int) -> Iterator[Tensor]:
        """Yield portion `index` of each parameter as a view of its bytes. Scalars have none."""
        portion = index, len(self.ranks)
        for layer in self._layers:
            for parameter in layer.parameters:
                if parameter.ndim:
                    first, last = span(parameter.shape, portion)
                    yield as_bytes(parameter.view(-1)[first:last])
