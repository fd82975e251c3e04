"""torchft: replica groups that train on while one group is incomplete."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription, pauses
from elastic_sim.traces.trace import Event


class TorchFTPolicy(PolicyBase):
    """Replica groups: a loss discards the running step, and its group waits for another node."""

    about = PolicyDescription(
        name="torchft",
        what="replica groups; a failure discards the running step, the batch shrinks meanwhile",
        source="torchft: heartbeat 5 s, our run 4.9 s to the next step; groups of the plain grid's "
        "depth; free nodes complete groups and heal from a peer; samples per step in proportion to "
        "the complete groups",
    )
    detect_s = 4.9

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        if self._plan is None:
            return self.on_start(job)
        before = self._nominal
        self._loss_events += bool(lost)
        enough = before is not None and len(job.alive) >= before.nodes
        unharmed = enough and not (lost and self.hits_used_nodes(job, lost))
        setup = self._form_groups(job)
        if setup == before and (not lost or unharmed):
            return None
        if setup is None or before is None:
            reason = "no replica group is complete"
            return self.restart_from_checkpoint(job, setup, reason, loss=False)
        grown = setup.nodes > before.nodes
        parts = pauses(
            detect_s=self.detect_s if lost else 0.0,
            plan_s=self.physics.groups_s(len(job.alive) // self._depth, self._depth),
            transfer_s=self.transfer_s(self.world.state_bytes / self._depth) if grown else 0.0,
        )
        reason = f"{len(lost)} lost, {len(joined)} joined"
        return Reconfiguration(parts, setup, lost_ms=job.now if lost else 0, reason=reason)

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        """Restart with more groups, or groups of another depth, if that pays off."""
        return self.grow_grid(job)

    def start(self, job: JobView) -> Setup | None:
        self._plan = self.world.varuna(len(job.alive))
        self._depth = self._plan.depth if self._plan else 0
        return self._form_groups(job)

    def _form_groups(self, job: JobView) -> Setup | None:
        """Return the setup of the complete groups, each with its share of the full batch."""
        grid = self._plan
        groups = min(len(job.alive) // self._depth, grid.pipelines) if grid else 0
        if grid is None or groups == 0:
            self._nominal = None
            return None
        self.run_plan(job, grid)
        return self.adjust_setup(
            job,
            nodes=groups * self._depth,
            samples=self.world.samples * groups // grid.pipelines,
            text=f"{groups} of {grid.pipelines} groups of {self._depth}",
        )
