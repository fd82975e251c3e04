"""The commit: the encoding of a contribution, and the decision from all contributions."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.errors import LedgerError
from elastic.domain.types import Accumulate
from elastic.planning.plan.rank_map import Roster
from elastic.worker.engine.commit import (
    Commit,
    Contribution,
    LayerContribution,
    commit,
    decide,
    pack,
    row_length,
    unpack,
)
from elastic.worker.model.gradients import Accumulator, FlatLayout
from elastic.worker.replica.gradient_sum import GradientSum
from tests.worker.engine.plans import roster_of
from tests.worker.engine.rank_processes import Rank, run_ranks

ROSTER = roster_of([[0, 2], [0, 1]], 3, [(0, 1), (2, 3)])
SINGLE = roster_of([[0]], 1, [tuple(range(130))])


def contributions(roster: Roster, norm: float = 2.0) -> list[Contribution]:
    """Contributions in a step without faults: each pipeline ran its part of the micro-batches."""
    per_pipeline = roster.n_microbatches // (1 + max(m.pipeline for m in roster.members))
    found = []
    for member in roster.members:
        first = member.pipeline * per_pipeline
        ledger = frozenset(range(first, first + per_pipeline))
        losses = {m: 1.0 + m for m in ledger} if member.layers[-1] == roster.n_layers - 1 else {}
        shares = tuple(LayerContribution(ledger, norm * (layer + 1)) for layer in member.layers)
        found.append(Contribution(7, 1, -1, shares, losses))
    return found


def test_a_whole_step_commits() -> None:
    agreed = decide(contributions(ROSTER), ROSTER)
    assert agreed == Commit(norm=math.sqrt(2.0 + 4.0 + 6.0), loss=2.5, halt_epoch=-1)


def common_contributions(roster: Roster, *ledgers: set[int]) -> list[Contribution]:
    """Contributions of common sums; `ledgers` has one ledger per pipeline."""
    rows = []
    for member, row in zip(roster.members, contributions(roster), strict=True):
        ledger = frozenset(ledgers[member.pipeline])
        shares = tuple(replace(share, ledger=ledger) for share in row.layers)
        losses = {m: 1.0 + m for m in ledger} if row.losses else {}
        rows.append(replace(row, layers=shares, losses=losses, common=True))
    return rows


def test_common_sums_count_once() -> None:
    rows, everything = contributions(ROSTER), set(range(4))
    agreed = decide(common_contributions(ROSTER, everything, everything), ROSTER)
    assert agreed == decide(rows, ROSTER)
    with pytest.raises(LedgerError, match=r"layer 0 .* common sums of its holders differ"):
        decide(common_contributions(ROSTER, everything, {0, 1, 2}), ROSTER)
    with pytest.raises(LedgerError, match=r"layer 0 .* missing: \[3\]"):
        decide(common_contributions(ROSTER, {0, 1, 2}, {0, 1, 2}), ROSTER)
    with pytest.raises(LedgerError, match="common sums, others their own sums"):
        decide([*common_contributions(ROSTER, everything, everything)[:2], *rows[2:]], ROSTER)


def test_tensor_parallel_shards_add_to_the_norm() -> None:
    both = roster_of([[0]], 2, [(0, 1)], tp=2)
    assert decide(contributions(both), both).norm == math.sqrt(2.0 + 2.0 + 4.0 + 4.0)


@pytest.mark.parametrize(
    ("rank", "ledger", "message"),
    [
        (0, {0}, r"layer 0 \(TP rank 0\): micro-batches missing: \[1\]"),
        (3, {1, 2, 3}, r"layer 1 .* doubled: \[1\]"),
        (1, {0, 1, 4}, r"layer 2 .* beyond the step: \[4\]"),
        (2, set(), r"layer 0 .* missing: \[2, 3\]"),
    ],
)
def test_an_error_names_the_wrong_ledger(rank: int, ledger: set[int], message: str) -> None:
    rows = contributions(ROSTER)
    shares = tuple(replace(share, ledger=frozenset(ledger)) for share in rows[rank].layers)
    rows[rank] = replace(rows[rank], layers=shares)
    with pytest.raises(LedgerError, match=message):
        decide(rows, ROSTER)


def test_workers_at_different_steps_do_not_commit() -> None:
    rows = contributions(ROSTER)
    rows[2] = replace(rows[2], step=8)
    with pytest.raises(LedgerError, match=r"\(8, 1\)"):
        decide(rows, ROSTER)


def test_one_halt_request_halts_all_workers() -> None:
    rows = contributions(ROSTER)
    rows[1] = replace(rows[1], halt_epoch=5)
    assert decide(rows, ROSTER).halt_epoch == 5


@given(
    ledger=st.frozensets(st.integers(0, 129)),
    norm=st.floats(allow_nan=False),
    step=st.integers(0, 2**40),
    halt=st.integers(-1, 2**40),
    common=st.booleans(),
)
def test_rows_round_trip(
    ledger: frozenset[int], norm: float, step: int, halt: int, common: bool
) -> None:
    losses = {m: m / 3 for m in ledger}
    before = Contribution(step, 3, halt, (LayerContribution(ledger, norm),), losses, common)
    row = pack(before, SINGLE)
    assert len(row) == row_length(SINGLE)
    assert unpack(row, SINGLE.members[0], SINGLE) == before


def test_an_empty_ledger_round_trips_on_the_last_stage() -> None:
    before = Contribution(0, 1, -1, (LayerContribution(frozenset(), 0.0),), {})
    assert unpack(pack(before, SINGLE), SINGLE.members[0], SINGLE) == before


def gather_and_decide(rank: Rank) -> Commit:
    mine = contributions(ROSTER, norm=0.1)[rank.rank]
    layers = list(zip(ROSTER.members[rank.rank].layers, mine.layers, strict=True))
    empty = Accumulator(FlatLayout((), 0), Accumulate.FAST, torch.device("cpu"), "")
    held = [
        GradientSum(index, empty, set(layer.ledger), dict(mine.losses)) for index, layer in layers
    ]
    norms = {index: layer.norm_sq for index, layer in layers}
    return commit(rank.open(), ROSTER, held, norms, step=7, halt_epoch=2 if rank.rank == 3 else -1)


def test_all_ranks_derive_the_same_commit() -> None:
    found = run_ranks(gather_and_decide, ROSTER.size)
    assert (
        found
        == [replace(decide(contributions(ROSTER, norm=0.1), ROSTER), halt_epoch=2)] * ROSTER.size
    )
