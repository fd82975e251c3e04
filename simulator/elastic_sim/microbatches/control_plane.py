"""The coordinator and the agents: the real transitions, connected by streams.

While the coordinator plans, messages to it wait in a queue. An agent has a vault, an uplink, a
stream to the coordinator and one worker.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.goodput import recovery_entry
from elastic.core.job.state import JobPhase, JobState
from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import Copy, NodeInfo
from elastic_sim.microbatches.clock import Uplink
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.vault import SimulatedVault
from elastic_sim.microbatches.worker import EpochRun, SimulatedWorker

TICK_S = 0.05
CHECK_S = 0.2
"""Seconds between two checks of the worker by its agent."""
COPIES = "copies"
"""Name of the uplink stream of backup copies."""
RUNNING = (NodePhase.RUNNING, NodePhase.INSTALLING, NodePhase.HALTING, NodePhase.FINISHED)


class CoordinatorModel:
    """The simulated coordinator: applies the real transition to messages and logs events."""

    def __init__(self, world: Environment, state: JobState) -> None:
        self._world, self.state = world, state
        self.losses: list[float] = []
        """Times at which nodes were lost."""
        self._resumed_at = 0.0
        self.finish: job.JobFinished | None = None
        self._sessions: dict[str, CoordinatorStream] = {}
        self._backlog: list[tuple[CoordinatorStream | None, Any]] = []
        self._busy_until = 0.0
        world.clock.after(TICK_S, self._tick)

    @property
    def over(self) -> bool:
        """Whether the job has ended."""
        return self.state.phase in (JobPhase.FINISHED, JobPhase.FAILED)

    def receive(self, stream: CoordinatorStream | None, message: Any) -> None:
        """Handle a message, or queue it while a plan is computed."""
        if self._world.clock.now < self._busy_until or self._backlog:
            self._backlog.append((stream, message))
        else:
            self._handle(stream, message)

    def _tick(self) -> None:
        self._world.clock.after(TICK_S, self._tick)
        if self._world.clock.now >= self._busy_until:
            self._apply(job.Tick())

    def _drain_backlog(self) -> None:
        while self._backlog and self._world.clock.now >= self._busy_until:
            self._handle(*self._backlog.pop(0))

    def _handle(self, stream: CoordinatorStream | None, message: Any) -> None:
        """Translate a message as `elastic.coordinator.service` does."""
        match message:
            case m.NodeReport():
                assert stream is not None
                self._sessions[message.info.node] = stream
                self._apply(message)
            case m.Heartbeat():
                assert stream is not None
                self._sessions.setdefault(message.node, stream)
                self._apply(message)
            case "closed":
                for node in [n for n, s in self._sessions.items() if s is stream]:
                    del self._sessions[node]
                    if node in self.state.members:
                        info = self.state.members[node].report.info
                        self._apply(job.ConnectionClosed(node, info.incarnation))
                        if stream is not None and not stream.agent.alive:
                            self._apply(job.PortRefused(node, info.incarnation))
            case _:
                self._apply(message)

    def _apply(self, event: Any) -> None:
        clock = self._world.clock
        self.state, actions, _ = transition(self.state, event, clock.now)
        if any(isinstance(a, job.LogEntry) and a.kind == "plan" for a in actions):
            change, physics = self.state.change, self._world.physics
            joining = change is not None and change.causes[0].kind is job.CauseKind.JOIN
            planning_s = clock.vary(physics.replan_s if joining else physics.plan_s)
            self._busy_until = clock.now + planning_s
            clock.after(planning_s, lambda: self._act(actions))
            clock.after(planning_s, self._drain_backlog)
        else:
            self._act(actions)

    def _act(self, actions: tuple[job.JobAction, ...]) -> None:
        for action in actions:
            match action:
                case job.Send(node, message) if node in self._sessions:
                    self._sessions[node].down(message)
                    if isinstance(message, m.Fenced):
                        del self._sessions[node]
                case job.JobFinished():
                    self.finish = action
                case job.ChangeCompleted() if not action.change.starts_job:
                    self._log_recovery(action)
                case job.LogEntry(kind, data) if kind != "step":  # `step_done` logs these
                    self._world.log(kind, data)

    def _log_recovery(self, event: job.ChangeCompleted) -> None:
        recent = [at for at in self.losses if self._resumed_at < at <= event.change.began]
        self._resumed_at = event.resumed_at
        self._world.log("recovery", recovery_entry(event, min(recent, default=None)))


class CoordinatorStream:
    """An agent's stream to the coordinator, ordered both ways. A break loses messages in flight."""

    def __init__(
        self, world: Environment, coordinator: CoordinatorModel, agent: SimulatedAgent
    ) -> None:
        self._world, self._coordinator, self.agent = world, coordinator, agent
        self.open, self._arrival = True, [0.0, 0.0]

    def up(self, message: Any) -> None:
        """Send a message to the coordinator."""
        self._deliver(0, lambda: self._coordinator.receive(self, message))

    def down(self, message: Any) -> None:
        """Send a message to the agent."""
        self._deliver(1, lambda: self.agent.receive_from_coordinator(message))

    def _deliver(self, direction: int, action: Callable[[], None]) -> None:
        clock = self._world.clock
        arrival = clock.now + clock.vary(self._world.physics.message_s)
        self._arrival[direction] = max(self._arrival[direction], arrival)
        seconds = self._arrival[direction] - clock.now
        clock.after(seconds, lambda: action() if self.open else None)


