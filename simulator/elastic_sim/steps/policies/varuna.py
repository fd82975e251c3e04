"""Varuna (Athlur et al., EuroSys 2022).

Its planner (grid of equal pipelines) is `elastic_sim.steps.rival_planners.plan_varuna`.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration
from elastic_sim.steps.policies.base import PolicyDescription
from elastic_sim.steps.policies.checkpoint_restart import CheckpointRestartPolicy
from elastic_sim.traces.trace import Event


class VarunaPolicy(CheckpointRestartPolicy):
    """Varuna: a checkpoint every ten steps; after a loss, a restart on another grid."""

    about = PolicyDescription(
        name="varuna",
        what="restart at a new (P, D) from the last checkpoint, every 10 steps; checkpoint on "
        "notice",
        source="Athlur et al., EuroSys 2022; every 10 steps as in Oobleck's artifact; checkpoints "
        "copied in the background and sharded, as docs/morphing.rst of its repository recommends; "
        "notices polled every 5 s",
    )
    detect_s = 5.0

    def checkpoint_due(self, job: JobView) -> bool:
        return job.steps % 10 == 0

    def on_notice(self, job: JobView, leaving: Sequence[Event]) -> None:
        """Schedule a checkpoint so late that it is just complete before the nodes leave."""
        left_s = min(event.seconds for event in leaving) - job.now / 1000
        needed_s = self.copy_s(job) + self.checkpoint_s(job) + 0.5
        job.set_timer(max(0.0, left_s - needed_s), "notice")

    def on_timer(self, job: JobView, name: str) -> Reconfiguration | None:
        self._complete_write(job)
        if job.paused or job.setup is None or self.newest_checkpoint == job.steps:
            return None
        return self.write_checkpoint(job, "notice of a loss: checkpoint")


class VarunaNoRollbackPolicy(VarunaPolicy):
    """Varuna with restarts that lose no steps."""

    about = PolicyDescription(
        name="varuna-no-rollback",
        what="as varuna, but no step is lost by a restart",
        source="as varuna; Oobleck's authors switch the rollback off on the recorded traces for "
        "three models",
    )

    def step_after_restart(self, job: JobView) -> int:
        return job.steps
