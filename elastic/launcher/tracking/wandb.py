"""A callback that writes to Weights & Biases.

The library's own variables hold: WANDB_API_KEY, WANDB_BASE_URL, WANDB_MODE=offline, WANDB_DIR.
"""

from __future__ import annotations

import uuid
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

with needs_extra("wandb", "--track wandb:PROJECT"):
    import wandb


class WeightsAndBiases(Callback):
    """One run of a project. A tracker that is started again goes on with the same run."""

    def __init__(self, place: str) -> None:
        self._entity, _, self._project = place.rpartition("/")
        self._run: Any = None

    def on_start(self, run: RunInfo, key: str) -> str:
        key = key or uuid.uuid4().hex[:8]
        try:
            self._run = self._init(run, key)
        except wandb.errors.CommError as error:
            raise OSError(f"Weights & Biases: {error}") from error
        # Steps may come late, and wandb's own step only grows.
        self._run.define_metric("step", hidden=True)
        self._run.define_metric("*", step_metric="step")
        return key

    def _init(self, run: RunInfo, key: str) -> Any:
        return wandb.init(
            project=self._project,
            entity=self._entity or None,
            id=key,
            resume="allow",
            name=run.name,
            config={"run_dir": run.run_dir, "steps": run.steps, **run.settings},
            settings=wandb.Settings(console="off", silent=True, x_disable_stats=True),
        )

    def on_step(self, step: StepMetrics) -> None:
        self._log(step.step, step.at, step.scalars())

    def on_evaluation(self, evaluation: EvaluationMetrics) -> None:
        self._log(evaluation.step, evaluation.at, evaluation.scalars())

    def on_recovery(self, recovery: RunEvent) -> None:
        values = {f"recovery/{name}": value for name, value in figures(recovery).items()}
        self._log(recovery.step, recovery.at, values)

    def on_plan(self, plan: RunEvent) -> None:
        if self._run is not None:
            self._run.summary["plan"] = str(plan.fields.get("text", ""))

    def on_checkpoint(self, checkpoint: RunEvent) -> None:
        if self._run is not None:
            self._run.summary["checkpoint"] = str(checkpoint.fields.get("path", ""))

    def on_end(self, end: RunEvent) -> None:
        if self._run is not None:
            self._run.summary["reason"] = str(end.fields.get("reason", ""))
            self._run.finish(exit_code=int(end.fields.get("code", 1)))
            self._run = None

    def close(self) -> None:
        if self._run is not None:  # interrupted: the run goes on when the tracker is started again
            self._run.finish(exit_code=0)

    def _log(self, step: int, at: float, values: dict[str, float]) -> None:
        if self._run is not None:
            self._run.log({"step": step, "time": at, **values})
