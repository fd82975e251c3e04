"""The commit: a gather before each update, after which all workers have the same facts.

Each worker contributes, per layer that it holds, the ledger and the squared norm of the reduced
gradient; the losses of the last layer; and the epoch of a planned change that its agent asked for.
All workers derive the same `Commit` from all contributions, with the same arithmetic in the same
order: proof that every micro-batch is in every layer exactly once, the global norm, the mean loss.

A contribution is a row of int64 words, padded to the longest row. float64 values are stored as
their bits, and M is the number of micro-batches:

    step, epoch, halt epoch, common
    per layer: ledger (ceil(M / 64) words), squared norm (1 word)
    losses (M words)

Only workers that hold the last layer append losses; the losses of micro-batches outside the ledger
are NaN. `common` is 1 if the ledgers belong to common sums, which are equal at all holders
(`elastic.worker.engine.incremental_allreduce`) and count once. Otherwise it is 0, and the ledgers
of a layer's holders are disjoint.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elastic.domain.errors import LedgerError
from elastic.planning.plan.rank_map import RankMember, Roster
from elastic.worker.transport.links import Links

_HEADER = 4
"""Words before the first layer."""


@dataclass(frozen=True, slots=True)
class LayerContribution:
    """One worker's facts about one layer."""

    ledger: frozenset[int]
    norm_sq: float
    """Squared norm of the layer's reduced gradient."""


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's facts about a step."""

    step: int
    epoch: int
    halt_epoch: int
    """Epoch of a planned change that the agent asked for, or -1."""
    layers: tuple[LayerContribution, ...]
    """In layer order."""
    losses: Mapping[int, float]
    """By micro-batch; empty without the last layer."""
    common: bool = False
    """The ledgers belong to common sums, which are equal at all holders."""


@dataclass(frozen=True, slots=True)
class Commit:
    """Facts that all workers share before the update, bit for bit."""

    step: int
    ledgers: tuple[tuple[int, ...], ...]
    """Per layer, the ledgers of its holders (TP rank 0, in pipeline order) as bit masks over the
    micro-batches; a common sum has one ledger."""
    norm: float
    """Norm of the whole gradient."""
    losses: tuple[float, ...]
    """By micro-batch."""
    loss: float
    """Mean over the micro-batches, added in their order."""
    halt_epoch: int
    """Epoch for which all workers leave after the update, or -1."""


class CommitLayer(Protocol):
    """The part of a layer replica, or of its common sum, that the commit uses."""

    index: int
    ledger: set[int]
    losses: dict[int, float]


def commit(
    links: Links,
    roster: Roster,
    replicas: Sequence[CommitLayer],
    norms_sq: Mapping[int, float],
    *,
    step: int,
    halt_epoch: int = -1,
    common: bool = False,
) -> Commit:
    """Gather all contributions and derive the commit.

    Args:
        norms_sq: layer -> squared norm of its reduced gradient.
        common: `replicas` are common sums.

    Raises:
        LedgerError: a micro-batch is missing or counted twice in a layer, or the workers are not
            at the same step.
        EpochAbandoned, LinkFailed: nothing was decided here.
    """
    layers = tuple(LayerContribution(frozenset(r.ledger), norms_sq[r.index]) for r in replicas)
    last = replicas[-1]
    losses = last.losses if last.index == roster.n_layers - 1 else {}
    own = Contribution(step, links.epoch, halt_epoch, layers, losses, common)
    row = torch.tensor(pack(own, roster), dtype=torch.int64)
    rows = [gathered.tolist() for gathered in links.gather(row)]
    members = zip(rows, roster.members, strict=True)
    return decide([unpack(words, member, roster) for words, member in members], roster)


def pack(contribution: Contribution, roster: Roster) -> list[int]:
    """Encode `contribution` as words, padded to `row_length`."""
    n_microbatches = roster.n_microbatches
    words = [contribution.step, contribution.epoch, contribution.halt_epoch]
    words.append(int(contribution.common))
    for layer in contribution.layers:
        words += _mask_words(sum(1 << m for m in layer.ledger), n_microbatches)
        words.append(_bits(layer.norm_sq))
    if contribution.losses:
        words += [_bits(contribution.losses.get(m, math.nan)) for m in range(n_microbatches)]
    return words + [0] * (row_length(roster) - len(words))


def unpack(words: Sequence[int], member: RankMember, roster: Roster) -> Contribution:
    """Decode the contribution of `member`."""
    n_words, at, layers = _n_words(roster.n_microbatches), _HEADER, []
    for _ in member.layers:
        ledger = _ledger(words[at : at + n_words])
        layers.append(LayerContribution(ledger, _float(words[at + n_words])))
        at += n_words + 1
    losses = {}
    if member.layers[-1] == roster.n_layers - 1:
        ledger = layers[-1].ledger
        losses = {m: _float(words[at + m]) for m in range(roster.n_microbatches) if m in ledger}
    return Contribution(words[0], words[1], words[2], tuple(layers), losses, bool(words[3]))


