from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.types import Accumulate
from elastic.worker.model.gradients import (
    SCALE,
    WEIGHT,
    Accumulator,
    FlatLayout,
    exact_limit,
    norm_sq,
    to_flat,
    weight_of,
)
from tests.worker.model.toy_model import CPU

SHAPES = [("a", (3, 5)), ("b", (1,)), ("empty", (0, 4)), ("c", (2, 3, 4)), ("scalar", ())]
LAYOUT = FlatLayout.of((name, torch.empty(shape)) for name, shape in SHAPES)
RANGES = {place.name: place for place in LAYOUT.ranges}
LIMIT = exact_limit(1)
finite = st.floats(-100, 100, width=32)


def accumulator(accumulate: Accumulate = Accumulate.EXACT, n_microbatches: int = 1) -> Accumulator:
    return Accumulator(LAYOUT, accumulate, CPU, "layer 3", exact_limit(n_microbatches))


def gradients(seed: int, size: float = 1.0) -> list[torch.Tensor]:
    seeded = torch.Generator().manual_seed(seed)
    return [size * torch.randn(shape, generator=seeded) for _, shape in SHAPES]


def test_layout_aligns_every_parameter_in_both_formats() -> None:
    for item in (4, 8):
        assert all(place.start * item % 64 == 0 for place in LAYOUT.ranges)
    assert LAYOUT.numel * 4 % 64 == 0
    assert RANGES["c"].shape == (2, 3, 4)
    views = LAYOUT.views(torch.arange(LAYOUT.numel))
    assert [tuple(view.shape) for view in views] == [shape for _, shape in SHAPES]


@settings(max_examples=30, deadline=None)
@given(
    st.integers(2, 9), st.randoms(use_true_random=False), st.sampled_from([1e-12, 1e-6, 1.0, 300.0])
)
def test_exact_sums_do_not_depend_on_order_or_grouping(
    n: int, shuffler: random.Random, size: float
) -> None:
    terms = [gradients(i, size) for i in range(n)]
    straight = accumulator()
    for term in terms:
        straight.add(term)
    order = list(range(n))
    shuffler.shuffle(order)
    cut = shuffler.randrange(n + 1)
    left, right = accumulator(), accumulator()
    for i in order[:cut]:
        left.add(terms[i])
    for i in order[cut:]:
        right.add(terms[i])
    left.merge(right.flat)
    assert torch.equal(left.flat, straight.flat)


def test_fast_sums_do_depend_on_order() -> None:
    """Float sums need exact mode; otherwise the test above would prove little."""
    terms = [gradients(i, 10.0 ** (i % 7)) for i in range(20)]
    one, other = accumulator(Accumulate.FAST), accumulator(Accumulate.FAST)
    for term in terms:
        one.add(term)
    for term in reversed(terms):
        other.add(term)
    assert not torch.equal(one.flat, other.flat)
    torch.testing.assert_close(one.flat, other.flat, rtol=1e-4, atol=1e-1)


@given(st.lists(finite, min_size=15, max_size=15))
def test_one_gradient_is_exact_to_half_a_unit(numbers: list[float]) -> None:
    wanted = torch.tensor(numbers).view(3, 5)
    sums = accumulator()
    sums.add([wanted, None, None, None, None])
    back = LAYOUT.views(to_flat(sums.flat))[0]
    assert ((back.double() - wanted.double()).abs() <= 0.5 / SCALE).all()
    large = wanted.abs() >= 2.0**-20
    assert torch.equal(back[large], wanted[large])


@pytest.mark.parametrize("accumulate", list(Accumulate))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_matches_float64(accumulate: Accumulate, dtype: torch.dtype) -> None:
    sums = accumulator(accumulate)
    expected = [torch.zeros(shape, dtype=torch.float64) for _, shape in SHAPES]
    for i in range(6):
        term = [g.to(dtype) for g in gradients(i)]
        sums.add(term)
        expected = [e + g.double() for e, g in zip(expected, term, strict=True)]
    for value, wanted in zip(LAYOUT.views(to_flat(sums.flat, 0.5)), expected, strict=True):
        assert value.dtype == torch.float32
        torch.testing.assert_close(value.double(), wanted / 2, rtol=1e-5, atol=1e-6)
    norm = math.sqrt(norm_sq(sums.flat, LAYOUT.ranges))
    assert norm == pytest.approx(
        math.sqrt(sum(float(e.square().sum()) for e in expected)), rel=1e-6
    )


def test_chunked_work_equals_whole_work() -> None:
    layout = FlatLayout.of([("big", torch.empty(100_001))])
    gradient = torch.randn(100_001, generator=torch.Generator().manual_seed(0))
    sums = Accumulator(layout, Accumulate.EXACT, CPU, "layer 0", LIMIT)
    sums.add([gradient])
    assert torch.equal(sums.flat[:100_001], (gradient.double() * SCALE).round().long())
    assert not sums.flat[100_001:].any()


