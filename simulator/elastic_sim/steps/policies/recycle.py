"""ReCycle (Gandhi et al., SOSP 2024): micro-batches of lost workers run on their peers.

Modelled from its abstract (arXiv 2405.14009), and from public summaries where named:

- No spare nodes, and a grid that keeps its shape. The grid is that of Varuna's planner (assumed).
- Peers run the micro-batches of lost workers in bubbles, with a decoupled backward pass and a
  staggered optimizer: `elastic_sim.steps.rerouted_schedule`. Without losses, the schedule is 1F1B.
- Plans exist for numbers of losses, not for places ("failure normalization" in summaries of the
  paper). So the losses are spread over the stages: a worker of another stage takes the place, and
  copies the state from a peer of its new stage. The copies run at the same time (assumed).
- Nodes that join take the place of lost ones, and copy the state from a peer.

Assumed, because no source tells it: the time of detection; training waits while state is copied; a
stage that has lost all its peers restarts from a durable checkpoint, written in the background as
ours; a loss costs what it costs our `recompute`. That is, the gradients that a lost worker had
accumulated in the running step are lost with it. All pipelines run these micro-batches again, and
those in flight.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription, pauses, to_ms
from elastic_sim.steps.policies.lost_work import lost_work
from elastic_sim.steps.rerouted_schedule import spread_losses
from elastic_sim.steps.world import PricedPlan
from elastic_sim.traces.trace import Event


class ReCyclePolicy(PolicyBase):
    """A fixed grid; data-parallel peers run the micro-batches of a lost worker in their bubbles."""

    about = PolicyDescription(
        name="recycle",
        what="micro-batches of lost workers run on peers of the same stage, in bubbles",
        source="Gandhi et al., SOSP 2024, modelled from the abstract: re-routing, decoupled "
        "backward pass, staggered optimizer, in a list schedule (theirs is optimised); losses are "
        "spread over the stages (failure normalization); a stage without peers: restart from a "
        "checkpoint that is at most an hour old; detection assumed",
    )

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        plan = self._plan
        if plan is None:
            reason = "nodes joined" if joined else "too few nodes"
            return self.restart_from_checkpoint(job, self.start(job), reason)
        self._loss_events += bool(lost)
        used = [at for e in lost if (at := self._places.pop(e.node, None)) is not None]
        if not used and not (joined and self._holes(plan)):
            return None
        if used and max(self._lost_per_stage(plan)) >= plan.pipelines:
            reason = "a stage lost all its peers"
            return self.restart_from_checkpoint(job, self.start(job), reason)
        return self._fill_holes(job, plan, used)

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        """Restart on a larger grid if that pays off."""
        return self.grow_grid(job)

    def start(self, job: JobView) -> Setup | None:
        setup = self.run_plan(job, self.world.varuna(len(job.alive)))
        nodes = list(job.alive)[: self._plan.nodes if self._plan else 0]
        self._places = {node: place for place, node in enumerate(nodes)}
        return setup

    # ---- parts ----

    def _fill_holes(self, job: JobView, plan: PricedPlan, lost: list[int]) -> Reconfiguration:
        """Return the change to the schedule for the workers present. `lost`: their places."""
        copies = self._use_free_nodes(job, plan)
        copies = self._spread(plan) or copies
        left = len(self._holes(plan))
        step_ms = to_ms(self.world.rerouted_step_s(plan, left))
        setup = self.adjust_setup(job, step_ms=step_ms, nodes=len(self._places))
        parts = pauses(
            detect_s=self.detect_s if lost else 0.0,
            plan_s=self.regroup_s(plan.pipelines, plan.depth),
            transfer_s=self.transfer_s(self.world.state_bytes / plan.depth) if copies else 0.0,
        )
        lost_ms = self._repeated_ms(job, plan, lost) if lost else 0
        reason = f"{left} of {plan.nodes} workers are missing"
        return Reconfiguration(parts, setup, lost_ms=lost_ms, reason=reason)

    def _repeated_ms(self, job: JobView, plan: PricedPlan, lost: list[int]) -> int:
        """Return the milliseconds of the running step that are repeated after a loss."""
        names = [plan.plan.nodes()[place] for place in lost]
        fraction = job.progress_ms / job.length_ms
        repeated = lost_work(self.world, plan, names, fraction, self.rng, updated=False)
        return to_ms(repeated.seconds)

    def _use_free_nodes(self, job: JobView, plan: PricedPlan) -> bool:
        """Let free nodes take places of lost ones. Return whether any did.

        The last stages come first, because the others may stay incomplete (`spread_losses`).
        """
        free = [node for node in job.alive if node not in self._places]
        holes = sorted(self._holes(plan), key=lambda place: -(place % plan.depth))
        self._places.update(zip(free, holes, strict=False))
        return bool(free and holes)

    def _spread(self, plan: PricedPlan) -> bool:
        """Move workers to other stages until the losses are spread. Return whether any moved."""
        holes, missing = self._holes(plan), self._lost_per_stage(plan)
        wanted = spread_losses(plan.depth, len(holes))
        moved = False
        for hole in holes:
            stage = hole % plan.depth
            if missing[stage] > wanted[stage]:
                donor = next(s for s in range(plan.depth) if missing[s] < wanted[s])
                node = next(n for n, at in self._places.items() if at % plan.depth == donor)
                self._places[node] = hole
                missing[stage] -= 1
                missing[donor] += 1
                moved = True
        return moved

    def _holes(self, plan: PricedPlan) -> list[int]:
        """Return the places of the grid without a node."""
        taken = set(self._places.values())
        return [place for place in range(plan.nodes) if place not in taken]

    def _lost_per_stage(self, plan: PricedPlan) -> list[int]:
        """Return the number of lost workers of each stage."""
        missing = [0] * plan.depth
        for place in self._holes(plan):
            missing[place % plan.depth] += 1
        return missing
