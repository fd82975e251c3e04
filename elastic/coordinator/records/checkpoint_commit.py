"""Checkpoints whose parts are all written are made the newest ones; the disk is waited for by a thread."""

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


class Commits:
    """Futures go to `done` when they are through."""

    def __init__(self, directory: Path, done: Callable[[Any], object]) -> None:
        self._directory, self._done = directory, done
        self._disk = ThreadPoolExecutor(1, "checkpoint")
        self._left: list[Commit] = []

    def begin(self, step: int, spec: JobSpec | None) -> None:
        def work() -> job.CheckpointCommitted | None:
            try:
                path = checkpoint_directory.commit(self._directory, step, spec)
            except (ElasticError, OSError) as error:  # the disk may be a network's
                log.error("checkpoint of step %d is not whole: %s", step, error)
                return None
            return job.CheckpointCommitted(str(path), step)

        future = self._disk.submit(work)
        self._left.append(future)
        future.add_done_callback(self._done)

    def left(self) -> tuple[Commit, ...]:
        """Those that were not taken."""
        return tuple(self._left)

    def take(self, future: Commit) -> job.CheckpointCommitted | None:
        """Wait for it. None: it was taken before, or is not whole."""
        if future not in self._left:
            return None
        self._left.remove(future)
        return future.result()

    def close(self) -> None:
        """Returns at once; what is under way is not waited for."""
        self._disk.shutdown(wait=False)
