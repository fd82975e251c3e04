"""A simulated cluster on which our own policy runs in full detail, micro-batch by micro-batch.

Decisions are the real ones: `elastic.core.coordinator.transitions.transition`, `elastic.core.node.node.transition`, the planner and
`recovery.solve`. Acted out are agents, workers, vaults, wires and the coordinator's own time. A node is one worker:
times of a profile with tensor parallelism are those of the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.job.state import CheckpointCommitted, DrainAsked, JobPhase, JobState, Policy
from elastic.core.protocol.fault_spec import FaultSpec, Phase, due
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec, NodeInfo
from elastic.planning.cost.profile import Profile, check_profile
from elastic.planning.plan.schemes import refuse_useless
from elastic_sim.microbatches.control_plane import Agent, CoordinatorModel
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.meter import Meter, Outcome
from elastic_sim.microbatches.physics import Physics, check
from elastic_sim.microbatches.worker import Run
from elastic_sim.traces.trace import ADD, Event, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What is trained, and what the user fixed for it."""

    microbatches: int
    """Of a step."""
    steps: int
    min_nodes: int = 1
    max_nodes: int = 1
    """Nodes used at most; more are kept as hot spares."""
    tokens_per_microbatch: int = 0
    backup: str = "auto"
    pipelines: str = "auto"
    schedule: str = "auto"
    checkpoint_every: int = 0
    """Steps between durable checkpoints; 0: none."""
    heartbeat_s: float = 0.5
    lease_s: float = 3.0
    tied: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        least = {"microbatches": 1, "steps": 1, "min_nodes": 1, "max_nodes": self.min_nodes}
        for name, lowest in least.items():
            if getattr(self, name) < lowest:
                raise FieldError(
                    f"Job.{name}", getattr(self, name), f"a whole number from {lowest} up"
                )
        if self.backup != "auto":
            refuse_useless(self.backup, self.pipelines, "Job.backup")


@dataclass(frozen=True, slots=True)
class Anchored:
    """An event that comes so many seconds after a step began, whenever that is; not at its own time."""

    event: Event
    step: int
    after_s: float
    ready: bool = False
    """Of a node that comes: its worker has started already."""
    fault: FaultSpec | None = None
    """Of a node that goes: the point of its own work at which it does; the time is not looked at then."""


