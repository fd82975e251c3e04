"""Checkpoints in an object store: a server that speaks S3, with which all processes talk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.store.checkpoints import SavedCheckpoint, open_checkpoints
from elastic.worker.replica.export import checkpoint_runs, params_sha256
from tests.scenarios.harness import ROOT, Run, elastic_run, proved
from tests.scenarios.shared import SCRIPT, exact, faults, reference
from tests.store.objects import s3_server

STEPS = (*SCRIPT, "--checkpoint-every", "2")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as (url, _):
        yield url


@pytest.fixture(scope="module")
def fallen_back(bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A node and the one with its copies are killed together."""
    kills = faults("kill node=1 step=5 microbatch=2", "kill node=0 step=5 phase=recovery")
    where = ["--checkpoint-dir", f"{bucket}/job", "--checkpoint-keep", "2"]
    flags = exact("--nnodes", "3", "--pipelines", "1", *where, *kills)
    return elastic_run(tmp_path_factory.mktemp("objects") / "run", flags, STEPS)


def test_training_falls_back_to_a_checkpoint_in_the_store(
    fallen_back: Run, bucket: str, tmp_path: Path
) -> None:
    run, expected = fallen_back, reference(tmp_path).summary
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == expected["params_sha256"], run.output
    assert run.summary["loss"] == expected["loss"]
    assert run.summary["ledger"] == proved(run.summary)
    (lost,) = [e for e in run.events if e["kind"] == "lost-steps"]
    assert lost["checkpoint"].startswith(f"{bucket}/job/step-0000000"), lost
    assert run.summary["recoveries"][-1]["state_source"] == "checkpoint"


def test_the_newest_checkpoints_are_kept_and_whole(
    fallen_back: Run, bucket: str, tmp_path: Path
) -> None:
    kept = open_checkpoints(f"{bucket}/job")
    found, problems = kept.complete()
    assert [manifest.step for _, manifest in found] == [6, 4] and not problems
    assert kept.staged_steps() == ()
    newest = found[0][0]
    expected = reference(tmp_path).summary
    assert params_sha256(checkpoint_runs(newest)) == expected["params_sha256"]
    assert fallen_back.summary["checkpoints"][-1] == 6


def test_the_last_checkpoint_is_exported(fallen_back: Run, bucket: str, tmp_path: Path) -> None:
    words = ["export", f"{bucket}/job", str(tmp_path / "model.safetensors"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "elastic", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    told = json.loads(done.stdout)
    assert (told["step"], told["params_sha256"]) == (6, fallen_back.summary["params_sha256"])


def test_a_run_resumes_from_the_store(fallen_back: Run, bucket: str, tmp_path: Path) -> None:
    start = f"{bucket}/job/step-00000004"
    flags = exact("--nnodes", "1", "--resume", start, "--checkpoint-dir", f"{bucket}/other")
    run = elastic_run(tmp_path / "run", flags, [*SCRIPT, "--checkpoint-every", "0"])
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == fallen_back.summary["params_sha256"]
    assert run.summary["loss"] == fallen_back.summary["loss"][4:]
    assert SavedCheckpoint(start).manifest.step == 4


def test_a_store_that_cannot_be_used_is_named_before_the_start(bucket: str, tmp_path: Path) -> None:
    flags = ["--nnodes", "1", "--checkpoint-dir", "s3://nobody-has-this/job"]
    run = elastic_run(tmp_path / "run", flags, SCRIPT)
    assert run.code == 2, run.output
    (line,) = run.output.splitlines()
    assert "--checkpoint-dir: 's3://nobody-has-this/job' is not usable" in line
    assert "check bucket, credentials and endpoint" in line
    assert not (tmp_path / "run").exists()
