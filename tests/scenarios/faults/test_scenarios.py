"""Real runs with real faults end with the parameters of a failure-free run, bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from tests.scenarios.catalogue import SCENARIOS, Scenario
from tests.scenarios.harness import Run, run_scenario

References = Callable[[Scenario], Run]


def _parameters() -> list[object]:
    return [
        pytest.param(s, id=s.name, marks=[] if s.small else [pytest.mark.chaos]) for s in SCENARIOS
    ]


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    """Failure-free runs on one node, one for each (model, flags)."""
    done: dict[tuple[str, ...], Run] = {}

    def reference(scenario: Scenario) -> Run:
        key = (scenario.model, *scenario.flags)
        if key not in done:
            plain = replace(scenario, faults=(), nodes="1", pipelines="1")
            done[key] = run_scenario(
                tmp_path_factory.mktemp("reference") / "run", plain, faults=False
            )
            assert done[key].code == 0, done[key].output
        return done[key]

    return reference


@pytest.mark.parametrize("scenario", _parameters())
def test_same_parameters_as_without_the_fault(
    scenario: Scenario, references: References, tmp_path: Path
) -> None:
    run = run_scenario(tmp_path / "run", scenario)
    assert run.code == 0, run.output
    summary, expected = run.summary, references(scenario).summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"]
    assert summary["ledger"] == {"double": 0, "missing": 0}
    assert len(summary["recoveries"]) >= scenario.recoveries
    if scenario.nodes_after is not None:
        assert summary["recoveries"][-1]["nodes_after"] == scenario.nodes_after
    if scenario.nothing_lost:
        assert all(r["microbatches_lost"] == 0 for r in summary["recoveries"])
