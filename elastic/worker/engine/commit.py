"""The commit: a gather before each update, after which all workers have the same facts.

Each worker contributes, per layer that it holds, the ledger, the squared norm of the reduced
gradient and a hash of the parameters; the losses of the last layer; and the epoch of a planned
change that its agent asked for. All workers derive the same `Commit` from all contributions, with
the same arithmetic in the same order: proof that every micro-batch is in every layer exactly once,
the global norm, the mean loss.

With exact accumulation, holders of a layer on equal devices must have equal bits. Their norms are
compared in every step, and the hashes of their parameters in those steps in which they are computed
(`StepChecks.verify_every`). If they differ, no worker updates.

A contribution is a row of bytes, padded to the longest row. M is the number of micro-batches:

    step, epoch, halt epoch (int64 each), common (1 byte), kind of device (uint32)
    hashes of the data that was read (3 x uint64)
    per layer: ledger (M // 8 + 1 bytes; bit m is micro-batch m), squared norm (float64),
               hash of the parameters (uint64; 0: not computed)
    losses times weights (M float64), weight (float64)

The first and the last stage of a pipeline read the same micro-batches, so the sums of their hashes
must be equal. In the first step of an epoch, all of these workers also compare the last micro-batch
of the step.

Only workers that hold the last layer append losses, and the sum of the weights of all micro-batches
of the step, from the reduced gradient. The losses of micro-batches outside the ledger are NaN.
`common` is 1 if the ledgers belong to common sums, which are equal at all holders
(`elastic.worker.engine.incremental_allreduce`) and count once. Otherwise it is 0, and the ledgers
of a layer's holders are disjoint.
"""

from __future__ import annotations

import contextlib
import math
import struct
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from elastic.domain.errors import DivergenceError, FieldError, LedgerError
from elastic.domain.types import NORM, PARAMETERS, Divergence
from elastic.planning.plan.rank_map import RankMember, Roster
from elastic.worker.datasets.data_source import PURE
from elastic.worker.model.checks import Described
from elastic.worker.replica.gradient_sum import GradientSum
from elastic.worker.transport.cancellation import EpochAbandoned, LinkFailed
from elastic.worker.transport.links import Links

_HEADER = struct.Struct("<qqq?IQQQ")
"""step, epoch, halt epoch, common, kind of device, hashes of the data."""
_SHARE = struct.Struct("<dQ")
"""Squared norm, hash of the parameters."""


@dataclass(frozen=True, slots=True)
class LayerContribution:
    """One worker's facts about one layer."""

    ledger: frozenset[int]
    norm_sq: float
    """Squared norm of the layer's reduced gradient."""
    digest: int = 0
    """Hash of the layer's parameters; 0: not computed in this step."""


@dataclass(frozen=True, slots=True)
class ReadData:
    """Hashes of the micro-batches that one worker has read in a step; 0: it has read none."""

    first: int = 0
    """Sum over those that it read for the model's first stage, modulo 2**64."""
    last: int = 0
    """Sum over those that it read for the model's last stage."""
    common: int = 0
    """Hash of a micro-batch that all workers with the first or the last stage have read."""

    @classmethod
    def of(cls, first: Mapping[int, int], last: Mapping[int, int], common: int = 0) -> ReadData:
        """`first`, `last`: hash by micro-batch."""
        return cls(sum(first.values()) % 2**64, sum(last.values()) % 2**64, common)


@dataclass(frozen=True, slots=True)
class Contribution:
    """One worker's facts about a step."""

    step: int
    epoch: int
    halt_epoch: int
    """Epoch of a planned change that the agent asked for, or -1."""
    layers: tuple[LayerContribution, ...]
    """Facts about each layer that the worker holds, in layer order."""
    losses: Mapping[int, float]
    """Loss times weight by micro-batch; empty if the worker does not hold the last layer."""
    weight: float = 0.0
    """Weight of all micro-batches of the step; 0 if the worker does not hold the last layer."""
    common: bool = False
    """Whether the ledgers belong to common sums, which are equal at all holders."""
    device: int = 0
    """Kind of the worker's device (`elastic.worker.replica.digest.device_kind`)."""
    data: ReadData = ReadData()


