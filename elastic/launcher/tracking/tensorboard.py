"""A callback that writes event files for TensorBoard.

The library's SummaryWriter writes on a thread of its own and forgets what a full disk refuses. So
events are kept here until `flush` has written them, in the thread that asks for it.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from elastic.domain.errors import needs_extra
from elastic.launcher.tracking.callback import (
    Callback,
    EvaluationMetrics,
    RunEvent,
    RunInfo,
    StepMetrics,
)
from elastic.launcher.tracking.figures import figures

with needs_extra("tensorboard", "--track tensorboard:FOLDER"):
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event


class TensorBoard(Callback):
    """Scalars of each step, and texts about plans, recoveries and checkpoints, in a folder.

    A tracker that is started again writes a further file; TensorBoard shows them as one run.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._file: EventsWriter | None = None
        self._waiting: list[Event] = []
        """Events that are not in a file yet."""

    def on_start(self, run: RunInfo, key: str) -> str:
        if not key:
            settings = json.dumps({"name": run.name, **run.settings}, indent=2)
            self._text("run", f"    {settings.replace(chr(10), chr(10) + '    ')}", 0, time.time())
        return "begun"

    def on_step(self, step: StepMetrics) -> None:
        for name, value in step.scalars().items():
            self._scalar(name, value, step.step, step.at)

    def on_evaluation(self, evaluation: EvaluationMetrics) -> None:
        for name, value in evaluation.scalars().items():
            self._scalar(name, value, evaluation.step, evaluation.at)

    def on_recovery(self, recovery: RunEvent) -> None:
        for name, value in figures(recovery).items():
            self._scalar(f"recovery/{name}", value, recovery.step, recovery.at)
        self._text("recovery", str(recovery.fields.get("cause", "")), recovery.step, recovery.at)

    def on_plan(self, plan: RunEvent) -> None:
        text = str(plan.fields.get("text", "")).replace("\n", "\n    ")
        self._text("plan", f"    {text}", plan.step, plan.at)

    def on_checkpoint(self, checkpoint: RunEvent) -> None:
        path = str(checkpoint.fields.get("path", ""))
        self._text("checkpoint", path, checkpoint.step, checkpoint.at)

    def on_end(self, end: RunEvent) -> None:
        self._text("end", str(end.fields.get("reason", "")), end.step, end.at)

    def flush(self) -> None:
        """Write all events. After an error the next call writes them to a new file, because a torn
        event hides what follows it."""
        if not self._waiting:
            return
        file, self._file = self._file, None
        if file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            # Without the suffix, a second file within a second replaces the first.
            file = EventsWriter(str(self._folder / "events"), f".{time.time_ns()}")
        for event in self._waiting:
            file.write_event(event)
        file.flush()
        self._file = file
        self._waiting.clear()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _scalar(self, name: str, value: float, step: int, at: float) -> None:
        self._keep(summary.scalar(name, value), step, at)

    def _text(self, name: str, text: str, step: int, at: float) -> None:
        self._keep(summary.text(name, text), step, at)

    def _keep(self, written: Any, step: int, at: float) -> None:
        self._waiting.append(Event(summary=written, step=step, wall_time=at))
