"""Recovery on random inventories, compared with brute force."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.errors import Unrecoverable
from elastic.domain.types import GRADIENT, STATE, Copy, StepRecord
from tests.core.recovery.copies import TWO, gradient, run, state
from tests.core.recovery.job_model import make_spec

microbatch_sets = st.sets(st.integers(0, 2), min_size=1)
random_copies = st.lists(
    st.one_of(
        st.builds(
            state,
            st.integers(0, 1),
            st.integers(1, 3),
            st.sampled_from("abz"),
            epoch=st.integers(1, 3),
        ),
        st.builds(
            gradient,
            st.integers(0, 1),
            st.integers(1, 3),
            microbatch_sets,
            st.sampled_from("abz"),
            epoch=st.integers(1, 3),
        ),
    ),
    max_size=14,
)


def subsets(sets: list[frozenset[int]]) -> list[frozenset[int]]:
    """Unions of all pairwise disjoint choices."""
    unions = []
    for n in range(len(sets) + 1):
        for chosen in itertools.combinations(sets, n):
            union = frozenset().union(*chosen)
            if len(union) == sum(map(len, chosen)):
                unions.append(union)
    return unions


@given(random_copies, st.sets(st.integers(1, 3)))
@settings(max_examples=200, deadline=None)
def test_version_and_coverage_match_brute_force(copies: list[Copy], recorded: set[int]) -> None:
    shares = ((0, 1), (2,))
    plan = replace(
        TWO,
        n_microbatches=3,
        pipelines=tuple(
            replace(p, microbatches=s) for p, s in zip(TWO.pipelines, shares, strict=True)
        ),
    )
    usable = [c for c in copies if c.node in "ab"]

    def held(kind: str, layer: int, step: int) -> list[Copy]:
        return [c for c in usable if (c.kind, c.layer, c.step) == (kind, layer, step)]

    def unions(layer: int, step: int) -> list[frozenset[int]]:
        return subsets(list({c.microbatches for c in held(GRADIENT, layer, step)}))

    def reachable(layer: int, version: int) -> bool:
        before = version - 1
        replay = (
            before in recorded
            and held(STATE, layer, before)
            and frozenset({0, 1, 2}) in unions(layer, before)
        )
        return bool(held(STATE, layer, version) or replay)

    versions = [v for v in range(1, 5) if reachable(0, v) and reachable(1, v)]
    records = tuple(StepRecord(step, 1.0, 1.0, 1.0) for step in sorted(recorded))
    if not versions:
        with pytest.raises(Unrecoverable):
            run(plan, *copies, records=records, nodes="ab", spec=make_spec(2, 3, 20))
        return
    result = run(plan, *copies, records=records, nodes="ab", spec=make_spec(2, 3, 20))
    assert result.step == max(versions)
    complete = frozenset.intersection(*(covered for _, covered in result.covered))
    best = max(len(x & y) for x in unions(0, result.step) for y in unions(1, result.step))
    assert len(complete) == best
    for _, recipe in result.recipes:
        assert recipe.state is not None and recipe.state.node in "ab"