class World(Environment):
    """The cluster: creates its parts, and carries out the trace on them."""

    def __init__(self, job: Job, profile: Profile, physics: Physics, seed: int) -> None:
        check_profile(profile)
        check(physics)
        spec = JobSpec(
            layers=profile.layers,
            n_microbatches=job.microbatches,
            n_steps=job.steps,
            tokens_per_microbatch=job.tokens_per_microbatch,
            tied=job.tied,
            checkpoint_every=job.checkpoint_every,
        )
        super().__init__(spec, profile, physics, seed)
        self.agents: dict[str, Agent] = {}
        """Also of nodes that are gone."""
        self.runs: dict[int, Run] = {}
        """By epoch; old ones are forgotten."""
        self._anchored: dict[int, list[Anchored]] = {}
        self._faults: list[tuple[FaultSpec, Event]] = []
        self._reached = -1
        policy = Policy(
            min_nodes=job.min_nodes,
            max_nodes=job.max_nodes,
            shape=job.pipelines,
            schedule=job.schedule,
            backup=job.backup,
            heartbeat_s=job.heartbeat_s,
            lease_s=job.lease_s,
            profile=profile,
        )
        state = JobState(policy=policy)
        self.meter = Meter(self, self.runs, state)
        self.coordinator = CoordinatorModel(self, state, self.meter)

    def node(self, name: str) -> Agent | None:
        return self.agents.get(name)

    def look(self) -> None:
        self.meter.look()

    # ---- what comes from outside ----------------------------------------------------------------

    def expect(self, trace: Trace, anchored: Sequence[Anchored] = ()) -> None:
        """Put the trace's events, and those that follow steps, into the calendar."""
        for at, events in trace.steps():
            for event in events:
                self._put(at, event, self.physics.spawn_s if at else self.physics.start_s)
        for one in anchored:
            if one.fault is not None:
                self._faults.append((one.fault, one.event))
            else:
                self._anchored.setdefault(one.step, []).append(one)

    def _put(self, seconds: float, event: Event, start_s: float) -> None:
        """`start_s`: of the node's worker, if one comes."""
        if event.kind == ADD:
            self.clock.after(seconds, lambda: self._add(event, start_s))
            return
        if event.notice_s > 0:
            told = max(0.0, seconds - event.notice_s)
            self.clock.after(told, lambda: self._tell(event, seconds - told))
        self.clock.after(seconds, lambda: self._remove(event))

    def _add(self, event: Event, start_s: float) -> None:
        known = {device.name for device in self.profile.devices}
        device = event.type if event.type in known else ""
        info = NodeInfo(event.node, "", "", domain=event.zone, device=device)
        self.present[event.node] = event
        agent = Agent(self, self.coordinator, self.agents, self.runs, info, start_s)
        self.agents[event.node] = agent
        self.meter.look()

    def _tell(self, event: Event, deadline_s: float) -> None:
        if event.node in self.present:
            self.coordinator.hear(None, DrainAsked(event.node, deadline_s))

    def _remove(self, event: Event) -> None:
        agent = self.agents.get(event.node)
        if agent is None or self.present.pop(event.node, None) is None:
            return
        if agent.alive:
            agent.die()
            self.meter.fault()
        self.meter.look()

    # ---- what happens inside --------------------------------------------------------------------

    def stepped(self, step: int, seconds: float) -> None:
        """A step is done: what was to come in the next one comes in its time."""
        self.meter.stepped(step, seconds)
        self.reach(step + 1)
        every = self.spec.checkpoint_every
        if every and (step + 1) % every == 0:
            rate, n = self.physics.disk_bytes_per_s, len(self.present) or 1
            nbytes = sum(map(self.state_bytes, range(self.spec.n_layers))) / n
            done = CheckpointCommitted("checkpoint", step + 1)
            write_s = nbytes / rate if rate > 0 else 0.0
            self.clock.after(write_s, lambda: self.coordinator.hear(None, done))

    def strikes(self, node: str, step: int, phase: Phase, microbatch: int | None = None) -> bool:
        """Whether a fault is due where the worker of `node` stands; if so it is gone."""
        for spec, event in self._faults:
            if due(spec, node=node, worker=0, step=step, phase=phase, microbatch=microbatch):
                self._faults.remove((spec, event))
                self._remove(event)
                return True
        return False

    def reach(self, step: int) -> None:
        for at in range(self._reached + 1, step + 1):
            for one in self._anchored.pop(at, []):
                self._put(
                    max(0.0, one.after_s), one.event, 0.0 if one.ready else self.physics.spawn_s
                )
        self._reached = max(self._reached, step)

    def outcome(self, end_s: float) -> Outcome:
        self.meter.look()
        meter, state, finish = self.meter, self.coordinator.state, self.coordinator.finish
        ended_s = min(end_s, self.clock.ms / 1000)
        return Outcome(
            ended_s=ended_s,
            phase=state.phase.value,
            reason=finish.reason if finish is not None else "",
            steps=tuple(meter.steps),
            samples=len(meter.steps) * self.spec.n_microbatches,
            tokens=len(meter.steps) * self.tokens,
            progress=tuple(meter.progress),
            recoveries=tuple(meter.recoveries),
            events=tuple(meter.events),
            account=meter.account,
        )


def simulate(
    trace: Trace,
    profile: Profile,
    job: Job,
    physics: Physics | None = None,
    seed: int = 0,
    anchored: Sequence[Anchored] = (),
) -> Outcome:
    """Run `job` on the nodes of `trace`, to its end or the trace's. Raises FieldError for what cannot be."""
    world = World(job, profile, physics or Physics(), seed)
    world.expect(trace, anchored)
    world.reach(0)
    world.clock.run(trace.end_s, lambda: world.coordinator.over)
    return world.outcome(trace.end_s)


__all__ = ["Anchored", "Job", "JobPhase", "Outcome", "World", "simulate"]
