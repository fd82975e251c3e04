"""Messages that an agent resends after each reconnect: steps, checkpoints and backups.

The coordinator may not have received them, or may have failed before it saved them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from elastic.core.protocol import messages as m
from elastic.core.recovery import lineage

MAX_STEPS, MAX_CHECKPOINTS, MAX_NOTES = 4096, 16, 64
"""Limits on the kept messages: finished steps, checkpoints with all their parts (twice as many as
the coordinator waits for), and notes. The oldest are dropped first."""


class Outbox:
    """Newest messages about steps, checkpoints and backups. Iteration gives the finished steps
    first."""

    def __init__(self) -> None:
        self._steps: deque[m.StepDone] = deque(maxlen=MAX_STEPS)
        self._others: list[m.CheckpointPart | m.BackupNote] = []

    def add(self, message: m.StepDone | m.CheckpointPart | m.BackupNote) -> None:
        if isinstance(message, m.StepDone):
            self._steps.append(message)
        else:
            self._others.append(message)
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        old = set(sorted({part.step for part in self.parts})[:-MAX_CHECKPOINTS])
        notes = [other for other in self._others if isinstance(other, m.BackupNote)]
        if len(notes) > MAX_NOTES:
            self._others.remove(notes[0])
        if old:
            self._others = [
                o for o in self._others if isinstance(o, m.BackupNote) or o.step not in old
            ]

    def __iter__(self) -> Iterator[m.StepDone | m.CheckpointPart | m.BackupNote]:
        yield from self._steps
        yield from self._others

    @property
    def parts(self) -> tuple[m.CheckpointPart, ...]:
        """Parts of checkpoints."""
        return tuple(part for part in self._others if isinstance(part, m.CheckpointPart))

    def enter(self, install: m.Install) -> None:
        """Drop the steps and checkpoints that a return to an older step has undone, and notes about
        backups and failures of earlier epochs."""
        step, starts = install.assignment.step, lineage.starts_of(install.assignment)
        steps = [
            done
            for done in self._steps
            if (done.record.step < step or done.epoch >= install.epoch)
            and not any(done.epoch < epoch and first <= done.record.step for epoch, first in starts)
        ]
        self._others = [
            o
            for o in self._others
            if isinstance(o, m.CheckpointPart)
            and not lineage.is_undone(o, starts)
            and not (o.error and o.epoch < install.epoch)
        ]
        self._steps = deque(steps, MAX_STEPS)
