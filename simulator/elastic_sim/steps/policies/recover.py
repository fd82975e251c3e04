"""ReCoVer (Liu et al. 2026, arXiv 2605.11215): a constant number of micro-batches per step.

Modelled from its abstract, and where marked (S) from a public machine-made summary of the paper:

- Fault-tolerant collectives isolate a fault in its replica. A fault in any device costs the whole
  replica, whose other devices are not used any more (S).
- Recovery inside the step keeps the gradients that the survivors have accumulated.
- Quotas of micro-batches move to the survivors, so each step has the same number of micro-batches.
  It may be divided unevenly (S).
- New replicas cannot join (S).

So a loss costs the micro-batches that its replica had finished in the step, and the time to repair
the communicators. The abstract's 2.23 times the throughput of checkpoint and restart is that of up
to 512 GPUs, of which 256 are lost.

Assumed: a loss is detected after 5 s. Survivors compute meanwhile, since they need the lost replica
only when gradients are reduced, so they wait for the part of the detection that is left at the end
of their step. They append the moved micro-batches to their own without a bubble. A replica is a
pipeline of the plain grid's depth. Without any replica, all nodes read the durable checkpoint,
written in the background as ours. All nodes restart on a larger grid if that pays off.
"""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration
from elastic_sim.steps.policies.base import PolicyDescription, pauses
from elastic_sim.steps.policies.replicas import ReplicaPolicy
from elastic_sim.traces.trace import Event


class ReCoVerPolicy(ReplicaPolicy):
    """ReCoVer: a loss costs its replica, and survivors take its micro-batches over in the step."""

    about = PolicyDescription(
        name="recover",
        what="a loss costs its replica; survivors keep their gradients and take its micro-batches, "
        "so the batch stays the same",
        source="Liu et al. 2026, arXiv 2605.11215, from the abstract and a public summary: "
        "fault-tolerant collectives, recovery inside the step, quotas of micro-batches; no replica "
        "joins without a restart; detection after 5 s assumed, while survivors compute; replicas "
        "of the plain grid's depth",
    )
    detect_s = 5.0

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        plan, before = self._plan, len(self.replicas)
        if plan is None:
            return self.restart(job, "nodes joined" if joined else "too few nodes", loss=False)
        self._loss_events += bool(lost)
        hit = self.drop_replicas(lost)
        if not hit:
            return None
        if self.restarting(job):
            return self.restart(job, f"{hit} replicas lost during a restart", loss=True)
        if not self.replicas:
            return self.restart(job, "no replica is left", loss=True)
        count = len(self.replicas)
        left_s = 0.0 if job.paused else (job.length_ms - job.progress_ms) / 1000
        parts = pauses(
            detect_s=max(0.0, self.detect_s - left_s), plan_s=self.regroup_s(count, plan.depth)
        )
        setup = self.run_plan(job, self.world.grid(count * plan.depth, plan.depth))
        lost_ms = round(job.progress_ms * hit / before)
        return Reconfiguration(
            parts, setup, lost_ms=lost_ms, reason=f"{hit} of {before} replicas lost"
        )
