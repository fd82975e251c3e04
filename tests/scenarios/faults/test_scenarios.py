"""Real runs with real faults end with the parameters of a failure-free run, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.catalogue import SCENARIOS, Scenario
from tests.scenarios.harness import Run, proved, run_scenario, words_of
from tests.scenarios.shared import made_once


def _parameters() -> list[object]:
    return [
        pytest.param(s, id=s.name, marks=[] if s.small else [pytest.mark.chaos]) for s in SCENARIOS
    ]


def reference(scenario: Scenario, directory: Path) -> Run:
    """The failure-free run on one node."""
    common, script = words_of(scenario)
    return made_once(directory, ["--nnodes", "1", *common], script)


@pytest.mark.parametrize("scenario", _parameters())
def test_same_parameters_as_without_the_fault(scenario: Scenario, tmp_path: Path) -> None:
    run = run_scenario(tmp_path / "run", scenario)
    assert run.code == 0, run.output
    summary, expected = run.summary, reference(scenario, tmp_path).summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"]
    assert summary["ledger"] == proved(summary)
    assert len(summary["recoveries"]) >= scenario.recoveries
    if scenario.nodes_after is not None:
        assert summary["recoveries"][-1]["nodes_after"] == scenario.nodes_after
    if scenario.nothing_lost:
        assert all(r["microbatches_lost"] == 0 for r in summary["recoveries"])
