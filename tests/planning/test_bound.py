"""The lower bound never exceeds what an exact search finds; whole pipelines are chosen as trying everything would."""

from __future__ import annotations

from itertools import product
from math import inf

import numpy as np
import pytest

from elastic.errors import FieldError
from elastic.planning import exact
from elastic.planning.bound import lower_bound
from elastic.planning.linear import bound, most_whole
from elastic.planning.model import CostModel, Kind
from elastic.planning.problem import Problem
from tests.planning.clusters import Case, random_case


def problem_of(case: Case) -> Problem:
    kinds = [Kind(device, slow, memory, units) for device, slow, memory, units in case.kinds]
    return Problem(
        model=CostModel(case.profile, kinds, stream=case.stream),
        counts=case.counts,
        microbatches=case.microbatches,
    )


@pytest.mark.parametrize("chunk", range(4))
def test_never_above_the_best_plan(chunk: int) -> None:
    """Random clusters of up to 7 nodes with and without tight memory, links and updates."""
    shares = []
    for seed in range(40_000 + 10 * chunk, 40_000 + 10 * (chunk + 1)):
        problem = problem_of(random_case(seed))
        solution, _ = exact.solve(problem)
        if solution is None:
            continue
        found = lower_bound(problem, 1.5 * solution.seconds, splits=12)
        assert 0 < found <= solution.seconds * (1 + 1e-9), seed
        shares.append(found / solution.seconds)
    assert np.median(shares) > 0.8, "and it says something"


def test_never_above_the_best_plan_with_several_devices_a_node() -> None:
    for seed in range(50_000, 50_010):
        problem = problem_of(random_case(seed, nodes=4, layers=7, microbatches=6, units=3))
        solution, _ = exact.solve(problem)
        if solution is not None:
            assert lower_bound(problem, 1.3 * solution.seconds, splits=8) <= solution.seconds * (1 + 1e-9), (
                seed
            )


def test_only_for_1f1b() -> None:
    problem = problem_of(random_case(1))
    other = Problem(model=problem.model, counts=problem.counts, microbatches=1, schedules=("zero-bubble",))
    with pytest.raises(FieldError, match="1F1B alone"):
        lower_bound(other, inf)


def best_whole(
    value: list[int], counts: list[tuple[int, int]], nodes: tuple[int, int], low: int, high: int
) -> int:
    """By trying all amounts; -1: no choice."""
    ranges = [range(min(n // c for n, c in zip(nodes, count, strict=True) if c) + 1) for count in counts]
    best = -1
    for amounts in product(*ranges):
        used = [sum(a * c[q] for a, c in zip(amounts, counts, strict=True)) for q in (0, 1)]
        if used[0] <= nodes[0] and used[1] <= nodes[1] and low <= sum(amounts) <= high:
            best = max(best, sum(a * v for a, v in zip(amounts, value, strict=True)))
    return best


def test_whole_columns_as_by_trying_everything() -> None:
    """Whatever is asked for is found if it exists, and else proven impossible."""
    rng = np.random.default_rng(7)
    for _ in range(60):
        counts = [tuple(map(int, c)) for c in rng.integers(0, 4, (4, 2)) if c.any()]
        value = [int(v) for v in rng.integers(1, 12, len(counts))]
        nodes = int(rng.integers(3, 8)), int(rng.integers(3, 8))
        low, high = sorted(map(int, rng.integers(1, 6, 2)))
        best = best_whole(value, counts, nodes, low, high)
        columns = np.array(value), np.array(counts)
        assert bound(*columns, nodes) >= best - 1e-6
        for enough in {max(1, best), best + 1, best + 5}:
            if enough <= 0:
                continue
            found = most_whole(*columns, nodes, enough, (low, high))
            if enough <= best:
                assert found.value >= enough and found.bound >= enough - 1e-6
                used = sum(np.array(counts[c]) * n for c, n in found.chosen.items())
                assert (used <= np.array(nodes)).all() and low <= found.chosen.total() <= high
                assert found.value == sum(value[c] * n for c, n in found.chosen.items())
            else:
                assert found.value < enough and found.bound < enough - 1e-6
