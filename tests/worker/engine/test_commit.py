"""The commit: the encoding of a contribution, and the decision from all contributions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.errors import DivergenceError, FieldError, LedgerError
from elastic.domain.types import NORM, PARAMETERS, Accumulate, Divergence
from elastic.planning.plan.rank_map import Roster
from elastic.worker.engine.commit import (
    Commit,
    Contribution,
    LayerContribution,
    ReadData,
    commit,
    decide,
    pack,
    row_length,
    unpack,
    verify,
)
from elastic.worker.model.gradients import Accumulator, FlatLayout
from elastic.worker.replica.gradient_sum import GradientSum
from tests.worker.engine.plans import roster_of
from tests.worker.engine.rank_processes import Rank, run_ranks

ROSTER = roster_of([[0, 2], [0, 1]], 3, [(0, 1), (2, 3)])
THREE = roster_of([[0], [0], [0]], 2, [(0,), (1,), (2,)])
SINGLE = roster_of([[0]], 1, [tuple(range(130))])


def contributions(roster: Roster, norm: float = 2.0) -> list[Contribution]:
    """Contributions in a step without faults: each pipeline ran its part of the micro-batches."""
    per_pipeline = roster.n_microbatches // (1 + max(m.pipeline for m in roster.members))
    found = []
    for member in roster.members:
        first = member.pipeline * per_pipeline
        ledger = frozenset(range(first, first + per_pipeline))
        last = member.layers[-1] == roster.n_layers - 1
        losses = {m: 1.0 + m for m in ledger} if last else {}
        shares = tuple(LayerContribution(ledger, norm * (layer + 1)) for layer in member.layers)
        weight = float(roster.n_microbatches) if last else 0.0
        found.append(Contribution(7, 1, -1, shares, losses, weight))
    return found


def test_a_whole_step_commits() -> None:
    agreed = decide(contributions(ROSTER), ROSTER)
    norm = math.sqrt(2.0 + 4.0 + 6.0)
    assert agreed == Commit(norm=norm, weight=4.0, loss=2.5, halt_epoch=-1, ledgers=3)


def test_the_loss_is_the_mean_by_weight() -> None:
    rows = contributions(ROSTER)
    weighted = [replace(row, weight=20.0 if row.losses else 0.0) for row in rows]
    agreed = decide(weighted, ROSTER)
    assert (agreed.weight, agreed.loss) == (20.0, 10.0 / 20.0)
    without = decide([replace(row, weight=0.0) for row in rows], ROSTER)
    assert (without.weight, without.loss) == (0.0, 0.0)


def test_a_holder_of_the_last_layer_without_work_knows_the_weight_too() -> None:
    """After a recovery, another holder may have the sums of all micro-batches."""
    both = roster_of([[0], [0]], 2, [(0, 1), (2, 3)])
    ledgers = (frozenset[int](), frozenset(range(4)))
    rows = []
    for ledger in ledgers:
        shares = (LayerContribution(ledger, 2.0), LayerContribution(ledger, 3.0))
        losses = {m: 1.0 + m for m in ledger}
        row = Contribution(7, 1, -1, shares, losses, weight=4.0)
        rows.append(unpack(pack(row, both), both.members[0], both))
    assert [row.weight for row in rows] == [4.0, 4.0]
    agreed = decide(rows, both)
    assert (agreed.weight, agreed.loss) == (4.0, 2.5)


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
    ("rank", "ledger", "message", "counts"),
    [
        (0, {0}, r"layer 0 \(TP rank 0\): micro-batches missing: \[1\]", (0, 1)),
        (3, {1, 2, 3}, r"layer 1 .* doubled: \[1\]", (1, 0)),
        (1, {0, 1, 4}, r"layer 2 .* beyond the step: \[4\]", (0, 0)),
        (2, set(), r"layer 0 .* missing: \[2, 3\]", (0, 2)),
    ],
)
def test_an_error_names_the_wrong_ledger(
    rank: int, ledger: set[int], message: str, counts: tuple[int, int]
) -> None:
    rows = contributions(ROSTER)
    shares = tuple(replace(share, ledger=frozenset(ledger)) for share in rows[rank].layers)
    rows[rank] = replace(rows[rank], layers=shares)
    with pytest.raises(LedgerError, match=message) as caught:
        decide(rows, ROSTER)
    assert (caught.value.doubled, caught.value.missing) == counts


def test_workers_at_different_steps_do_not_commit() -> None:
    rows = contributions(ROSTER)
    rows[2] = replace(rows[2], step=8)
    with pytest.raises(LedgerError, match=r"\(8, 1\)"):
        decide(rows, ROSTER)


def test_one_halt_request_halts_all_workers() -> None:
    rows = contributions(ROSTER)
    rows[1] = replace(rows[1], halt_epoch=5)
    assert decide(rows, ROSTER).halt_epoch == 5


def reading(*data: ReadData) -> list[Contribution]:
    return [replace(row, data=d) for row, d in zip(contributions(ROSTER), data, strict=True)]


FIRST, SECOND = {0: 2**63, 1: 2**63 + 5}, {2: 11, 3: 12}


def test_both_ends_of_a_pipeline_have_read_the_same() -> None:
    """Pipelines read different micro-batches, and middle stages none."""
    rows = reading(
        ReadData.of(FIRST, {}, 9),
        ReadData.of({}, dict(reversed(FIRST.items())), 9),
        ReadData.of(SECOND, {}, 9),
        ReadData.of({}, SECOND, 9),
    )
    assert decide(rows, ROSTER) == decide(contributions(ROSTER), ROSTER)
    assert rows[0].data.first == 5, "modulo 2**64"


@pytest.mark.parametrize(
    ("data", "nodes"),
    [
        ((ReadData(5), ReadData(0, 6), ReadData(), ReadData()), "node1 than on node0"),
        ((ReadData(), ReadData(), ReadData(4), ReadData()), "node3 than on node2"),
        ((ReadData(0, 0, 9), ReadData(), ReadData(0, 0, 8), ReadData()), "node2 than on node0"),
    ],
)
def test_other_data_on_another_node_is_refused(data: tuple[ReadData, ...], nodes: str) -> None:
    text = f"^data: other micro-batches on {nodes} in step 7 is not usable: data must depend on"
    with pytest.raises(FieldError, match=text) as caught:
        decide(reading(*data), ROSTER)
    assert caught.value.exit_code == 2


def test_a_worker_with_the_whole_model_reads_each_micro_batch_once() -> None:
    (row,) = contributions(SINGLE)
    hashes = dict.fromkeys(range(130), 3)
    assert decide([replace(row, data=ReadData.of(hashes, hashes, 3))], SINGLE).ledgers == 1


def altered(rank: int, layer: int, device: int = 0, **changes: Any) -> list[Contribution]:
    """Contributions of which one has other facts about one layer."""
    rows = contributions(ROSTER)
    at = ROSTER.members[rank].layers.index(layer)
    shares = list(rows[rank].layers)
    shares[at] = replace(shares[at], **changes)
    rows[rank] = replace(rows[rank], layers=tuple(shares), device=device)
    return rows


@pytest.mark.parametrize(
    ("rank", "layer", "changes", "values"),
    [
        (0, 1, {"norm_sq": math.nextafter(4.0, 5.0)}, ("4.000000000000001", "4.0")),
        (3, 2, {"norm_sq": math.nan}, ("6.0", "nan")),
        (3, 1, {"digest": 1}, (f"{0:016x}", f"{1:016x}")),
    ],
)
def test_holders_that_disagree_do_not_commit(
    rank: int, layer: int, changes: dict[str, Any], values: tuple[str, str]
) -> None:
    """The error names the layer, the step, the nodes and their values."""
    rows = altered(rank, layer, **changes)
    with pytest.raises(DivergenceError) as raised:
        decide(rows, ROSTER, exact=True)
    nodes = [ROSTER.members[holder].unit.node for holder in ROSTER.holders(layer, 0)]
    what = PARAMETERS if "digest" in changes else NORM
    found = Divergence(layer, 0, what, tuple(zip(nodes, values, strict=True)))
    assert (raised.value.step, raised.value.found) == (7, (found,))
    assert str(raised.value) == f"step 7: {found.text}"
    decide(rows, ROSTER)  # without exact accumulation the last bits may differ
    decide(altered(rank, layer, device=5, **changes), ROSTER, exact=True)  # and on other devices


@pytest.mark.parametrize("rank", range(3))
def test_every_holder_of_a_layer_is_compared(rank: int) -> None:
    rows = contributions(THREE)
    shares = list(rows[rank].layers)
    shares[1] = replace(shares[1], norm_sq=math.nextafter(4.0, 5.0))
    rows[rank] = replace(rows[rank], layers=tuple(shares))
    with pytest.raises(DivergenceError, match="step 7: layer 1 "):
        decide(rows, THREE, exact=True)


def test_norms_that_are_not_finite_alike_are_no_divergence() -> None:
    rows = contributions(ROSTER)
    for rank in ROSTER.holders(1, 0):
        at = ROSTER.members[rank].layers.index(1)
        shares = list(rows[rank].layers)
        shares[at] = replace(shares[at], norm_sq=float("nan"))
        rows[rank] = replace(rows[rank], layers=tuple(shares))
    agreed = decide(rows, ROSTER, exact=True)
    assert math.isnan(agreed.norm) and agreed.nonfinite == (1,)


@pytest.mark.parametrize("rank", ROSTER.holders(2, 0))
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_norm_that_is_not_finite_at_one_holder_counts(rank: int, bad: float) -> None:
    """Its memory may be faulty. With exact accumulation this is a divergence first."""
    rows = altered(rank, 2, norm_sq=bad)
    agreed = decide(rows, ROSTER)
    assert repr(agreed.norm) == repr(bad) and agreed.nonfinite == (2,)
    with pytest.raises(DivergenceError):
        decide(rows, ROSTER, exact=True)
    other = decide(altered(rank, 2, device=5, norm_sq=bad), ROSTER, exact=True)
    assert other.nonfinite == (2,), "holders on other devices are not compared"


@given(
    ledger=st.frozensets(st.integers(0, 129)),
    norm=st.floats(allow_nan=False),
    digest=st.integers(0, 2**64 - 1),
    device=st.integers(0, 2**32 - 1),
    step=st.integers(0, 2**40),
    halt=st.integers(-1, 2**40),
    weight=st.floats(0, 2.0**43),
    common=st.booleans(),
    data=st.builds(ReadData, *[st.integers(0, 2**64 - 1)] * 3),
)
def test_rows_round_trip(
    ledger: frozenset[int],
    norm: float,
    digest: int,
    device: int,
    step: int,
    halt: int,
    weight: float,
    common: bool,
    data: ReadData,
) -> None:
    losses = {m: m / 3 for m in ledger}
    share = LayerContribution(ledger, norm, digest)
    before = Contribution(step, 3, halt, (share,), losses, weight, common, device, data)
    row = pack(before, SINGLE)
    assert len(row) == row_length(SINGLE)
    assert unpack(row, SINGLE.members[0], SINGLE) == before


def test_an_empty_ledger_round_trips_on_the_last_stage() -> None:
    before = Contribution(0, 1, -1, (LayerContribution(frozenset(), 0.0),), {})
    assert unpack(pack(before, SINGLE), SINGLE.members[0], SINGLE) == before


def disagree(rank: Rank) -> tuple[str, str]:
    """Texts of the errors of a commit and of a last comparison, in which rank 3 differs."""
    links, member = rank.open(), ROSTER.members[rank.rank]
    digests = dict.fromkeys(member.layers, 9 + (rank.rank == 3))
    mine = contributions(ROSTER)[rank.rank]
    empty = Accumulator(FlatLayout((), 0), Accumulate.FAST, torch.device("cpu"), "", 1.0)
    held = [
        GradientSum(index, empty, set(layer.ledger), dict(mine.losses))
        for index, layer in zip(member.layers, mine.layers, strict=True)
    ]
    norms = dict.fromkeys(member.layers, 1.0)
    with pytest.raises(DivergenceError) as at_commit:
        commit(links, ROSTER, held, norms, step=7, weight=0.0, exact=True, digests=digests)
    with pytest.raises(DivergenceError) as at_end:
        verify(links, ROSTER, member.layers, digests, step=8, device=0)
    links.close()
    return str(at_commit.value), str(at_end.value)


def test_all_ranks_learn_who_disagrees() -> None:
    """No rank leaves before the others know it, too."""
    found = run_ranks(disagree, ROSTER.size)
    assert len(set(found)) == 1
    at_commit, at_end = found[0]
    assert at_commit.startswith("step 7: layer 1 ") and at_end.startswith("step 8: layer 1 ")
    assert "layer 0" not in at_commit + at_end and "layer 2" in at_commit


def gather_and_decide(rank: Rank) -> Commit:
    mine = contributions(ROSTER, norm=0.1)[rank.rank]
    member = ROSTER.members[rank.rank]
    layers = list(zip(member.layers, mine.layers, strict=True))
    empty = Accumulator(FlatLayout((), 0), Accumulate.FAST, torch.device("cpu"), "", 1.0)
    held = [
        GradientSum(index, empty, set(layer.ledger), dict(mine.losses)) for index, layer in layers
    ]
    norms = {index: layer.norm_sq for index, layer in layers}
    weight = 4.0 if member.layers[-1] == ROSTER.n_layers - 1 else 0.0
    halt = 2 if rank.rank == 3 else -1
    return commit(rank.open(), ROSTER, held, norms, step=7, weight=weight, halt_epoch=halt)


def test_all_ranks_derive_the_same_commit() -> None:
    found = run_ranks(gather_and_decide, ROSTER.size)
    assert (
        found
        == [replace(decide(contributions(ROSTER, norm=0.1), ROSTER), halt_epoch=2)] * ROSTER.size
    )
