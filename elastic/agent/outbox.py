"""What an agent says again after each break: the coordinator may not have heard it, or not have saved it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from elastic.core.protocol import messages as m

STEPS, OTHERS = 4096, 64
"""Newest that are kept."""


class News:
    """Steps first: a report that follows may end the job."""

    def __init__(self) -> None:
        self._steps: deque[m.StepDone] = deque(maxlen=STEPS)
        self._others: deque[m.CheckpointPart | m.BackupNote] = deque(maxlen=OTHERS)

    def add(self, message: m.StepDone | m.CheckpointPart | m.BackupNote) -> None:
        if isinstance(message, m.StepDone):
            self._steps.append(message)
        else:
            self._others.append(message)

    def __iter__(self) -> Iterator[m.StepDone | m.CheckpointPart | m.BackupNote]:
        yield from self._steps
        yield from self._others

    def enter(self, install: m.Install) -> None:
        """The job goes on at a step: what it had done beyond it, before an older checkpoint was taken, is undone."""
        step = install.assignment.step
        steps = [d for d in self._steps if d.record.step < step or d.epoch >= install.epoch]
        others = [o for o in self._others if not (isinstance(o, m.CheckpointPart) and o.step > step)]
        self._steps, self._others = deque(steps, STEPS), deque(others, OTHERS)