@dataclass(frozen=True, slots=True)
class Commit:
    """Facts that are equal on all workers, bit for bit, before the update."""

    norm: float
    """Norm of the sum of all gradients."""
    weight: float
    """Weight of all micro-batches; their number, if all count equally."""
    loss: float
    """Weighted mean of the losses, which are added in the order of the micro-batches; 0 if none has
    a weight."""
    halt_epoch: int
    """Epoch for which all workers leave after the update, or -1."""
    ledgers: int = 0
    """Number of ledgers, one per layer and TP rank, that are complete."""
    nonfinite: tuple[int, ...] = ()
    """Layers whose gradient is infinite or NaN."""


def commit(
    links: Links,
    roster: Roster,
    sums: Sequence[GradientSum],
    norms_sq: Mapping[int, float],
    *,
    step: int,
    weight: float,
    halt_epoch: int = -1,
    common: bool = False,
    exact: bool = False,
    digests: Mapping[int, int] | None = None,
    device: int = 0,
    data: ReadData = ReadData(),
) -> Commit:
    """Gather all contributions and derive the commit.

    Args:
        sums: gradient sums of this worker's layers, in layer order.
        norms_sq: layer -> squared norm of its reduced gradient.
        weight: weight of the micro-batches in the last layer's reduced gradient; 0 if this worker
            does not hold that layer.
        common: `sums` are common sums.
        exact: compare what the holders of a layer have.
        digests: layer -> hash of its parameters; None: not computed in this step.
        device: kind of this worker's device.
        data: hashes of the data that this worker has read.

    Raises:
        FieldError: workers have read different data.
        LedgerError: a micro-batch is missing or counted twice in a layer, or the workers are not
            at the same step.
        DivergenceError: holders of a layer disagree. All workers learn it, and none updates.
        EpochAbandoned, LinkFailed: this worker has no commit and must not update.
    """
    hashes = digests or {}
    layers = tuple(
        LayerContribution(frozenset(s.ledger), norms_sq[s.index], hashes.get(s.index, 0))
        for s in sums
    )
    losses = sums[-1].losses if sums[-1].index == roster.n_layers - 1 else {}
    own = Contribution(step, links.epoch, halt_epoch, layers, losses, weight, common, device, data)
    gathered = _gather(links, own, roster)
    with _told_to_all(links):
        return decide(gathered, roster, exact=exact)


def verify(
    links: Links,
    roster: Roster,
    layers: Sequence[int],
    digests: Mapping[int, int],
    *,
    step: int,
    device: int,
) -> None:
    """Wait for all workers, and compare the hashes of all layers, before or after an update.

    Args:
        layers: this worker's layers, in order.
        digests: layer -> hash of its parameters; {}: only wait.

    Raises DivergenceError, EpochAbandoned, LinkFailed as `commit` does.
    """
    shares = tuple(LayerContribution(frozenset(), 0.0, digests.get(i, 0)) for i in layers)
    own = Contribution(step, links.epoch, -1, shares, {}, device=device)
    gathered = _gather(links, own, roster)
    with _told_to_all(links):
        compare(gathered, roster)


def _gather(links: Links, own: Contribution, roster: Roster) -> list[Contribution]:
    """Return the contributions of all workers, in rank order."""
    row = torch.frombuffer(bytearray(pack(own, roster)), dtype=torch.uint8)
    rows = [gathered.numpy().tobytes() for gathered in links.gather(row)]
    members = zip(rows, roster.members, strict=True)
    return [unpack(row, member, roster) for row, member in members]


