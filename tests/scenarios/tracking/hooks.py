"""A callback that writes lines, and is killed once."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from elastic import Callback
from elastic.launcher.tracking.callback import EvaluationMetrics, RunEvent, RunInfo, StepMetrics

OUT, KILL_AT = "HOOKS_OUT", "HOOKS_KILL_AT"


class Lines(Callback):
    """Writes a line per call to the file OUT. The first process kills itself at step KILL_AT."""

    def on_start(self, run: RunInfo, key: str) -> str:
        self.second = bool(key)
        self.note("start", steps=run.steps, key=key)
        return "second"

    def on_step(self, step: StepMetrics) -> None:
        if not self.second and step.step == int(os.environ[KILL_AT]):
            self.note("killed")
            os.kill(os.getpid(), signal.SIGKILL)
        self.note("step", step=step.step, loss=step.loss, nodes=step.nodes)

    def on_evaluation(self, evaluation: EvaluationMetrics) -> None:
        self.note("evaluation", step=evaluation.step, loss=evaluation.loss, **evaluation.figures)

    def on_recovery(self, recovery: RunEvent) -> None:
        self.note("recovery", step=recovery.step, lost=recovery.fields["microbatches_lost"])

    def on_checkpoint(self, checkpoint: RunEvent) -> None:
        self.note("checkpoint", path=checkpoint.fields["path"])

    def on_end(self, end: RunEvent) -> None:
        self.note("end", code=end.fields["code"])

    def note(self, kind: str, **fields: object) -> None:
        with Path(os.environ[OUT]).open("a") as file:
            file.write(json.dumps({"kind": kind, **fields}) + "\n")
