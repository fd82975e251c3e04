"""The commit: one gather before the update of a step, after which every worker knows the same.

Each worker contributes, per layer that it holds, the ledger and the squared norm of the reduced gradient, the
losses of the last layer, and the epoch of a planned change that its agent asked for. From all contributions
each worker derives, with the same arithmetic in the same order, a `Commit`: proof that every micro-batch is
in every layer exactly once, the global norm, the mean loss.

A contribution is a row of int64 words (float64 values as their bits), padded to the longest:

    step, epoch, halt epoch, common | per layer: ledger (ceil(M / 64) words), squared norm (bits of a float64) | M
    losses (float64 bits)

Losses are there only in rows of workers that hold the last layer; those of micro-batches not in the ledger
are NaN. `common` is 1 where the ledgers are those of sums that all holders have alike (`elastic.worker.engine.incremental_allreduce`): then
they are the same at all of them, and count once. Else it is 0, and they are disjoint.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from elastic.domain.errors import LedgerError
from elastic.planning.plan.rank_map import Member, Roster
from elastic.worker.transport.links import Links

_HEADER = 4


@dataclass(frozen=True, slots=True)
class LayerContribution:
    """One worker's part of one layer."""

    ledger: frozenset[int]
    norm_sq: float


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one worker brings; `layers` in order, `losses` by micro-batch."""

    step: int
    epoch: int
    halt_epoch: int
    """Epoch of a planned change that was asked for, or -1."""
    layers: tuple[LayerContribution, ...]
    losses: Mapping[int, float]
    common: bool = False
    """The ledgers are those of sums that all holders have alike."""


@dataclass(frozen=True, slots=True)
class Commit:
    """What all workers know before the update; the same bits everywhere."""

    step: int
    ledgers: tuple[tuple[int, ...], ...]
    """Per layer, its holders' ledgers (TP rank 0, pipeline order) as bit masks over the M micro-batches; of common
    sums one."""
    norm: float
    """Norm of the whole gradient."""
    losses: tuple[float, ...]
    """By micro-batch."""
    loss: float
    """Mean over the micro-batches, added in their order."""
    halt_epoch: int
    """All workers leave for this epoch after the update, if it is not -1."""


class CommitLayer(Protocol):
    """What the commit needs of `elastic.worker.replica.replica.LayerReplica`, or of its common sum."""

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
    """Gather and decide. `norms_sq`: layer -> squared norm of its reduced gradient. `common`: all holders of a layer
    have the same sum.

    Raises:
        LedgerError: a micro-batch is missing or doubled in some layer, or the workers are not at the same
        step. EpochAbandoned, LinkFailed: nothing was decided here.
    """
    shares = tuple(LayerContribution(frozenset(r.ledger), norms_sq[r.index]) for r in replicas)
    last = replicas[-1]
    losses = last.losses if last.index == roster.n_layers - 1 else {}
    mine = Contribution(step, links.epoch, halt_epoch, shares, losses, common)
    row = torch.tensor(pack(mine, roster), dtype=torch.int64)
    rows = [gathered.tolist() for gathered in links.gather(row)]
    return decide(
        [unpack(words, member, roster) for words, member in zip(rows, roster.members, strict=True)], roster
    )


def pack(contribution: Contribution, roster: Roster) -> list[int]:
    """The words of one contribution."""
    words = [contribution.step, contribution.epoch, contribution.halt_epoch, int(contribution.common)]
    for share in contribution.layers:
        words += _mask_words(sum(1 << m for m in share.ledger), roster.n_microbatches)
        words.append(_bits(share.norm_sq))
    if contribution.losses:
        words += [_bits(contribution.losses.get(m, math.nan)) for m in range(roster.n_microbatches)]
    return words + [0] * (row_length(roster) - len(words))


def unpack(words: Sequence[int], member: Member, roster: Roster) -> Contribution:
    """The contribution of `member` that `pack` turned into `words`."""
    n_words, at, shares = _n_words(roster.n_microbatches), _HEADER, []
    for _ in member.layers:
        mask = sum((word & (2**64 - 1)) << (64 * i) for i, word in enumerate(words[at : at + n_words]))
        ledger = frozenset(m for m in range(n_words * 64) if mask >> m & 1)
        shares.append(LayerContribution(ledger, _float(words[at + n_words])))
        at += n_words + 1
    losses = {}
    if member.layers[-1] == roster.n_layers - 1:
        ledger = shares[-1].ledger
        losses = {m: _float(words[at + m]) for m in range(roster.n_microbatches) if m in ledger}
    return Contribution(words[0], words[1], words[2], tuple(shares), losses, bool(words[3]))


def decide(contributions: Sequence[Contribution], roster: Roster) -> Commit:
    """What follows from all contributions, in rank order. Raises LedgerError."""
    steps = [(c.step, c.epoch) for c in contributions]
    if len(set(steps)) > 1:
        raise LedgerError(f"workers are at different (step, epoch), in rank order: {steps}")
    common = {c.common for c in contributions}
    if len(common) > 1:
        raise LedgerError("some workers bring common sums, others their own")
    shares = {
        (r, layer): share
        for r, (member, c) in enumerate(zip(roster.members, contributions, strict=True))
        for layer, share in zip(member.layers, c.layers, strict=True)
    }
    norm_sq, ledgers = 0.0, []
    for layer in range(roster.n_layers):
        for shard in range(roster.tp):
            held = [shares[(r, layer)] for r in roster.holders(layer, shard)]
            found = [share.ledger for share in held]
            if common == {True}:
                found = _alike(layer, shard, found)
            _check(layer, shard, found, roster.n_microbatches)
            norm_sq += held[0].norm_sq
            if shard == 0:
                ledgers.append(tuple(sum(1 << m for m in ledger) for ledger in found))
    losses = _losses(contributions, roster)
    return Commit(
        step=contributions[0].step,
        ledgers=tuple(ledgers),
        norm=math.sqrt(norm_sq),
        losses=losses,
        loss=_ordered_sum(losses) / roster.n_microbatches,
        halt_epoch=max(c.halt_epoch for c in contributions),
    )


def _alike(layer: int, shard: int, ledgers: Sequence[frozenset[int]]) -> list[frozenset[int]]:
    """The one ledger that all holders have. Raises LedgerError."""
    if len(set(ledgers)) > 1:
        text = [sorted(ledger) for ledger in ledgers]
        raise LedgerError(f"layer {layer} (TP rank {shard}): its holders' common sums differ: {text}")
    return [ledgers[0]]


def _check(layer: int, shard: int, ledgers: Sequence[frozenset[int]], n_microbatches: int) -> None:
    found = [m for ledger in ledgers for m in ledger]
    doubled = sorted(m for m in set(found) if found.count(m) > 1)
    missing = sorted(set(range(n_microbatches)) - set(found))
    foreign = sorted(set(found) - set(range(n_microbatches)))
    wrong = {"missing": missing, "doubled": doubled, "beyond the step": foreign}
    text = ", ".join(f"{name}: {microbatches}" for name, microbatches in wrong.items() if microbatches)
    if text:
        raise LedgerError(f"layer {layer} (TP rank {shard}): micro-batches {text}")


def _losses(contributions: Sequence[Contribution], roster: Roster) -> tuple[float, ...]:
    losses: dict[int, float] = {}
    for rank in roster.holders(roster.n_layers - 1, 0):
        losses.update(contributions[rank].losses)
    return tuple(losses[m] for m in range(roster.n_microbatches))


def _ordered_sum(values: Sequence[float]) -> float:
    """Left to right, on purpose: `sum` compensates in newer Pythons; the last bit would differ."""
    total = 0.0
    for value in values:
        total += value
    return total


def row_length(roster: Roster) -> int:
    """Words of a row: those of the largest contribution."""
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
    words = [(mask >> (64 * i)) & (2**64 - 1) for i in range(_n_words(n_microbatches))]
    return [word - 2**64 if word >= 2**63 else word for word in words]


def _bits(value: float) -> int:
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _float(bits: int) -> float:
    return float(struct.unpack("<d", struct.pack("<q", bits))[0])
