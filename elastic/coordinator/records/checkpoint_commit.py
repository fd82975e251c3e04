"""Completes checkpoints whose parts are all written, on a thread that waits for the disk."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from elastic.core.job import state as job
from elastic.core.protocol.messages import CheckpointPart
from elastic.core.recovery import lineage
from elastic.domain.errors import ElasticError
from elastic.domain.types import JobSpec
from elastic.rpc.control.event_loop import Dispatcher
from elastic.store import checkpoint_directory

log = logging.getLogger("elastic.coordinator")
Commit = Future[job.CheckpointCommitted | job.CheckpointFailed]


class CheckpointCommits:
    """Completes the checkpoints of a run in the background. `done(commit)` is called on another
    thread when a commit ends; pass the commit to `take`. `late(entry)` is called there if the disk
    fails for longer than a moment."""

    def __init__(
        self,
        directory: Path,
        done: Callable[[Any], object],
        late: Callable[[job.LogEntry], object] = lambda entry: None,
        run: str = "",
    ) -> None:
        self._directory, self._done, self._late, self._run = directory, done, late, run
        self._disk = Dispatcher("checkpoint")
        self._closed = threading.Event()
        self._pending: dict[Commit, int] = {}
        self._removed: threading.Event | None = None
        """Set when the newest removal has ended; None: there was none."""

    def begin(
        self,
        step: int,
        spec: JobSpec | None,
        patience_s: float = 0.0,
        starts: lineage.Starts = (),
    ) -> None:
        """Start to complete the checkpoint of `step`, unless this is under way. A disk that
        fails is tried several times, for `patience_s` in all. Files that a later one of `starts`
        has undone do not count."""
        if step in self._pending.values():
            return
        future: Commit = Future()

        def held(error: Exception) -> None:
            why = str(error.__cause__ or error)
            text = "checkpoint of step %d cannot be completed yet; it is tried for %g s: %s"
            log.warning(text, step, patience_s, why)
            data = {"step": step, "why": why, "patience_s": patience_s}
            self._late(job.LogEntry("checkpoint-late", data))

        def counts(epoch: int) -> bool:
            known = epoch or -1  # agents of the former version write no epoch
            return not lineage.is_undone(CheckpointPart(step, (), known), starts)

        def commit() -> job.CheckpointCommitted | job.CheckpointFailed:
            try:
                path = checkpoint_directory.retry(
                    lambda: checkpoint_directory.commit(
                        self._directory, step, spec, counts, self._run
                    ),
                    self._closed.wait,
                    patience_s=patience_s,
                    held=held,
                )
            except (ElasticError, OSError) as error:  # a network disk may fail at any time
                log.error("checkpoint of step %d is incomplete: %s", step, error)
                return job.CheckpointFailed(step, str(error))
            return job.CheckpointCommitted(str(path), step)

        def work() -> None:
            try:
                future.set_result(commit())
            except Exception as error:  # noqa: BLE001 - somebody waits for the result
                future.set_exception(error)

        self._pending[future] = step
        future.add_done_callback(self._done)
        self._disk.post(work)

    def drop(self, step: int, before: int = 0, patience_s: float = 0.0) -> None:
        """Remove the files of the incomplete checkpoint of `step`. `before`: only those of epochs
        below it, also of a complete checkpoint; the result of a commit under way is ignored. A
        disk that fails is tried several times, for `patience_s` in all."""
        if before:
            self._pending = {commit: s for commit, s in self._pending.items() if s != step}

        def discard() -> None:
            checkpoint_directory.discard_step(self._directory, step, before, self._run)

        self._removed = removed = threading.Event()

        def work() -> None:
            try:
                checkpoint_directory.retry(discard, self._closed.wait, patience_s=patience_s)
            except (ElasticError, OSError) as error:
                log.error("files of step %d cannot be removed: %s", step, error)
            finally:
                removed.set()

        self._disk.post(work)

    def left_over(
        self, due: Iterable[int], timeout_s: float = 0.0
    ) -> tuple[job.CheckpointFailed, ...]:
        """Return an event for each checkpoint that is `due`, or has files, but was not committed.
        Call this at the end of the job, when no commit is pending. Wait up to `timeout_s` for
        removals."""
        if self._removed is not None:
            self._removed.wait(timeout_s)
        why = "some of its files were not reported before the job ended"
        staged = checkpoint_directory.staged_steps(self._directory)
        failed = []
        for step in sorted({*staged, *due}):
            if not checkpoint_directory.is_committed(self._directory, step, self._run):
                failed.append(job.CheckpointFailed(step, why))
            elif step in staged:
                self.drop(step)
        return tuple(failed)

    def pending(self) -> tuple[Commit, ...]:
        """Return the commits that were not taken."""
        return tuple(self._pending)

    def take(
        self, future: Commit, timeout_s: float = 0.0
    ) -> job.CheckpointCommitted | job.CheckpointFailed | None:
        """Wait for a commit; return its event, or None if it was taken before. After `timeout_s` it
        counts as failed."""
        if future not in self._pending:
            return None
        step = self._pending.pop(future)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            return job.CheckpointFailed(step, f"the disk did not answer for {timeout_s:g} s")

    def close(self) -> None:
        """Begin no further commit; do not wait for one in progress."""
        self._closed.set()
        self._disk.abandon()
