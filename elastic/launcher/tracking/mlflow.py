"""A callback that writes to MLflow.

The library's own variables hold: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN and so on.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from elastic.domain.errors import FieldError, describe, needs_extra
from elastic.launcher.tracking.callback import (
    Callback,
    EvaluationMetrics,
    RunEvent,
    RunInfo,
    StepMetrics,
)
from elastic.launcher.tracking.figures import figures

with needs_extra("mlflow", "--track mlflow:EXPERIMENT"):
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

MOST_CHARS = 6000
"""MLflow refuses longer parameters."""
MOST_METRICS = 1000
"""MLflow refuses more metrics in one request."""
PASSING = ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
"""Codes of errors that may pass; the library gives the first one to a network that is away."""
STATUS = {True: "FINISHED", False: "FAILED"}


@contextmanager
def _errors() -> Iterator[None]:
    """Raise OSError, after which a call is repeated, for an error that may pass."""
    try:
        yield
    except MlflowException as error:
        if error.error_code not in PASSING:
            raise
        raise OSError(f"MLflow: {error}") from error


class MLflow(Callback):
    """One run of an experiment. A tracker that is started again goes on with the same run."""

    def __init__(self, experiment: str) -> None:
        self._experiment, self._run = experiment, ""
        try:
            self._client = MlflowClient()
        except Exception as error:  # MLflow, and those whom it asks, raise many kinds
            given = os.environ.get("MLFLOW_TRACKING_URI", "")
            remedy = "give the address of a server; a file of SQLite needs `pip install mlflow`"
            why = next(iter(str(error).strip().splitlines()), describe(error))
            raise FieldError("MLFLOW_TRACKING_URI", given, f"{remedy} ({why})") from error
        self._metrics: list[Metric] = []
        self._tags: list[RunTag] = []

    def on_start(self, run: RunInfo, key: str) -> str:
        settings = {"run_dir": run.run_dir, "steps": run.steps, **run.settings}
        with_values = [Param(n, str(v)[:MOST_CHARS]) for n, v in settings.items() if str(v)]
        with _errors():
            found = self._client.get_experiment_by_name(self._experiment)
            place = found.experiment_id if found else self._new_experiment()
            # A call that is repeated must not make another run.
            self._run = self._run or key or self._new_run(place, run.name)
            if not key:
                self._client.log_batch(self._run, params=with_values)
        return self._run

    def on_step(self, step: StepMetrics) -> None:
        self._note(step.scalars(), step.step, step.at)

    def on_evaluation(self, evaluation: EvaluationMetrics) -> None:
        self._note(evaluation.scalars(), evaluation.step, evaluation.at)

    def on_recovery(self, recovery: RunEvent) -> None:
        values = {f"recovery/{name}": value for name, value in figures(recovery).items()}
        self._note(values, recovery.step, recovery.at)

    def on_plan(self, plan: RunEvent) -> None:
        self._tags.append(RunTag("plan", str(plan.fields.get("text", ""))[:MOST_CHARS]))

    def on_checkpoint(self, checkpoint: RunEvent) -> None:
        self._tags.append(RunTag("checkpoint", str(checkpoint.fields.get("path", ""))))

    def on_end(self, end: RunEvent) -> None:
        self._tags.append(RunTag("reason", str(end.fields.get("reason", ""))[:MOST_CHARS]))
        self.flush()
        if self._run:
            with _errors():
                self._client.set_terminated(self._run, STATUS[end.fields.get("code") == 0])

    def flush(self) -> None:
        while self._run and (self._metrics or self._tags):
            metrics, tags = self._metrics[:MOST_METRICS], self._tags[:100]
            with _errors():
                self._client.log_batch(self._run, metrics=metrics, tags=tags)
            del self._metrics[: len(metrics)], self._tags[: len(tags)]

    def _new_experiment(self) -> str:
        return self._client.create_experiment(self._experiment)

    def _new_run(self, experiment: str, name: str) -> str:
        return str(self._client.create_run(experiment, run_name=name).info.run_id)

    def _note(self, values: dict[str, float], step: int, at: float) -> None:
        self._metrics += [Metric(n, value, int(at * 1000), step) for n, value in values.items()]
