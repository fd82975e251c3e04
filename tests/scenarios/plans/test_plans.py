"""The same job gives the same parameters with any number of nodes and any plan, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import elastic_run
from tests.scenarios.shared import SCRIPT, exact, reference

SHAPES = (
    pytest.param("2", "1", "2", id="two-nodes", marks=pytest.mark.chaos),
    pytest.param("3", "auto", "1+1+1", id="three-replicas", marks=pytest.mark.chaos),
    pytest.param("3", "2+1", "2+1", id="two-plus-one"),
    pytest.param("4", "3+1", "3+1", id="three-plus-one", marks=pytest.mark.chaos),
    pytest.param("3", "1", "3", id="depth-three", marks=pytest.mark.chaos),
    pytest.param("4", "1", "4", id="depth-four", marks=pytest.mark.chaos),
    pytest.param("4", "2", "2+2", id="two-plus-two", marks=pytest.mark.chaos),
    pytest.param("4", "2+1+1", "2+1+1", id="two-plus-one-plus-one", marks=pytest.mark.chaos),
    pytest.param(
        "4", "auto", "1+1+1", id="six-microbatches-leave-one-spare", marks=pytest.mark.chaos
    ),
)


@pytest.mark.parametrize(("nodes", "pipelines", "depths"), SHAPES)
def test_parameters_do_not_depend_on_the_plan(
    nodes: str, pipelines: str, depths: str, tmp_path: Path
) -> None:
    """The reference is a run on one node."""
    expected = reference(tmp_path).summary
    run = elastic_run(tmp_path / "run", exact("--nnodes", nodes, "--pipelines", pipelines), SCRIPT)
    assert run.code == 0, run.output
    summary = run.summary
    shape = [
        line.count("[") for line in summary["plan"].splitlines() if line.startswith("pipeline")
    ]
    assert "+".join(map(str, shape)) == depths
    assert summary["params_sha256"] == expected["params_sha256"]
    assert summary["loss"] == expected["loss"]
    assert summary["recoveries"] == []