class SimulatedAgent:
    """A node's agent: applies the real node transition and acts on its worker and vault."""

    def __init__(
        self,
        world: Environment,
        coordinator: CoordinatorModel,
        agents: Mapping[str, SimulatedAgent],
        runs: dict[int, EpochRun],
        info: NodeInfo,
        start_s: float,
    ) -> None:
        """`agents`: all agents by name. `runs`: the workers' runs by epoch.

        `start_s`: start-up time of the node's first worker; later ones take `physics.spawn_s`.
        """
        self.world, self.name, self.info = world, info.node, info
        self._coordinator, self._agents, self._runs = coordinator, agents, runs
        self._first_start_s = start_s
        rate = world.physics.bytes_per_s or world.link_bytes_per_s
        self.uplink = Uplink(world.clock, rate, world.profile.link.latency_s)
        self.alive = True
        self.stream: CoordinatorStream | None = None
        self._generation = 0
        self.vault, self.fence = SimulatedVault(self.name), 0
        self._outside: dict[str, int] = {}
        """Owner -> oldest epoch of its copies that the vault takes in spite of the fence."""
        self._begin()
        self.stream = CoordinatorStream(world, coordinator, self)
        self._report()
        self._check_worker()
        self._beat()

    def _begin(self) -> None:
        incarnation = f"{self.name}.{self.world.number()}"
        self.info = replace(self.info, incarnation=incarnation, vault=f"{self.name}:1")
        self.state = core.NodeState(self.info)
        self.worker: SimulatedWorker | None = None
        self._last_arrival = 0.0
        self._outgoing: deque[tuple[int, str]] = deque()
        """(epoch, peer) of the bundles of copies in flight, in order."""
        self._discarded = 0
        """Bundles of older epochs are not sent any more."""
        self._lost: tuple[str, ...] | None = ()
        """Peers whose bundles nobody waits for; None: all peers that do not answer."""

    def _disconnect(self, seconds: float) -> None:
        """Break the stream; the coordinator notices it after about `seconds`."""
        if self.stream is not None:
            stream, self.stream = self.stream, None
            stream.open = False
            closed = partial(self._coordinator.receive, stream, "closed")
            self.world.clock.after_about(seconds, closed)

    def _send(self, message: Any) -> None:
        if self.stream is not None:
            self.stream.up(message)

    def receive_from_coordinator(self, message: Any) -> None:
        """Handle a message of the coordinator."""
        if not self.alive:
            return
        match message:
            case m.Trim(epoch, step):
                self.vault.trim(epoch, step)
                self._outside = {} if epoch >= self.fence else self._outside
            case m.Prefetch():
                self._prefetch(message)
            case _:
                self.apply(message)

    def _prefetch(self, order: m.Prefetch) -> None:
        """Pull states into this node's vault while training continues."""
        incarnation, copies, left = self.info.incarnation, list[Copy](), 1

        def pulled() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.world.clock.after_about(self.world.physics.prefetch_s, done)

        def done() -> None:
            if self.alive and self.info.incarnation == incarnation:
                for copy in copies:
                    if copy.node in self._agents and self._agents[copy.node].alive:
                        self.vault.add(copy)
                self.apply(core.PrefetchDone(order.epoch))

        for layer, _, node in order.sources:
            source = self._agents.get(node)
            if source is not None and source.alive:
                mine = [copy for copy in source.vault.newest_state(layer) if copy.owner == node]
                copies += mine
                left += len(mine)
                for copy in mine:
                    source.uplink.send(f"{self.name}, in advance", copy.nbytes, pulled)
        pulled()

    def receive_from_worker(self, generation: int, message: Any) -> None:
        """Take a message of worker `generation`, in the order of sending, unless it is outdated."""
        clock = self.world.clock
        arrival = clock.now + clock.vary(self.world.physics.local_s)
        self._last_arrival = max(self._last_arrival, arrival)
        clock.after(self._last_arrival - clock.now, lambda: self._handle(generation, message))

    def _handle(self, generation: int, message: Any) -> None:
        if not self.alive or generation != self._generation:
            return
        match message:
            case m.StepDone():
                self._send(message)
            case core.WorkerExited():
                self.apply(message)
            case _:
                self.apply(core.WorkerMessage(0, message))

    def _backup_failed(self, peer: str) -> None:
        """Report that the peer's vault cannot be reached."""
        if self.worker is not None and self.alive:
            self.apply(core.WorkerMessage(0, m.CommFailed(self.state.epoch, (peer,), "backup")))

    def _check_worker(self) -> None:
        if not self.alive:
            return
        self.world.clock.after(CHECK_S, self._check_worker)
        worker = self.worker
        if worker is not None and worker.alive:
            if worker.attached:
                self.apply(core.WorkerMessage(0, worker.progress()))
            self.apply(core.WorkersPolled((core.ProcessSample(0, False, self.world.clock.now),)))

    def _beat(self) -> None:
        if self.alive:
            self.world.clock.after(self._coordinator.state.policy.heartbeat_s, self._beat)
            self._send(core.heartbeat(self.state))

    def apply(self, event: Any) -> None:
        """Apply the node transition to an event and carry out its actions."""
        if not self.alive:
            return
        self.state, actions, _ = core.transition(self.state, event, self.world.clock.now)
        for action in actions:
            self._act(action)

    def _act(self, action: core.NodeAction) -> None:
        match action:
            case core.SendToWorkers(message):
                if self.worker is not None:
                    self.worker.order(message)
            case core.SpawnWorkers():
                self._generation += 1
                first = self._generation == 1
                start_s = self._first_start_s if first else self.world.physics.spawn_s
                self.worker = SimulatedWorker(
                    self.world, self, self._runs, self._generation, start_s
                )
            case core.KillWorkers():
                if self.worker is not None:
                    self.worker.crash()
            case core.EnterEpoch() | core.FenceVault() | core.StopHolding():
                self._act_on_copies(action)
            case core.SendReport():
                self._report()
            case core.EndAgent():
                self.alive = False
                if self.worker is not None:
                    self.worker.die(silent=True)
                self._disconnect(self.world.physics.message_s)
            case core.Rejoin(keep_vault):
                self._rejoin(keep_vault)

    def _act_on_copies(self, action: core.EnterEpoch | core.FenceVault | core.StopHolding) -> None:
        match action:
            case core.EnterEpoch(install):
                self._fence(install.epoch)
                self._discard(install.epoch)
                self.vault.enter(install.epoch, install.assignment.step)
            case core.FenceVault(epoch, outside, publishing, discard):
                self._fence(epoch, dict.fromkeys(outside, publishing))
                if discard:
                    self._discard(epoch)
            case core.StopHolding(peers):
                every = peers is None or self._lost is None
                self._lost = None if every else (*(self._lost or ()), *(peers or ()))

    def _rejoin(self, keep_vault: bool) -> None:
        self._generation += 1
        if not keep_vault:
            self.vault, self.fence, self._outside = SimulatedVault(self.name), 0, {}
        self._begin()
        self._report()

    def _fence(self, epoch: int, outside: Mapping[str, int] | None = None) -> None:
        """Refuse copies of older epochs. `outside`: owners that still train in an older one."""
        if epoch > self.fence:
            self.fence, self._outside = epoch, {}
        if epoch == self.fence:
            self._outside = {**self._outside, **(outside or {})}

    def takes(self, copy: Copy) -> bool:
        """Return whether the fence of the vault lets the copy in."""
        return copy.epoch >= self._outside.get(copy.owner, self.fence)

    def _discard(self, epoch: int) -> None:
        """Drop the copies that are not sent yet."""
        if epoch > self._discarded:
            self._discarded, self._lost = epoch, ()
            self._outgoing.clear()
            self.uplink.drop(COPIES)

    def _waits_for(self, peer: str) -> bool:
        return self._lost is not None and peer not in self._lost

    def _report(self) -> None:
        report = core.report(self.state)
        if report.promises or report.phase not in RUNNING:
            report = replace(report, inventory=self.vault.inventory())
        self._send(report)

    def replicate(self, copies: list[Copy], peer: str, acked: Callable[[], None]) -> None:
        """Send a bundle to the peer's vault. `acked()` is called if the vault accepts it, or if it
        does not and nobody waits for the peer."""
        epoch, bundle = copies[0].epoch, (copies[0].epoch, peer)
        self._outgoing.append(bundle)

        def arrive() -> None:
            if bundle in self._outgoing:
                self._outgoing.remove(bundle)
            if not self.alive or self._discarded > epoch:
                return
            target = self._agents.get(peer)
            reached = target is not None and target.alive and target.takes(copies[0])
            if not reached and not self._waits_for(peer):
                acked()
            elif target is None or not target.alive:
                self._backup_failed(peer)
            elif target.takes(copies[0]):
                for copy in copies:
                    target.vault.add(copy)
                acked()

        nbytes, delay_s = sum(copy.nbytes for copy in copies), 2 * self.world.physics.local_s
        self.uplink.send(COPIES, nbytes, lambda: self.world.clock.after_about(delay_s, arrive))

    def _peer_lost(self, peer: str) -> None:
        """Report that the peer failed, if it is the one that the first bundle in flight is for."""
        if self._outgoing and self._outgoing[0][1] == peer and self._waits_for(peer):
            self._backup_failed(peer)

    def die(self) -> None:
        """End agent, vault and worker; the node's connections break."""
        if self.alive:
            self.alive = False
            if self.worker is not None:
                self.worker.die()
            closed_s = self.world.physics.closed_s
            for other in self._agents.values():
                self.world.clock.after_about(closed_s, partial(other._peer_lost, self.name))
            self._disconnect(closed_s)
