"""Completes checkpoints whose parts are all written, on a thread that waits for the disk.

"Disk" also stands for an object store here. A disk may fail: then a commit is tried again for
`disk_s`. A network disk may also hang without an error, and the thread with it. `check` warns after
`disk_s`. After `return_s`, as long as a job waits for lost nodes that have its state, the commits
have failed.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Collection, Iterable
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from elastic.core.job import state as job
from elastic.domain.errors import ElasticError, StaleError
from elastic.domain.types import JobSpec
from elastic.rpc.control.event_loop import Dispatcher
from elastic.store import checkpoint_directory
from elastic.store.checkpoints import open_checkpoints

T = TypeVar("T")
log = logging.getLogger("elastic.coordinator")
Commit = Future[job.CheckpointCommitted | job.CheckpointFailed]


class CheckpointCommits:
    """Completes the checkpoints of a run in the background. `done(commit)` is called on another
    thread when a commit ends; pass the commit to `take`. `find` calls it with events.
    `late(entry)` is called there if the disk fails for longer than a moment."""

    def __init__(
        self,
        location: str | Path,
        done: Callable[[Any], object],
        late: Callable[[job.LogEntry], object] = lambda entry: None,
        run: str = "",
        keep: int = 0,
    ) -> None:
        """`keep`: number of newest checkpoints that are kept; 0: all."""
        self._checkpoints, self._keep = open_checkpoints(location), keep
        self._done, self._late, self._run = done, late, run
        self._disk = Dispatcher("checkpoint")
        self._closed = threading.Event()
        self._pending: dict[Commit, int] = {}
        self._removals: set[job.DropCheckpoint] = set()
        """Removals that have not begun."""
        self._sought: set[int] = set()
        """Steps whose checkpoints are looked for on the disk."""
        self._answers = 0
        """Number of answers of the disk, errors included. Only the thread for the disk adds."""
        self._seen, self._quiet_since = -1, 0.0
        """Number of answers at the newest check, and the time since which it stays."""
        self._warned: set[Commit] = set()
        """Commits of which people were told that the disk does not answer."""

    def begin(
        self,
        step: int,
        spec: JobSpec | None,
        patience_s: float = 0.0,
        counts: Callable[[int], bool] = lambda epoch: True,
    ) -> None:
        """Start to complete the checkpoint of `step`, unless this is under way. A disk that
        fails is tried several times, for `patience_s` in all. `counts(epoch)` tells whether files
        of that epoch belong to the checkpoint."""
        if step in self._pending.values():
            return

        def held(error: Exception) -> None:
            why = str(error.__cause__ or error)
            text = "checkpoint of step %d cannot be completed yet; it is tried for %g s: %s"
            log.warning(text, step, patience_s, why)
            data = {"step": step, "why": why, "patience_s": patience_s}
            self._late(job.LogEntry("checkpoint-late", data))

        def commit() -> job.CheckpointCommitted | job.CheckpointFailed:
            try:
                path = checkpoint_directory.retry(
                    lambda: self._checkpoints.commit(step, spec, counts, self._run),
                    self._pause,
                    patience_s=patience_s,
                    held=held,
                )
            except (ElasticError, OSError) as error:  # a network disk may fail at any time
                log.error("checkpoint of step %d is incomplete: %s", step, error)
                return job.CheckpointFailed(step, str(error))
            return job.CheckpointCommitted(path, step)

        future = self._post(commit)
        self._pending[future] = step
        future.add_done_callback(self._done)
        self._post(partial(self._remove_old, step))

    def _remove_old(self, step: int) -> None:
        """Remove the checkpoints of this run before the newest `keep` up to `step`. Others stay:
        no name tells for sure whose they are."""
        if not self._keep:
            return
        try:
            found, _ = self._checkpoints.complete()
            mine = [m.step for _, m in found if m.run == self._run and m.step <= step]
            for old in mine[self._keep :]:
                self._checkpoints.remove(old, self._run)
                log.info("removed the checkpoint of step %d (--checkpoint-keep)", old)
        except (ElasticError, OSError) as error:
            log.error("old checkpoints cannot be removed: %s", error)

    def _post(self, action: Callable[[], T]) -> Future[T]:
        """Call `action` on the thread that waits for the disk, after all that was posted before."""
        future: Future[T] = Future()

        def work() -> None:
            try:
                future.set_result(action())
            except Exception as error:  # noqa: BLE001 - somebody waits for the result
                future.set_exception(error)
            self._answers += 1

        self._disk.post(work)
        return future

    def _pause(self, seconds: float) -> None:
        """Wait until the next try. Raises StaleError after `close`: by the next try, another
        coordinator may have let the agents write other files."""
        self._answers += 1
        if self._closed.wait(seconds):
            raise StaleError("this coordinator has ended before the next try")

    def check(
        self, now: float, late_s: float, warn_s: float, limit_s: float
    ) -> tuple[job.CheckpointFailed, ...]:
        """Return an event for each commit if the disk has not answered for `limit_s`: they count as
        failed. Warn after `warn_s`. Call this with each tick; `late_s` is the tick's delay, in
        which the process may have been stopped."""
        if self._answers != self._seen or not self._pending:
            self._seen, self._quiet_since = self._answers, now
            self._warned.clear()
        self._quiet_since += late_s
        if now - self._quiet_since < warn_s:
            return ()
        for future in self._pending.keys() - self._warned:
            self._warned.add(future)
            step, why = self._pending[future], "the disk does not answer"
            log.warning("the commit of the checkpoint of step %d waits: %s", step, why)
            data = {"step": step, "why": why, "patience_s": limit_s}
            self._late(job.LogEntry("checkpoint-late", data))
        if now - self._quiet_since < limit_s:
            return ()
        why = f"the disk did not answer for {limit_s:g} s"
        failed = tuple(job.CheckpointFailed(step, why) for step in self._pending.values())
        self._pending.clear()
        return failed

    def drop(self, order: job.DropCheckpoint, patience_s: float = 0.0) -> None:
        """Remove files of a checkpoint. If it may be committed, the result of a commit under way is
        ignored, and a disk that fails is tried for `patience_s` in all. Other files do no harm, and
        commits wait for the removal, so a few tries are enough for them."""
        step, patience_s = order.step, patience_s if order.committed else 0.0
        if order.committed:
            self._pending = {commit: s for commit, s in self._pending.items() if s != step}
        if order in self._removals:
            return
        self._removals.add(order)

        def discard() -> None:
            self._checkpoints.discard_step(step, order.before, self._run, committed=order.committed)

        def work() -> None:
            self._removals.discard(order)
            try:
                checkpoint_directory.retry(discard, self._pause, patience_s=patience_s)
            except (ElasticError, OSError) as error:
                log.error("files of step %d cannot be removed: %s", step, error)

        self._post(work)

    def find(
        self, step: int, spec: JobSpec | None, counts: Callable[[int], bool], newest: int
    ) -> None:
        """Look on the disk for a checkpoint of which only some parts are known.

        Another coordinator may have completed it, if the store was restored from a snapshot. Then
        call `done(event)`. If the checkpoint has no files, and the one of step `newest` is there,
        it was removed as an old one, and has failed. The other arguments are as for `begin`.
        """
        if step in self._sought:
            return
        self._sought.add(step)

        def look() -> None:
            try:
                path = self._checkpoints.commit(step, spec, counts, self._run)
                self._done(job.CheckpointCommitted(path, step))
            except (ElasticError, OSError):
                if self._is_removed(step, newest):
                    self._done(job.CheckpointFailed(step, "its files are not there any more"))
            finally:
                self._sought.discard(step)

        self._post(look)

    def _is_removed(self, step: int, newest: int) -> bool:
        """Return whether a checkpoint has no files, on a disk that has the newer one."""
        try:
            readable = step < newest and self._checkpoints.is_committed(newest, self._run)
            return readable and step not in self._checkpoints.staged_steps()
        except (ElasticError, OSError):
            return False

    def left_over(
        self,
        due: Iterable[int],
        settled: Callable[[int], bool],
        timeout_s: float = 0.0,
        *,
        spec: JobSpec | None = None,
        counts: Callable[[int, int], bool] = lambda step, epoch: True,
        recorded: Callable[[], Collection[int]] = tuple,
    ) -> tuple[job.CheckpointCommitted | job.CheckpointFailed, ...]:
        """Return an event for each checkpoint that is `due`, or has files, but is neither committed
        nor `settled(step)`: it is completed if all its files are there. Remove the files of the
        others that are incomplete.

        `counts(step, epoch)` tells whether files of that epoch belong to the checkpoint;
        `recorded()` gives the steps of all checkpoints that this run has completed: one that is
        not there any more was removed by the user.

        Call this at the end of the job, when no commit is pending. If the disk does not answer
        within `timeout_s`, the checkpoints that are due count as missing.
        """

        def survey() -> tuple[job.CheckpointCommitted | job.CheckpointFailed, ...]:
            staged = self._checkpoints.staged_steps()
            found: list[job.CheckpointCommitted | job.CheckpointFailed] = []
            open_steps = [
                step
                for step in sorted({*staged, *due})
                if not settled(step) and not self._checkpoints.is_committed(step, self._run)
            ]
            known = frozenset(recorded()) if open_steps else frozenset()
            for step in open_steps:
                if step in staged:
                    found.append(self._complete(step, spec, partial(counts, step)))
                elif step not in known:
                    why = "none of its files were on disk when the job ended"
                    found.append(job.CheckpointFailed(step, why))
            for step in set(staged) - set(open_steps):
                self._checkpoints.discard_step(step)
            return tuple(found)

        try:
            return self._post(survey).result(timeout_s)
        except TimeoutError:
            why = f"the disk did not answer for {timeout_s:g} s"
        except OSError as error:
            why = f"the checkpoint directory cannot be read: {error}"
        log.error("%s", why)
        return tuple(job.CheckpointFailed(step, why) for step in due if not settled(step))

    def _complete(
        self, step: int, spec: JobSpec | None, counts: Callable[[int], bool]
    ) -> job.CheckpointCommitted | job.CheckpointFailed:
        """Complete a checkpoint of which not all parts were reported, in one try."""
        try:
            path = self._checkpoints.commit(step, spec, counts, self._run)
        except (ElasticError, OSError) as error:
            return job.CheckpointFailed(step, f"it was incomplete when the job ended: {error}")
        return job.CheckpointCommitted(path, step)

    def flush(self, timeout_s: float) -> None:
        """Wait for commits and removals, up to `timeout_s`."""
        with contextlib.suppress(TimeoutError):
            self._post(lambda: None).result(timeout_s)

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
        """Begin no further commit, and no further try; do not wait for one in progress."""
        self._closed.set()
        self._disk.abandon()