@contextlib.contextmanager
def _told_to_all(links: Links) -> Iterator[None]:
    """Before a DivergenceError is raised, wait until all workers have the same facts.

    A worker that left earlier would close its links, and the others would report a lost contact
    instead of what they know. A failure of this wait is not reported, for the same reason.
    """
    try:
        yield
    except DivergenceError:
        with contextlib.suppress(LinkFailed, EpochAbandoned):
            links.gather(torch.zeros(1, dtype=torch.uint8))
        raise


def pack(contribution: Contribution, roster: Roster) -> bytes:
    """Encode `contribution`, padded to `row_length`."""
    own, n = contribution, roster.n_microbatches
    data = own.data
    row = _HEADER.pack(
        own.step, own.epoch, own.halt_epoch, own.common, own.device,
        data.first, data.last, data.common,
    )  # fmt: skip
    for layer in own.layers:
        mask = sum(1 << m for m in layer.ledger)
        row += mask.to_bytes(_ledger_bytes(roster), "little")
        row += _SHARE.pack(layer.norm_sq, layer.digest)
    if own.losses or own.weight:
        values = (own.losses.get(m, math.nan) for m in range(n))
        row += struct.pack(f"<{n + 1}d", *values, own.weight)
    return row.ljust(row_length(roster), b"\0")


def unpack(row: bytes, member: RankMember, roster: Roster) -> Contribution:
    """Decode the contribution of `member`."""
    size, at, layers = _ledger_bytes(roster), _HEADER.size, []
    for _ in member.layers:
        mask = int.from_bytes(row[at : at + size], "little")
        ledger = frozenset(m for m in range(8 * size) if mask >> m & 1)
        layers.append(LayerContribution(ledger, *_SHARE.unpack_from(row, at + size)))
        at += size + _SHARE.size
    losses, weight = {}, 0.0
    if member.layers[-1] == roster.n_layers - 1:
        *values, weight = struct.unpack_from(f"<{roster.n_microbatches + 1}d", row, at)
        losses = {m: value for m, value in enumerate(values) if m in layers[-1].ledger}
    step, epoch, halt_epoch, common, device, *hashes = _HEADER.unpack_from(row)
    data = ReadData(*hashes)
    return Contribution(
        step, epoch, halt_epoch, tuple(layers), losses, weight, common, device, data
    )


def row_length(roster: Roster) -> int:
    """Number of bytes in a row: the length of the longest contribution."""
    per_layer, losses = _ledger_bytes(roster) + _SHARE.size, 8 * (roster.n_microbatches + 1)
    return max(
        _HEADER.size
        + len(m.layers) * per_layer
        + (losses if m.layers[-1] == roster.n_layers - 1 else 0)
        for m in roster.members
    )


def _ledger_bytes(roster: Roster) -> int:
    return roster.n_microbatches // 8 + 1


def compare(contributions: Sequence[Contribution], roster: Roster) -> None:
    """Raise DivergenceError if holders of a layer, on equal devices, have other bits than others.

    `contributions` are in rank order.
    """
    found: list[Divergence] = []
    for layer in range(roster.n_layers):
        for shard in range(roster.tp):
            by_device: dict[int, dict[str, LayerContribution]] = {}
            for rank in roster.holders(layer, shard):
                member, row = roster.members[rank], contributions[rank]
                share = row.layers[member.layers.index(layer)]
                by_device.setdefault(row.device, {})[member.unit.name] = share
            for shares in by_device.values():
                if len({(share.norm_sq, share.digest) for share in shares.values()}) == 1:
                    continue
                norms = tuple((node, repr(share.norm_sq)) for node, share in shares.items())
                hashes = tuple((node, f"{share.digest:016x}") for node, share in shares.items())
                for what, values in ((NORM, norms), (PARAMETERS, hashes)):
                    if len({value for _, value in values}) > 1:
                        found.append(Divergence(layer, shard, what, values))
    if found:
        raise DivergenceError(contributions[0].step, tuple(found))


