"""Writes durable checkpoints while training goes on.

When a worker publishes the state of a checkpoint's step, the state is copied at once and a thread
writes it to disk. One node writes each layer: its holder in the first pipeline. If holders share
the state of a layer, each writes its portion.

The state after the last step is always a checkpoint. Workers wait for this checkpoint only: its
bundles are acknowledged when the files are on disk, so that the job does not end before.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import CheckpointPart, Published
from elastic.domain.errors import ElasticError, VaultError
from elastic.domain.types import STATE, WHOLE, Copy, Plan
from elastic.rpc.control.event_loop import run_callback
from elastic.store import checkpoint_directory

log = logging.getLogger(__name__)


class CheckpointWriter:
    """Writes this node's files of checkpoints on a thread of its own.

    `emit(part)` is called on this thread when the node's files of a step are on disk. `failed(why)`
    is called instead if they could not be written; training goes on.
    """

    def __init__(
        self,
        directory: Path,
        vault: Vault,
        emit: Callable[[CheckpointPart], None],
        failed: Callable[[str], None] = lambda why: None,
    ) -> None:
        self._directory, self._vault, self._emit, self._failed = directory, vault, emit, failed
        self.every = 0
        """Steps between checkpoints; 0: no checkpoints."""
        self.steps = 0
        """Number of steps of the job."""
        self.final = False
        """Whether this node's part of the last checkpoint is queued or written."""
        self._plan: Plan | None = None
        self._written: set[tuple[int, ...]] = set()
        """(step, layer, TP rank), with the portion at the end if there are several, of each part of
        the newest step that is queued or written."""
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def enter(self, plan: Plan) -> None:
        """Begin a new plan, which determines the layers that this node writes."""
        self._plan, self.final = plan, False

    def offer(self, published: Published) -> None:
        """Copy the states that belong to a checkpoint from a bundle, and queue them. Call this
        before the bundle is acknowledged: afterwards the worker may overwrite its memory."""
        plan = self._plan
        if not self.every or plan is None:
            return
        parts: list[tuple[Copy, memoryview]] = []
        for local in published.copies:
            copy = local.copy
            due = copy.step > 0 and (copy.step % self.every == 0 or copy.step == self.steps)
            writes = copy.portion != WHOLE or plan.holders(copy.layer)[0].node == self._vault.node
            mine = due and copy.kind == STATE and writes
            part = (copy.step, *copy.slot)
            if mine and part not in self._written:
                try:
                    parts.append((copy, self._vault.read(copy.key)))
                except VaultError as error:
                    log.error("checkpoint of step %d: %s", copy.step, error)
                    continue
                self._written = {other for other in self._written if other[0] == copy.step} | {part}
        if parts:
            self.final = self.final or parts[0][0].step == self.steps
            self._queue.put(partial(self._write, plan, parts))

    def then(self, action: Callable[[], None]) -> None:
        """Call `action` on the writer's thread, after the parts queued so far are on disk or have
        failed."""
        self._queue.put(action)

    def close(self, wait: bool = True) -> None:
        """Write the queued parts and end. `wait`: return when they are written."""
        self._queue.put(None)
        if wait:
            self._thread.join()

    def _run(self) -> None:
        while (action := self._queue.get()) is not None:
            run_callback(action)

    def _write(self, plan: Plan, parts: list[tuple[Copy, memoryview]]) -> None:
        step = parts[0][0].step
        try:
            for copy, data in parts:
                checkpoint_directory.write_part(
                    self._directory, step, copy.layer, copy.shard, plan.n_layers, plan.tp, data
                )
        except (ElasticError, OSError) as error:
            log.error("checkpoint of step %d: %s", step, error)
            self._failed(str(error.__cause__ or error))
            return
        except Exception as error:
            log.exception("checkpoint of step %d", step)
            self._failed(f"unexpected {type(error).__name__}: {error}")
            return
        self._emit(CheckpointPart(step, tuple(copy.slot for copy, _ in parts)))
