"""All-reduce of each layer's gradient over its holders, into separate buffers.

The accumulators keep their values, so a fault during the reduction loses nothing. Adjacent layers
with the same holders share one buffer and one collective; the next buffer is filled while a
collective runs. Tied tensors are then summed over their owners within each pipeline, row by row in
the order of their group, so every owner in every pipeline gets the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import permutations

import torch

from elastic.planning.plan.rank_map import Roster
from elastic.worker.model.layers import Tied
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links

BUCKET_BYTES = 32 * 2**20
"""Maximum bytes of several layers that share a collective."""
TAG_TIED = 2**16
"""Tag of the first tied group; the other groups follow. The pipelines' tags are lower."""


def buckets(
    replicas: Iterable[LayerReplica],
    key: Callable[[LayerReplica], object],
    nbytes: Callable[[LayerReplica], int],
) -> Iterator[list[LayerReplica]]:
    """Yield groups of adjacent layers with equal keys, of at most BUCKET_BYTES or of one layer.

    The groups are the same at all holders if `key` and `nbytes` are.
    """
    group: list[LayerReplica] = []
    for replica in replicas:
        if group:
            follows = replica.index == group[-1].index + 1 and key(replica) == key(group[-1])
            if not follows or sum(map(nbytes, (*group, replica))) > BUCKET_BYTES:
                yield group
                group = []
        group.append(replica)
    if group:
        yield group


class GradientAllReduce:
    """Sums one worker's gradients over the holders, in one epoch. Buffers are reused every step.

    Args:
        replicas: this worker's layers, in order.
        tied: groups of (layer, parameter name) that are one tensor.
    """

    def __init__(
        self,
        replicas: Sequence[LayerReplica],
        links: Links,
        roster: Roster,
        tied: Tied = (),
    ) -> None:
        self._replicas, self._links, self._roster, self._tied = replicas, links, roster, tied
        self._me = roster.members[links.rank]
        tied_layers = {layer for group in tied for layer, _ in group}

        def key(replica: LayerReplica) -> tuple[tuple[int, ...], bool]:
            """Return the layer's holders, and whether `sum_tied` changes its reduced gradient."""
            return roster.holders(replica.index, self._me.shard), replica.index in tied_layers

        self._buckets = []
        for layers in buckets(replicas, key, lambda replica: replica.gradient.nbytes):
            ranks, changed = key(layers[0])
            self._buckets.append(_ReduceBucket(layers, ranks, copied=len(ranks) > 1 or changed))

    def run(self, on_layer: Callable[[int], None] = lambda layer: None) -> dict[int, torch.Tensor]:
        """Reduce all layers. Returns layer -> reduced flat gradient.

        The tensors are valid until the next run and must not be changed.

        Args:
            on_layer: called after each layer is summed over its holders.

        Raises:
            EpochAbandoned, LinkFailed: the accumulators are unchanged.
        """
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
        return self.sum_tied(reduced)

    def sum_tied(self, reduced: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Sum tied tensors over their owners, in place in `reduced`, and return it.

        Args:
            reduced: layer -> gradient that is summed over the layer's holders.
        """
        for g, group in enumerate(self._tied):
            self._reduce_tied(group, TAG_TIED + g, reduced)
        if self._tied:
            self._links.flush()
        return reduced

    def _reduce_tied(
        self, group: tuple[tuple[int, str], ...], tag: int, reduced: dict[int, torch.Tensor]
    ) -> None:
        """Sum one tied tensor over its owners in this pipeline.

        The other pipelines sum the same values, so the result is equal in all pipelines.
        """
        owners = [self._owner(layer) for layer, _ in group]
        if self._links.rank not in owners:
            return
        slices = {r.index: r.gradient_slice for r in self._replicas}
        own = {
            row: reduced[layer][slices[layer](name)]
            for row, (layer, name) in enumerate(group)
            if owners[row] == self._links.rank
        }
        others = [(row, rank) for row, rank in enumerate(owners) if rank != self._links.rank]
        expected = {row: self._links.recv(rank, tag) for row, rank in others}
        for rank in sorted(set(owners) - {self._links.rank}):
            for row in own.values():
                self._links.send(row, rank, tag)
        rows = [own[row] if row in own else expected[row].wait() for row in range(len(group))]
        total = rows[0].clone()
        for row_tensor in rows[1:]:
            total += row_tensor
        self._links.flush()
        for row_tensor in own.values():
            row_tensor.copy_(total)

    def _owner(self, layer: int) -> int:
        """Return the rank in this pipeline that holds `layer`."""
        ranks = self._roster.holders(layer, self._me.shard)
        return next(r for r in ranks if self._roster.members[r].pipeline == self._me.pipeline)


def tied_pairs(roster: Roster, tied: Tied) -> tuple[tuple[int, int], ...]:
    """Return the (sender, receiver) ranks that sum tied tensors, in both directions, sorted."""
    found = set()
    for group in tied:
        for shard in range(roster.tp):
            ranks = [rank for layer, _ in group for rank in roster.holders(layer, shard)]
            for one, other in permutations(ranks, 2):
                if one != other and roster.members[one].pipeline == roster.members[other].pipeline:
                    found.add((one, other))
    return tuple(sorted(found))


class _ReduceBucket:
    """Layers that share a collective.

    Args:
        copied: reduce a copy of the gradients; false if nothing would change the originals.
    """

    def __init__(self, layers: list[LayerReplica], ranks: tuple[int, ...], *, copied: bool) -> None:
        self.ranks = tuple(sorted(ranks))
        self._layers, self._copied = layers, copied
        self._buffer: torch.Tensor | None = None

    def fill(self) -> torch.Tensor:
        """Return the layers' gradients in one buffer; without `copied`, the first gradient."""
        first = self._layers[0].gradient
        if not self._copied:
            return first
        if self._buffer is None:
            size = sum(r.gradient.numel() for r in self._layers)
            self._buffer = torch.empty(size, dtype=first.dtype, device=first.device)
        torch.cat([r.gradient for r in self._layers], out=self._buffer)
        return self._buffer

    def views(self) -> list[tuple[int, torch.Tensor]]:
        """Return (layer, its part of the buffer) pairs; without `copied`, its own gradient."""
        if not self._copied or self._buffer is None:
            return [(r.index, r.gradient) for r in self._layers]
        parts = torch.split(self._buffer, [r.gradient.numel() for r in self._layers])
        return [(r.index, part) for r, part in zip(self._layers, parts, strict=True)]