def decide(contributions: Sequence[Contribution], roster: Roster) -> Commit:
    """Derive the commit from all contributions, in rank order. Raises LedgerError."""
    steps = [(c.step, c.epoch) for c in contributions]
    if len(set(steps)) > 1:
        raise LedgerError(f"workers are at different (step, epoch), in rank order: {steps}")
    common = {c.common for c in contributions}
    if len(common) > 1:
        raise LedgerError("some workers contribute common sums, others their own sums")
    by_holder = {
        (r, index): layer
        for r, (member, c) in enumerate(zip(roster.members, contributions, strict=True))
        for index, layer in zip(member.layers, c.layers, strict=True)
    }
    norm_sq, masks = 0.0, []
    for layer in range(roster.n_layers):
        for shard in range(roster.tp):
            held = [by_holder[(r, layer)] for r in roster.holders(layer, shard)]
            ledgers = [contribution.ledger for contribution in held]
            if common == {True}:
                ledgers = _common_ledger(layer, shard, ledgers)
            _check(layer, shard, ledgers, roster.n_microbatches)
            norm_sq += held[0].norm_sq
            if shard == 0:
                masks.append(tuple(sum(1 << m for m in ledger) for ledger in ledgers))
    losses = _losses(contributions, roster)
    return Commit(
        step=contributions[0].step,
        ledgers=tuple(masks),
        norm=math.sqrt(norm_sq),
        losses=losses,
        loss=_ordered_sum(losses) / roster.n_microbatches,
        halt_epoch=max(c.halt_epoch for c in contributions),
    )


def _common_ledger(
    layer: int, shard: int, ledgers: Sequence[frozenset[int]]
) -> list[frozenset[int]]:
    """The ledger that all holders share. Raises LedgerError if the ledgers differ."""
    if len(set(ledgers)) > 1:
        text = [sorted(ledger) for ledger in ledgers]
        where = f"layer {layer} (TP rank {shard})"
        raise LedgerError(f"{where}: the common sums of its holders differ: {text}")
    return [ledgers[0]]


def _check(layer: int, shard: int, ledgers: Sequence[frozenset[int]], n_microbatches: int) -> None:
    """Raise LedgerError unless each micro-batch is in exactly one of `ledgers`."""
    counted = [m for ledger in ledgers for m in ledger]
    doubled = sorted(m for m in set(counted) if counted.count(m) > 1)
    missing = sorted(set(range(n_microbatches)) - set(counted))
    foreign = sorted(set(counted) - set(range(n_microbatches)))
    wrong = {"missing": missing, "doubled": doubled, "beyond the step": foreign}
    text = ", ".join(f"{name}: {indices}" for name, indices in wrong.items() if indices)
    if text:
        raise LedgerError(f"layer {layer} (TP rank {shard}): micro-batches {text}")


def _losses(contributions: Sequence[Contribution], roster: Roster) -> tuple[float, ...]:
    losses: dict[int, float] = {}
    for rank in roster.holders(roster.n_layers - 1, 0):
        losses.update(contributions[rank].losses)
    return tuple(losses[m] for m in range(roster.n_microbatches))


def _ordered_sum(values: Sequence[float]) -> float:
    """Sum from left to right. `sum` compensates from Python 3.12 on and may differ in last bits."""
    total = 0.0
    for value in values:
        total += value
    return total


def row_length(roster: Roster) -> int:
    """Number of words in a row: the length of the longest contribution."""
    per_layer = _n_words(roster.n_microbatches) + 1
    return max(
        _HEADER
        + len(m.layers) * per_layer
        + (roster.n_microbatches if m.layers[-1] == roster.n_layers - 1 else 0)
        for m in roster.members
    )


def _n_words(n_microbatches: int) -> int:
    return -(-n_microbatches // 64)


def _mask_words(mask: int, n_microbatches: int) -> list[int]:
    """`mask` as signed 64-bit words, the lowest bits first."""
    words = [(mask >> (64 * i)) & (2**64 - 1) for i in range(_n_words(n_microbatches))]
    return [word - 2**64 if word >= 2**63 else word for word in words]


def _ledger(words: Sequence[int]) -> frozenset[int]:
    """The set that `_mask_words` encoded."""
    mask = sum((word & (2**64 - 1)) << (64 * i) for i, word in enumerate(words))
    return frozenset(m for m in range(len(words) * 64) if mask >> m & 1)


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
