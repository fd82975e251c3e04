"""A callback that writes to MLflow.

The library's own variables hold: MLFLOW_TRACKING_URI, MLFLOW_TRACKING_TOKEN and so on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from elastic.domain.errors import needs_extra
from elastic.launcher.tracking.callback import Callback, RunEvent, RunInfo, StepMetrics
from elastic.launcher.tracking.figures import figures

with needs_extra("mlflow", "--track mlflow:EXPERIMENT"):
    from mlflow import MlflowClient
    from mlflow.entities import Metric, Param, RunTag
    from mlflow.exceptions import MlflowException

MOST_CHARS = 6000
"""MLflow refuses longer parameters."""
MOST_METRICS = 1000
"""MLflow refuses more metrics in one request."""
STATUS = {True: "FINISHED", False: "FAILED"}


@contextmanager
def _errors() -> Iterator[None]:
    """Raise OSError, after which a call is repeated, for an error of the server."""
    try:
        yield
    except MlflowException as error:
        raise OSError(f"MLflow: {error}") from error


class MLflow(Callback):
    """One run of an experiment. A tracker that is started again goes on with the same run."""

    def __init__(self, experiment: str) -> None:
        self._experiment, self._run = experiment, ""
        self._client = MlflowClient()
        self._metrics: list[Metric] = []
        self._tags: list[RunTag] = []

    def on_start(self, run: RunInfo, key: str) -> str:
        settings = {"run_dir": run.run_dir, "steps": run.steps, **run.settings}
        with_values = [Param(n, str(v)[:MOST_CHARS]) for n, v in settings.items() if str(v)]
        with _errors():
            found = self._client.get_experiment_by_name(self._experiment)
            place = found.experiment_id if found else self._new_experiment()
            if not key:
                key = self._client.create_run(place, run_name=run.name).info.run_id
                self._client.log_batch(key, params=with_values)
        self._run = key
        return key

    def on_step(self, step: StepMetrics) -> None:
        self._note(step.scalars(), step.step, step.at)

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

    def _note(self, values: dict[str, float], step: int, at: float) -> None:
        self._metrics += [Metric(n, value, int(at * 1000), step) for n, value in values.items()]
