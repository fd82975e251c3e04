"""A simulated cluster that runs our policy micro-batch by micro-batch.

The decisions are the real ones: the transitions of the coordinator and the node, the planner and
`recovery.solve`. Agents, workers, vaults, links and the coordinator's own time are simulated. Each
node has one worker; a profile with tensor parallelism gives the times of the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.core.job.state import CheckpointCommitted, DrainRequested, JobState, Policy
from elastic.core.protocol.fault_spec import FaultSpec, Phase, due
from elastic.domain.errors import FieldError
from elastic.domain.types import JobSpec, NodeInfo
from elastic.planning.cost.profile import Profile, check_profile
from elastic.planning.plan.schemes import refuse_useless
from elastic_sim.microbatches.control_plane import CoordinatorModel, SimulatedAgent
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.meter import MicrobatchResult, RunMeter
from elastic_sim.microbatches.physics import MicrobatchPhysics, check
from elastic_sim.microbatches.worker import EpochRun
from elastic_sim.traces.trace import ADD, Event, Trace


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchJob:
    """A training job and the user's settings for it."""

    microbatches: int
    """Micro-batches per step."""
    steps: int
    min_nodes: int = 1
    max_nodes: int = 1
    """Largest number of nodes in use; further ones are hot spares."""
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
            value = getattr(self, name)
            if value < lowest:
                raise FieldError(f"Job.{name}", value, f"a whole number from {lowest} up")
        if self.backup != "auto":
            refuse_useless(self.backup, self.pipelines, "Job.backup")


@dataclass(frozen=True, slots=True)
class AnchoredEvent:
    """An event at a time relative to the beginning of a step; its own time does not count."""

    event: Event
    step: int
    after_s: float
    ready: bool = False
    """For a new node: its worker has started already."""
    fault: FaultSpec | None = None
    """For a lost node: the point of its work at which it is lost, instead of the time."""


class MicrobatchWorld(Environment):
    """The cluster: creates its parts and carries out the trace on them."""

    def __init__(
        self, job: MicrobatchJob, profile: Profile, physics: MicrobatchPhysics, seed: int
    ) -> None:
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
        self.agents: dict[str, SimulatedAgent] = {}
        """Agents by node, lost ones included."""
        self.runs: dict[int, EpochRun] = {}
        """Recent runs by epoch."""
        self._anchored: dict[int, list[AnchoredEvent]] = {}
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
        self.meter = RunMeter(self, self.runs, state)
        self.coordinator = CoordinatorModel(self, state, self.meter)

    def node(self, name: str) -> SimulatedAgent | None:
        return self.agents.get(name)

    def account(self) -> None:
        self.meter.account_time()

    def schedule(self, trace: Trace, anchored: Sequence[AnchoredEvent] = ()) -> None:
        """Schedule the events of the trace and those relative to steps."""
        for at, events in trace.steps():
            for event in events:
                self._put(at, event, self.physics.spawn_s if at else self.physics.start_s)
        for one in anchored:
            if one.fault is not None:
                self._faults.append((one.fault, one.event))
            else:
                self._anchored.setdefault(one.step, []).append(one)

    def _put(self, seconds: float, event: Event, start_s: float) -> None:
        """`start_s`: start-up time of a new node's worker."""
        if event.kind == ADD:
            self.clock.after(seconds, lambda: self._add(event, start_s))
            return
        if event.notice_s > 0:
            at = max(0.0, seconds - event.notice_s)
            self.clock.after(at, lambda: self._notify(event, seconds - at))
        self.clock.after(seconds, lambda: self._remove(event))

    def _add(self, event: Event, start_s: float) -> None:
        known = {device.name for device in self.profile.devices}
        device = event.type if event.type in known else ""
        info = NodeInfo(event.node, "", "", domain=event.zone, device=device)
        self.present[event.node] = event
        self.agents[event.node] = SimulatedAgent(
            self, self.coordinator, self.agents, self.runs, info, start_s
        )
        self.meter.account_time()

    def _notify(self, event: Event, deadline_s: float) -> None:
        if event.node in self.present:
            self.coordinator.receive(None, DrainRequested(event.node, deadline_s))

    def _remove(self, event: Event) -> None:
        agent = self.agents.get(event.node)
        if agent is None or self.present.pop(event.node, None) is None:
            return
        if agent.alive:
            agent.die()
            self.meter.fault()
        self.meter.account_time()

    def step_done(self, step: int, seconds: float) -> None:
        self.meter.step_done(step, seconds)
        self.reach(step + 1)
        every = self.spec.checkpoint_every
        if every and (step + 1) % every == 0:
            rate, n = self.physics.disk_bytes_per_s, len(self.present) or 1
            nbytes = sum(map(self.state_bytes, range(self.spec.n_layers))) / n
            done = CheckpointCommitted("checkpoint", step + 1)
            write_s = nbytes / rate if rate > 0 else 0.0
            self.clock.after(write_s, lambda: self.coordinator.receive(None, done))

    def strike(self, node: str, step: int, phase: Phase, microbatch: int | None = None) -> bool:
        for spec, event in self._faults:
            if due(spec, node=node, worker=0, step=step, phase=phase, microbatch=microbatch):
                self._faults.remove((spec, event))
                self._remove(event)
                return True
        return False

    def reach(self, step: int) -> None:
        """Schedule the events relative to steps up to `step`."""
        for at in range(self._reached + 1, step + 1):
            for one in self._anchored.pop(at, []):
                self._put(
                    max(0.0, one.after_s), one.event, 0.0 if one.ready else self.physics.spawn_s
                )
        self._reached = max(self._reached, step)

    def result(self, end_s: float) -> MicrobatchResult:
        """Return the results up to `end_s`."""
        self.meter.account_time()
        meter, state, finish = self.meter, self.coordinator.state, self.coordinator.finish
        return MicrobatchResult(
            ended_s=min(end_s, self.clock.ms / 1000),
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
    job: MicrobatchJob,
    physics: MicrobatchPhysics | None = None,
    seed: int = 0,
    anchored: Sequence[AnchoredEvent] = (),
) -> MicrobatchResult:
    """Run `job` on `trace` until one of them ends. Raises FieldError for wrong values."""
    world = MicrobatchWorld(job, profile, physics or MicrobatchPhysics(), seed)
    world.schedule(trace, anchored)
    world.reach(0)
    world.clock.run(trace.end_s, lambda: world.coordinator.over)
    return world.result(trace.end_s)
