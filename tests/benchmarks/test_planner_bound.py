"""The lower bound never exceeds the exact optimum; integer choices match exhaustive search."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from math import inf

import numpy as np
import pytest
from scipy.optimize import linprog

from benchmarks.planning.planner_bound import lower_bound
from elastic.domain.errors import FieldError
from elastic.domain.types import LayerSpec
from elastic.planning.cost.cost_model import CostModel, NodeKind
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile
from elastic.planning.search import exact
from elastic.planning.search.master_problem import Relaxation, solve_integer
from elastic.planning.search.problem import Problem
from tests.planning.search.clusters import Case, random_case


def problem_of(case: Case) -> Problem:
    kinds = [NodeKind(device, slow, memory, units) for device, slow, memory, units in case.kinds]
    return Problem(
        model=CostModel(case.profile, kinds, stream_share=float(case.stream)),
        counts=case.counts,
        microbatches=case.microbatches,
    )


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(i, marks=pytest.mark.chaos) for i in range(1, 4))]
)
def test_never_above_the_best_plan(chunk: int) -> None:
    """Random clusters of up to 7 nodes with and without tight memory, links and updates."""
    shares = []
    for seed in range(40_000 + 10 * chunk, 40_000 + 10 * (chunk + 1)):
        problem = problem_of(random_case(seed))
        solution, _ = exact.solve(problem)
        if solution is None:
            continue
        found = lower_bound(problem, 1.5 * solution.seconds, splits=5)
        assert 0 < found <= solution.seconds * (1 + 1e-9), seed
        shares.append(found / solution.seconds)
    assert np.median(shares) > 0.8, "the bound is not trivial"


def profile_of(
    layers: list[LayerSpec], times: Mapping[str, Sequence[tuple[float, float]]], link: LinkProfile
) -> Profile:
    """Forward and backward seconds of every layer, by device."""
    devices = tuple(
        Device(name, tuple(LayerTimes(f, b) for f, b in pairs)) for name, pairs in times.items()
    )
    return Profile(
        model="x", layers=tuple(layers), devices=devices, inside=LinkProfile(), link=link
    )


def layer(params: int = 0, activation: int = 0, output: int = 0) -> LayerSpec:
    return LayerSpec(params, 0, 0, 0, 0, activation, output)


NO_LINK = LinkProfile()
HARD = {
    "each kind is fast at other layers": (
        profile_of([layer()] * 2, {"a": [(0.5, 0.5), (5, 5)], "b": [(5, 5), (0.5, 0.5)]}, NO_LINK),
        (NodeKind("a", 1.0, 0, 1), NodeKind("b", 1.0, 0, 1)), (1, 1), 10, 11.0,
    ),
    "an earlier start meets a wide boundary": (
        profile_of(
            [layer(10, 0, 100), layer(10), layer(10)],
            {"a": [(1, 1), (0.25, 0.25), (1, 1)]},
            LinkProfile(1.0),
        ),
        (NodeKind("a", 1.0, 25, 1),), (2,), 20, 52.0,
    ),
    "a deeper pipeline need not recompute": (
        profile_of(
            [layer(5, 10, 1)] * 6 + [layer(60, 25)], {"a": [(1, 1)] * 6 + [(8, 12)]}, NO_LINK
        ),
        (NodeKind("a", 1.0, 100, 1),), (3,), 8, 172.0,
    ),
}  # fmt: skip
"""(profile, kinds, nodes per kind, micro-batches, seconds of the best plan)"""


@pytest.mark.parametrize("name", HARD)
def test_never_above_the_best_plan_of_hard_cases(name: str) -> None:
    profile, kinds, counts, microbatches, best = HARD[name]
    problem = Problem(
        model=CostModel(profile, kinds, stream_share=0.0), counts=counts, microbatches=microbatches
    )
    solution, _ = exact.solve(problem)
    assert solution is not None and solution.seconds == pytest.approx(best)
    for above in (1.01 * best, 1.5 * best, 3 * best):
        assert 0 < lower_bound(problem, above, splits=5) <= best * (1 + 1e-9)


def test_unsupported_problems_are_refused() -> None:
    problem = problem_of(random_case(1))
    with pytest.raises(FieldError, match="seconds of a known plan"):
        lower_bound(problem, inf)
    kinds = (NodeKind("a", 1.0, 0, 2),)
    model = CostModel(HARD["a deeper pipeline need not recompute"][0], kinds)
    with pytest.raises(FieldError, match="one unit"):
        lower_bound(Problem(model=model, counts=(2,), microbatches=2), 1000.0)


def test_only_for_1f1b() -> None:
    problem = problem_of(random_case(1))
    other = Problem(
        model=problem.model, counts=problem.counts, microbatches=1, schedules=("zero-bubble",)
    )
    with pytest.raises(FieldError, match="1F1B alone"):
        lower_bound(other, 1.0)


def test_the_relaxation_solves_problems_in_turn() -> None:
    """Results equal SciPy's after any earlier problem, also without nodes of a kind."""
    rng = np.random.default_rng(8)
    for kinds in (1, 2, 3):
        counts = rng.integers(0, 5, (40, kinds))
        counts = counts[counts.any(axis=1)]
        nodes = tuple(map(int, rng.integers(0, 30, kinds)))
        relaxation = Relaxation(counts, nodes)
        for _ in range(20):
            value = rng.integers(0, 12, len(counts))
            found = relaxation.maximise(value)
            best = -linprog(-value, A_ub=counts.T, b_ub=nodes).fun
            assert found.bound == pytest.approx(best, rel=1e-7, abs=1e-7)
            assert (counts @ found.prices >= value - 1e-9).all()
            assert found.gaps == pytest.approx(counts @ found.prices - value)


def best_whole(
    value: list[int], counts: list[list[int]], nodes: tuple[int, int], low: int, high: int
) -> int:
    """Best value by exhaustive search; -1: no choice."""
    ranges = [
        range(min(n // c for n, c in zip(nodes, count, strict=True) if c) + 1) for count in counts
    ]
    best = -1
    for amounts in product(*ranges):
        used = [sum(a * c[q] for a, c in zip(amounts, counts, strict=True)) for q in (0, 1)]
        if used[0] <= nodes[0] and used[1] <= nodes[1] and low <= sum(amounts) <= high:
            best = max(best, sum(a * v for a, v in zip(amounts, value, strict=True)))
    return best


def test_integer_choices_match_exhaustive_search() -> None:
    """A sufficient choice is found if it exists, and otherwise proven impossible."""
    rng = np.random.default_rng(7)
    for _ in range(60):
        counts = [c.tolist() for c in rng.integers(0, 4, (4, 2)) if c.any()]
        value = [int(v) for v in rng.integers(1, 12, len(counts))]
        nodes = int(rng.integers(3, 8)), int(rng.integers(3, 8))
        low, high = sorted(map(int, rng.integers(1, 6, 2)))
        best = best_whole(value, counts, nodes, low, high)
        relaxation = Relaxation(np.array(counts), nodes)
        assert relaxation.maximise(np.array(value)).bound >= best - 1e-6
        for enough in {max(1, best), best + 1, best + 5}:
            if enough <= 0:
                continue
            found = solve_integer(relaxation, np.array(value), enough, (low, high))
            if enough <= best:
                assert found.value >= enough and found.bound >= enough - 1e-6
                used = sum(np.array(counts[c]) * n for c, n in found.chosen.items())
                assert (used <= np.array(nodes)).all() and low <= found.chosen.total() <= high
                assert found.value == sum(value[c] * n for c, n in found.chosen.items())
            else:
                assert found.value < enough and found.bound < enough - 1e-6
