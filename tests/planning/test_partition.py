"""Cuts and shares of micro-batches, against brute force."""

from __future__ import annotations

import itertools
from math import inf

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.types import LayerSpec
from elastic.planning import batches, partition
from elastic.planning.costs import Costs, measure

layers = st.builds(
    LayerSpec,
    param_bytes=st.integers(0, 9),
    state_bytes=st.integers(0, 9),
    gradient_bytes=st.integers(0, 9),
    forward_s=st.integers(1, 5).map(float),
    backward_s=st.integers(0, 5).map(float),
    activation_bytes=st.integers(0, 5),
)
stacks = st.lists(layers, min_size=1, max_size=7).map(tuple)


def all_cuts(n_layers: int, depth: int) -> list[tuple[int, ...]]:
    return [(0, *inner, n_layers) for inner in itertools.combinations(range(1, n_layers), depth - 1)]


def slowest(costs: Costs, cuts: tuple[int, ...], microbatches: int) -> int | None:
    """Ticks of the slowest stage, None if one does not fit."""
    depth = len(cuts) - 1
    for s, (a, b) in enumerate(itertools.pairwise(cuts)):
        if costs.needs(a, b, partition.in_flight(depth, s, microbatches)) > costs.memory:
            return None
    return max(costs.ticks(a, b) for a, b in itertools.pairwise(cuts))


@given(stacks, st.integers(1, 7), st.integers(1, 5), st.sampled_from([0, 20, 40, 80]), st.booleans())
@settings(max_examples=150, deadline=None)
def test_bottleneck_is_the_least_possible(
    stack: tuple[LayerSpec, ...], depth: int, microbatches: int, memory: int, stream: bool
) -> None:
    costs = measure(stack, tp=1, memory_bytes=memory, link_bytes_per_s=2.0, stream=stream)
    found = [slowest(costs, cuts, microbatches) for cuts in all_cuts(len(stack), depth)]
    feasible = [ticks for ticks in found if ticks is not None]
    result = partition.bottleneck(costs, depth, microbatches)
    assert result == min(feasible, default=None)
    if result is not None:
        cuts = partition.cut(costs, depth, microbatches, result)
        assert slowest(costs, cuts, microbatches) == result


@given(stacks, st.integers(1, 4), st.data())
@settings(max_examples=100, deadline=None)
def test_of_equally_fast_cuts_the_one_that_moves_least_is_taken(
    stack: tuple[LayerSpec, ...], depth: int, data: st.DataObject
) -> None:
    costs = measure(stack, tp=1)
    limit = partition.bottleneck(costs, depth, 1)
    if limit is None:
        return
    rows = st.lists(st.integers(0, 3), min_size=len(stack), max_size=len(stack))
    moved = [[0, *itertools.accumulate(data.draw(rows))] for _ in range(depth)]

    def fetched(cuts: tuple[int, ...]) -> int:
        return sum(moved[s][b] - moved[s][a] for s, (a, b) in enumerate(itertools.pairwise(cuts)))

    equal = [cuts for cuts in all_cuts(len(stack), depth) if slowest(costs, cuts, 1) == limit]
    assert fetched(partition.cut(costs, depth, 1, limit, moved)) == min(map(fetched, equal))


@given(stacks, st.integers(1, 7), st.integers(1, 4))
@settings(max_examples=80, deadline=None)
def test_memory_needed_is_the_least_possible(
    stack: tuple[LayerSpec, ...], depth: int, microbatches: int
) -> None:
    depth = min(depth, len(stack))
    costs = measure(stack, tp=1)
    needed, stage, (first, last) = partition.memory_needed(costs, depth, microbatches)
    fullest = [
        max(
            costs.needs(a, b, partition.in_flight(depth, s, microbatches))
            for s, (a, b) in enumerate(itertools.pairwise(cuts))
        )
        for cuts in all_cuts(len(stack), depth)
    ]
    assert needed == min(fullest)
    assert costs.needs(first, last, partition.in_flight(depth, stage, microbatches)) == needed


def linear(depth: int, slowest_s: int, most: int) -> batches.Cost:
    return lambda m: (m + depth - 1) * slowest_s if m <= most else inf


pipelines = st.lists(
    st.tuples(st.integers(1, 5), st.integers(1, 6), st.integers(1, 9)), min_size=1, max_size=4
)


@given(pipelines, st.integers(1, 9))
@settings(max_examples=200, deadline=None)
def test_shares_have_the_least_makespan(shapes: list[tuple[int, int, int]], total: int) -> None:
    costs = [linear(*shape) for shape in shapes]
    every = itertools.product(range(1, total + 1), repeat=len(costs))
    spans = [max(c(m) for c, m in zip(costs, share, strict=True)) for share in every if sum(share) == total]
    best = min(spans, default=inf)
    classes = [(linear(*shape), shapes.count(shape)) for shape in sorted(set(shapes))]
    assert batches.makespan(total, classes) == best
    if best < inf:
        share = batches.allot(total, costs)
        assert sum(share) == total
        assert max(c(m) for c, m in zip(costs, share, strict=True)) == best


def test_shares_without_a_minimum_may_be_empty() -> None:
    assert batches.allot(1, [lambda m: 9.0 * m, lambda m: 5.0 * m], least=0) == (0, 1)
    assert batches.allot(0, [lambda m: 1.0 * m], least=0) == (0,)
    assert batches.deal([3, 5, 7], (1, 0, 2)) == ((3,), (), (5, 7))
