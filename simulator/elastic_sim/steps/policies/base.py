"""Base class of all policies.

A policy decides what its system does after each event. `SimulatedWorld` and `ClusterPhysics` give
the duration of each action."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from elastic_sim.steps.engine import ElasticPolicy, JobView, PlanInForce, Reconfiguration, Setup
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import PricedPlan, SimulatedWorld
from elastic_sim.traces.trace import Event

CHECKPOINT_INTERVAL_S = 600.0
"""Seconds between the starts of durable checkpoints in the background (assumed). If writing takes
more than half of this, the interval is twice the time of writing."""


def to_ms(seconds: float) -> int:
    return round(seconds * 1000)


def pauses(
    *, detect_s: float = 0.0, write_s: float = 0.0, plan_s: float = 0.0, transfer_s: float = 0.0
) -> tuple[tuple[Use, int], ...]:
    """Return the pauses in this order, without empty ones. `write_s`: writing a checkpoint."""
    parts = (
        (Use.DETECT, detect_s),
        (Use.TRANSFER, write_s),
        (Use.PLAN, plan_s),
        (Use.TRANSFER, transfer_s),
    )
    return tuple((use, to_ms(seconds)) for use, seconds in parts if seconds > 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyDescription:
    """Name, behaviour and source of a policy, as `elastic-sim policies` prints them."""

    name: str
    what: str
    source: str
    ours: bool = False
    bound: bool = False
    """Whether the policy is an upper bound, which no system can reach."""

    @property
    def model(self) -> bool:
        """Whether the policy models another system."""
        return not self.ours and not self.bound


class PolicyBase(ElasticPolicy):
    """Base of all policies: checkpoints, restarts, and a job as slow as its slowest node."""

    about: PolicyDescription
    detect_s = 5.0
    """Seconds from a loss until the system detects it."""

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        self.world, self.physics = world, world.physics
        self.rng = random.Random(f"{seed} {self.about.name}")
        self._nominal: Setup | None = None
        """The running setup as it would be without slow nodes."""
        self._in_force: PlanInForce | None = None
        self._loss_events = 0
        """Number of moments at which nodes were lost."""
        self._durable_step, self._checkpoint_began_ms = 0, 0
        """Step of the newest durable checkpoint, and time at which the last write began."""
        self._step_being_written: int | None = None
        self._plan: PricedPlan | None = None
        """The plan of the last call of `run_plan`."""

    # ---- answers to events ----

    def on_start(self, job: JobView) -> Reconfiguration:
        return Reconfiguration(setup=self.start(job))

    def start(self, job: JobView) -> Setup | None:
        """Choose a plan for the nodes present and return its setup; None: no plan fits."""
        raise NotImplementedError

    def on_speed_change(self, job: JobView) -> Reconfiguration | None:
        """Keep the setup: all nodes wait for the slowest one."""
        if self._nominal is None:
            return None
        return Reconfiguration(
            setup=self.with_stragglers(job),
            reason="a node changed its speed",
            keep_pauses=True,
            in_force=self._in_force,
        )

    # ---- helpers for subclasses ----

    def run_plan(self, job: JobView, plan: PricedPlan | None) -> Setup | None:
        """Make `plan` the running one and return its setup; None: nothing runs."""
        self._plan, self._nominal = plan, None
        if plan is not None:
            self._nominal = Setup(
                nodes=min(plan.nodes, len(job.alive)),
                step_ms=max(1, to_ms(plan.step_s)),
                samples=self.world.samples,
                text=f"{plan.pipelines} x {plan.depth}",
            )
        return self.with_stragglers(job)

    def adjust_setup(self, job: JobView, **changes: object) -> Setup | None:
        """Change fields of the running setup and return the result."""
        if self._nominal is not None:
            self._nominal = replace(self._nominal, **changes)  # type: ignore[arg-type]
        return self.with_stragglers(job)

    def with_stragglers(self, job: JobView) -> Setup | None:
        """Return the running setup at the speed of the slowest node."""
        setup = self._nominal
        if setup is None or not job.slow:
            return setup
        return replace(setup, step_ms=round(setup.step_ms * max(job.slow.values())))

    def write_checkpoint_in_background(self, job: JobView) -> None:
        """Begin or complete a durable checkpoint, if due, while training continues."""
        write_ms = 1000 * self.checkpoint_s(job)
        age_ms = job.now - self._checkpoint_began_ms
        if self._step_being_written is not None and age_ms >= write_ms:
            self._durable_step = min(self._step_being_written, job.steps)
            self._step_being_written = None
        if self._step_being_written is None and age_ms >= max(
            1000 * CHECKPOINT_INTERVAL_S, 2 * write_ms
        ):
            self._step_being_written, self._checkpoint_began_ms = job.steps, job.now

    def durable_step(self, job: JobView) -> int:
        """Abandon a running write and return the step of the newest durable checkpoint."""
        self._step_being_written = None
        return min(self._durable_step, job.steps)

    def restart_from_checkpoint(
        self, job: JobView, setup: Setup | None, reason: str, *, loss: bool = True
    ) -> Reconfiguration:
        """Return a restart of all processes from the durable checkpoint.

        `loss`: whether a loss must first be detected. If `setup` is None, nothing starts yet.
        """
        parts = pauses(
            detect_s=self.detect_s if loss else 0.0,
            plan_s=self.restart_s(job),
            transfer_s=self.checkpoint_s(job),
        )
        back_to = self.durable_step(job)
        return Reconfiguration(parts if setup else parts[:1], setup, back_to=back_to, reason=reason)

    def restart_without_copies(self, job: JobView, lost: Sequence[Event]) -> Reconfiguration:
        """Return a restart from the durable checkpoint; no node holds the whole state any more."""
        reason = f"{len(lost)} lost, no node has the state" if lost else "nodes joined"
        return self.restart_from_checkpoint(job, self.start(job), reason, loss=bool(lost))

    def pays_off(self, job: JobView, plan: PricedPlan | None, pause_s: float) -> bool:
        """Return whether `plan` gains more until the next expected loss than its pause costs."""
        now = self._nominal
        if now is None or plan is None:
            return False
        rate = now.samples / now.step_ms
        new_rate = self.world.samples / (1000 * plan.step_s)
        until_loss_s = (job.now / 1000 + 3600.0) / (self._loss_events + 1)
        return (1 - rate / new_rate) * until_loss_s > pause_s

    def grow_grid(self, job: JobView) -> Reconfiguration | None:
        """At a step's end, return a restart on Varuna's best grid if it is larger and pays off."""
        self.write_checkpoint_in_background(job)
        larger = self.world.varuna(len(job.alive))
        if larger is None or self._plan is None or larger.nodes <= self._plan.nodes:
            return None
        checkpoint_s, restart_s = self.checkpoint_s(job), self.restart_s(job)
        if not self.pays_off(job, larger, 2 * checkpoint_s + restart_s):
            return None
        parts = pauses(write_s=checkpoint_s, plan_s=restart_s, transfer_s=checkpoint_s)
        self._durable_step, self._step_being_written = job.steps, None
        return Reconfiguration(parts, self.start(job), reason="a larger grid")

    def hits_used_nodes(self, job: JobView, lost: Sequence[Event]) -> bool:
        """Return whether the plan used a lost node. The used nodes are drawn at random."""
        used = self._nominal.nodes if self._nominal else 0
        before = len(job.alive) + len(lost)
        return any(self.rng.random() < used / before for _ in lost)

    def checkpoint_s(self, job: JobView) -> float:
        """Return the seconds to write or to read a durable checkpoint."""
        return self.world.checkpoint_s(len(job.alive))

    def restart_s(self, job: JobView) -> float:
        """Return the seconds to restart all processes, without loading the state."""
        return self.physics.restart_s(self.world.devices(len(job.alive)))

    def regroup_s(self, pipelines: int, depth: int) -> float:
        """Return the seconds to decide on a plan and to build its groups while processes stay."""
        return self.physics.decide_s + self.physics.groups_s(pipelines, depth)

    def transfer_s(self, nbytes: float) -> float:
        """Return the seconds to send bytes over the link of one node."""
        return nbytes / self.world.link_bytes_per_s if self.world.link_bytes_per_s else 0.0
