"""An agent: the real node transition, with a vault, a wire, a stream to the coordinator and one worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from elastic.core.node import node as core
from elastic.core.protocol import messages as m
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import Copy, NodeInfo
from elastic_sim.microbatches.clock import Wire
from elastic_sim.microbatches.coordinator import CoordinatorModel
from elastic_sim.microbatches.environment import Environment
from elastic_sim.microbatches.training import Run
from elastic_sim.microbatches.vault import Vault
from elastic_sim.microbatches.worker import Worker

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
            case core.WorkerExited():
                self.apply(message)
            case _:
                self.apply(core.WorkerMessage(0, message))

    def held(self, peer: str) -> None:
        """The peer's vault cannot be reached."""
        if self.worker is not None and self.alive:
            self.apply(core.WorkerMessage(0, m.CommFailed(self.state.epoch, (peer,), "backup")))

    def _look(self) -> None:
        if not self.alive:
            return
        self.world.clock.after(LOOK_S, self._look)
        worker = self.worker
        if worker is not None and worker.alive:
            if worker.attached and not worker.stopped:
                self.apply(core.WorkerMessage(0, worker.progress()))
            cpu_s = 0.0 if worker.stopped else self.world.clock.now
            self.apply(core.WorkersPolled((core.ProcessSample(0, worker.stopped, cpu_s),)))

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

    def _act(self, action: core.NodeAction) -> None:
        match action:
            case core.SendToWorkers(message, _):
                if self.worker is not None:
                    self.worker.order(message)
            case core.SpawnWorkers():
                self._generation += 1
                start_s = self._start_s()
                self.worker = Worker(self.world, self, self._runs, self._generation, start_s)
            case core.KillWorkers():
                if self.worker is not None:
                    self.worker.crash()
            case core.EnterEpoch(install):
                self._fence(install.epoch)
                self.vault.enter(install.epoch, install.assignment.step)
            case core.FenceVault(epoch):
                self._fence(epoch)
            case core.SendReport():
                self.report()
            case core.EndAgent():
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
                self.world.clock.about(self.world.physics.closed_s, partial(other.peer_gone, self.name))
            self.disconnect(self.world.physics.closed_s)
