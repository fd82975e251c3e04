"""A stage and the node with its backup are killed together; training resumes from checkpoints."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.planning.plan.plan import parse_plan
from tests.scenarios.harness import ROOT, Run, elastic_run, proved
from tests.scenarios.shared import GPT, SCRIPT, exact, faults, reference

CHECKPOINTS = ("--checkpoint-every", "2")
AT = "step=5 microbatch=2"


def both() -> list[str]:
    """The node that keeps node0's backups, and node0."""
    return faults(f"kill node=1 {AT}", "kill node=0 step=5 phase=recovery")


def assert_pair(run: Run, node: str, peer: str) -> None:
    """Check that the test killed a node and the keeper of its backups."""
    text = next(e["text"] for e in run.events if e["kind"] == "plan")
    assert parse_plan(text).peer_of(node) == peer


@pytest.fixture(scope="module")
def fallen_back(tmp_path_factory: pytest.TempPathFactory) -> Run:
    flags = exact("--nnodes", "3", "--pipelines", "1", *both())
    run = elastic_run(tmp_path_factory.mktemp("fallback") / "run", flags, [*SCRIPT, *CHECKPOINTS])
    assert run.code == 0, run.output
    return run


def test_falls_back_to_the_checkpoint_and_says_what_was_lost(
    fallen_back: Run, tmp_path: Path
) -> None:
    assert_pair(fallen_back, "node0", "node1")
    summary = fallen_back.summary
    assert summary["params_sha256"] == reference(tmp_path).summary["params_sha256"]
    assert summary["loss"] == reference(tmp_path).summary["loss"]
    assert summary["ledger"] == proved(summary)
    (lost,) = [e for e in fallen_back.events if e["kind"] == "lost-steps"]
    first = lost["from_step"]
    assert first in (2, 4)  # the newest that was whole by then
    assert f"fell back to the checkpoint of step {first}" in lost["why"], lost
    assert "no copy of state" in lost["why"] and "computed again" in lost["why"], lost
    assert f"step-{first:08d}" in lost["checkpoint"]
    assert summary["recoveries"][-1]["state_source"] == "checkpoint"
    assert lost["why"] in summary["recoveries"][-1]["reason"]


@pytest.mark.chaos
def test_without_a_checkpoint_it_says_so_and_ends(tmp_path: Path) -> None:
    flags = exact("--nnodes", "3", "--pipelines", "1", *both())
    run = elastic_run(tmp_path / "run", flags, [*SCRIPT, "--checkpoint-every", "0"])
    assert_pair(run, "node0", "node1")
    assert run.code == 3, run.output
    assert run.summary["params_sha256"] == ""
    assert run.summary["exit_code"] == 3
    assert "layer" in run.summary["reason"] and "checkpoint" in run.summary["reason"], run.summary[
        "reason"
    ]
    assert run.summary["reason"] in run.output


def test_export_gives_the_parameters_of_the_run(fallen_back: Run, tmp_path: Path) -> None:
    out = tmp_path / "model.safetensors"
    source = fallen_back.run_dir / "checkpoints"
    command = [sys.executable, "-m", "elastic", "export", str(source), str(out), "--json"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = json.loads(
        subprocess.run(command, cwd=ROOT, env=env, check=True, capture_output=True).stdout
    )
    assert told["step"] == 6
    assert told["params_sha256"] == fallen_back.summary["params_sha256"]
    from safetensors import safe_open

    with safe_open(out, framework="numpy") as file:
        assert len(list(file.keys())) == told["tensors"]


def test_resumes_on_more_nodes_and_ends_the_same(fallen_back: Run, tmp_path: Path) -> None:
    start = fallen_back.run_dir / "checkpoints" / "step-00000004"
    assert fallen_back.summary["recoveries"][-1]["nodes_after"] == 1
    flags = exact("--nnodes", "2", "--pipelines", "1", "--resume", str(start))
    run = elastic_run(tmp_path / "run", flags, SCRIPT)
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == fallen_back.summary["params_sha256"]
    assert run.summary["loss"] == fallen_back.summary["loss"][4:]


@pytest.mark.chaos
def test_a_checkpoint_of_another_model_ends_the_job(fallen_back: Run, tmp_path: Path) -> None:
    """Also one that an older version wrote, without a description of the model."""
    described = fallen_back.run_dir / "checkpoints" / "step-00000004"
    plain = tmp_path / "step-00000004"
    shutil.copytree(described, plain)
    manifest = json.loads((plain / "manifest.json").read_text())
    del manifest["contents"], manifest["optimizer"]
    (plain / "manifest.json").write_text(json.dumps(manifest))
    for number, path in enumerate((described, plain)):
        flags = exact("--nnodes", "1", "--resume", str(path))
        run = elastic_run(tmp_path / f"run-{number}", flags, [*SCRIPT, "--hidden", "32"])
        assert run.code == 2, run.output
        last = run.output.splitlines()[-1]
        assert "another model" in last and str(path) in last and "Traceback" not in run.output
        assert run.summary["reason"] in last and run.summary["steps"] == 0
        assert len([e for e in run.events if e["kind"] == "plan"]) == number


@pytest.mark.chaos  # tests/agent/vault/test_checkpoints.py has damaged ones
def test_an_older_checkpoint_is_used_if_the_newest_is_damaged(
    fallen_back: Run, tmp_path: Path
) -> None:
    """One bit of a file is flipped, which shows only when the file is read."""
    kept = tmp_path / "checkpoints"
    shutil.copytree(fallen_back.run_dir / "checkpoints", kept)
    file = next((kept / "step-00000006").glob("layer-0002*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-9] ^= 1
    file.write_bytes(data)
    flags = exact("--nnodes", "1", "--resume", str(kept))
    run = elastic_run(tmp_path / "run", flags, [*SCRIPT, "--checkpoint-every", "0"])
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == fallen_back.summary["params_sha256"]
    assert run.summary["loss"] == fallen_back.summary["loss"][4:]
    (event,) = [e for e in run.events if e["kind"] == "checkpoint-unusable"]
    assert "step-00000006" in event["path"] and file.name in event["why"]
    assert f"warning: {event['path']} is passed over" in run.output


@pytest.mark.chaos
def test_resumes_with_another_tensor_parallel_size(tmp_path: Path) -> None:
    before = elastic_run(tmp_path / "one", exact("--nnodes", "1"), [*GPT, *CHECKPOINTS])
    start = before.run_dir / "checkpoints" / "step-00000004"
    flags = exact("--nnodes", "1", "--nproc-per-node", "2", "--resume", str(start))
    run = elastic_run(tmp_path / "run", flags, [*GPT, "--tp", "2"])
    assert run.code == 0, run.output
    assert run.summary["loss"] == pytest.approx(before.summary["loss"][4:], abs=1e-4)
