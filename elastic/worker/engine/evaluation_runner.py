"""An evaluation on one worker: its micro-batches run forward through all pipelines.

The parameters have version v, before the micro-batches of step v. All workers take part:

1. They exchange the result of version v, if some of them know it from an epoch that ended.
2. Otherwise each runs the forward passes of its stages. The micro-batches are shared by the
   pipelines in proportion to those of a step.
3. They exchange losses and figures, from which all derive the same result, in the order of the
   micro-batches.

Gradients, ledgers and the random numbers of the training stay as they are, so a fault in an
evaluation loses nothing but its forward passes.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from elastic.domain import codec
from elastic.domain.errors import LedgerError
from elastic.domain.ledger import format_indices
from elastic.domain.types import EvaluationResult, Figure, Plan
from elastic.planning.plan.rank_map import Roster
from elastic.planning.schedule.schedule import Kind, actions_of
from elastic.worker.engine.expected_messages import ExpectedMessages, message_tag
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.engine.stage_runner import GroupAgreement
from elastic.worker.model.microbatch import Microbatch, figure_known
from elastic.worker.model.values import Message
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.links import Links

FORWARD = (Kind.RECV_F, Kind.F, Kind.SEND_F)
PIECE = 1024
"""Micro-batches whose actions are listed at once."""
FIRST_TAG = 1 << 16
"""Tags of an evaluation's messages begin here. They are flows of their own, because shapes may
differ from those of the training."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's part of an evaluation."""

    losses: tuple[tuple[int, float, float], ...] = ()
    """(micro-batch, loss, weight); () unless the worker holds the last layer."""
    figures: tuple[tuple[str, int, float], ...] = ()
    """(name, micro-batch, value) of the figures that its layers reported."""
    seconds: float = 0.0


@dataclass(kw_only=True, eq=False)
class EvaluationRunner:
    """Runs the evaluations of one worker in one epoch."""

    microbatches: int
    """Micro-batches of an evaluation."""
    data: Callable[[int, int], Microbatch]
    """data(version, index) -> micro-batch on this device, which keeps figures."""
    weigh: Callable[[Microbatch], float] = lambda microbatch: 1.0
    """weigh(micro-batch) -> its weight in the means."""
    plan: Plan
    roster: Roster
    replicas: Sequence[LayerReplica]
    links: Links
    agreement: GroupAgreement
    """Agreement with the tensor-parallel group to leave the epoch."""
    before: Callable[[int, Kind, int], None]
    """before(version, kind, micro-batch): called before each action."""
    after: Callable[[float], None]
    """after(seconds): called after each forward pass, which took this time."""

    def run(self, version: int, known: EvaluationResult | None) -> EvaluationResult:
        """Return the result of the parameters of `version`, which all replicas have.

        Args:
            known: the result, if this worker has it already.

        Raises:
            EpochAbandoned, LinkFailed: there is no result.
            LedgerError: a micro-batch was evaluated twice or not at all.
            FieldError: two layers report the same figure.
        """
        if known is not None and known.step != version:
            known = None
        with self.agreement:
            texts = gather_texts(self.links, codec.dumps(known) if known else "")
        found = next(filter(None, texts), "")
        if found:
            return codec.loads(EvaluationResult, found)
        began = time.perf_counter()
        with self.agreement, evaluating(replica.module for replica in self.replicas):
            mine = self._run(version)
            mine = replace(mine, seconds=time.perf_counter() - began)
            texts = gather_texts(self.links, codec.dumps(mine))
        found_by = [codec.loads(Contribution, text) for text in texts]
        return combined(version, self.plan.epoch, found_by, self.microbatches)

    def _run(self, version: int) -> Contribution:
        """Run this worker's part of the forward passes, piece by piece: the actions of a piece are
        listed at once."""
        member = self.roster.members[self.links.rank]
        mine = shares(self.plan, self.microbatches)[member.pipeline]
        losses: dict[int, tuple[Tensor, float]] = {}
        figures: list[tuple[str, int, Tensor | float]] = []
        for first in range(0, len(mine), PIECE):
            for microbatch, loss in self._piece(version, mine[first : first + PIECE]):
                index, found = microbatch.index, (microbatch.figures or {}).items()
                figures += [(name, index, value) for name, value in found]
                if loss is not None:
                    losses[index] = loss, self.weigh(microbatch)
        self.links.flush()
        if member.shard:  # the ranks of a tensor-parallel group have the same values
            return Contribution()
        return Contribution(
            tuple((index, float(loss), weight) for index, (loss, weight) in losses.items()),
            tuple((name, index, float(value)) for name, index, value in figures),
        )

    def _piece(
        self, version: int, indices: Sequence[int]
    ) -> Iterator[tuple[Microbatch, Tensor | None]]:
        """Run some micro-batches. Yield each forward pass: (micro-batch, loss; None before the last
        stage)."""
        member = self.roster.members[self.links.rank]
        pipeline = self.plan.pipelines[member.pipeline]
        lists = actions_of(pipeline, tuple(range(len(indices))))
        actions = [action for action in lists[member.stage] if action.kind in FORWARD]
        local = stages_of_rank(self.roster, self.links.rank, self.replicas)
        stages = {stage.number: stage for stage in local}
        expected = ExpectedMessages(actions, stages, self.links, FIRST_TAG)
        received: dict[tuple[int, int], Message] = {}
        outgoing: dict[tuple[int, int], Message] = {}
        for action in actions:
            stage, place = stages[action.stage], (action.microbatch, action.stage)
            index = indices[action.microbatch]
            self.before(version, action.kind, index)
            match action.kind:
                case Kind.RECV_F:
                    received[place] = expected.take(action).to(self.links.device)
                case Kind.SEND_F:
                    assert stage.following is not None
                    tag = FIRST_TAG + message_tag(action)
                    self.links.send(outgoing.pop(place), stage.following, tag)
                case _:
                    self.agreement.check()
                    began = time.perf_counter()
                    microbatch, loss = self.data(version, index), None
                    out = stage.evaluate(microbatch, received.pop(place, None))
                    if stage.ends:
                        assert isinstance(out, Tensor), "the last layer returns the loss"
                        loss = out.clone()
                    else:
                        outgoing[place] = Message.of(out, self.links.device)
                    self.after(time.perf_counter() - began)
                    yield microbatch, loss


