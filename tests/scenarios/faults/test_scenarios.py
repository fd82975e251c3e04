"""Real runs with real faults end with the parameters of a failure-free run, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.catalogue import MODELS, SCENARIOS, Scenario
from tests.scenarios.harness import Run, elastic_run, proved
from tests.scenarios.shared import exact, faults, made_once, script

ELASTIC_FLAGS = ("--nproc-per-node", "--backup")
"""Flags of a scenario that belong to `elastic run`, each with a value; the job gets the others."""


def _parameters() -> list[object]:
    return [
        pytest.param(s, id=s.name, marks=[] if s.small else [pytest.mark.chaos]) for s in SCENARIOS
    ]


def words_of(scenario: Scenario) -> tuple[list[str], list[str]]:
    """Return the flags of `elastic run` that a scenario and its reference share, and the job."""
    mine = list(scenario.flags)
    ours: list[str] = []
    for name in ELASTIC_FLAGS:
        if name in mine:
            at = mine.index(name)
            ours += mine[at : at + 2]
            del mine[at : at + 2]
    return exact(*ours), script(*MODELS[scenario.model], *mine)


def run_scenario(run_dir: Path, scenario: Scenario) -> Run:
    common, job = words_of(scenario)
    shape = ["--nnodes", scenario.nodes, "--pipelines", scenario.pipelines]
    return elastic_run(run_dir, [*shape, *common, *faults(*scenario.faults)], job)


def reference(scenario: Scenario, directory: Path) -> Run:
    """The failure-free run on one node."""
    common, job = words_of(scenario)
    return made_once(directory, ["--nnodes", "1", *common], job)


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
