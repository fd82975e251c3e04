"""DOC"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from elastic.core.coordinator.transitions import transition
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState
from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import Copy, NodeInfo
from elastic_sim.microbatches.clock import Wire
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.meter import Meter
from elastic_sim.microbatches.vault import Vault
from elastic_sim.microbatches.worker import Run, Worker

TICK_S = 0.05
OVER = (JobPhase.FINISHED, JobPhase.FAILED)


class CoordinatorModel:
    """Applies the real transition to what it hears, and tells `meter` about every decision."""

    def __init__(self, world: Environment, state: JobState, meter: Meter) -> None:
        self._world, self._meter, self.state = world, meter, state
        self.finish: job.Finish | None = None
        self._sessions: dict[str, Link] = {}
        self._backlog: list[tuple[Link | None, Any]] = []
        self._busy_until = 0.0
        world.clock.after(TICK_S, self._tick)

    def hear(self, link: Link | None, message: Any) -> None:
        """A message arrived; while a plan is made it waits in the queue."""
        if self._world.clock.now < self._busy_until or self._backlog:
            self._backlog.append((link, message))
        else:
            self._take(link, message)

    def _tick(self) -> None:
        self._world.clock.after(TICK_S, self._tick)
        if self._world.clock.now >= self._busy_until:
            self._apply(job.Tick())

    def _wake(self) -> None:
        while self._backlog and self._world.clock.now >= self._busy_until:
            self._take(*self._backlog.pop(0))

    def _take(self, link: Link | None, message: Any) -> None:
        """As `elastic.coordinator.service` does; but what came while a plan was made is learned as of its end."""
        match message:
            case m.NodeReport():
                assert link is not None
                node = message.info.node
                connected = self._sessions.get(node) is not link
                self._sessions[node] = link
                self._apply(job.Reported(message, connected))
            case m.Heartbeat():
                assert link is not None
                self._sessions.setdefault(message.node, link)
                self._apply(
                    job.Beat(
                        message.node,
                        message.incarnation,
                        message.step,
                        message.microbatch,
                        message.measured,
                    )
                )
            case m.StepDone():
                self._apply(job.Stepped(message.record))
            case "closed":
                for node in [n for n, s in self._sessions.items() if s is link]:
                    del self._sessions[node]
                    if node in self.state.members:
                        self._apply(
                            job.Closed(node, self.state.members[node].report.info.incarnation)
                        )
            case _:
                self._apply(message)

    def _apply(self, event: Any) -> None:
        clock = self._world.clock
        before = self.state
        self.state, actions, reason = transition(before, event, clock.now)
        self._meter.state = self.state
        if reason and (actions or self.state.phase is not before.phase):
            self._meter.decided(reason)
        if any(isinstance(a, job.Send) and isinstance(a.message, m.Install) for a in actions):
            planning_s = clock.vary(self._planning_s())
            self._busy_until = self._meter.sent_at = clock.now + planning_s
            clock.after(planning_s, lambda: self._act(actions))
            clock.after(planning_s, self._wake)
        else:
            self._act(actions)

    def _planning_s(self) -> float:
        change, physics = self.state.change, self._world.physics
        joining = change is not None and change.causes[0].kind is job.CauseKind.JOIN
        return physics.replan_s if joining else physics.plan_s

    def _act(self, actions: tuple[job.Action, ...]) -> None:
        for action in actions:
            match action:
                case job.Send(node, message):
                    link = self._sessions.get(node)
                    if link is not None:
                        link.down(message)
                    if isinstance(message, m.Fenced) and link is not None:
                        del self._sessions[node]
                case job.Finish():
                    self.finish = action
                case job.Recovered() if not action.change.starts_job:
                    self._meter.recovered(action)
                case job.Note(kind, data):
                    self._meter.noted(kind, data)
        if actions:
            self._meter.look()

    @property
    def over(self) -> bool:
        return self.state.phase in OVER


LOOK_S = 0.2
"""Between two looks at the worker."""
COPIES = "copies"
"""The stream of what a node backs up."""
RUNNING = (NodePhase.RUNNING, NodePhase.INSTALLING, NodePhase.HALTING, NodePhase.FINISHED)


class Link:
    """One stream to the coordinator: in order both ways; what is under way when it breaks is lost."""

    def __init__(self, world: Environment, coordinator: CoordinatorModel, agent: Agent) -> None:
        self._world, self._coordinator, self._agent = world, coordinator, agent
        self.open, self._at = True, [0.0, 0.0]

    def up(self, message: Any) -> None:
        self._later(0, lambda: self._coordinator.hear(self, message))

    def down(self, message: Any) -> None:
        self._later(1, lambda: self._agent.hear_coordinator(message))

    def _later(self, way: int, action: Callable[[], None]) -> None:
        clock = self._world.clock
        self._at[way] = max(self._at[way], clock.now + clock.vary(self._world.physics.message_s))
        clock.after(self._at[way] - clock.now, lambda: action() if self.open else None)


class Agent:
    def __init__(
        self,
        world: Environment,
        coordinator: CoordinatorModel,
        agents: Mapping[str, Agent],
        runs: dict[int, Run],
        info: NodeInfo,
        start_s: float,
    ) -> None:
        """`agents` and `runs`: those of the cluster, by name and epoch.

        `start_s`: start-up time of its first worker; later ones take `Physics.spawn_s`.
        """
        self.world, self.name, self._first_s = world, info.node, start_s
        self._coordinator, self._agents, self._runs = coordinator, agents, runs
        self.info = info
        profile, physics = world.profile, world.physics
        rate = physics.bytes_per_s or world.link_bytes_per_s
        self.wire = Wire(world.clock, rate, profile.link.latency_s)
        self.alive = True
        self.link: Link | None = None
        self._steps: list[m.StepDone] = []
        self._generation = 0
        self._begin()
        self.connect()
        self._look()
        self._beat()

    def _begin(self) -> None:
        self.info = replace(
            self.info, incarnation=f"{self.name}.{self.world.number()}", vault=f"{self.name}:1"
        )
        self.state = core.NodeState(self.info)
        self.vault, self.fence = Vault(self.name), 0
        self.worker: Worker | None = None
        self._speak = 0.0
        self._outgoing: deque[tuple[int, str]] = deque()
        """(epoch, peer) of copies that are on their way, in order."""

    @property
    def reachable(self) -> bool:
        return self.alive

    # ---- the stream -----------------------------------------------------------------------------

    def connect(self) -> None:
        if self.alive and self.link is None:
            self.link = Link(self.world, self._coordinator, self)
            self.report()

    def disconnect(self, seconds: float) -> None:
        """The stream broke; the coordinator sees it after so long."""
        if self.link is not None:
            link, self.link = self.link, None
            link.open = False
            self.world.clock.about(seconds, lambda: self._coordinator.hear(link, "closed"))

    def _send(self, message: Any) -> None:
        if self.link is not None:
            self.link.up(message)

    def hear_coordinator(self, message: Any) -> None:
        if not self.alive:
            return
        match message:
            case m.Trim(epoch, step):
                self.vault.trim(epoch, step)
            case m.Prefetch():
                self._prefetch(message)
            case _:
                self.apply(message)

    def _prefetch(self, order: m.Prefetch) -> None:
        """Pull states into the own vault while training goes on."""
        incarnation, copies, left = self.info.incarnation, list[Copy](), 1

        def pulled() -> None:
            nonlocal left
            left -= 1
            if not left:
                self.world.clock.about(self.world.physics.prefetch_s, done)

        def done() -> None:
            if self.alive and self.info.incarnation == incarnation:
                for copy in copies:
                    if copy.node in self._agents and self._agents[copy.node].reachable:
                        self.vault.add(copy)
                self.apply(core.PrefetchDone(order.epoch))

        for layer, _, node in order.sources:
            source = self._agents.get(node)
            if source is not None and source.reachable:
                mine = [copy for copy in source.vault.newest_state(layer) if copy.owner == node]
                copies += mine
                left += len(mine)
                for copy in mine:
                    source.wire.send(f"{self.name}, in advance", copy.nbytes, pulled)
        pulled()

    # ---- events ---------------------------------------------------------------------------------

    def hear_worker(self, generation: int, message: Any) -> None:
        """Take messages in the order in which they were sent, and only from the present worker."""
        clock = self.world.clock
        self._speak = max(self._speak, clock.now + clock.vary(self.world.physics.local_s))
        clock.after(self._speak - clock.now, lambda: self._hear(generation, message))

    def _hear(self, generation: int, message: Any) -> None:
        if not self.alive or generation != self._generation:
            return
        match message:
            case m.StepDone():
                self._send(message)
            case core.Exited():
                self.apply(message)
            case _:
                self.apply(core.Said(0, message))

    def held(self, peer: str) -> None:
        """The peer's vault cannot be reached."""
        if self.worker is not None and self.alive:
            self.apply(core.Said(0, m.CommFailed(self.state.epoch, (peer,), "backup")))

    def _look(self) -> None:
        if not self.alive:
            return
        self.world.clock.after(LOOK_S, self._look)
        worker = self.worker
        if worker is not None and worker.alive:
            if worker.attached and not worker.stopped:
                self.apply(core.Said(0, worker.progress()))
            cpu_s = 0.0 if worker.stopped else self.world.clock.now
            self.apply(core.Looked((core.Evidence(0, worker.stopped, cpu_s),)))

    def _beat(self) -> None:
        if self.alive:
            self.world.clock.after(self._coordinator.state.policy.heartbeat_s, self._beat)
            self._send(core.heartbeat(self.state))

    def apply(self, event: Any) -> None:
        if not self.alive:
            return
        self.state, actions, _ = core.transition(self.state, event, self.world.clock.now)
        for action in actions:
            self._act(action)

    def _act(self, action: core.Action) -> None:
        match action:
            case core.Tell(message, _):
                if self.worker is not None:
                    self.worker.order(message)
            case core.Spawn():
                self._generation += 1
                start_s = self._start_s()
                self.worker = Worker(self.world, self, self._runs, self._generation, start_s)
            case core.KillWorkers():
                if self.worker is not None:
                    self.worker.crash()
            case core.Enter(install):
                self._fence(install.epoch)
                self.vault.enter(install.epoch, install.assignment.step)
            case core.Fence(epoch):
                self._fence(epoch)
            case core.Report():
                self.report()
            case core.Leave():
                self.alive = False
                if self.worker is not None:
                    self.worker.die(silent=True)
                self.disconnect(self.world.physics.message_s)
            case core.Rejoin():
                self._generation += 1
                self._begin()
                self.report()

    def _start_s(self) -> float:
        return self._first_s if self._generation == 1 else self.world.physics.spawn_s

    def _fence(self, epoch: int) -> None:
        if epoch > self.fence:
            self.fence = epoch
            self._outgoing.clear()
            self.wire.drop(COPIES)

    def report(self) -> None:
        report = core.report(self.state)
        if report.phase not in RUNNING:
            report = replace(report, inventory=self.vault.inventory())
        self._send(report)

    # ---- backups --------------------------------------------------------------------------------

    def replicate(self, copies: list[Copy], peer: str, acked: Callable[[], None]) -> None:
        """Bring copies to the peer's vault, behind those before. If it refuses, there is no acknowledgement."""
        epoch, job = copies[0].epoch, (copies[0].epoch, peer)
        self._outgoing.append(job)

        def arrive() -> None:
            if job in self._outgoing:
                self._outgoing.remove(job)
            if not self.alive or self.fence > epoch:
                return
            target = self._agents.get(peer)
            if target is None or not target.alive:
                self.held(peer)
            elif target.fence <= epoch:
                for copy in copies:
                    target.vault.add(copy)
                acked()

        def gone() -> None:
            self.world.clock.about(2 * self.world.physics.local_s, arrive)

        self.wire.send(COPIES, sum(copy.nbytes for copy in copies), gone)

    def peer_gone(self, peer: str) -> None:
        """Its connections have ended: a copy that is on its way there is seen to fail."""
        if self._outgoing and self._outgoing[0] == (self.fence, peer):
            self.held(peer)

    # ---- faults ---------------------------------------------------------------------------------

    def die(self) -> None:
        """The node is gone, agent, vault and worker; its connections break."""
        if self.alive:
            self.alive = False
            if self.worker is not None:
                self.worker.die()
            for other in self._agents.values():
                self.world.clock.about(
                    self.world.physics.closed_s, partial(other.peer_gone, self.name)
                )
            self.disconnect(self.world.physics.closed_s)
