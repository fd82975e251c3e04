"""What a coordinator finds in its run directory, and what it writes there of itself."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from elastic.config import JobConfig
from elastic.coordinator.queries import policy_of
from elastic.core import job
from elastic.store import durable


def first_state(config: JobConfig) -> job.JobState:
    """Of a new run: from the checkpoint that it resumes, if any. What is left of unfinished ones is removed."""
    durable.discard_incomplete(Path(config.checkpoint_dir))
    checkpoint = _checkpoint(Path(config.resume)) if config.resume else None
    state = job.JobState(policy=policy_of(config))
    if checkpoint is not None:
        state = state.of(checkpoint=(str(checkpoint), step_of(checkpoint)))
    return state


def announce(run_dir: Path, told: dict[str, Any]) -> None:
    """Say in coordinator.json who leads, unless one with a higher term did."""
    path = run_dir / "coordinator.json"
    if (read_told(path).get("term") or 0) <= told["term"]:
        draft = run_dir / f"coordinator.{os.getpid()}.tmp"
        draft.write_text(json.dumps(told) + "\n")
        os.replace(draft, path)


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
    return path if (path / durable.MANIFEST).is_file() else durable.latest(path)
