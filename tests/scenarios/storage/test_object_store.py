"""Checkpoints in an object store: a server that speaks S3, with which all processes talk."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.store.checkpoints import open_checkpoints
from elastic.worker.replica.export import checkpoint_runs, params_sha256
from tests.scenarios.harness import ROOT, Run, elastic_run
from tests.scenarios.shared import SCRIPT, exact, faults, reference
from tests.store.objects import s3_server

STEPS = (*SCRIPT, "--checkpoint-every", "2")


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as (url, _):
        yield url


@pytest.fixture(scope="module")
def first(bucket: str, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run that leaves checkpoints in the store."""
    flags = exact("--nnodes", "1", "--checkpoint-dir", f"{bucket}/job", "--checkpoint-keep", "2")
    run = elastic_run(tmp_path_factory.mktemp("objects") / "run", flags, STEPS)
    assert run.code == 0, run.output
    return run


def test_training_resumes_and_falls_back_to_a_checkpoint_in_the_store(
    first: Run, bucket: str, tmp_path: Path
) -> None:
    """A node and the one with its copies are killed together, before another checkpoint is due."""
    start = f"{bucket}/job/step-00000004"
    kills = faults("kill node=1 step=5 microbatch=2", "kill node=0 step=5 phase=recovery")
    where = ["--resume", start, "--checkpoint-dir", f"{bucket}/other"]
    flags = exact("--nnodes", "3", "--pipelines", "1", *where, *kills)
    run = elastic_run(tmp_path / "run", flags, STEPS)
    assert run.code == 0, run.output
    assert run.summary["params_sha256"] == first.summary["params_sha256"], run.output
    assert run.summary["loss"] == first.summary["loss"][4:]
    (lost,) = [e for e in run.events if e["kind"] == "lost-steps"]
    assert lost["checkpoint"] == start, lost
    assert run.summary["recoveries"][-1]["state_source"] == "checkpoint"
    assert [m.step for _, m in open_checkpoints(f"{bucket}/other").complete()[0]] == [6]


def test_the_newest_checkpoints_are_kept_and_whole(first: Run, bucket: str, tmp_path: Path) -> None:
    kept = open_checkpoints(f"{bucket}/job")
    found, problems = kept.complete()
    assert [manifest.step for _, manifest in found] == [6, 4] and not problems
    assert kept.staged_steps() == ()
    newest = found[0][0]
    expected = reference(tmp_path).summary
    assert params_sha256(checkpoint_runs(newest)) == expected["params_sha256"]
    assert first.summary["checkpoints"][-1] == 6


def test_the_last_checkpoint_is_exported(first: Run, bucket: str, tmp_path: Path) -> None:
    words = ["export", f"{bucket}/job", str(tmp_path / "model.safetensors"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "elastic", *words],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
        capture_output=True,
    )
    told = json.loads(done.stdout)
    assert (told["step"], told["params_sha256"]) == (6, first.summary["params_sha256"])


def test_a_store_that_cannot_be_used_is_named_before_the_start(bucket: str, tmp_path: Path) -> None:
    flags = ["--nnodes", "1", "--checkpoint-dir", "s3://nobody-has-this/job"]
    run = elastic_run(tmp_path / "run", flags, SCRIPT)
    assert run.code == 2, run.output
    (line,) = run.output.splitlines()
    assert "--checkpoint-dir: 's3://nobody-has-this/job' is not usable" in line
    assert "check bucket, credentials and endpoint" in line
    assert not (tmp_path / "run").exists()
