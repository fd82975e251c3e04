"""The benchmark of fidelity: its rows, and (slow) both of its runs, as small as they go."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from elastic_sim.microbatches.validate import ComparedFigure, ValidationReport

from benchmarks.simulation.fidelity import FULL, QUICK, FidelityCase, compared, rows_of, shifted
from elastic.core.protocol.fault_spec import FaultKind, FaultSpec, parse_fault


def report(measured: float, predicted: float) -> ValidationReport:
    figures = (
        ComparedFigure("throughput", "samples/s", measured, predicted),
        ComparedFigure("losses: total, mean", "s", 1.0, 1.1),
    )
    return ValidationReport(figures, (({}, {}),), (0, 1))


def test_errors_are_those_of_all_runs_and_the_worst_one_is_told() -> None:
    single = [report(10.0, 10.2), report(8.0, 10.0), report(10.0, 9.9)]
    rows = {row.metric: row for row in rows_of(report(10.0, 10.2), single)}
    assert (
        rows["throughput: error"].value == pytest.approx(2.0)
        and rows["throughput: error"].met == "met"
    )
    assert rows["throughput: error, worst single run"].value == pytest.approx(25.0)
    assert rows["losses: total, mean: error"].value == pytest.approx(10.0)
    assert rows["recoveries compared"].value == 1 and rows["runs compared"].value == 3
    assert rows["unmatched recoveries"].met == "missed"
    assert "losses: detect, mean: error" not in rows


@pytest.mark.parametrize("case", [FULL, QUICK])
def test_runs_have_faults_of_their_own_in_steps_that_come(case: FidelityCase) -> None:
    for number in range(4):
        points = [
            {parse_fault(text) for text in shifted(case, f, number)}
            for f in (case.calibration, case.validation)
        ]
        assert number == 0 or points[0] != {parse_fault(text) for text in case.calibration}
        check_points(case, points)


def check_points(case: FidelityCase, both: list[set[FaultSpec]]) -> None:
    for faults in both:
        assert all(fault.step < case.steps for fault in faults)
    kills = [{f for f in faults if f.kind is FaultKind.KILL} for faults in both]
    assert not kills[0] & kills[1]
    if case is FULL:
        assert len(case.validation) >= 10
        assert {fault.kind for fault in both[1]} == {
            FaultKind.KILL,
            FaultKind.DRAIN,
            FaultKind.JOIN,
        }


@pytest.mark.chaos
@pytest.mark.slow
def test_a_small_pair_of_real_runs(tmp_path: Path) -> None:
    found, (single,) = compared(QUICK, 1, tmp_path)
    assert found.recoveries and all(
        math.isfinite(f.measured) and f.predicted >= 0 for f in found.figures
    )
    assert found == single and found.figure("throughput").predicted > 0
    assert compared(QUICK, 1, tmp_path)[0] == found  # runs that are there are not made again
