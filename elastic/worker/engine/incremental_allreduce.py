"""The gradient scheme `reduce`: gradients are summed over their holders in rounds, while the step goes on.

When a worker joins a round it hands over what its layers hold, begins their accumulators anew, and starts a reduction
of a copy. When that is over, the sum of all holders' parts moves into the layer's *common* sum, which every holder has
alike: from then on these micro-batches survive as long as one holder does. After the last round everything is
common, and the update takes it. If the epoch ends first, what was handed over is taken back (`LayerReplica.cancel_rounds`): a
micro-batch is in the layer's own gradient or in the common one, never in both.

Beside each sum of gradients goes a small one of int64: per layer how often each micro-batch of the step is in it, which
is its ledger and proves it, and the bits of the losses, which are with the one holder where the micro-batch ran. So
nobody has to know beforehand what the others bring, also not in the first round after a recovery.

Reductions of two workers that have several layers in common begin in the same order on both: round by round, in a
round by layers. A tensor-parallel group moves a sum into the common ones on all of its ranks or on none, so that their
ledgers stay equal. `elastic.planning.schedule.reduction_rounds` says when a round is due, and why waiting for one cannot hang.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from elastic.domain.errors import LedgerError
from elastic.planning.plan.rank_map import Roster
from elastic.planning.schedule.reduction_rounds import Rounds, rounds_of
from elastic.planning.schedule.schedule import Action
from elastic.worker.engine import allreduce as reduction
from elastic.worker.engine.stage_runner import Agreement
from elastic.worker.replica.gradient_sum import GradientSum
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links, Sum


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Layers of one stage with the same holders, summed in one go."""

    layers: tuple[LayerReplica, ...]
    ranks: tuple[int, ...]


@dataclass(slots=True)
class _Sums:
    """One bucket of a round under way."""

    bucket: _Bucket
    gradients: Tensor
    counts: Tensor
    """int64 [layers, or one more for the losses' bits; micro-batches]"""
    waits: tuple[Sum, Sum]


class CommonSums:
    """The rounds of one worker, for one epoch."""

    def __init__(
        self,
        replicas: Sequence[LayerReplica],
        links: Links,
        roster: Roster,
        rank: int,
        every: int,
        agreement: Agreement,
    ) -> None:
        """`every`: micro-batches of a round, in the pipeline that runs most."""
        self._replicas, self._links, self._roster = replicas, links, roster
        self._pipeline, self._every, self._agreement = roster.members[rank].pipeline, every, agreement
        self._buckets = list(_buckets(replicas, roster, roster.members[rank].shard))
        self._under_way: deque[list[_Sums]] = deque()
        self._spare: dict[_Bucket, list[Tensor]] = {bucket: [] for bucket in self._buckets}
        self._joined, self._rounds = 0, Rounds(1, (0,), (1,))
        self._finishing: Iterator[int] = iter(())
        self._finished: dict[int, int] = {}
        self.shared = False
        """Whether a round of this epoch is over: what the recovery brought is with all holders."""

    def begin(self, actions: Sequence[Action], shares: Sequence[int]) -> None:
        """A step begins, in which this worker runs `actions` and the pipelines run `shares` micro-batches each."""
        self._rounds = rounds_of(self._roster.pipelines, shares, self._every)
        stages = [action.stage for action in actions if action.kind.finishes]
        self._finishing, self._finished = iter(stages), dict.fromkeys(stages, 0)
        self._joined = 0
        self._join()

    def after_microbatch(self) -> None:
        """The next of the actions that finish a micro-batch is done, and in the layers' gradients."""
        self._finished[next(self._finishing)] += 1
        while self._under_way and self._agreement.all_say(_done(self._under_way[0])):
            self._end_oldest()
        self._join()

    def finish(
        self, copied: Collection[int], on_layer: Callable[[int], None] = lambda layer: None
    ) -> dict[int, Tensor]:
        """End the step's rounds. Return layer -> common gradient; those of layers in `copied` may be changed.

        `on_layer` is called for each layer when all is in it. Raises EpochAbandoned, LinkFailed: nothing is lost.
        """
        while len(self._under_way) > 1:
            self._end_oldest()
        if self._under_way:
            self._end_oldest(on_layer)
        found = {part.index: part.gradient for part in self.parts()}
        return {layer: g.clone() if layer in copied else g for layer, g in found.items()}

    def parts(self) -> list[GradientSum]:
        """The common sums of all layers, after `finish`. Raises LedgerError if anything is left beside them."""
        rest = {replica.index: sorted(replica.ledger) for replica in self._replicas if replica.ledger}
        parts = [replica.common for replica in self._replicas if replica.common is not None]
        if rest or len(parts) < len(self._replicas):
            raise LedgerError(f"not summed over the holders, by layer: {rest}")
        return parts

    def _join(self) -> None:
        """Begin the rounds that are due; wait for older ones where the window is full."""
        finished = min(self._finished.values(), default=0)
        rounds = self._rounds
        while self._joined < rounds.number and rounds.due(self._pipeline, self._joined) <= finished:
            while len(self._under_way) >= rounds.windows[self._pipeline]:
                self._end_oldest()
            self._under_way.append([self._start(bucket) for bucket in self._buckets])
            self._joined += 1

    def _start(self, bucket: _Bucket) -> _Sums:
        sent, n = [layer.start_round() for layer in bucket.layers], self._roster.n_microbatches
        last = sent[-1].index == self._roster.n_layers - 1
        rows = [[int(m in part.ledger) for m in range(n)] for part in sent]
        counts = torch.tensor(rows, dtype=torch.int64)
        if last:
            losses = torch.tensor([sent[-1].losses.get(m, 0.0) for m in range(n)], dtype=torch.float64)
            counts = torch.cat([counts, losses.view(torch.int64)[None]])
        gradients = self._buffer(bucket, sent)
        waits = self._links.all_reduce(gradients, bucket.ranks), self._links.all_reduce(counts, bucket.ranks)
        return _Sums(bucket, gradients, counts, waits)

    def _buffer(self, bucket: _Bucket, sent: Sequence[GradientSum]) -> Tensor:
        """The gradients side by side."""
        parts, spare = [part.gradient for part in sent], self._spare[bucket]
        return torch.cat(parts, out=spare.pop()) if spare else torch.cat(parts)

    def _end_oldest(self, on_layer: Callable[[int], None] = lambda layer: None) -> None:
        """Wait for the oldest round and make it common, on all ranks of the tensor-parallel group or on none."""
        for sums in self._under_way[0]:
            for wait in sums.waits:
                wait()
        self._agreement.check()
        for sums in self._under_way.popleft():
            _share(sums)
            self._spare[sums.bucket].append(sums.gradients)
            for layer in sums.bucket.layers:
                on_layer(layer.index)
        self.shared = True


