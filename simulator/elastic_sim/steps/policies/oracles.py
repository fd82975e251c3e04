"""What could be reached at most."""

from __future__ import annotations

from collections.abc import Sequence

from elastic_sim.steps.engine import Change, Job, Setup
from elastic_sim.steps.policies.base import About, Base, ms
from elastic_sim.traces.trace import Event


class Feasible(Base):
    """Always the best plan known for the nodes that are there, at no cost and with nothing lost."""

    about = About(
        name="oracle",
        what="the best plan for the nodes alive, changes at no cost",
        source="integral of X*(n(t)): what goodput is measured against",
    )

    def begin(self, job: Job) -> Change:
        return Change(setup=self.use(job, self.world.best(len(job.alive))))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change:
        return self.begin(job)

    def paced(self, job: Job) -> Setup | None:
        """Slow nodes only make the others' lives harder: its nodes are all well."""
        return self._plain

    def slowed(self, job: Job) -> Change | None:
        return None


class Ceiling(Base):
    """Every node computes all the time: no bubbles, no messages, no limits of memory."""

    about = About(
        name="ceiling",
        what="every node alive computes all the time",
        source="alive node-seconds at the rate of a block's forward and backward pass",
    )

    def begin(self, job: Job) -> Change:
        n = len(job.alive)
        if not n:
            return Change()
        step_s = self.world.compute_s / n
        return Change(setup=Setup(n, max(1, ms(step_s)), self.world.samples, text="ceiling"))

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change:
        return self.begin(job)

    def slowed(self, job: Job) -> Change | None:
        return None
