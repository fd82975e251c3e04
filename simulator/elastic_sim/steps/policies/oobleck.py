"""Oobleck (Jang et al., SOSP 2023).

Its planner (pipeline templates) is `elastic_sim.steps.rival_planners.plan_oobleck`.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription, pauses
from elastic_sim.steps.world import PricedPlan, SimulatedWorld
from elastic_sim.traces.trace import Event


class OobleckPolicy(PolicyBase):
    """Oobleck: pipelines from templates; a loss costs the running step and a regrouping."""

    about = PolicyDescription(
        name="oobleck",
        what="heterogeneous pipelines from templates; the running step is repeated",
        source="Jang et al., SOSP 2023; lease of 5 s from their 2026 refactor; copying and groups "
        "from physics (measured by others: 57 s for a loss, TrainMover); nodes that join enter at "
        "the end of a step if that pays off",
    )

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._copies_lost = False
        """Whether no node holds the whole state, so that it must be read from storage."""

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        if not lost and job.setup is not None:
            return None
        self._loss_events += bool(lost)
        self._copies_lost |= not job.alive
        if self._copies_lost:
            return self.restart_without_copies(job, lost)
        if not lost:
            return self._repeat_step(job, "nodes joined")
        plan = self._plan
        if plan is not None:
            if len(job.alive) >= plan.nodes and not self.hits_used_nodes(job, lost):
                return None
            if self._all_replicas_lost(plan, len(job.alive) + len(lost), len(lost)):
                self._copies_lost = True
                reason = f"{len(lost)} lost, no replica left"
                return self.restart_from_checkpoint(job, self.start(job), reason)
        return self._repeat_step(job, f"{len(lost)} lost")

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        """Let nodes that joined enter now if that pays off. The artifact does not do this."""
        self._copies_lost = False
        self.write_checkpoint_in_background(job)
        larger = self.world.oobleck(len(job.alive))
        if self._plan is None or larger is None or len(job.alive) <= self._plan.nodes:
            return None
        groups_s, copy_s = self._regroup_costs_s(larger)
        if not self.pays_off(job, larger, groups_s + copy_s):
            return None
        parts = pauses(plan_s=groups_s, transfer_s=copy_s)
        return Reconfiguration(parts, self.start(job), reason="nodes joined")

    def _regroup_costs_s(self, plan: PricedPlan) -> tuple[float, float]:
        """Return the seconds of (building groups, the slowest copy: a whole stage)."""
        copy_s = self.transfer_s(self.world.state_bytes / plan.depth)
        return self.regroup_s(plan.pipelines, plan.depth), copy_s

    def _repeat_step(self, job: JobView, reason: str) -> Reconfiguration:
        """Return a change to new pipelines, which repeat the whole running step."""
        setup, plan = self.start(job), self._plan
        groups_s, copy_s = self._regroup_costs_s(plan) if plan else (0.0, 0.0)
        parts = pauses(detect_s=self.detect_s, plan_s=groups_s, transfer_s=copy_s)
        return Reconfiguration(parts, setup, lost_ms=job.now, reason=reason)

    def _all_replicas_lost(self, plan: PricedPlan, before: int, lost: int) -> bool:
        """Return whether one stage was lost in all pipelines; the lost nodes are drawn at
        random."""
        k = plan.pipelines
        if lost < k:
            return False
        if k == 1:
            return any(self.rng.random() < plan.nodes / before for _ in range(lost))
        hit = sorted(self.rng.sample(range(before), min(lost, before)))
        stages_lost = [
            {n % plan.depth for n in hit if n < plan.nodes and n // plan.depth == p}
            for p in range(k)
        ]
        return bool(set.intersection(*stages_lost))

    def start(self, job: JobView) -> Setup | None:
        return self.run_plan(job, self.world.oobleck(len(job.alive)))
