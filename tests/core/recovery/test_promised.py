"""Recoveries beside pipelines that go on: these keep their layers, sums and micro-batches."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.recovery.recovery import PromisedWork
from elastic.domain.types import Assignment, Copy
from tests.core.recovery.copies import M, gradient, pipeline, plan_of, run, state

TWO = plan_of(
    pipeline(("a", 0, 2), microbatches=(0, 1)),
    pipeline(("b", 0, 1), ("c", 1, 2), microbatches=(2, 3)),
)
OTHER = PromisedWork({0: (0, 1)})
STATES = tuple(state(layer, 6, node) for layer, node in ((0, "a"), (1, "a"), (0, "b"), (1, "c")))


def times_run(result: Assignment, layer: int) -> Counter[int]:
    """Return how often each micro-batch is added to the sum of a layer."""
    counts, skipped = Counter[int](), dict(result.covered)[layer]
    for _, some in result.promised:
        counts.update(some)
    in_part = [one.microbatch for one in result.partial if one.first <= layer < one.last]
    counts.update(index for index in (*sum(result.todo, ()), *in_part) if index not in skipped)
    for _, recipe in result.recipes:
        if recipe.layer == layer:
            counts.update(index for copy in recipe.gradients for index in copy.microbatches)
    return counts


def test_layers_outside_have_no_recipes_and_their_work_is_not_repeated() -> None:
    result = run(TWO, *STATES, promised=OTHER)
    assert result.step == 6 and result.promised == ((0, (0, 1)),)
    assert {node for node, _ in result.recipes} == {"b", "c"}
    assert sorted(sum(result.todo, ())) == [2, 3]


def test_sums_are_given_to_the_repaired_pipeline_only() -> None:
    """The vault of "a" keeps a copy for "b"."""
    copies = (gradient(0, 6, {2}, "a", "b"), gradient(1, 6, {2}, "c"))
    result = run(TWO, *STATES, *copies, promised=OTHER)
    assert [(n, r.layer) for n, r in result.recipes if r.gradients] == [("b", 0), ("c", 1)]
    assert sorted(sum(result.todo, ())) == [3]


def test_copies_with_a_promised_microbatch_are_not_used() -> None:
    copies = [gradient(layer, 6, held, "b", "x") for layer in (0, 1) for held in ({1, 2}, {1})]
    result = run(TWO, *STATES, *copies, promised=OTHER)
    assert not any(recipe.gradients for _, recipe in result.recipes)
    assert sorted(sum(result.todo, ())) == [2, 3]


@pytest.mark.parametrize(("left", "taken"), [(1.0, 0), (0.0, 1)])
def test_a_pipeline_that_is_done_soon_takes_over_work(left: float, taken: int) -> None:
    result = run(TWO, *STATES, promised=PromisedWork({0: (0, 1)}, left))
    assert len(result.todo[0]) == taken and len(result.todo[1]) == 2 - taken


@given(
    st.lists(
        st.tuples(
            st.sampled_from("abcx"),
            st.integers(0, 1),
            st.frozensets(st.integers(0, M - 1), min_size=1),
        ),
        max_size=8,
    ),
    st.floats(0, 1),
)
def test_each_microbatch_once_in_each_layer(
    held: list[tuple[str, int, frozenset[int]]], left: float
) -> None:
    copies: list[Copy] = [gradient(n, 6, set(mbs), "b", owner) for owner, n, mbs in held]
    result = run(TWO, *STATES, *copies, promised=PromisedWork({0: (0, 1)}, left))
    for layer in (0, 1):
        assert times_run(result, layer) == Counter(range(M))


def test_without_a_repaired_pipeline_its_work_is_done_again() -> None:
    """The pipelines that go on keep their sums, so none of them adds a copy."""
    one = plan_of(pipeline(("a", 0, 2), microbatches=(0, 1, 2, 3)))
    copies = tuple(gradient(layer, 6, {2}, "b", "c") for layer in (0, 1))
    result = run(one, *STATES, *copies, promised=OTHER)
    assert result.todo == ((2, 3),) and not result.recipes
