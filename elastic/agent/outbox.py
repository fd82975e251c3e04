"""Messages of an agent about finished steps, checkpoints and backups.

After each reconnect the agent resends what its `Outbox` holds: the coordinator may not have
received a message, or may have failed before it saved the message.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from elastic.core.protocol import messages as m

MAX_STEPS, MAX_OTHERS = 4096, 64
"""Number of newest messages that are kept."""


class Outbox:
    """Messages that are resent after a reconnect. Finished steps come first in iteration, because
    a report that follows them may end the job."""

    def __init__(self) -> None:
        self._steps: deque[m.StepDone] = deque(maxlen=MAX_STEPS)
        self._others: deque[m.CheckpointPart | m.BackupNote] = deque(maxlen=MAX_OTHERS)

    def add(self, message: m.StepDone | m.CheckpointPart | m.BackupNote) -> None:
        if isinstance(message, m.StepDone):
            self._steps.append(message)
        else:
            self._others.append(message)

    def __iter__(self) -> Iterator[m.StepDone | m.CheckpointPart | m.BackupNote]:
        yield from self._steps
        yield from self._others

    def enter(self, install: m.Install) -> None:
        """Forget the steps and checkpoints that a return to an older checkpoint has undone."""
        step = install.assignment.step
        steps = [d for d in self._steps if d.record.step < step or d.epoch >= install.epoch]
        others = [
            o for o in self._others if not (isinstance(o, m.CheckpointPart) and o.step > step)
        ]
        self._steps, self._others = deque(steps, MAX_STEPS), deque(others, MAX_OTHERS)
