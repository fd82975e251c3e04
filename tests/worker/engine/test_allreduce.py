"""Gradient all-reduce: pipelines of different depth and cuts, tied tensors, faults."""

from __future__ import annotations

import signal

import pytest
import torch

from elastic.domain.types import Accumulate
from elastic.worker.engine import allreduce
from elastic.worker.engine.allreduce import GradientAllReduce, tied_pairs
from elastic.worker.engine.stage import stages_of_rank
from elastic.worker.model.gradients import ALIGN_ELEMENTS
from elastic.worker.transport.cancellation import LinkFailed
from tests.planning.schedule.action_text import one_f_one_b
from tests.worker.engine.models import (
    RecordingHooks,
    replicas,
    runner,
    single_rank_links,
    stack,
    train_on_one_worker,
)
from tests.worker.engine.plans import roster_of
from tests.worker.engine.rank_processes import Rank, Ranks, run_ranks

N_LAYERS, M = 4, 4
PLANS = [
    ([[0], [0]], [(0, 1), (2, 3)]),
    ([[0, 2], [0, 2]], [(0, 1, 2), (3,)]),
    ([[0, 3], [0]], [(1, 3), (0, 2)]),
    ([[0, 1], [0, 3]], [(0, 2), (1, 3)]),
    ([[0], [0], [0, 2]], [(0,), (1,), (2, 3)]),
    ([[0, 2]], [(0, 1, 2, 3)]),
]


def train_and_reduce(
    rank: Rank,
    cuts: list[list[int]],
    shares: list[tuple[int, ...]],
    accumulate: Accumulate,
    tied: bool,
) -> dict[int, torch.Tensor]:
    roster, model = roster_of(cuts, N_LAYERS, shares), stack(N_LAYERS, tied)
    me = roster.members[rank.rank]
    links = rank.open(holder_sets=roster.holder_sets(), pairs=roster.pairs())
    layers = replicas(model, me.layers, accumulate)
    stage = runner(layers, links, M, stages_of_rank(roster, rank.rank, layers))
    reducer = GradientAllReduce(layers, links, roster, model.tied)
    for _ in range(2):
        for layer in layers:
            layer.clear()
        stage.run(
            0,
            one_f_one_b(me.stage, len(cuts[me.pipeline]), shares[me.pipeline]),
            {},
            RecordingHooks(),
        )
        before = [layer.gradient.clone() for layer in layers]
        summed: list[int] = []
        reduced = reducer.run(summed.append)
        assert summed == list(me.layers)
        for layer, gradient in zip(layers, before, strict=True):
            assert torch.equal(layer.gradient, gradient)
    return {layer: tensor.clone() for layer, tensor in reduced.items()}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("cuts", "shares"), PLANS)
def test_exact_sums_equal_those_of_one_worker(
    cuts: list[list[int]], shares: list[tuple[int, ...]], tied: bool
) -> None:
    model, size = stack(N_LAYERS, tied), sum(map(len, cuts))
    layers = train_on_one_worker(model, M, Accumulate.EXACT)
    roster = roster_of([[0]], N_LAYERS, [tuple(range(M))])
    expected = GradientAllReduce(layers, single_rank_links(), roster, model.tied).run()
    if tied:
        both = (layers[0].gradient + layers[-1].gradient)[:-ALIGN_ELEMENTS]
        for layer in (0, N_LAYERS - 1):
            assert torch.equal(expected[layer][:-ALIGN_ELEMENTS], both)
    for found in run_ranks(train_and_reduce, size, cuts, shares, Accumulate.EXACT, tied):
        for layer, tensor in found.items():
            assert torch.equal(tensor, expected[layer])


@pytest.mark.parametrize("tied", [False, True])
def test_fast_sums_have_the_same_bits_at_all_holders(tied: bool) -> None:
    cuts, shares = PLANS[4]
    found = run_ranks(train_and_reduce, 4, cuts, shares, Accumulate.FAST, tied)
    whole = train_on_one_worker(stack(N_LAYERS), M, Accumulate.FAST)
    for layer in range(N_LAYERS):
        copies = [reduced[layer] for reduced in found if layer in reduced]
        assert len(copies) == 3
        assert all(torch.equal(copies[0], copy) for copy in copies)
        if not tied:
            torch.testing.assert_close(copies[0], whole[layer].gradient, rtol=1e-5, atol=1e-6)


def small_buckets(
    rank: Rank, cuts: list[list[int]], shares: list[tuple[int, ...]]
) -> dict[int, torch.Tensor]:
    allreduce.BUCKET_BYTES = 1
    return train_and_reduce(rank, cuts, shares, Accumulate.EXACT, False)


def test_the_result_does_not_depend_on_the_bucket_size() -> None:
    cuts, shares = PLANS[3]
    large = run_ranks(train_and_reduce, 4, cuts, shares, Accumulate.EXACT, False)
    small = run_ranks(small_buckets, 4, cuts, shares)
    for a, b in zip(large, small, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[layer], b[layer]) for layer in a)


def die_in_reduction(rank: Rank) -> bool:
    """Two pipelines of one stage each. Rank 1 is killed after it has reduced its first layer."""
    allreduce.BUCKET_BYTES = 1
    roster = roster_of([[0], [0]], N_LAYERS, [(0, 1), (2, 3)])
    links = rank.open(holder_sets=roster.holder_sets())
    layers = replicas(stack(N_LAYERS), range(N_LAYERS), Accumulate.EXACT)
    runner(layers, links, M).run(
        0, one_f_one_b(0, 1, (2 * rank.rank, 2 * rank.rank + 1)), {}, RecordingHooks()
    )
    before = [layer.gradient.clone() for layer in layers]
    reducer = GradientAllReduce(layers, links, roster)
    if rank.rank == 1:

        def pause(layer: int) -> None:
            rank.report(layer)
            rank.wait_for_parent()

        reducer.run(pause)
    with pytest.raises(LinkFailed) as caught:
        reducer.run()
        reducer.run()
    assert caught.value.ranks == (1,)
    return all(torch.equal(layer.gradient, b) for layer, b in zip(layers, before, strict=True))


def test_accumulators_are_unchanged_after_a_fault_during_the_reduction() -> None:
    with Ranks(die_in_reduction, 2) as ranks:
        assert ranks.reports(1) == [0]
        ranks.signal(1, signal.SIGKILL)
        assert ranks.reports(0) == [True]


def test_ranks_that_sum_tied_tensors_are_announced() -> None:
    """NCCL opens all connections of an epoch before its first message."""
    ranks = roster_of([[0, 1, 2], [0]], 3, [(0,), (1,)])
    tied = (((0, "weight"), (2, "weight")),)
    assert tied_pairs(ranks, tied) == ((0, 2), (2, 0))
    assert tied_pairs(ranks, ()) == ()
