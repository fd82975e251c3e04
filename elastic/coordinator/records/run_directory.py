"""Small files of the run directory, and the initial state of a run."""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from elastic.config import JobConfig, is_url
from elastic.coordinator.queries import policy_of
from elastic.core.job import state as job
from elastic.core.protocol.version import PROTOCOL
from elastic.domain.errors import CorruptCheckpoint, FieldError
from elastic.store import checkpoint_directory, checkpoint_format
from elastic.store.checkpoint_format import Manifest
from elastic.store.checkpoints import open_checkpoints

log = logging.getLogger("elastic.coordinator")


def initial_state(
    config: JobConfig, run: str = "", wait: Callable[[float], object] = time.sleep
) -> tuple[job.JobState, tuple[job.LogEntry, ...]]:
    """Return the state of the new run named `run`, with the checkpoints that it can resume, if any;
    and events about the one that it resumes, and about newer ones that are damaged. Removes no
    files of unfinished checkpoints, because another coordinator may lead by now.

    `wait(seconds)` makes a pause: a commit of the former run may hold the directory for a while.
    Raises CorruptCheckpoint if none of the checkpoints to resume is complete, and FieldError if the
    directory cannot be used.
    """
    state = job.JobState(policy=policy_of(config), protocol=PROTOCOL, run=run)
    patiently = partial(
        checkpoint_directory.retry,
        wait=wait,
        patience_s=state.limits.disk_s,
        held=lambda error: log.warning("the run cannot begin yet: %s", error),
    )
    patiently(open_checkpoints(config.checkpoint_dir).finish_commits)
    if not config.resume:
        return state, ()
    found, problems = patiently(open_checkpoints(config.resume).complete)
    if not found:
        remedy = "; ".join(map(str, problems)) or "it holds no checkpoint"
        raise CorruptCheckpoint("--resume", config.resume, remedy)
    found, note = _of_one_job(config, run, found)
    known = tuple((path, manifest.step) for path, manifest in found)
    resumed = checkpoint_format.saved_model(*found[0])
    state = state.of(checkpoint=known[0], older_checkpoints=known[1:], resumed=resumed)
    unusable = [{"path": error.value, "why": error.remedy} for error in problems]
    path, manifest = found[0]
    data = {"path": path, "step": manifest.step, "run": manifest.run, "note": note}
    entries = [job.LogEntry("checkpoint-unusable", problem) for problem in unusable]
    return state, (*entries, job.LogEntry("checkpoint-resumed", data))


def _of_one_job(
    config: JobConfig, run: str, found: list[tuple[str, Manifest]]
) -> tuple[list[tuple[str, Manifest]], str]:
    """Return those of the checkpoints, newest first, that a run may resume, and a note if they are
    of another job, or if newer ones are.

    Several jobs may write to one `--checkpoint-dir`: checkpoints of this job come first, else those
    of the job that wrote the newest one. A directory that the user names otherwise, or that belongs
    to the run directory, is taken as it is.
    """
    directory = config.checkpoint_dir
    own = not is_url(directory) and Path(config.run_dir) in Path(directory).parents
    if config.resume.rstrip("/") != directory.rstrip("/") or own:
        return found, ""
    mine, newest = job_name(run), found[0][1]
    of_job = [one for one in found if job_name(one[1].run) == mine]
    if not of_job:
        other = job_name(newest.run)
        others = [one for one in found if job_name(one[1].run) == other]
        return others, f"another job wrote it, since {directory} has no checkpoint of this one"
    if of_job[0][1] is newest:
        return of_job, ""
    return of_job, f"that of step {newest.step} is of another job, run {newest.run or 'unknown'}"


def job_name(run: str) -> str:
    """Return the name that the user gave a job (`--rdzv-id`), from the name of a run; "": no name,
    or an unknown run. The name of a run is NAME-TOKEN.TERM, or TOKEN.TERM without a name."""
    job_id = run.rpartition(".")[0]
    token = re.fullmatch(r"(?:(.*)-)?[0-9a-f]{6}", job_id)
    return job_id if token is None else token[1] or ""


def discard_former(location: str | Path, run: str) -> None:
    """Remove the files of unfinished checkpoints of other runs than `run`. Call this before nodes
    are told to start workers. If the disk fails, the files stay: `run` ignores them."""
    discard = partial(open_checkpoints(location).discard_incomplete, run)
    try:
        checkpoint_directory.retry(discard, time.sleep)
    except (FieldError, OSError) as error:
        log.error("files of former runs cannot be removed: %s", error)


def announce(run_dir: Path, leader: dict[str, Any]) -> None:
    """Write the leader to coordinator.json, unless the file has a leader with a higher term."""
    path = run_dir / "coordinator.json"

    def leads() -> bool:
        return bool((read_json(path).get("term") or 0) <= leader["term"])

    if leads():  # and still after the draft is written, because the disk may have hung meanwhile
        try_write(path, lambda: replace_file(path, json.dumps(leader) + "\n", leads))


def write_pid(run_dir: Path, slot: int) -> None:
    """Write this process's id to coordinator-SLOT.pid."""
    path = run_dir / f"coordinator-{slot}.pid"
    try_write(path, lambda: replace_file(path, f"{os.getpid()}\n"))


def replace_file(path: Path, text: str, wanted: Callable[[], bool] = lambda: True) -> None:
    """Replace a file atomically; if that fails (full disk), overwrite the file. Raises OSError.

    Nothing is done if `wanted()` is false after the new text is on disk.
    """
    draft = path.with_suffix(f".{os.getpid()}.{time.monotonic_ns()}.tmp")
    try:
        draft.write_text(text)
        if not wanted():
            draft.unlink(missing_ok=True)
            return
        os.replace(draft, path)
    except OSError:
        draft.unlink(missing_ok=True)
        overwrite_file(path, text)


def overwrite_file(path: Path, text: str) -> None:
    """Overwrite an existing file in place. Raises OSError, also if the file does not exist."""
    with path.open("r+b", buffering=0) as file:
        data = text.encode()
        if file.write(data) != len(data):
            raise OSError(f"{path}: no room for {len(data)} bytes")
        file.truncate()


def try_write(path: Path, write: Callable[[], object]) -> None:
    """Call `write`, which writes `path`. Only log a failure: training needs no such file."""
    try:
        write()
    except (OSError, FieldError) as error:
        log.error("%s cannot be written: %s", path, error)


def read_json(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file; {} if the file has none or does not exist."""
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def coordinator_name(slot: int) -> str:
    """Return the name of coordinator number `slot` of this machine."""
    return f"coordinator-{slot}" if slot else "coordinator"
