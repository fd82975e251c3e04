"""Plans for small clusters are exactly as fast as the best of an exhaustive search."""

from __future__ import annotations

import subprocess
import sys
from math import inf

import pytest

from elastic.domain.errors import InfeasiblePlan
from elastic.planning.cost.cost_model import CostModel, NodeKind
from elastic.planning.plan.plan import format_plan, parse_plan, validate_plan
from elastic.planning.search import column_search, exact
from elastic.planning.search.problem import Problem
from elastic.planning.search.search import make_plan
from tests.planning.search.brute_force import Brute
from tests.planning.search.clusters import Case, random_case

CHUNK = 100


def check(case: Case, schedule: str) -> None:
    """The planner's plan, priced by the brute force's formulas, against the brute force's best."""
    brute = Brute(case.profile, case.nodes, case.microbatches, (schedule,), case.stream)
    best = brute.best()
    if best == inf:
        with pytest.raises(InfeasiblePlan):
            make_plan(case.request(schedule))
        return
    plan = make_plan(case.request(schedule))
    validate_plan(plan)
    assert parse_plan(format_plan(plan)) == plan
    assert brute.cost_of(plan, case.named()) == pytest.approx(best, rel=1e-9), format_plan(plan)


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(i, marks=pytest.mark.chaos) for i in range(1, 16))]
)
def test_as_fast_as_brute_force(chunk: int) -> None:
    """Up to 7 nodes of 2 device types, 9 layers, 8 micro-batches; memory is tight in half."""
    for seed in range(chunk * CHUNK, (chunk + 1) * CHUNK):
        check(random_case(seed), "1f1b")


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(i, marks=pytest.mark.chaos) for i in range(1, 8))]
)
def test_as_fast_as_brute_force_with_zero_bubbles(chunk: int) -> None:
    for seed in range(10_000 + chunk * CHUNK, 10_000 + (chunk + 1) * CHUNK):
        check(random_case(seed, nodes=5, layers=7), "zero-bubble")


@pytest.mark.parametrize(
    "chunk", [0, *(pytest.param(i, marks=pytest.mark.chaos) for i in range(1, 8))]
)
def test_as_fast_as_brute_force_with_several_devices_a_node(chunk: int) -> None:
    for seed in range(20_000 + chunk * CHUNK, 20_000 + (chunk + 1) * CHUNK):
        check(random_case(seed, nodes=4, layers=7, microbatches=6, units=3), "1f1b")


def test_as_fast_as_brute_force_with_a_schedule_for_each_pipeline() -> None:
    schedules = ("1f1b", "zero-bubble")
    for seed in range(30_000, 30_000 + CHUNK):
        case = random_case(seed, nodes=5, layers=7)
        best = Brute(case.profile, case.nodes, case.microbatches, schedules, case.stream).best()
        solution, _ = exact.solve(problem_of(case, schedules))
        assert (solution.seconds if solution else inf) == pytest.approx(best, rel=1e-9)


def test_column_search_is_never_better_and_seldom_worse() -> None:
    """The method for large clusters is weakest on small ones."""
    ratios = []
    for seed in range(50_000, 50_000 + CHUNK // 4):
        problem = problem_of(random_case(seed))
        solution, _ = exact.solve(problem)
        found = column_search.candidate_solutions(problem)
        near = min(found, key=lambda one: one.seconds, default=None)
        assert (solution is None) == (near is None)
        if solution is not None and near is not None:
            assert near.seconds >= solution.seconds * (1 - 1e-9)
            ratios.append(near.seconds / solution.seconds)
    ratios.sort()
    assert ratios[len(ratios) // 2] == pytest.approx(1.0) and ratios[len(ratios) * 9 // 10] < 1.1


def problem_of(case: Case, schedules: tuple[str, ...] = ("1f1b",)) -> Problem:
    kinds = tuple(
        NodeKind(device, slow, memory, units) for device, slow, memory, units in case.kinds
    )
    model = CostModel(case.profile, kinds, stream_share=case.stream)
    return Problem(
        model=model, counts=case.counts, microbatches=case.microbatches, schedules=schedules
    )


def test_the_solver_writes_nothing() -> None:
    """`elastic plan --json` writes the plan to the same stdout. HiGHS 1.16.0 had a banner."""
    code = (
        "import numpy as np\n"
        "from elastic.planning.search.master_problem import Relaxation, solve_integer\n"
        "relaxation = Relaxation(np.array([[1, 0], [0, 1], [1, 1]]), (3, 2))\n"
        "assert solve_integer(relaxation, np.array([2, 3, 6]), 10).value >= 10"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
