"""What a coordinator finds in its run directory, and what it writes there of itself."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from elastic.config import JobConfig
from elastic.coordinator.queries import policy_of
from elastic.core.job import state as job
from elastic.store import checkpoint_directory

log = logging.getLogger("elastic.coordinator")


def first_state(config: JobConfig) -> job.JobState:
    """Of a new run: from the checkpoint that it resumes, if any. What is left of unfinished ones is removed."""
    checkpoint_directory.discard_incomplete(Path(config.checkpoint_dir))
    checkpoint = _checkpoint(Path(config.resume)) if config.resume else None
    state = job.JobState(policy=policy_of(config))
    if checkpoint is not None:
        state = state.of(checkpoint=(str(checkpoint), step_of(checkpoint)))
    return state


def announce(run_dir: Path, told: dict[str, Any]) -> None:
    """Say in coordinator.json who leads, unless one with a higher term did."""
    path = run_dir / "coordinator.json"
    if (read_told(path).get("term") or 0) <= told["term"]:
        _try(path, json.dumps(told) + "\n")


def note_pid(run_dir: Path, slot: int) -> None:
    """Say in coordinator-SLOT.pid that it runs."""
    _try(run_dir / f"coordinator-{slot}.pid", f"{os.getpid()}\n")


def replace(path: Path, text: str) -> None:
    """Change a file at once; on a disk without room for a second one, where it lies. Raises OSError."""
    draft = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        draft.write_text(text)
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        overwrite(path, text)


def overwrite(path: Path, text: str) -> None:
    """Into the room that an existing file has. Raises OSError; FileNotFoundError if there is none."""
    with path.open("r+b", buffering=0) as file:
        data = text.encode()
        if file.write(data) != len(data):
            raise OSError(f"{path}: no room for {len(data)} bytes")
        file.truncate()


def _try(path: Path, text: str) -> None:
    """Training needs none of these files: a disk that refuses ends no coordinator."""
    try:
        replace(path, text)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error)


def read_told(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} if there is none."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def name_of(slot: int) -> str:
    """Of one among the coordinators of this machine."""
    return f"coordinator-{slot}" if slot else "coordinator"


def step_of(checkpoint: Path) -> int:
    """Step of a checkpoint directory step-XXXXXXXX."""
    return int(checkpoint.name.rsplit("-", 1)[1])


def _checkpoint(path: Path) -> Path | None:
    """`path` itself if it is one checkpoint, else the newest one in it."""
    return path if (path / checkpoint_directory.MANIFEST).is_file() else checkpoint_directory.latest(path)
