"""Writes durable checkpoints while training goes on.

When a worker publishes the state of a checkpoint's step, the state is copied at once and a thread
writes it to disk. One node writes each layer: its holder in the first pipeline. If holders share
the state of a layer, each writes its portion.

A disk that is slow or hangs must not fill the memory with copies: while `MAX_BEHIND` checkpoints
wait for it, the next one is given up.

The state after the last step is always a checkpoint. Workers wait for this checkpoint only: its
bundles are acknowledged when the files are on disk. The coordinator waits for it, too, before it
ends the job, but one of the former version (protocol 1) does not: it ends the job as soon as the
workers are done.

If an epoch begins at an earlier step than states that were written, training repeats these steps.
The writer then forgets these states, drops those in its queue, and writes the new ones.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import CheckpointPart, Published
from elastic.core.recovery import lineage
from elastic.domain.checksum import checksum_problem
from elastic.domain.errors import ElasticError, VaultError, describe
from elastic.domain.types import STATE, WHOLE, Assignment, Copy, Plan, Slot
from elastic.rpc.control.event_loop import run_callback
from elastic.store import checkpoint_directory
from elastic.store.checkpoints import open_checkpoints
from elastic.store.shared_memory import checksum, private_copy

log = logging.getLogger(__name__)
KEPT_STEPS = 8
"""Number of steps of which the written parts are remembered."""
CLOSE_S = 30.0
"""Upper limit of the wait for the disk at the end of the job."""
MAX_BEHIND = 2
"""Number of earlier checkpoints that may be in the queue when the next one is copied."""
SMALL_BYTES = 64 << 20
"""Copies in the queue that have fewer bytes altogether do not count."""


class CheckpointWriter:
    """Writes this node's files of checkpoints on a thread of its own.

    `emit(part)` is called on any thread when the node's files of a step are on disk, or could not
    be written after several tries. `failed(why)` is also called in the second case. Training goes
    on. The files of the last step are tried for `patience_s`, and `failed` is called meanwhile.
    """

    def __init__(
        self,
        location: str | Path,
        vault: Vault,
        emit: Callable[[CheckpointPart], None],
        failed: Callable[[str], None] = lambda why: None,
        patience_s: float = 0.0,
    ) -> None:
        self._checkpoints = open_checkpoints(location)
        self._vault, self._emit, self._failed = vault, emit, failed
        self._patience_s = patience_s
        self.every = 0
        """Steps between checkpoints; 0: no checkpoints."""
        self.steps = 0
        """Number of steps of the job."""
        self.final = False
        """Whether this node's part of the last checkpoint is queued or written."""
        self.final_files = 0
        """Number of files of the last checkpoint that were written: a sign of progress, because a
        slow disk may need long for all of a part."""
        self._plan: Plan | None = None
        self._job_run = ""
        """`Assignment.run`. A writer serves one run: a node that joins another gets a new one."""
        self._starts: lineage.Starts = ()
        self._checkpointed = -1
        """`Assignment.checkpointed` of the present epoch."""
        self._written: dict[tuple[int, Slot], Copy] = {}
        """State by (step, slot) of each part of the newest steps that is queued or written."""
        self._queued: list[tuple[int, int, int]] = []
        """(step, epoch, bytes) of each bundle whose private copies are in memory until the disk has
        them."""
        self._unwritten = 0
        """Number of writes that are queued or in progress."""
        self._lock = threading.Lock()
        """Guards the fields above: `enter` and `offer` are called on different threads."""
        self._closed = threading.Event()
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def enter(self, assignment: Assignment) -> None:
        """Begin a new epoch. Its plan determines the layers that this node writes."""
        with self._lock:
            self._plan, self.final = assignment.plan, False
            self._job_run, self._starts = assignment.run, lineage.starts_of(assignment)
            self._checkpointed = assignment.checkpointed
            written = self._written.items()
            self._written = {part: copy for part, copy in written if not self.is_undone(copy)}
        for copy in (copy for copy in assignment.rescued if copy.node == self._vault.node):
            with self._lock:
                queued = (copy.step, copy.slot) in self._written
                self._written.setdefault((copy.step, copy.slot), copy)
            if not queued:
                self._rescue(assignment.plan, copy)

    def _rescue(self, plan: Plan, copy: Copy) -> None:
        """Queue a copy in the vault, which keeps it until it is written."""
        lease = contextlib.ExitStack()
        try:
            view = lease.enter_context(self._vault.lease(copy.key))
        except VaultError as error:
            self._give_up([copy], error, str(error))
            return

        def write() -> None:
            try:
                with lease:
                    data = private_copy(view)
            except (MemoryError, OSError) as error:
                self._give_up([copy], error, _problem(error))
                return
            if not checksum_problem(copy, checksum(data)):
                self._write(plan, [(copy, data)])
            else:
                torn = VaultError(f"{copy.key} is torn or corrupt")
                self._give_up([copy], torn, str(torn))

        self._put(write)

    def offer(self, published: Published) -> None:
        """Copy the states that belong to a checkpoint from a bundle, and queue them. Call this
        before the bundle is acknowledged: afterwards the worker may overwrite its memory."""
        if not self.every:
            return
        # A worker that was halted during an update announces layers of two versions together.
        for step in sorted({local.copy.step for local in published.copies}):
            self._offer([local.copy for local in published.copies if local.copy.step == step], step)

    def _offer(self, copies: list[Copy], step: int) -> None:
        with self._lock:
            plan = self._plan
            due = [copy for copy in copies if self._is_due(copy)]
            if plan is None or not due:
                return
            bundle = step, plan.epoch, sum(copy.nbytes for copy in due)
            behind = 0 if step == self.steps else self._behind(bundle)
            if behind < MAX_BEHIND:
                self._queued.append(bundle)
                self._enlist(due, step)
        if behind >= MAX_BEHIND:
            late = VaultError(f"the disk is {behind} checkpoints behind")
            self._give_up(due, late, str(late))
            return
        try:
            parts = [(copy, self._vault.read(copy.key)) for copy in due]
        except (VaultError, MemoryError, OSError) as error:
            self._leave_queue(bundle)
            self._give_up(due, error, _problem(error))
            return

        def write() -> None:
            try:
                self._write(plan, parts)
            finally:
                parts.clear()
                self._leave_queue(bundle)

        self._put(write)

    def _behind(self, bundle: tuple[int, int, int]) -> int:
        """Return the number of other checkpoints with large copies in memory. The caller holds the
        lock."""
        if sum(nbytes for _, _, nbytes in self._queued) < SMALL_BYTES:
            return 0
        return len({queued[:2] for queued in self._queued} - {bundle[:2]})

    def _leave_queue(self, bundle: tuple[int, int, int]) -> None:
        with self._lock:
            self._queued.remove(bundle)

    def _enlist(self, due: list[Copy], step: int) -> None:
        """Remember that the copies are written now. The caller holds the lock."""
        self._written |= {(step, copy.slot): copy for copy in due}
        newest = sorted({step for step, _ in self._written})[-KEPT_STEPS:]
        for part in [part for part in self._written if part[0] not in newest]:
            del self._written[part]
        self.final = self.final or step == self.steps

    def _is_due(self, copy: Copy) -> bool:
        """Return whether this node must write the copy now. The caller holds the lock."""
        step, plan = copy.step, self._plan
        if copy.kind != STATE or plan is None or self.is_undone(copy):
            return False
        due = step > self._checkpointed and (step % self.every == 0 or step == self.steps)
        writes = copy.portion != WHOLE or plan.holders(copy.layer)[0].node == self._vault.node
        return step > 0 and due and writes and (step, copy.slot) not in self._written

    def is_undone(self, item: Copy | CheckpointPart) -> bool:
        """Return whether training has repeated the step of a state or part since then, or will."""
        return lineage.is_undone(item, self._starts)

    @property
    def busy(self) -> bool:
        """Whether parts wait for the disk."""
        return self._unwritten > 0

    def _put(self, write: Callable[[], None]) -> None:
        """Queue a write, unless the writer is closed."""

        def counted() -> None:
            try:
                write()
            finally:
                with self._lock:
                    self._unwritten -= 1

        with self._lock:
            if not self._closed.is_set():
                self._unwritten += 1
                self._queue.put(counted)

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` on the writer's thread, after the parts queued so far are on disk or have
        failed."""
        self._queue.put(action)

    def close(self, wait: bool = True) -> bool:
        """Write the queued parts and end. `wait`: return when they are written, or when the disk
        has not answered for `CLOSE_S`. Return False in the second case."""
        with self._lock:
            self._closed.set()
            self._queue.put(None)
        if wait:
            self._thread.join(CLOSE_S)
            if self._thread.is_alive():
                log.error("the disk does not answer: the newest checkpoint may be incomplete")
                return False
        return True

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            run_callback(action)

    def _write(self, plan: Plan, parts: list[tuple[Copy, memoryview]]) -> None:
        copies = [copy for copy, _ in parts]
        try:
            for copy, data in parts:
                if self.is_undone(copy):
                    return
                checkpoint_directory.retry(
                    partial(self._write_part, plan, copy, data),
                    partial(self._pause, copy),
                    patience_s=self._patience_s if copy.step == self.steps else 0.0,
                    held=lambda error: self._failed(str(error.__cause__ or error)),
                )
                self.final_files += copy.step == self.steps
        except (ElasticError, OSError) as error:
            self._give_up(copies, error, str(error.__cause__ or error))
            return
        except Exception as error:
            log.exception("checkpoint of step %d", copies[0].step)
            self._give_up(copies, error, f"unexpected {type(error).__name__}: {error}")
            return
        slots = tuple(copy.slot for copy in copies)
        self._emit(CheckpointPart(copies[0].step, slots, copies[0].epoch, self._vault.node))

    def _pause(self, copy: Copy, seconds: float) -> bool:
        """Wait until the next try to write a copy; return whether no more tries are needed."""
        return self._closed.wait(seconds) or self.is_undone(copy)

    def _write_part(self, plan: Plan, copy: Copy, data: memoryview) -> None:
        self._checkpoints.write_part(
            copy.step,
            copy.layer,
            copy.shard,
            plan.n_layers,
            plan.tp,
            data,
            copy.epoch,
            self._job_run,
        )

    def _give_up(self, copies: list[Copy], error: Exception, why: str) -> None:
        """Report that the copies could not be written, and let a later epoch write them."""
        step = copies[0].step
        log.error("checkpoint of step %d: %s", step, error)
        with self._lock:
            for copy in copies:
                self._written.pop((step, copy.slot), None)
            epoch = self._plan.epoch if self._plan is not None else copies[0].epoch
            undone = self.is_undone(copies[0])
        self._failed(why)
        if not undone:  # the present epoch may have relied on these copies
            slots = tuple(copy.slot for copy in copies)
            self._emit(CheckpointPart(step, slots, epoch, self._vault.node, why))


def _problem(error: Exception) -> str:
    """Return why a private copy could not be made."""
    return str(error) if isinstance(error, VaultError) else f"no memory: {describe(error)}"
