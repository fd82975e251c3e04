"""Metrics of a coordinator's process, over all the terms that it leads and while it stands by between them."""

from __future__ import annotations

from collections.abc import Callable

from elastic.config import JobConfig
from elastic.coordinator.metrics.counters import CoordinatorMetrics
from elastic.coordinator.metrics.gauges import JobCollector, Standing
from elastic.core.job.state import JobState
from elastic.metrics import MetricsAddress, new_registry, serve
from elastic.rpc.security.rejections import REJECTIONS

STANDBY = Standing(False, 0, 0, 0)
Reading = Callable[[], tuple[JobState | None, Standing]]
"""The job as a leader knows it, and how it stands; asked from any thread."""


class Exposed:
    """Serves until closed. Counters begin at 0 with the process and count what was decided by it."""

    def __init__(self, config: JobConfig, name: str, port: int, clock: Callable[[], float]) -> None:
        """`port` 0: any free one; -1: nothing is served, only counted."""
        self.meter = CoordinatorMetrics(new_registry(), clock())
        self.meter.count_refused(REJECTIONS.by_reason)
        self._clock = clock
        self._reading: Reading = _nobody
        collector = JobCollector(config.job_id, lambda: self._reading(), self.meter, clock)
        self.meter.registry.register(collector)
        where = (config.metrics_host, port, config.run_dir, config.job_id, name, "coordinator", config.certs)
        self._exposition = serve(self.meter.registry, MetricsAddress(*where))

    def lead(self, reading: Reading) -> CoordinatorMetrics:
        """A term begins: gauges tell of it, until `stand_by`."""
        self.meter.begin(self._clock())
        self._reading = reading
        return self.meter

    def stand_by(self) -> None:
        self._reading = _nobody

    def close(self) -> None:
        if self._exposition is not None:
            self._exposition.close()


def _nobody() -> tuple[JobState | None, Standing]:
    return None, STANDBY
