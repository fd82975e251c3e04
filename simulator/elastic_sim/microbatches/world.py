"""A simulated cluster that runs our policy micro-batch by micro-batch.

The decisions are the real ones: the transitions of the coordinator and the node, the planner and
`recovery.solve`. Agents, workers, vaults, links and the coordinator's own time are simulated. Each
node has one worker; a profile with tensor parallelism gives the times of the whole group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastic.core.job.state import (
    CheckpointCommitted,
    DrainRequested,
    JobPhase,
    JobState,
    Policy,
)
from elastic.core.protocol.fault_spec import FaultSpec, Phase, due
from elastic.domain.types import JobSpec, NodeInfo
from elastic_sim.microbatches.control_plane import CoordinatorModel, SimulatedAgent
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.worker import EpochRun
from elastic_sim.traces.trace import ADD, Event, Trace


@dataclass(frozen=True, slots=True)
class AnchoredEvent:
    """An event `after_s` seconds after the beginning of `step`; `event.seconds` is not used."""

    event: Event
    step: int
    after_s: float
    ready: bool = False
    """Whether a new node's worker has started already."""
    fault: FaultSpec | None = None
    """Point of a lost node's work at which it is lost, instead of `after_s`."""


class MicrobatchWorld(Environment):
    """The cluster: creates its parts and carries out the trace on them."""

    def __init__(
        self,
        spec: JobSpec,
        policy: Policy,
        physics: MicrobatchPhysics,
        seed: int,
        *,
        accelerated: bool = True,
    ) -> None:
        assert policy.profile is not None
        super().__init__(spec, policy.profile, physics, seed, accelerated=accelerated)
        self.agents: dict[str, SimulatedAgent] = {}
        self.runs: dict[int, EpochRun] = {}
        """Runs by epoch."""
        self._present: set[str] = set()
        """Nodes that exist according to the trace, whatever runs on them."""
        self._anchored: dict[int, list[AnchoredEvent]] = {}
        self._faults: list[tuple[FaultSpec, Event]] = []
        self._reached = -1
        self.coordinator = CoordinatorModel(self, JobState(policy=policy))

    def schedule(self, trace: Trace, anchored: Sequence[AnchoredEvent] = ()) -> None:
        """Schedule the events of the trace and the anchored events."""
        for at, events in trace.steps():
            for event in events:
                self._put(at, event, self.physics.spawn_s if at else self.physics.start_s)
        for one in anchored:
            if one.fault is not None:
                self._faults.append((one.fault, one.event))
            else:
                self._anchored.setdefault(one.step, []).append(one)

    def _put(self, seconds: float, event: Event, start_s: float) -> None:
        """Schedule an event. `start_s`: start-up time of a new node's worker."""
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
        self._present.add(event.node)
        self.agents[event.node] = SimulatedAgent(
            self, self.coordinator, self.agents, self.runs, info, start_s
        )

    def _notify(self, event: Event, deadline_s: float) -> None:
        if event.node in self._present:
            self.coordinator.receive(None, DrainRequested(event.node, deadline_s))

    def _remove(self, event: Event) -> None:
        if event.node in self._present:
            self._present.remove(event.node)
            if self.agents[event.node].alive:
                self.agents[event.node].die()
                self.coordinator.losses.append(self.clock.now)

    def step_done(self, step: int, seconds: float) -> None:
        self.log("step", {"step": step, "seconds": round(seconds, 5)})
        self.reach(step + 1)
        every = self.spec.checkpoint_every
        if every and ((step + 1) % every == 0 or step + 1 == self.spec.n_steps):
            rate, n = self.physics.disk_bytes_per_s, len(self._present) or 1
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
        """Schedule the events anchored to steps up to `step`."""
        for at in range(self._reached + 1, step + 1):
            for one in self._anchored.pop(at, []):
                self._put(
                    max(0.0, one.after_s), one.event, 0.0 if one.ready else self.physics.spawn_s
                )
        self._reached = max(self._reached, step)


@dataclass(frozen=True, slots=True)
class MicrobatchResult:
    """End and events of a simulated run."""

    phase: JobPhase
    """Final phase of the job."""
    reason: str
    """Reason for the end of the job; "" if it did not end."""
    events: Sequence[dict[str, Any]]
    """Events as in events.jsonl; `at` is in seconds since the beginning of the trace."""


def simulate(
    trace: Trace,
    spec: JobSpec,
    policy: Policy,
    physics: MicrobatchPhysics,
    seed: int = 0,
    anchored: Sequence[AnchoredEvent] = (),
    *,
    accelerated: bool = True,
) -> MicrobatchResult:
    """Simulate a job until the job or `trace` ends. `policy` has the profile of the nodes.

    `accelerated`: the nodes have accelerators, so that each loss halts all nodes.
    """
    world = MicrobatchWorld(spec, policy, physics, seed, accelerated=accelerated)
    world.schedule(trace, anchored)
    world.reach(0)
    world.clock.run(trace.end_s, lambda: world.coordinator.over)
    finish = world.coordinator.finish
    reason = finish.reason if finish is not None else ""
    return MicrobatchResult(world.coordinator.state.phase, reason, world.events)
