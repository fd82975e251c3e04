"""Hugging Face models recover exactly on any plan: masks are in every stage, and states move."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.scenarios.harness import elastic_run
from tests.scenarios.shared import exact, faults, made_once

KILL = "kill node=1 step=2 microbatch=3"
CASES = (
    pytest.param("gemma3_text", "3", "1", "log+snapshot", id="three-stages"),
    pytest.param("llama", "4", "1", "stream+snapshot", id="four", marks=pytest.mark.chaos),
    pytest.param("qwen3", "2", "1", "stream+snapshot", id="two", marks=pytest.mark.chaos),
    pytest.param("mistral", "3", "2+1", "stream+snapshot", id="uneven", marks=pytest.mark.chaos),
    pytest.param("gpt2", "4", "2", "log+snapshot", id="two-pairs", marks=pytest.mark.chaos),
    pytest.param("mixtral", "3", "1", "stream+snapshot", id="experts", marks=pytest.mark.chaos),
)


@pytest.mark.parametrize(("family", "nodes", "pipelines", "backup"), CASES)
def test_a_killed_node_changes_no_bit(
    family: str, nodes: str, pipelines: str, backup: str, tmp_path: Path
) -> None:
    """The reference is a run on one node."""
    job = ("-m", "examples.train_huggingface", "--model", family, "--steps", "4")
    expected = made_once(tmp_path, exact("--nnodes", "1"), job).summary
    flags = exact("--nnodes", nodes, "--pipelines", pipelines, "--backup", backup)
    run = elastic_run(tmp_path / "run", [*flags, *faults(KILL)], job)
    assert run.code == 0, run.output
    summary = run.summary
    assert summary["params_sha256"] == expected["params_sha256"], run.output
    assert summary["loss"] == expected["loss"] and len(summary["recoveries"]) == 1
