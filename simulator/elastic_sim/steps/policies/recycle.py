"""ReCycle (Gandhi et al., SOSP 2024): micro-batches of lost workers run on their peers."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription, pauses, to_ms
from elastic_sim.steps.world import PricedPlan
from elastic_sim.traces.trace import Event


class ReCyclePolicy(PolicyBase):
    """A fixed grid; data-parallel peers run the micro-batches of a lost worker in their bubbles."""

    about = PolicyDescription(
        name="recycle",
        what="micro-batches of lost workers run on peers of the same stage",
        source="Gandhi et al., SOSP 2024, modelled from the abstract: with d of D peers of a stage "
        "lost, a step takes at least max(m + p - 1, m D / (D - d)) t; a stage without peers: "
        "restart from a checkpoint that is at most an hour old; detection assumed",
    )

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        plan = self._plan
        if plan is None:
            reason = "nodes joined" if joined else "too few nodes"
            return self.restart_from_checkpoint(job, self.start(job), reason)
        self._loss_events += bool(lost)
        used = [event.node for event in lost if self._places.pop(event.node, None) is not None]
        holes = len(self._places) < plan.nodes
        if not used and not (joined and holes):
            return None
        if lost and max(self._lost_per_stage(plan)) >= plan.pipelines:
            reason = "a stage lost all its peers"
            return self.restart_from_checkpoint(job, self.start(job), reason)
        return self._fill_holes(job, bool(used))

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        """Restart on a larger grid if that pays off."""
        return self.grow_grid(job)

    def _fill_holes(self, job: JobView, loss: bool) -> Reconfiguration:
        """Let free nodes take the places of lost ones and copy the state from a stage's peer."""
        plan = self._plan
        assert plan is not None
        free = [n for n in job.alive if n not in self._places]
        taken = set(self._places.values())
        holes = [place for place in range(plan.nodes) if place not in taken]
        self._places.update(zip(free, holes, strict=False))
        worst = max(self._lost_per_stage(plan))
        d, m = plan.pipelines, self.world.spec.n_microbatches / plan.pipelines
        full = m + plan.depth - 1
        factor = max(full, m * d / (d - worst)) / full
        step_ms = round(to_ms(plan.step_s) * factor)
        setup = self.adjust_setup(job, step_ms=step_ms, nodes=len(self._places))
        copy_s = self.transfer_s(self.world.state_bytes / plan.depth) if free and holes else 0.0
        parts = pauses(
            detect_s=self.detect_s if loss else 0.0,
            plan_s=self.regroup_s(plan.pipelines, plan.depth),
            transfer_s=copy_s,
        )
        lost_ms = to_ms(plan.slowest_stage_s * plan.depth) if loss else 0
        reason = f"at most {worst} of {d} peers lost"
        return Reconfiguration(parts, setup, lost_ms=lost_ms, reason=reason)

    def _lost_per_stage(self, plan: PricedPlan) -> list[int]:
        """Return the number of lost workers of each stage."""
        missing = [plan.pipelines] * plan.depth
        for place in self._places.values():
            missing[place % plan.depth] -= 1
        return missing

    def start(self, job: JobView) -> Setup | None:
        setup = self.run_plan(job, self.world.varuna(len(job.alive)))
        nodes = list(job.alive)[: self._plan.nodes if self._plan else 0]
        self._places = {node: place for place, node in enumerate(nodes)}
        return setup
