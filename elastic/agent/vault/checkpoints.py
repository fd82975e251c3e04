"""Durable checkpoints without waiting: when a worker publishes the state of a checkpoint's step, it is copied
aside at once and written to disk by a thread. One node a layer writes it: the holder in the first pipeline. Where
holders share the state, each writes its portion.

The state after the last step is always a checkpoint's. It alone is waited for: workers are told that it is
protected only when it is on disk, and so the job does not end before."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from pathlib import Path

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import CheckpointPart, Published
from elastic.domain.errors import ElasticError, VaultError
from elastic.domain.types import STATE, WHOLE, Copy, Plan
from elastic.store import checkpoint_directory

log = logging.getLogger(__name__)


class CheckpointWriter:
    """`emit` gets a CheckpointPart, from the writer's thread, when this node's files of a step are on
    disk."""

    def __init__(
        self,
        directory: Path,
        vault: Vault,
        emit: Callable[[CheckpointPart], None],
        refused: Callable[[str], None] = lambda why: None,
    ) -> None:
        """`refused` is told, from the same thread, why files of a step could not be written; training goes on."""
        self._directory, self._vault, self._emit, self._refused = directory, vault, emit, refused
        self.every = 0
        """Steps between checkpoints; 0: none."""
        self.steps = 0
        """Steps of the job."""
        self.final = False
        """The last checkpoint is queued or written here."""
        self._node = ""
        self._plan: Plan | None = None
        self._last: set[tuple[int, ...]] = set()
        """(step, *slot) of what is queued or written here."""
        self._queue: queue.Queue[tuple[Plan, list[tuple[Copy, memoryview]]] | Callable[[], None] | None]
        self._queue = queue.Queue()
        self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
        self._thread.start()

    def enter(self, node: str, plan: Plan) -> None:
        """A new plan: it says which layers this node writes."""
        self._node, self._plan, self.final = node, plan, False

    def offer(self, published: Published) -> None:
        """Copy what belongs to a checkpoint out of a bundle whose slots will not change before it is acknowledged."""
        plan = self._plan
        if not self.every or plan is None:
            return
        runs: list[tuple[Copy, memoryview]] = []
        for local in published.copies:
            copy = local.copy
            due = copy.step > 0 and (copy.step % self.every == 0 or copy.step == self.steps)
            writes = copy.portion != WHOLE or plan.holders(copy.layer)[0].node == self._node
            mine = due and copy.kind == STATE and writes
            part = (copy.step, *copy.slot)
            if mine and part not in self._last:
                try:
                    runs.append((copy, self._vault.read(copy.key)))
                except VaultError as error:
                    log.error("checkpoint of step %d: %s", copy.step, error)
                    continue
                self._last = {other for other in self._last if other[0] == copy.step} | {part}
        if runs:
            self.final = self.final or runs[0][0].step == self.steps
            self._queue.put((plan, runs))

    def then(self, action: Callable[[], None]) -> None:
        """Call `action`, from the writer's thread, when what is queued now is on disk (or was refused)."""
        self._queue.put(action)

    def close(self) -> None:
        """Finish what is queued."""
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if not isinstance(item, tuple):
                item()
                continue
            plan, runs = item
            step = runs[0][0].step
            try:
                for copy, run in runs:
                    checkpoint_directory.write_part(
                        self._directory, step, copy.layer, copy.shard, plan.n_layers, plan.tp, run
                    )
            except (ElasticError, OSError) as error:
                log.error("checkpoint of step %d: %s", step, error)
                self._refused(str(error.__cause__ or error))
                continue
            self._emit(CheckpointPart(step, tuple(copy.slot for copy, _ in runs)))
