"""The checkpoint from which a new run continues, if several jobs write to one directory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.records.run_directory import initial_state, job_name
from elastic.store import checkpoint_directory
from tests.agent.vault.checkpoints import layer_run
from tests.coordinator.helpers import three_nodes

MINE, BEFORE, OTHER = "train-0000ff.1", "train-0000aa.3", "tune-0000bb.1"
"""Runs: this one, an earlier one of its job, and one of another job."""


def write(directory: Path, step: int, run: str) -> None:
    """Write a checkpoint of one layer."""
    state = memoryview(layer_run(0, step))
    checkpoint_directory.write_part(directory, step, 0, 0, 1, 1, state, 1, run)
    checkpoint_directory.commit(directory, step, run=run)


def resumed(directory: Path, run: str, **changes: Any) -> tuple[list[int], dict[str, Any]]:
    """Return the steps that `run` can resume, the first one first, and the event about it."""
    config = three_nodes(directory / "run", checkpoint_dir=str(directory), resume=str(directory))
    state, (*_, event) = initial_state(config.of(**changes), run)
    assert event.kind == "checkpoint-resumed" and state.checkpoint is not None
    known = (state.checkpoint, *state.older_checkpoints)
    assert state.checkpoint == (event.data["path"], event.data["step"])
    return [step for _, step in known], event.data


def test_a_job_continues_from_its_own_checkpoints(tmp_path: Path) -> None:
    for step, run in ((2, BEFORE), (4, BEFORE), (6, OTHER)):
        write(tmp_path, step, run)
    steps, event = resumed(tmp_path, MINE)
    assert steps == [4, 2] and event["run"] == BEFORE
    assert event["note"] == f"that of step 6 is of another job, run {OTHER}"


def test_an_own_checkpoint_that_is_the_newest_needs_no_note(tmp_path: Path) -> None:
    for step, run in ((2, OTHER), (4, BEFORE)):
        write(tmp_path, step, run)
    steps, event = resumed(tmp_path, MINE)
    assert steps == [4] and not event["note"], "it never falls back to those of another job"


def test_a_checkpoint_of_another_job_is_taken_with_a_note_if_there_is_no_other(
    tmp_path: Path,
) -> None:
    for step, run in ((2, "third-0000cc.1"), (4, OTHER), (6, OTHER)):
        write(tmp_path, step, run)
    steps, event = resumed(tmp_path, MINE)
    assert steps == [6, 4] and event["run"] == OTHER
    assert "another job wrote it" in event["note"]


def test_a_directory_that_the_user_names_is_taken_as_it_is(tmp_path: Path) -> None:
    for step, run in ((2, BEFORE), (4, OTHER)):
        write(tmp_path, step, run)
    steps, event = resumed(tmp_path, MINE, checkpoint_dir=str(tmp_path / "mine"))
    assert steps == [4, 2] and not event["note"]


def test_the_directory_of_the_run_has_no_other_jobs(tmp_path: Path) -> None:
    """The attempts in a run directory may have different names."""
    write(tmp_path, 2, OTHER)
    steps, event = resumed(tmp_path, MINE, run_dir=str(tmp_path.parent))
    assert steps == [2] and not event["note"]


@pytest.mark.parametrize(
    ("run", "name"),
    [
        ("train-0000ff.1", "train"),
        ("my-job.v2-0000ff.12", "my-job.v2"),
        ("0000ff.1", ""),
        ("sim.1", "sim"),
        ("", ""),
    ],
)
def test_the_name_of_a_job_is_that_of_the_user(run: str, name: str) -> None:
    assert job_name(run) == name
