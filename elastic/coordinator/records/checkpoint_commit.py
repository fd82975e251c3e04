"""Completes checkpoints whose parts are all written, on a thread that waits for the disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic.core.job import state as job
from elastic.domain.errors import ElasticError
from elastic.domain.types import JobSpec
from elastic.store import checkpoint_directory

log = logging.getLogger("elastic.coordinator")
Commit = Future[job.CheckpointCommitted | job.CheckpointFailed]


class CheckpointCommits:
    """Completes checkpoints in the background. `done(commit)` is called on another thread when a
    commit ends; pass the commit to `take`."""

    def __init__(self, directory: Path, done: Callable[[Any], object]) -> None:
        self._directory, self._done = directory, done
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._closed = threading.Event()
        self._pending: list[Commit] = []

    def begin(self, step: int, spec: JobSpec | None) -> None:
        """Start to complete the checkpoint of `step`. A disk that fails is tried several times."""

        def work() -> job.CheckpointCommitted | job.CheckpointFailed:
            try:
                path = checkpoint_directory.retry(
                    lambda: checkpoint_directory.commit(self._directory, step, spec),
                    self._closed.wait,
                )
            except (ElasticError, OSError) as error:  # a network disk may fail at any time
                log.error("checkpoint of step %d is incomplete: %s", step, error)
                return job.CheckpointFailed(step, str(error))
            return job.CheckpointCommitted(str(path), step)

        future = self._disk.submit(work)
        self._pending.append(future)
        future.add_done_callback(self._done)

    def drop(self, step: int) -> None:
        """Remove the files of the incomplete checkpoint of `step`."""
        self._disk.submit(checkpoint_directory.discard_step, self._directory, step)

    def left_over(self) -> tuple[job.CheckpointFailed, ...]:
        """Return an event for each checkpoint that has files but was not committed. Call this at
        the end of the job, when no commit is pending."""
        why = "some nodes were lost before they reported their files"
        steps = checkpoint_directory.staged_steps(self._directory)
        return tuple(job.CheckpointFailed(step, why) for step in steps)

    def pending(self) -> tuple[Commit, ...]:
        """Return the commits that were not taken."""
        return tuple(self._pending)

    def take(self, future: Commit) -> job.CheckpointCommitted | job.CheckpointFailed | None:
        """Wait for a commit; return its event, or None if it was taken before."""
        if future not in self._pending:
            return None
        self._pending.remove(future)
        return future.result()

    def close(self) -> None:
        """Stop the thread, without waiting for a commit in progress."""
        self._closed.set()
        self._disk.shutdown(wait=False)