@pytest.mark.parametrize("accumulate", list(Accumulate))
def test_weights_are_added_up_beside_the_gradients(accumulate: Accumulate) -> None:
    one, other = accumulator(accumulate), accumulator(accumulate)
    one.add(gradients(0), 3.0)
    one.add(gradients(1), 0.5)
    other.add([None] * len(SHAPES), 4095.0)
    one.merge(other.flat)
    assert weight_of(one.flat) == 4098.5
    norm = norm_sq(one.flat, LAYOUT.ranges)
    other.add(gradients(2))
    assert weight_of(other.flat) == 4095.0
    one.flat[WEIGHT] = 0
    assert norm_sq(one.flat, LAYOUT.ranges) == norm


def test_a_gradient_that_is_left_out_keeps_its_weight() -> None:
    sums = accumulator()
    sums.add([torch.full(shape, torch.nan) for _, shape in SHAPES], 7.0)
    assert weight_of(sums.flat) == 7.0 and math.isnan(norm_sq(sums.flat, LAYOUT.ranges))


def test_norm_counts_only_the_given_ranges() -> None:
    sums = accumulator()
    sums.add([torch.ones(shape) for _, shape in SHAPES])
    assert norm_sq(sums.flat, LAYOUT.ranges) == 15 + 1 + 0 + 24 + 1
    assert norm_sq(sums.flat, [RANGES["a"], RANGES["scalar"]]) == 16


@pytest.mark.parametrize("bad", [LIMIT, -2 * LIMIT])
def test_a_warning_names_layer_and_parameter_of_a_gradient_out_of_range(
    bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    sums, term = accumulator(), gradients(0)
    term[3][1, 2, 3] = bad
    sums.add(term)
    text = f"layer 3: gradient of c reaches {abs(bad):g}; exact accumulation holds gradients of a "
    assert f"{text}micro-batch below 8192 (" in caplog.text


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, LIMIT, -2 * LIMIT, 3e38])
def test_a_gradient_that_cannot_be_held_is_counted(bad: float) -> None:
    """The count survives sums in any order, and makes the norm NaN."""
    good, spoiled = gradients(0), gradients(1)
    spoiled[3][1, 2, 3] = bad
    sums, other = accumulator(), accumulator()
    for term in (good, spoiled, good):
        sums.add(term)
    twice = accumulator()
    twice.add(good)
    twice.add(good)
    assert math.isnan(norm_sq(sums.flat, LAYOUT.ranges)) and sums.flat[-1] == 1
    assert torch.equal(sums.flat[: LAYOUT.numel], twice.flat[: LAYOUT.numel]), "others are kept"
    other.merge(sums.flat)
    other.merge(sums.flat)
    other.merge(twice.flat)
    assert other.flat[-1] == 2 and math.isnan(norm_sq(other.flat, LAYOUT.ranges))
    assert math.isfinite(norm_sq(twice.flat, LAYOUT.ranges))
    other.clear()
    assert norm_sq(other.flat, LAYOUT.ranges) == 0.0


@pytest.mark.parametrize("n_microbatches", [2, 64, 100])
def test_a_sum_in_range_does_not_depend_on_the_plan(n_microbatches: int) -> None:
    """One pipeline or many, from copies or not: the same micro-batches are judged alike."""
    at_most = torch.tensor(exact_limit(n_microbatches)).nextafter(torch.tensor(0.0))
    term = [at_most.expand(shape) for _, shape in SHAPES]
    together, merged = (accumulator(n_microbatches=n_microbatches) for _ in range(2))
    for _ in range(n_microbatches):
        together.add(term)
        alone = merged.new_empty()
        alone.add(term)
        merged.merge(alone.flat)
    assert torch.equal(together.flat, merged.flat)
    assert together.flat[0] == n_microbatches * int(at_most.double() * SCALE)
    assert math.isfinite(norm_sq(together.flat, LAYOUT.ranges))


@pytest.mark.parametrize("n_microbatches", [1, 3, 64, 65, 100, 4096])
@pytest.mark.parametrize("n_owners", [1, 2, 3])
def test_a_sum_of_all_microbatches_and_owners_does_not_overflow(
    n_microbatches: int, n_owners: int
) -> None:
    limit = exact_limit(n_microbatches, [["owner"] * n_owners] if n_owners > 1 else [])
    assert limit == 8192 if n_microbatches * n_owners <= 64 else limit < 8192
    below = torch.tensor(limit).nextafter(torch.tensor(0.0)).double()
    assert n_microbatches * n_owners * int(below * SCALE) < 1 << 63


def test_no_gradients_at_all() -> None:
    for accumulate in Accumulate:
        sums = accumulator(accumulate)
        sums.add([None] * len(SHAPES))
        assert not sums.flat.any()