def shares(plan: Plan, microbatches: int) -> tuple[tuple[int, ...], ...]:
    """Return the micro-batches of an evaluation per pipeline, in proportion to those of a step."""
    total, before, found = plan.n_microbatches, 0, []
    for pipeline in plan.pipelines:
        after = before + len(pipeline.microbatches)
        first, last = (microbatches * edge // total for edge in (before, after))
        found.append(tuple(range(first, last)))
        before = after
    return tuple(found)


def combined(
    version: int, epoch: int, contributions: Sequence[Contribution], microbatches: int
) -> EvaluationResult:
    """Derive the result from the contributions of all workers.

    Raises LedgerError unless each micro-batch has one loss, and FieldError if a micro-batch has two
    values of a figure.
    """
    losses: dict[int, float] = {}
    weights: dict[int, float] = {}
    figures: dict[str, dict[int, float]] = defaultdict(dict)
    doubled: list[int] = []
    for share in contributions:
        for index, loss, weight in share.losses:
            doubled += [index] if index in losses else []
            losses[index], weights[index] = loss, weight
        for name, index, value in share.figures:
            if index in figures[name]:
                raise figure_known(name)
            figures[name][index] = value
    missing = sorted({*range(microbatches)} - losses.keys())
    if missing or doubled:
        parts = {"missing": missing, "doubled": sorted({*doubled})}
        text = ", ".join(f"{name}: {format_indices(i)}" for name, i in parts.items() if i)
        raise LedgerError(f"evaluation after step {version}: micro-batches {text}")
    return EvaluationResult(
        step=version,
        epoch=epoch,
        loss=_mean(losses, weights),
        microbatches=microbatches,
        seconds=max(share.seconds for share in contributions),
        figures=tuple(Figure(name, _mean(figures[name], weights)) for name in sorted(figures)),
    )


def _mean(values: dict[int, float], weights: dict[int, float]) -> float:
    """Return the weighted mean of values that are added in the order of their micro-batches; 0 if
    none has a weight."""
    total = weight = 0.0
    for index in sorted(values):  # not `sum`, which compensates rounding from Python 3.12 on
        if weights[index]:  # the loss of a micro-batch without weight may be NaN
            total += values[index] * weights[index]
            weight += weights[index]
    return total / weight if weight else 0.0


def gather_texts(links: Links, text: str) -> list[str]:
    """Return the text of every rank, in rank order. Raises EpochAbandoned or LinkFailed."""
    data = text.encode()
    sizes = [int(size) for size in links.gather(torch.tensor([len(data)]))]
    if not any(sizes):
        return [""] * len(sizes)
    row = torch.frombuffer(bytearray(data.ljust(max(sizes), b" ")), dtype=torch.uint8)
    rows = zip(links.gather(row), sizes, strict=True)
    return [gathered.numpy().tobytes()[:size].decode() for gathered, size in rows]


@contextmanager
def evaluating(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Put `modules` into evaluation mode; afterwards each part has its former mode."""
    parts = [(part, part.training) for module in modules for part in module.modules()]
    try:
        for part, _ in parts:
            part.training = False
        yield
    finally:
        for part, training in parts:
            part.training = training
