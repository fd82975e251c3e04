"""FT-HSDP (Salpekar et al. 2026, arXiv 2602.00277): replicas fail and recover one by one.

Modelled from its abstract, and where marked (S) from a public survey of the paper ("Distributed
Training Observability: A Bounded Paper Closure", August 2026):

- The unit of fault is a data-parallel replica. A failure takes it offline alone; the others go on.
- The fault-tolerant all-reduce adds and removes participants without a restart. The survivors of a
  failure discard the gradients of the step and train it again (S).
- The batch has as many samples as the healthy replicas take (S).
- Catching up does not block: the replica restarts while the others train, fetches the state from a
  peer (S), and sends a zero gradient before it is a full member (S).

The published stall per failure, 3 minutes in place of 10, is of 100,000 GPUs. Here it consists of
detection, new groups and the step that is trained again.

Assumed: a loss is detected after 5 s, torchft's heartbeat timeout, because the paper's detection is
not known to us. Fetch and zero gradient fall into one step; the all-reduce waits for the part of a
fetch that is longer than that. A replica is a pipeline of the plain grid's depth, as in the model
of torchft (in the paper it shards within itself). Any free nodes complete a replica; more replicas
than the grid has need a restart of all nodes, if that pays off. Without any replica, all nodes read
the durable checkpoint, written in the background as ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic_sim.steps.engine import JobView, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyDescription, pauses, to_ms
from elastic_sim.steps.policies.replicas import ReplicaPolicy
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import PricedPlan, SimulatedWorld
from elastic_sim.traces.trace import Event


@dataclass(slots=True)
class _RecoveringReplica:
    """A replica that does not contribute to the batch yet."""

    nodes: tuple[str, ...]
    ready_ms: int
    """Time at which its processes have restarted."""
    catching_up: bool = False
    """Whether it fetches the state in the running step."""


class FTHSDPPolicy(ReplicaPolicy):
    """FT-HSDP: a loss costs a step and its replica, which restarts while the others train."""

    about = PolicyDescription(
        name="ft-hsdp",
        what="a loss takes its replica offline; the others repeat the step with a smaller batch; "
        "the replica restarts and catches up without blocking them",
        source="Salpekar et al. 2026, arXiv 2602.00277, from the abstract and a public survey: "
        "fault-tolerant all-reduce, non-blocking catch-up with a zero gradient in one step; "
        "detection after 5 s assumed, as torchft's heartbeat; replicas of the plain grid's depth",
    )
    detect_s = 5.0

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        self._recovering: list[_RecoveringReplica] = []

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        if self._plan is None:
            return self.restart(job, "nodes joined" if joined else "too few nodes", loss=False)
        self._loss_events += bool(lost)
        hit = self.drop_replicas(lost) + self._drop_recovering(lost)
        if hit and self.restarting(job):
            return self.restart(job, f"{hit} replicas lost during a restart", loss=True)
        if hit and not self.replicas:
            return self.restart(job, "no replica is complete", loss=True)
        self._recover_replicas(job, self._plan, delay_s=self.detect_s if hit else 0.0)
        if not hit:
            return None
        parts = pauses(
            detect_s=self.detect_s, plan_s=self.regroup_s(len(self.replicas), self._plan.depth)
        )
        setup = self._train_replicas(job, self._plan)
        return Reconfiguration(parts, setup, lost_ms=job.now, reason=f"{hit} replicas lost")

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        """Let replicas begin or end to catch up. Otherwise, grow if that pays off."""
        plan = self._plan
        ends = [replica for replica in self._recovering if replica.catching_up]
        begins = [
            replica
            for replica in self._recovering
            if not replica.catching_up and replica.ready_ms <= job.now
        ]
        if plan is None or not (ends or begins):
            return super().on_step_end(job)
        for replica in begins:
            replica.catching_up = True
        self._recovering = [replica for replica in self._recovering if replica not in ends]
        self.replicas += [replica.nodes for replica in ends]
        parts = self._begin_pauses(plan) if begins else ()
        reason = f"{len(begins)} replicas begin to catch up, {len(ends)} have caught up"
        return Reconfiguration(parts, self._train_replicas(job, plan), reason=reason)

    def start(self, job: JobView) -> Setup | None:
        self._recovering = []
        return super().start(job)

    # ---- parts ----

    def _drop_recovering(self, lost: Sequence[Event]) -> int:
        """Give up recovering replicas of lost nodes. Return the number that was catching up."""
        names = {event.node for event in lost}
        gone = [one for one in self._recovering if not names.isdisjoint(one.nodes)]
        self._recovering = [one for one in self._recovering if one not in gone]
        return sum(one.catching_up for one in gone)

    def _recover_replicas(self, job: JobView, plan: PricedPlan, delay_s: float) -> None:
        """Restart replicas on free nodes after a delay, up to as many as the grid has."""
        there = {node for nodes in self.replicas for node in nodes}
        there |= {node for one in self._recovering for node in one.nodes}
        free = [node for node in job.alive if node not in there]
        restart_s = self.physics.restart_s(self.world.devices(plan.depth))
        missing = plan.pipelines - len(self.replicas) - len(self._recovering)
        for i in range(min(missing, len(free) // plan.depth)):
            nodes = tuple(free[i * plan.depth : (i + 1) * plan.depth])
            ready_ms = job.now + to_ms(delay_s + restart_s)
            self._recovering.append(_RecoveringReplica(nodes, ready_ms))

    def _begin_pauses(self, plan: PricedPlan) -> tuple[tuple[Use, int], ...]:
        """Return the pauses of the step in which replicas catch up."""
        fetch_s = self.transfer_s(self.world.state_bytes / plan.depth)
        members = len(self.replicas) + sum(one.catching_up for one in self._recovering)
        return pauses(
            plan_s=self.regroup_s(members, plan.depth),
            transfer_s=max(0.0, fetch_s - plan.step_s),
        )

    def _train_replicas(self, job: JobView, plan: PricedPlan) -> Setup | None:
        """Return the setup in which each replica trains its share of the full batch."""
        count = len(self.replicas)
        return self.adjust_setup(
            job,
            nodes=count * plan.depth,
            samples=self.world.samples * count // plan.pipelines,
            text=f"{count} of {plan.pipelines} replicas of {plan.depth}",
        )
