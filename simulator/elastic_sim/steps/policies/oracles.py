"""Upper bounds: the best that any system could reach on a trace."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import JobView, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription, to_ms
from elastic_sim.traces.trace import Event


class _BoundPolicy(PolicyBase):
    """Base of the upper bounds: changes cost nothing, and slow nodes have no effect."""

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration:
        return self.on_start(job)

    def on_speed_change(self, job: JobView) -> Reconfiguration | None:
        return None


class OraclePolicy(_BoundPolicy):
    """The best known plan for the nodes present, at no cost and with no lost work."""

    about = PolicyDescription(
        name="oracle",
        what="the best plan for the nodes present; changes cost nothing",
        source="integral of X*(n(t)); goodput is measured against it",
        bound=True,
    )

    def start(self, job: JobView) -> Setup | None:
        return self.run_plan(job, self.world.best(len(job.alive)))

    def with_stragglers(self, job: JobView) -> Setup | None:
        """Return the running setup at full speed: slow nodes do not slow the oracle."""
        return self._nominal


class CeilingPolicy(_BoundPolicy):
    """Every node computes all the time: no bubbles, no messages, no memory limit."""

    about = PolicyDescription(
        name="ceiling",
        what="every node present computes all the time",
        source="node-seconds present, at the rate of a block's forward and backward pass",
        bound=True,
    )

    def start(self, job: JobView) -> Setup | None:
        n = len(job.alive)
        if not n:
            return None
        step_ms = max(1, to_ms(self.world.compute_s / n))
        return Setup(n, step_ms, self.world.samples, text="ceiling")