def compare_data(contributions: Sequence[Contribution], roster: Roster) -> None:
    """Raise FieldError if workers have read different data. `contributions` are in rank order."""
    step, last_layer = contributions[0].step, roster.n_layers - 1
    per_pipeline: dict[int, list[tuple[int, str]]] = defaultdict(list)
    everywhere: list[tuple[int, str]] = []
    for member, row in zip(roster.members, contributions, strict=True):
        name, data = member.unit.node, row.data
        if 0 in member.layers:
            per_pipeline[member.pipeline].append((data.first, name))
        if last_layer in member.layers:
            per_pipeline[member.pipeline].append((data.last, name))
        if data.common:
            everywhere.append((data.common, name))
    for read in (everywhere, *per_pipeline.values()):
        first = read[0] if read else (0, "")
        other = next((name for digest, name in read if digest != first[0]), None)
        if other is not None:
            what = Described(f"other micro-batches on {other} than on {first[1]} in step {step}")
            raise FieldError("data", what, PURE)


def decide(contributions: Sequence[Contribution], roster: Roster, *, exact: bool = False) -> Commit:
    """Derive the commit from all contributions, in rank order.

    Raises LedgerError, FieldError (`compare_data`), and with `exact` DivergenceError (`compare`).
    """
    steps = [(c.step, c.epoch) for c in contributions]
    if len(set(steps)) > 1:
        raise LedgerError(f"workers are at different (step, epoch), in rank order: {steps}")
    common = {c.common for c in contributions}
    if len(common) > 1:
        raise LedgerError("some workers contribute common sums, others their own sums")
    compare_data(contributions, roster)
    by_holder = {
        (r, index): layer
        for r, (member, c) in enumerate(zip(roster.members, contributions, strict=True))
        for index, layer in zip(member.layers, c.layers, strict=True)
    }
    norm_sq = loss = 0.0
    ledgers, nonfinite = 0, []
    for layer in range(roster.n_layers):
        for shard in range(roster.tp):
            held = [by_holder[(r, layer)] for r in roster.holders(layer, shard)]
            where = f"layer {layer} (TP rank {shard})"
            _check(where, [share.ledger for share in held], common == {True}, roster.n_microbatches)
            ledgers += 1
            bad = [share.norm_sq for share in held if not math.isfinite(share.norm_sq)]
            norm_sq += bad[0] if bad else held[0].norm_sq
            nonfinite += [layer] if bad else []
    if exact:
        compare(contributions, roster)
    losses: dict[int, float] = {}
    last = roster.holders(roster.n_layers - 1, 0)
    for rank in last:
        losses.update(contributions[rank].losses)
    weight = max(contributions[rank].weight for rank in last)  # equal at all of them
    # A loop, because Python's `sum` compensates rounding from version 3.12 on.
    for m in range(roster.n_microbatches):
        loss += losses[m]
    return Commit(
        norm=math.sqrt(norm_sq),
        weight=weight,
        loss=loss / weight if weight else 0.0,
        halt_epoch=max(c.halt_epoch for c in contributions),
        ledgers=ledgers,
        nonfinite=tuple(dict.fromkeys(nonfinite)),
    )


def _check(where: str, ledgers: list[frozenset[int]], common: bool, n_microbatches: int) -> None:
    """Raise LedgerError unless each micro-batch is in exactly one of `ledgers`.

    `common`: each micro-batch must be in all of them instead.
    """
    if common and len(set(ledgers)) > 1:
        found = [sorted(ledger) for ledger in ledgers]
        raise LedgerError(f"{where}: the common sums of its holders differ: {found}")
    counted = [m for ledger in (ledgers[:1] if common else ledgers) for m in ledger]
    doubled = sorted(m for m in set(counted) if counted.count(m) > 1)
    missing = sorted(set(range(n_microbatches)) - set(counted))
    foreign = sorted(set(counted) - set(range(n_microbatches)))
    wrong = {"missing": missing, "doubled": doubled, "beyond the step": foreign}
    text = ", ".join(f"{name}: {indices}" for name, indices in wrong.items() if indices)
    if text:
        raise LedgerError(f"{where}: micro-batches {text}", len(doubled), len(missing))
