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
TP2, CP2 = ("--tp", "2"), ("--cp", "2")
CASES = (
    pytest.param("llama", (), "3", "1", BACKWARD, id="llama", marks=SLOW),
    pytest.param("llama", TP2, "2", "2", REDUCTION, id="llama-layers", marks=SLOW),
    pytest.param("llama", CP2, "2", "2", REDUCTION, id="llama-sequences", marks=SLOW),
    pytest.param("llama", CP2, "2", "1", FORWARD, id="sequences-forward", marks=SLOW),
    pytest.param("llama", CP2, "3", "1", BACKWARD, id="sequences-backward", marks=SLOW),
    pytest.param("experts", (), "4", "2", REDUCTION, id="experts", marks=SLOW),
    pytest.param("experts", TP2, "2", "1", BACKWARD, id="experts-shared"),
    pytest.param("experts", TP2, "2", "1", FORWARD, id="experts-forward", marks=SLOW),
    pytest.param("experts", TP2, "3", "1+1+1", REDUCTION, id="experts-reduction", marks=SLOW),
    pytest.param("experts", TP2, "2", "1", UPDATE, id="experts-update", marks=SLOW),
)


@pytest.mark.parametrize(("model", "shared", "nodes", "pipelines", "fault"), CASES)
def test_a_killed_node_changes_no_bit(
    model: str, shared: tuple[str, ...], nodes: str, pipelines: str, fault: str, tmp_path: Path
) -> None:
    """The reference is a run on one node. `shared`: how the workers of a node share the model."""
    job = ("-m", "examples.train_megatron", "--model", model, *shared, "--steps", "4")
    workers = ("--nproc-per-node", shared[1] if shared else "1")
    expected = made_once(tmp_path, exact(*workers, "--nnodes", "1"), job).summary
    flags = exact(*workers, "--nnodes", nodes, "--pipelines", pipelines)
    run = elastic_run(tmp_path / "run", [*flags, *faults(fault)], job)
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"] and len(summary["recoveries"]) == 1
