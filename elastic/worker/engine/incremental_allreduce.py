"""The gradient scheme `reduce`: all-reduce in rounds while the step runs.

When a worker joins a round, it sets the gradient sums of its layers aside, continues with empty
sums, and starts an all-reduce of a copy. When the round is over, the total is added to the layer's
*common* sum, which is equal at all holders. From then on the micro-batches of the round survive as
long as one holder does. After the last round all gradients are common, and the update uses the
common sum. If the epoch ends earlier, the sums of unfinished rounds are taken back
(`LayerReplica.cancel_rounds`). A micro-batch is never in both the replica's own and the common sum.

A small all-reduce of int64 counts runs beside each all-reduce of gradients. The counts tell, per
layer, how often the total contains each micro-batch; they are the ledger and its proof. The same
message carries the bits of the losses, which only the holder that ran the micro-batch contributes.
So no worker needs to know in advance what the others contribute, even after a recovery.

Two workers that share several layers start their all-reduces in the same order: round by round,
and by layer within a round. A tensor-parallel group moves a total into the common sums on all of
its ranks or on none, so their ledgers stay equal. `elastic.planning.schedule.reduction_rounds`
defines when a round is due, and why waiting for one cannot deadlock.
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
from elastic.worker.engine.allreduce import buckets
from elastic.worker.engine.stage_runner import GroupAgreement
from elastic.worker.replica.gradient_sum import GradientSum
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links, PendingCollective


@dataclass(slots=True)
class _PendingReduction:
    """The running all-reduces of one bucket in one round."""

    layers: list[LayerReplica]
    gradients: Tensor
    counts: Tensor
    """int64 [layers (+ 1 for the losses' bits), micro-batches]."""
    waits: tuple[PendingCollective, PendingCollective]
    """The all-reduces of `gradients` and of `counts`."""


class IncrementalAllReduce:
    """Runs the rounds of one worker in one epoch.

    Args:
        every: micro-batches per round, in the pipeline that runs the most of them.
    """

    def __init__(
        self,
        replicas: Sequence[LayerReplica],
        links: Links,
        roster: Roster,
        every: int,
        agreement: GroupAgreement,
    ) -> None:
        self._replicas, self._links, self._roster = replicas, links, roster
        self._me, self._every = roster.members[links.rank], every
        self._agreement = agreement
        self._buckets = list(
            buckets(
                replicas,
                lambda r: _stages(roster, r.index),
                lambda replica: replica.gradient.nbytes,
            )
        )
        self._running: deque[list[_PendingReduction]] = deque()
        """Rounds that this worker has joined and that are not over, oldest first."""
        self._spare: dict[int, list[Tensor]] = {bucket[0].index: [] for bucket in self._buckets}
        """First layer of a bucket -> gradient buffers of its finished rounds."""
        self._joined, self._rounds = 0, Rounds(1, (0,), (1,))
        self._finishing: Iterator[int] = iter(())
        """Stages of the actions that will finish a micro-batch, in order."""
        self._finished: dict[int, int] = {}
        """Stage -> number of micro-batches that the stage has finished in this step."""
        self.shared = False
        """Whether a round of this epoch is over; all holders then have the recovered gradients."""

    def begin(self, actions: Sequence[Action], n_microbatches: Sequence[int]) -> None:
        """Begin a step.

        Args:
            actions: actions of this worker in the step.
            n_microbatches: number of micro-batches that each pipeline runs in the step.
        """
        self._rounds = rounds_of(self._roster.pipelines, n_microbatches, self._every)
        stages = [action.stage for action in actions if action.kind.finishes]
        self._finishing, self._finished = iter(stages), dict.fromkeys(stages, 0)
        self._joined = 0
        self._join()

    def after_microbatch(self) -> None:
        """Called when the next micro-batch is finished and in the layers' gradient sums."""
        self._finished[next(self._finishing)] += 1
        while self._running and self._agreement.all_true(_done(self._running[0])):
            self._end_oldest()
        self._join()

    def finish(
        self, copied: Collection[int], on_layer: Callable[[int], None] = lambda layer: None
    ) -> dict[int, Tensor]:
        """End all rounds of the step. Returns layer -> common gradient.

        Args:
            copied: layers whose gradient is copied, because the caller changes it.
            on_layer: called for each layer when its common gradient is whole.

        Raises:
            EpochAbandoned, LinkFailed: nothing is lost.
            LedgerError: see `parts`.
        """
        while len(self._running) > 1:
            self._end_oldest()
        if self._running:
            self._end_oldest(on_layer)
        gradients = {part.index: part.gradient for part in self.parts()}
        return {layer: g.clone() if layer in copied else g for layer, g in gradients.items()}

    def parts(self) -> list[GradientSum]:
        """Return the common sums of all layers. Call when all rounds of the step are over.

        Raises LedgerError if a layer has no common sum, or has gradients that are not in it.
        """
        rest = {r.index: sorted(r.ledger) for r in self._replicas if r.ledger}
        parts = [replica.common for replica in self._replicas if replica.common is not None]
        if rest or len(parts) < len(self._replicas):
            raise LedgerError(f"not summed over the holders, by layer: {rest}")
        return parts

    def _join(self) -> None:
        """Join the rounds that are due. If too many rounds run, wait for the oldest ones."""
        finished = min(self._finished.values(), default=0)
        rounds = self._rounds
        while (
            self._joined < rounds.number and rounds.due(self._me.pipeline, self._joined) <= finished
        ):
            while len(self._running) >= rounds.windows[self._me.pipeline]:
                self._end_oldest()
            self._running.append([self._start(bucket) for bucket in self._buckets])
            self._joined += 1

    def _start(self, layers: list[LayerReplica]) -> _PendingReduction:
        """Start a round for `layers`, which share the collectives."""
        sent, n = [layer.start_round() for layer in layers], self._roster.n_microbatches
        rows = [[int(m in part.ledger) for m in range(n)] for part in sent]
        counts = torch.tensor(rows, dtype=torch.int64)
        if sent[-1].index == self._roster.n_layers - 1:
            values = [sent[-1].losses.get(m, 0.0) for m in range(n)]
            losses = torch.tensor(values, dtype=torch.float64)
            counts = torch.cat([counts, losses.view(torch.int64)[None]])
        counts = counts.to(self._links.device)
        spare = self._spare[layers[0].index]
        out = spare.pop() if spare else None  # fresh memory costs page faults in every round
        gradients = torch.cat([part.gradient for part in sent], out=out)
        ranks = tuple(sorted(self._roster.holders(layers[0].index, self._me.shard)))
        waits = self._links.all_reduce(gradients, ranks), self._links.all_reduce(counts, ranks)
        return _PendingReduction(layers, gradients, counts, waits)

    def _end_oldest(self, on_layer: Callable[[int], None] = lambda layer: None) -> None:
        """Wait for the oldest round and add its totals to the common sums.

        All ranks of a tensor-parallel group add them, or no rank does.
        """
        for reduction in self._running[0]:
            for wait in reduction.waits:
                wait()
        self._agreement.check()
        for reduction in self._running.popleft():
            _share(reduction)
            self._spare[reduction.layers[0].index].append(reduction.gradients)
            for layer in reduction.layers:
                on_layer(layer.index)
        self.shared = True


def _done(round_: Sequence[_PendingReduction]) -> bool:
    return all(wait.done() for reduction in round_ for wait in reduction.waits)


def _share(reduction: _PendingReduction) -> None:
    """Add the totals of a bucket to its layers' common sums.

    Raises LedgerError if a micro-batch was contributed twice.
    """
    layers, rows = reduction.layers, reduction.counts.cpu()
    totals = torch.split(reduction.gradients, [layer.gradient.numel() for layer in layers])
    for row, (layer, total) in enumerate(zip(layers, totals, strict=True)):
        counts = rows[row].tolist()
        wrong = {m: count for m, count in enumerate(counts) if count not in (0, 1)}
        if wrong:
            text = f"micro-batches contributed more than once, with their counts: {wrong}"
            raise LedgerError(f"layer {layer.index}: {text}")
        ledger, losses = {m for m, count in enumerate(counts) if count}, {}
        if layer is layers[-1] and len(rows) > len(layers):
            values = rows[-1].view(torch.float64).tolist()
            losses = {m: values[m] for m in ledger}
        layer.finish_round(total, ledger, losses)


def _stages(roster: Roster, layer: int) -> list[int]:
    """Return the number of the stage that holds `layer`, per pipeline."""
    return [
        s
        for pipeline in roster.pipelines
        for s, stage in enumerate(pipeline.stages)
        if stage.first <= layer < stage.last
    ]
