"""Base of systems whose unit of fault is the replica: a pipeline with all its nodes.

A loss takes its replica out of training, and all others go on. FT-HSDP (ft_hsdp.py) and ReCoVer
(recover.py) derive from it.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyBase
from elastic_sim.steps.world import SimulatedWorld
from elastic_sim.traces.trace import Event


class ReplicaPolicy(PolicyBase):
    """Base: replicas on the plain grid, and restarts of all nodes from a durable checkpoint."""

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        self.replicas: list[tuple[str, ...]] = []
        """Nodes of each replica that trains."""
        self._restart_ends_ms = 0
        """End of the last restart of all nodes."""

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        """Restart on a larger grid if that pays off."""
        change = self.grow_grid(job)
        return self._noted(job, change) if change else None

    def start(self, job: JobView) -> Setup | None:
        plan = self.world.varuna(len(job.alive))
        nodes = list(job.alive)[: plan.nodes] if plan else []
        depth = plan.depth if plan else 1
        self.replicas = [tuple(nodes[i : i + depth]) for i in range(0, len(nodes), depth)]
        return self.run_plan(job, plan)

    # ---- helpers for subclasses ----

    def drop_replicas(self, lost: Sequence[Event]) -> int:
        """Take the replicas of lost nodes out of training and return their number."""
        names = {event.node for event in lost}
        before = len(self.replicas)
        self.replicas = [nodes for nodes in self.replicas if names.isdisjoint(nodes)]
        return before - len(self.replicas)

    def restarting(self, job: JobView) -> bool:
        """Return whether a restart of all nodes is under way."""
        return job.now < self._restart_ends_ms

    def restart(self, job: JobView, reason: str, *, loss: bool) -> Reconfiguration:
        """Return a restart of all nodes from the durable checkpoint. `loss`: after a loss."""
        change = self.restart_from_checkpoint(job, self.start(job), reason, loss=loss)
        return self._noted(job, change)

    def _noted(self, job: JobView, change: Reconfiguration) -> Reconfiguration:
        """Note when a restart ends, and return it."""
        self._restart_ends_ms = job.now + sum(length for _, length in change.pauses)
        return change
