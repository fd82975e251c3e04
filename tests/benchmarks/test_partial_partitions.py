"""The campaign of partial partitions continues where it ended, and counts what failed."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from benchmarks import partial_partitions
from tests.scenarios.network.partial_partitions import CASES, Case, Figures


def test_a_second_call_runs_the_other_cases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[Case] = []

    def check(case: Case, folder: Path) -> Figures:
        assert folder.is_dir()
        ran.append(case)
        assert len(ran) != 2, "the training stood still"
        return Figures(longest_s=4.0 + len(ran), step_s=0.5)

    monkeypatch.setattr(partial_partitions, "check_case", check)
    monkeypatch.setattr(partial_partitions, "missing", lambda: "")
    path = tmp_path / "found.json"
    for codes, runs in ((0, 1), (1, 2), (1, 1)):
        monkeypatch.setattr(sys, "argv", ["", "--json", str(path), "--runs", str(runs)])
        assert partial_partitions.main() == codes
    assert ran == list(CASES[:4])
    values = {row["metric"]: row["value"] for row in json.loads(path.read_text())["rows"]}
    assert values["cases with the failure-free result"] == 3
    assert values["cases that failed"] == 1
    assert values["longest time between two steps, max"] == 8.0
    assert values["the same less a usual step, max"] == 7.5
    (failed,) = [one for one in partial_partitions.known(path) if not one["right"]]
    assert "the training stood still" in failed["error"] and failed["case"] == str(CASES[1])


def test_there_are_all_pairs_ways_kinds_and_phases() -> None:
    assert len({str(case) for case in CASES}) == 6 * 3 * 2 * 6
