"""Completes checkpoints whose parts are all written, on a thread that waits for the disk."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from elastic.core.job import state as job
from elastic.domain.errors import ElasticError
from elastic.domain.types import JobSpec
from elastic.store import checkpoint_directory

log = logging.getLogger("elastic.coordinator")
Commit = Future[job.CheckpointCommitted | None]


class CheckpointCommits:
    """Completes checkpoints in the background. `done(commit)` is called on another thread when a
    commit ends; pass the commit to `take`."""

    def __init__(self, directory: Path, done: Callable[[Any], object]) -> None:
        self._directory, self._done = directory, done
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._pending: list[Commit] = []

    def begin(self, step: int, spec: JobSpec | None) -> None:
        """Start to complete the checkpoint of `step`."""

        def work() -> job.CheckpointCommitted | None:
            try:
                path = checkpoint_directory.commit(self._directory, step, spec)
            except (ElasticError, OSError) as error:  # a network disk may fail at any time
                log.error("checkpoint of step %d is incomplete: %s", step, error)
                return None
            return job.CheckpointCommitted(str(path), step)

        future = self._disk.submit(work)
        self._pending.append(future)
        future.add_done_callback(self._done)

    def pending(self) -> tuple[Commit, ...]:
        """Return the commits that were not taken."""
        return tuple(self._pending)

    def take(self, future: Commit) -> job.CheckpointCommitted | None:
        """Wait for a commit; return its event, or None if it was taken before or has failed."""
        if future not in self._pending:
            return None
        self._pending.remove(future)
        return future.result()

    def close(self) -> None:
        """Stop the thread, without waiting for a commit in progress."""
        self._disk.shutdown(wait=False)
