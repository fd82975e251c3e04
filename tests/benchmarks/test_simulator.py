"""A small instance of each of the simulator's benchmarks."""

from __future__ import annotations

import sys

import pytest
from elastic_sim.replay.replay import Mean

from benchmarks.simulation import headline, simulator


def test_headline_compares_seed_by_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["headline", "--quick"])
    assert headline.main() == 0
    row = capsys.readouterr().out.splitlines()[-1]
    assert row.startswith("| bert-large | mtbf 600 s |") and row.count("**") == 2


def test_verdicts_claim_no_more_than_the_seeds_allow() -> None:
    def place(value: float, margin: float) -> headline.ScenarioResult:
        return headline.ScenarioResult("t", "m", {"ours": Mean(0.9)}, "varuna", Mean(value, margin))

    assert [
        place(*ahead).verdict
        for ahead in ((1.1, 0.05), (1.1, 0.2), (0.9, 0.05), (float("inf"), 0.0))
    ] == [
        "ahead",
        "undecided",
        "behind",
        "ahead",
    ]


def test_speed_is_measured(capsys: pytest.CaptureFixture[str]) -> None:
    scenario = simulator.like_p3(4, 0.3, "bert-large")
    assert scenario.trace_of(0).events
    rows = [*simulator.month(0.02), *simulator.imports(1)]
    assert [row.value > 0 for row in rows] == [True] * 3, "without torch, or the import fails"


def test_what_notices_give_stands_beside_what_there_is_without() -> None:
    places = [
        headline.ScenarioResult(trace, "m", {"ours": Mean(0.9)}, "varuna", Mean(1.1, 0.01))
        for trace in ("p3-trace.csv", "g4dn-trace.csv")
    ]
    policies = {"ours": {"goodput": 0.95, "margins": {"goodput": None}}}
    told = headline.noticed({"scenarios": [{"model": "m", "policies": policies}]})
    assert headline.notice_table(places, told).splitlines()[2:] == ["| m | 90.0 | 95.0 |"]
    assert [row.value for row in headline.rows_of(places, told) if "notice" in row.metric] == [0.95]
