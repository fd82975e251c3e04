"""Sums each layer's gradient over its holders, into buffers beside the accumulators.

The accumulators stay as they are, so a fault in the middle costs nothing. Layers next to each other with the
same holders share one buffer and one collective; while it runs the next buffer is filled. Tied tensors are
then summed over their owners, row by row in the order of the group, so that every owner in every pipeline has
the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from elastic.planning.plan.rank_map import Roster
from elastic.worker.transport.links import Links

BUCKET_BYTES = 32 * 2**20
TAG_TIED = 2**16
"""Tag of the first tied group; the others follow. Those of pipelines are below."""

Tied = tuple[tuple[tuple[int, str], ...], ...]


class ReducibleLayer(Protocol):
    """What the reduction needs of `elastic.worker.replica.replica.LayerReplica`."""

    index: int

    @property
    def gradient(self) -> torch.Tensor: ...

    def gradient_slice(self, name: str) -> slice: ...


def _nothing(layer: int) -> None:
    return None


class GradientAllReduce:
    """The reduction of one worker's layers, for one epoch; its buffers are reused every step.

    Args:
        replicas: this worker's layers, in order.
        tied: groups of (layer, parameter name) that are one tensor.
    """

    def __init__(
        self, replicas: Sequence[ReducibleLayer], links: Links, roster: Roster, rank: int, tied: Tied = ()
    ) -> None:
        self._replicas, self._links, self._roster, self._rank, self._tied = (
            replicas,
            links,
            roster,
            rank,
            tied,
        )
        self._shard = roster.members[rank].shard
        self._pipeline = roster.members[rank].pipeline
        shared = {layer for group in tied for layer, _ in group}
        self._buckets = [
            _ReduceBucket(layers, ranks, copied=len(ranks) > 1 or any(r.index in shared for r in layers))
            for layers, ranks in self._group(shared)
        ]

    def _group(self, tied: set[int]) -> list[tuple[list[ReducibleLayer], tuple[int, ...]]]:
        """Neighbouring layers with the same holders, up to BUCKET_BYTES; the same cuts at all holders."""
        groups: list[tuple[list[ReducibleLayer], tuple[int, ...], bool]] = []
        for replica in self._replicas:
            ranks, is_tied = self._roster.holders(replica.index, self._shard), replica.index in tied
            follows = groups and groups[-1][0][-1].index == replica.index - 1
            if follows and groups[-1][1:] == (ranks, is_tied):
                size = sum(r.gradient.nbytes for r in groups[-1][0]) + replica.gradient.nbytes
                if size <= BUCKET_BYTES:
                    groups[-1][0].append(replica)
                    continue
            groups.append(([replica], ranks, is_tied))
        return [(layers, ranks) for layers, ranks, _ in groups]

    def run(self, on_layer: Callable[[int], None] = _nothing) -> dict[int, torch.Tensor]:
        """Reduce all layers. Return layer -> reduced flat gradient: read only, valid until the next run.

        Args:
            on_layer: called after each layer's holders are summed.

        Raises:
            EpochAbandoned, LinkFailed: the accumulators are as they were.
        """
        return self.tie(self._sum(on_layer))

    def tie(self, reduced: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Sum tied tensors over their owners, in the tensors of `reduced`, layer -> its holders' sum; return it."""
        for g, group in enumerate(self._tied):
            self._reduce_tied(group, TAG_TIED + g, reduced)
        if self._tied:
            self._links.flush()
        return reduced

    def _sum(self, on_layer: Callable[[int], None]) -> dict[int, torch.Tensor]:
        begun = []
        for bucket in self._buckets:
            buffer = bucket.fill()
            begun.append((bucket, self._links.all_reduce(buffer, bucket.ranks)))
        reduced: dict[int, torch.Tensor] = {}
        for bucket, wait in begun:
            wait()
            for layer, tensor in bucket.views():
                reduced[layer] = tensor
                on_layer(layer)
        return reduced

    def _reduce_tied(
        self, group: tuple[tuple[int, str], ...], tag: int, reduced: dict[int, torch.Tensor]
    ) -> None:
        """Sum one tied tensor over its owners in this pipeline; others do the same with the same values."""
        owners = [self._owner(layer) for layer, _ in group]
        if self._rank not in owners:
            return
        slices = {r.index: r.gradient_slice for r in self._replicas}
        mine = {
            row: reduced[layer][slices[layer](name)]
            for row, (layer, name) in enumerate(group)
            if owners[row] == self._rank
        }
        expected = {row: self._links.recv(rank, tag) for row, rank in enumerate(owners) if rank != self._rank}
        for rank in sorted(set(owners) - {self._rank}):
            for row in mine.values():
                self._links.send(row, rank, tag)
        rows = [mine[row] if row in mine else expected[row].wait() for row in range(len(group))]
        total = rows[0].clone()
        for row_tensor in rows[1:]:
            total += row_tensor
        self._links.flush()
        for row_tensor in mine.values():
            row_tensor.copy_(total)

    def _owner(self, layer: int) -> int:
        ranks = self._roster.holders(layer, self._shard)
        return next(r for r in ranks if self._roster.members[r].pipeline == self._pipeline)


class _ReduceBucket:
    """Layers that are summed in one go."""

    def __init__(self, layers: list[ReducibleLayer], ranks: tuple[int, ...], *, copied: bool) -> None:
        self.ranks = tuple(sorted(ranks))
        self._layers, self._copied = layers, copied
        self._buffer: torch.Tensor | None = None

    def fill(self) -> torch.Tensor:
        """The layers' gradients side by side in a buffer; what nobody else has stays where it is."""
        if not self._copied:
            return self._layers[0].gradient
        if self._buffer is None:
            size = sum(r.gradient.numel() for r in self._layers)
            self._buffer = torch.empty(
                size, dtype=self._layers[0].gradient.dtype, device=self._layers[0].gradient.device
            )
        torch.cat([r.gradient for r in self._layers], out=self._buffer)
        return self._buffer

    def views(self) -> list[tuple[int, torch.Tensor]]:
        if not self._copied or self._buffer is None:
            return [(r.index, r.gradient) for r in self._layers]
        parts = torch.split(self._buffer, [r.gradient.numel() for r in self._layers])
        return [(r.index, part) for r, part in zip(self._layers, parts, strict=True)]
