"""Simulated agents: the real node transition with simulated workers, vault and stream."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from elastic.core.node import node as core
from elastic.core.node.path_watch import PathWatch, attempt_s, attempted, interval_s
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import HealthReport, UnreachablePeer
from elastic.core.protocol.messages import NodePhase
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.types import Assignment, Copy, JobSpec, NodeInfo
from tests.core.recovery.proof import Vault
from tests.core.worker_model import check_ledgers
from tests.core.world.worker import Worker

if TYPE_CHECKING:
    from tests.core.world.world import World

LOOK_S, BEAT_S = 0.1, 0.5
RUNNING = (NodePhase.RUNNING, NodePhase.INSTALLING, NodePhase.HALTING, NodePhase.FINISHED)


class Link:
    """A stream to the coordinator, in order both ways. A break loses messages under way."""

    def __init__(self, world: World, agent: Agent) -> None:
        self.world, self.agent, self.open = world, agent, True
        self._at = [0.0, 0.0]

    def up(self, message: Any) -> None:
        self._later(0, lambda: self.world.coordinator.hear(self, message))

    def down(self, message: Any) -> None:
        self._later(1, lambda: self.agent.hear_coordinator(message))

    def _later(self, way: int, action: Callable[[], None]) -> None:
        """Run `action` after some latency, in order, if the stream is still open."""
        self._at[way] = max(self._at[way], self.world.now + self.world.soon(0.001, 0.006))

        def arrive() -> None:
            if self.open and not self.world.uplink_cut:
                action()

        self.world.at(self._at[way] - self.world.now, arrive)


@dataclass
class Run:
    """The workers that meet in one epoch."""

    assignment: Assignment
    present: dict[tuple[str, int], Worker] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """All workers of the plan are present and reachable."""
        return self._meet([unit.node for unit in self.assignment.plan.units()])

    def whole_pipeline(self, number: int) -> bool:
        """All workers of a pipeline are present and reachable."""
        pipeline = self.assignment.plan.pipelines[number]
        return self._meet([stage.unit.node for stage in pipeline.stages])

    def _meet(self, nodes: list[str]) -> bool:
        wanted = [(node, rank) for node in nodes for rank in range(self.assignment.plan.tp)]
        workers = [self.present.get(one) for one in wanted]
        if not all(worker is not None and worker.reachable for worker in workers):
            return False
        world = next(iter(self.present.values())).world
        return not world.broken or all(world.joined(a, b) for a in nodes for b in nodes if a < b)

    def check_ledgers(self, spec: JobSpec, step: int) -> None:
        check_ledgers([w.model for w in self.present.values() if w.model is not None], spec, step)


class Agent:
    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.alive = False
        self.link: Link | None = None
        self.cut_until = 0.0
        self.cuts: list[tuple[float, float]] = []
        """(from, to) of the times when this node was unreachable."""
        self.steps: list[m.StepDone] = []
        self.mute_starts = 0
        """Number of next workers that hang before they attach."""
        self.refuses, self.full = False, False
        """Whether its vault refuses copies of peers, and whether its workers cannot publish."""
        self._generation = 0
        self._incarnations = itertools.count()
        self.vault, self.fence = Vault(name), 0
        self.outside: dict[str, int] = {}
        """Owner -> oldest epoch of its copies that the vault takes in spite of the fence."""
        self._begin()

    def _begin(self) -> None:
        incarnation = f"{self.name}.{next(self.world.sequence)}"
        lifetime_s = self.world.lifetime_s
        info = NodeInfo(
            self.name, incarnation, f"{self.name}:1", workers=self.world.tp, lifetime_s=lifetime_s
        )
        self.state = core.NodeState(info)
        self.workers = list[Worker]()
        self._discarded = 0
        """Bundles of older epochs are not sent any more."""
        self._lost: tuple[str, ...] | None = ()
        """Peers whose bundles are acknowledged as not kept; None: all that would be held."""
        self._held = list[Callable[[], None]]()
        """Attempts to deliver the bundles that are held."""
        self._speak: dict[int, float] = {}
        self.watches: dict[str, tuple[str, PathWatch]] = {}
        """Per peer: (address of its vault, attempts to reach it)."""
        self.unreachable: tuple[UnreachablePeer, ...] = ()

    def start(self) -> None:
        self.alive = True
        self.connect()
        self._look()
        self._beat()
        self._ask_peers()

    # ---- the stream -----------------------------------------------------------------------------

    def connect(self) -> None:
        if not self.alive or self.link is not None:
            return
        if not self.world.coordinator.up or self.world.uplink_cut:
            self.world.at(self.world.soon(0.05, 0.4), self.connect)
            return
        self.link = Link(self.world, self)
        if self.world.rng.random() < 0.3:
            self._beat_once()
        self.report()
        for step in self.steps:
            self._send(step)
        if self.unreachable:
            self._report_health()

    def disconnect(self) -> None:
        """The stream broke."""
        if self.link is not None:
            link, self.link = self.link, None
            link.open = False
            self.world.at(
                self.world.soon(0.001, 0.01), lambda: self.world.coordinator.hear(link, "closed")
            )
            self.world.at(self.world.soon(0.03, 0.1), self.connect)

    def _send(self, message: Any) -> None:
        if self.link is not None and not self.cut:
            self.link.up(message)

    def hear_coordinator(self, message: Any) -> None:
        if not self.alive or self.cut:
            return
        match message:
            case m.Trim(epoch):
                self.outside = {} if epoch >= self.fence else self.outside
                self.vault.held = {k: v for k, v in self.vault.held.items() if v[0].epoch >= epoch}
            case m.Prefetch():
                self._watch(message.vaults)
                self.world.at(
                    self.world.soon(0.05, 0.5), lambda: self._prefetch(message, self.state.info)
                )
            case _:
                self.apply(message)

    def _prefetch(self, order: m.Prefetch, info: NodeInfo) -> None:
        if not self.alive or self.state.info != info:
            return
        for layer, shard, node in order.sources:
            source = self.world.agents[node]
            copies = [
                v
                for v in source.vault.held.values()
                if (v[0].kind, v[0].layer, v[0].shard) == ("state", layer, shard)
            ]
            if source.reachable and self.world.joined(self.name, node) and copies:
                self.vault.add(*max(copies, key=lambda v: (v[0].step, v[0].epoch)))
        self.apply(core.PrefetchDone(order.epoch))

    # ---- events ---------------------------------------------------------------------------------

    def hear_worker(self, worker: Worker, message: Any) -> None:
        """Messages arrive in order, and only from workers of the present launch."""
        at = max(self._speak.get(worker.rank, 0.0), self.world.now + self.world.soon(0.0003, 0.002))
        self._speak[worker.rank] = at
        generation = worker.generation
        self.world.at(at - self.world.now, lambda: self._worker(generation, worker.rank, message))

    def _worker(self, generation: int, rank: int, message: Any) -> None:
        if not self.alive or generation != self._generation:
            return
        match message:
            case m.StepDone():
                self.steps.append(message)
                self._send(message)
            case core.WorkerExited():
                self.apply(message)
            case _:
                self.apply(core.WorkerMessage(rank, message))

    def peer_unreachable(self, epoch: int, peer: str) -> None:
        """Report that the peer takes no copies of `epoch`, for worker 0, as the replicator does."""
        failed = m.CommFailed(epoch, (peer,), f"backup at {peer}")
        if self.workers:
            self.apply(core.WorkerMessage(0, failed))

    def _look(self) -> None:
        if not self.alive:
            return
        self.world.at(LOOK_S, self._look)
        for worker in self.workers:
            if worker.alive and worker.attached and not worker.stopped and not worker.mute:
                self.apply(core.WorkerMessage(worker.rank, worker.progress()))
        seen = tuple(
            core.ProcessSample(w.rank, w.stopped, w.cpu_s()) for w in self.workers if w.alive
        )
        if seen:
            self.apply(core.WorkersPolled(seen))

    def _beat(self) -> None:
        if self.alive:
            self.world.at(BEAT_S, self._beat)
            self._beat_once()

    def _beat_once(self) -> None:
        self._send(core.heartbeat(self.state))

    def apply(self, event: Any) -> None:
        if not self.alive:
            return
        before = self.state
        self.state, actions, reason = core.transition(before, event, self.world.now)
        assert self.state.epoch >= before.epoch, "a node's epoch only grows"
        if self.state.phase is not before.phase:
            self.world.log(
                f"{self.name} {before.phase} -> {self.state.phase} ({self.state.epoch}): {reason}"
            )
        for action in actions:
            self._act(action)

    def _act(self, action: core.NodeAction) -> None:
        match action:
            case core.SendToWorkers(message):
                for worker in self.workers:
                    worker.order(message)
            case core.SpawnWorkers():
                self._generation += 1
                self.workers = [
                    Worker(self, rank, self._generation) for rank in range(self.world.tp)
                ]
            case core.KillWorkers(reason):
                self._check_kill(reason)
                for worker in self.workers:
                    worker.die(-9)
            case core.EnterEpoch() | core.FenceVault() | core.StopHolding():
                self._act_on_copies(action)
            case core.SendReport():
                self.report()
            case core.EndAgent():
                self.alive = False
                self.disconnect()
            case core.Rejoin(keep_vault):
                self._generation += 1
                if not keep_vault:
                    self.vault, self.fence, self.outside = Vault(self.name), 0, {}
                self._begin()
                self.report()

    def _act_on_copies(self, action: core.EnterEpoch | core.FenceVault | core.StopHolding) -> None:
        match action:
            case core.EnterEpoch(install):
                self._fence(install.epoch)
                self._discard(install.epoch)
                self._watch(install.assignment.vaults)
            case core.FenceVault(epoch, outside, publishing, discard):
                self._fence(epoch, dict.fromkeys(outside, publishing))
                if discard:
                    self._discard(epoch)
            case core.StopHolding(peers):
                stops = peers is None or self._lost is None
                self._lost = None if stops else (*(self._lost or ()), *(peers or ()))
                held, self._held = self._held, []
                for again in held:
                    again()

    def _fence(self, epoch: int, outside: dict[str, int] | None = None) -> None:
        """Refuse copies of older epochs, except those of the owners `outside`."""
        if epoch > self.fence:
            self.fence, self.outside = epoch, {}
        if epoch == self.fence:
            self.outside |= outside or {}

    def takes(self, copy: Copy) -> bool:
        """Whether the vault takes a copy of this owner and epoch."""
        return copy.epoch >= self.outside.get(copy.owner, self.fence)

    def _discard(self, epoch: int) -> None:
        """Drop the bundles that are not sent yet."""
        self._discarded, self._lost = max(self._discarded, epoch), ()
        self._held.clear()

    def _check_kill(self, reason: str) -> None:
        healthy = all(w.alive and not w.frozen for w in self.workers)
        assert not (healthy and reason.startswith("hang")), (
            f"{self.name}: healthy workers are killed: {reason}"
        )

    def report(self) -> None:
        report = core.report(self.state)
        halting = report.phase is NodePhase.HALTING
        if (halting and len(report.promises) == self.world.tp) or report.phase not in RUNNING:
            report = replace(report, inventory=self.inventory())
        self._send(report)

    def inventory(self) -> tuple[Copy, ...]:
        return tuple(self.vault.held[key][0] for key in sorted(self.vault.held))

    # ---- paths to other nodes -------------------------------------------------------------------

    def _watch(self, vaults: tuple[tuple[str, str], ...]) -> None:
        """Ask these vaults from now on."""
        addresses, now = {n: v for n, v in vaults if n != self.name}, self.world.now
        kept = {p: (v, watch) for p, (v, watch) in self.watches.items() if addresses.get(p) == v}
        new = {p: (v, PathWatch(now, now)) for p, v in addresses.items() if p not in kept}
        self.watches = kept | new
        self._update_paths()

    def _ask_peers(self) -> None:
        """Ask all peers at intervals. An attempt that fails takes as long as its timeout."""
        if not self.alive:
            return
        began, limits = self.world.now, DEFAULT_TIMEOUTS
        failing = [peer for peer in self.watches if not self._answers(peer)]
        self._attempted([peer for peer in self.watches if peer not in failing], "", began)
        if failing:
            self.world.at(attempt_s(limits), lambda: self._attempted(failing, "no answer", began))
        self.world.at(attempt_s(limits) if failing else interval_s(limits), self._ask_peers)

    def _answers(self, peer: str) -> bool:
        target = self.world.agents[peer]
        return self.reachable and target.reachable and (self.name, peer) not in self.world.broken

    def _attempted(self, peers: list[str], error: str, began: float) -> None:
        for peer in (peer for peer in peers if peer in self.watches):
            vault, watch = self.watches[peer]
            watch = attempted(watch, error, began, self.world.now, DEFAULT_TIMEOUTS)
            self.watches[peer] = vault, watch
        self._update_paths()

    def _update_paths(self) -> None:
        now = self.world.now
        found = tuple(
            UnreachablePeer(peer, vault, 0.0, watch.error)
            for peer, (vault, watch) in self.watches.items()
            if watch.silent_s(now, DEFAULT_TIMEOUTS)
        )
        if found != self.unreachable:
            self.unreachable = found
            self._report_health()

    def _report_health(self) -> None:
        info = self.state.info
        report = HealthReport(info.node, info.incarnation, self.world.now)
        self._send(replace(report, unreachable=self.unreachable))

    # ---- backups --------------------------------------------------------------------------------

    def replicate(
        self, copies: list[tuple[Copy, Any]], peer: str, acked: Callable[[], None]
    ) -> None:
        """Send copies to the peer's vault. There is no acknowledgement if it refuses them, and the
        bundle may be held."""
        epoch, target = copies[0][0].epoch, self.world.agents[peer]

        def arrive() -> None:
            if not self.alive or self._discarded > epoch:
                return
            reached = target.alive and not target.refuses and target.takes(copies[0][0])
            reached = reached and not self.cut and not target.cut
            held = not reached or not self.world.joined(self.name, peer)
            if (held and self._lost is None) or peer in (self._lost or ()):
                acked()
            elif not target.alive:
                self._held.append(arrive)
                self.peer_unreachable(epoch, peer)
            elif self.cut or target.cut or not self.world.joined(self.name, peer):
                self.world.at(0.1, arrive)
            elif target.refuses:
                self.peer_unreachable(epoch, peer)
                self.world.at(5.0, arrive)
            elif target.takes(copies[0][0]):
                for copy, content in copies:
                    target.vault.add(copy, content)
                acked()
            else:
                self._held.append(arrive)

        self.world.at(self.world.soon(0.002, 0.02), arrive)

    # ---- faults ---------------------------------------------------------------------------------

    @property
    def cut(self) -> bool:
        return self.world.now < self.cut_until

    @property
    def reachable(self) -> bool:
        return self.alive and not self.cut

    def away_s(self, window: float) -> float:
        """Unreachable seconds of the last `window` plus two heartbeats."""
        begin = self.world.now - window - 2 * BEAT_S
        return sum(max(0.0, min(b, self.world.now) - max(a, begin)) for a, b in self.cuts)

    def die(self, silent: bool) -> None:
        self.alive = False
        self.world.lose_vault(self.name)
        for worker in self.workers:
            worker.die(-9, silent=silent)
        if silent:
            self.link = None
            return
        self.disconnect()
        incarnation = self.state.info.incarnation
        self.world.at(
            self.world.soon(0.001, 0.05), lambda: self.world.coordinator.refused(self, incarnation)
        )

    def cut_off(self, seconds: float) -> None:
        self.cut_until = max(self.cut_until, self.world.now + seconds)
        self.cuts.append((self.world.now, self.cut_until))

        def heal() -> None:
            if self.alive and not self.cut:
                self.report()
                for worker in self.workers:
                    worker.poke()

        self.world.at(seconds + 0.001, heal)

    def blip(self) -> None:
        self.disconnect()

    def hurt_worker(self, kind: str, rng: random.Random) -> None:
        alive = [w for w in self.workers if w.alive and w.attached]
        if alive:
            worker = rng.choice(alive)
            if kind == "crash":
                worker.die(1)
            elif kind == "hang":
                worker.stop()
            elif kind == "spin":
                worker.spin()
            elif kind == "no-slots":
                self.refuses = True
            elif kind == "no-memory":
                self.full = True
            elif kind == "mute":
                self.mute_starts = 1
                worker.die(1)
            else:
                worker.slowness = 20.0