def _done(round_: Sequence[_Sums]) -> bool:
    return all(wait.done() for sums in round_ for wait in sums.waits)


def _share(sums: _Sums) -> None:
    """Give each layer of a bucket what all of its holders brought. Raises LedgerError if one was there twice."""
    layers = sums.bucket.layers
    totals = torch.split(sums.gradients, [layer.gradient.numel() for layer in layers])
    for row, (layer, total) in enumerate(zip(layers, totals, strict=True)):
        counts = sums.counts[row].tolist()
        wrong = {m: count for m, count in enumerate(counts) if count not in (0, 1)}
        if wrong:
            raise LedgerError(f"layer {layer.index}: micro-batches (and how often) {wrong} at its holders")
        ledger, losses = {m for m, count in enumerate(counts) if count}, {}
        if layer is layers[-1] and len(sums.counts) > len(layers):
            values = sums.counts[-1].view(torch.float64).tolist()
            losses = {m: values[m] for m in ledger}
        layer.finish_round(total, ledger, losses)


def _buckets(replicas: Sequence[LayerReplica], roster: Roster, shard: int) -> Iterator[_Bucket]:
    """Neighbouring layers that are in the same stage at all of their holders, up to BUCKET_BYTES: the same at all."""
    layers: list[LayerReplica] = []
    for replica in replicas:
        size = sum(other.gradient.nbytes for other in (*layers, replica))
        together = layers and _stages(roster, layers[-1].index) == _stages(roster, replica.index)
        if layers and (not together or size > reduction.BUCKET_BYTES):
            yield _Bucket(tuple(layers), _holders(roster, layers[0].index, shard))
            layers = []
        layers.append(replica)
    if layers:
        yield _Bucket(tuple(layers), _holders(roster, layers[0].index, shard))


def _holders(roster: Roster, layer: int, shard: int) -> tuple[int, ...]:
    return tuple(sorted(roster.holders(layer, shard)))


def _stages(roster: Roster, layer: int) -> list[int]:
    """In each pipeline the number of the stage that has `layer`."""
    return [
        s
        for pipeline in roster.pipelines
        for s, stage in enumerate(pipeline.stages)
        if stage.first <= layer < stage.last
    ]
