"""Set packing against brute force."""

from __future__ import annotations

import itertools
import time

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.recovery.set_packing import best_packing, exact_cover
from elastic.domain.ledger import to_mask

masks = st.dictionaries(st.integers(0, 255), st.integers(0, 5), max_size=9)


def choices(costs: dict[int, int]) -> list[tuple[int, ...]]:
    """All sets of pairwise disjoint masks."""
    real = [mask for mask in costs if mask]
    sets = (c for n in range(len(real) + 1) for c in itertools.combinations(real, n))
    return [c for c in sets if sum(mask.bit_count() for mask in c) == union(c).bit_count()]


def union(chosen: tuple[int, ...]) -> int:
    total = 0
    for mask in chosen:
        total |= mask
    return total


@given(masks, st.integers(0, 255))
@settings(max_examples=200, deadline=None)
def test_packing_is_best(costs: dict[int, int], useful: int) -> None:
    def rank(chosen: tuple[int, ...]) -> tuple[int, int, int, int]:
        all_ = union(chosen)
        return (
            (all_ & useful).bit_count(),
            all_.bit_count(),
            -sum(costs[m] for m in chosen),
            -len(chosen),
        )

    chosen = best_packing(costs, useful)
    assert tuple(sorted(chosen)) in {tuple(sorted(c)) for c in choices(costs)}
    assert rank(chosen) == max(map(rank, choices(costs)))


@given(masks, st.integers(1, 255))
@settings(max_examples=200, deadline=None)
def test_exact_cover_is_found_when_there_is_one(costs: dict[int, int], full: int) -> None:
    covers = [c for c in choices(costs) if union(c) == full]
    found = exact_cover(costs, full)
    if not covers:
        assert found is None
        return
    assert found is not None and union(found) == full == sum(found)
    assert sum(costs[m] for m in found) == min(sum(costs[m] for m in c) for c in covers)


def test_hundreds_of_overlapping_ledgers_take_seconds_at_most() -> None:
    costs = {
        to_mask(range(a, min(a + n, 256))): (a * n) % 7 for a in range(0, 256, 2) for n in (2, 3, 8)
    }
    began = time.process_time()
    assert union(best_packing(costs)) == (1 << 256) - 1
    assert exact_cover(costs, (1 << 256) - 1) is not None
    assert time.process_time() - began < 5.0
