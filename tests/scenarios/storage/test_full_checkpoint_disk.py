"""The disk is full while a job ends. The last checkpoint is written once there is room again."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.disks import fill, small_disk
from tests.kubernetes.train import LAYERS
from tests.scenarios.harness import ROOT
from tests.scenarios.jobs import Job
from tests.scenarios.paced import STEPS, paced, paced_reference
from tests.scenarios.shared import exact
from tests.scenarios.storage.progress import check_epochs

FLAGS = exact("--nnodes", "2", "--pipelines", "1", "--backup", "stream+snapshot")
FULL_S = 15.0
"""Time for which the disk is full in the long test."""


@pytest.mark.chaos
def test_the_disk_is_full_when_the_last_checkpoint_is_completed(tmp_path: Path) -> None:
    """The coordinator is stopped until all parts are written, and the disk is full."""
    disk, hurry = tmp_path / "disk", tmp_path / "hurry"
    with small_disk(disk, "4m"):
        words = ["run", "--standalone", *FLAGS, "--checkpoint-dir", str(disk)]
        job = Job(tmp_path / "run", words, [*paced(hurry), "--checkpoint-every", str(STEPS)])
        try:
            job.await_steps(2)
            coordinator = int(job.leader()["pid"])
            os.kill(coordinator, signal.SIGSTOP)
            hurry.touch()
            parts = disk / f"step-{STEPS:08d}.tmp"
            job.wait("all parts", lambda: len(list(parts.glob("layer-*.json"))) == LAYERS)
            filler = fill(disk)
            os.kill(coordinator, signal.SIGCONT)
            (late,) = job.wait("a warning", lambda: job.of("checkpoint-late"))
            filler.unlink()
            run = job.finish()
        finally:
            job.kill()
    assert run.code == 0, run.output
    assert run.final_sha256 == paced_reference(tmp_path).final_sha256
    assert late["step"] == STEPS and "No space left on device" in late["why"]
    assert "cannot be completed yet" in run.output


@pytest.mark.chaos
def test_a_drain_on_a_full_disk(tmp_path: Path) -> None:
    """The disk of all records and checkpoints is full from before a drain until after the steps."""
    disk, hurry = tmp_path / "disk", tmp_path / "hurry"
    with small_disk(disk, "64m"):
        job = Job(
            disk / "run",
            ["run", "--standalone", *FLAGS],
            [*paced(hurry), "--checkpoint-every", str(STEPS)],
        )
        try:
            job.await_steps(2)
            filler = fill(disk)
            drain = [sys.executable, "-m", "elastic", "drain", "node1"]
            drain += ["--run-dir", str(job.run_dir)]
            asked = subprocess.Popen(drain, cwd=ROOT, stdout=subprocess.DEVNULL)
            hurry.touch()
            time.sleep(FULL_S)  # the fault itself
            filler.unlink()
            run = job.finish()
            asked.wait()
        finally:
            job.kill()
        events = run.events
        final = run.final_sha256
    assert run.code == 0, run.output
    assert final == paced_reference(tmp_path).final_sha256
    check_epochs(events)
