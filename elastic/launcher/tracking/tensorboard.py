"""A callback that writes event files for TensorBoard."""

from __future__ import annotations

import json
import time

from elastic.domain.errors import needs_extra
from elastic.launcher.tracking.callback import Callback, RunEvent, RunInfo, StepMetrics
from elastic.launcher.tracking.figures import figures

with needs_extra("tensorboard", "--track tensorboard:FOLDER"):
    from tensorboardX import SummaryWriter


class TensorBoard(Callback):
    """Scalars of each step, and texts about plans, recoveries and checkpoints, in a folder.

    A tracker that is started again writes a further file; TensorBoard shows them as one run.
    """

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._writer: SummaryWriter | None = None

    def on_start(self, run: RunInfo, key: str) -> str:
        self._writer = SummaryWriter(
            self._folder,
            max_queue=1000,
            flush_secs=3600,
            filename_suffix=f".{time.time_ns()}",  # else a second one in a second replaces the file
        )
        if not key:
            settings = json.dumps({"name": run.name, **run.settings}, indent=2)
            self._text("run", f"    {settings.replace(chr(10), chr(10) + '    ')}", 0, None)
        return "begun"

    def on_step(self, step: StepMetrics) -> None:
        for name, value in step.scalars().items():
            self._scalar(name, value, step.step, step.at)

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
        if self._writer is not None:
            self._writer.flush()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _scalar(self, name: str, value: float, step: int, at: float) -> None:
        if self._writer is not None:
            self._writer.add_scalar(name, value, step, walltime=at)

    def _text(self, name: str, text: str, step: int, at: float | None) -> None:
        if self._writer is not None:
            self._writer.add_text(name, text, step, walltime=at)
