"""Current architectures of megatron-core's layers recover exactly on any plan, experts included."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import elastic_run
from tests.scenarios.shared import exact, faults, made_once

BACKWARD = "kill node=1 step=2 microbatch=3"
FORWARD = "kill node=1 step=2 microbatch=3 phase=forward"
REDUCTION = "kill node=1 step=2 phase=reduce"
UPDATE = "kill node=1 step=2 phase=optimizer"
SLOW = pytest.mark.chaos
CASES = (
    pytest.param("llama", "1", "3", "1", BACKWARD, id="llama", marks=SLOW),
    pytest.param("llama", "2", "2", "2", REDUCTION, id="llama-two-workers", marks=SLOW),
    pytest.param("experts", "1", "4", "2", REDUCTION, id="experts", marks=SLOW),
    pytest.param("experts", "2", "2", "1", BACKWARD, id="experts-two-workers"),
    pytest.param("experts", "2", "2", "1", FORWARD, id="experts-forward", marks=SLOW),
    pytest.param("experts", "2", "3", "1+1+1", REDUCTION, id="experts-reduction", marks=SLOW),
    pytest.param("experts", "2", "2", "1", UPDATE, id="experts-update", marks=SLOW),
)


@pytest.mark.parametrize(("model", "workers", "nodes", "pipelines", "fault"), CASES)
def test_a_killed_node_changes_no_bit(
    model: str, workers: str, nodes: str, pipelines: str, fault: str, tmp_path: Path
) -> None:
    """The reference is a run on one node."""
    job = ("-m", "examples.train_megatron", "--model", model, "--tp", workers, "--steps", "4")
    one_node = exact("--nproc-per-node", workers, "--nnodes", "1")
    expected = made_once(tmp_path, one_node, job).summary
    flags = exact("--nproc-per-node", workers, "--nnodes", nodes, "--pipelines", pipelines)
    run = elastic_run(tmp_path / "run", [*flags, *faults(fault)], job)
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"] and len(summary["recoveries"]) == 1
