"""A simulated cluster: real decisions of coordinator and nodes, simulated clock and network.

One heap of (time, order) events. One seeded generator gives every delay, so a run is a function of
its seed and its faults. `tests.core.world.node` has the agents, `tests.core.world.worker` the
workers.

Tests of the pure core use it to bring a job into a state. Whole jobs under faults are judged in
`tests.simulation`, with the real shells.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from elastic.core.coordinator.transitions import RULES, transition
from elastic.core.job import scope
from elastic.core.job import state as job
from elastic.core.job.state import JobPhase, JobState, Policy
from elastic.core.protocol import messages as m
from elastic.domain import codec
from elastic.domain.types import UPDATE, Assignment, Plan
from elastic.planning.plan.plan import validate_plan
from tests.core.recovery.job_model import make_spec
from tests.core.recovery.oracle import of_present_history, reachable_versions
from tests.core.recovery.proof import check_assignment
from tests.core.world.node import Agent, Link, Run

TICK_S = 0.1
OVER = (JobPhase.FINISHED, JobPhase.FAILED)


@dataclass(frozen=True)
class Fault:
    """A fault of the `node`-th living node (or of the coordinator) at a time.

    kill: the node is gone and its connections close. power: gone without a closed connection.
    back: killed, and its agent restarts after `seconds`. crash, hang (SIGSTOP), slow, spin (endless
    loop), mute (crashes, and hangs before it attaches again): one worker. no-slots: its vault
    refuses copies of peers from now on. no-memory: its workers can publish no copy from now on.
    path: the node and the next living one cannot connect to each other for `seconds`.
    partition: no message passes for `seconds`. blip: the stream to the coordinator breaks.
    coordinator-kill: the coordinator restarts after `seconds` from its saved state.
    coordinator-save: the same, but it dies between saving and acting. coordinator-amnesia: the
    same, and the store has lost the writes of its last 0.1 s to 0.5 s.
    coordinator-stall: it stops for `seconds`. coordinator-cut: no message passes between it and the
    nodes for `seconds`, after which all streams break. reset: all streams break.
    drain: with `seconds` of notice. join: a new node.
    """

    kind: str
    at: float
    node: int = 0
    seconds: float = 1.0


class World:
    def __init__(
        self,
        seed: int,
        nodes: int,
        *,
        tp: int = 1,
        steps: int = 5,
        checks: float = 0.03,
        **policy: Any,
    ):
        self.rng = random.Random(seed)
        self.now = 0.0
        self.tp, self.checks = tp, checks
        self.lifetime_s = 0.0
        """Lifetime that joining nodes announce."""
        self.spec = make_spec(4, 3, steps, tp)
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self.sequence = itertools.count(1)
        self.runs: dict[int, Run] = {}
        self.agents: dict[str, Agent] = {}
        self.trail: list[str] = []
        self.faults: list[str] = []
        self.vaults_lost, self.alone = 0, False
        self.uplink_cut_until = 0.0
        """Time until which the coordinator's network is cut."""
        self.paths_cut = False
        """Whether there ever was a bad path. The vaults behind it may be left out of a recovery."""
        self.broken: set[tuple[str, str]] = set()
        """(node, other) of which the first cannot open connections to the second."""
        defaults = {"min_nodes": nodes, "max_nodes": 9, "workers_per_node": tp}
        self.coordinator = CoordinatorShell(self, Policy(**{**defaults, **policy}))
        for _ in range(nodes):
            self.add_node()

    # ---- clock ----------------------------------------------------------------------------------

    def at(self, delay: float, action: Callable[[], None]) -> None:
        heapq.heappush(self._heap, (self.now + delay, next(self._order), action))

    def soon(self, low: float, high: float) -> float:
        return self.rng.uniform(low, high)

    def log(self, text: str) -> None:
        self.trail.append(f"{self.now:8.3f} {text}")

    def run(self, limit: float = 120.0) -> JobPhase:
        """Run until the job is over and all nodes have left, or no event remains."""
        while self._heap and self._heap[0][0] <= limit:
            self.now, _, action = heapq.heappop(self._heap)
            action()
            if self.over:
                break
        return self.coordinator.state.phase

    def check_end(self) -> None:
        """The job finished, or waits because no node can train, or failed for a good reason."""
        state = self.coordinator.state
        if state.doubt_since:
            assert not any(agent.reachable for agent in self.living), "nodes can be heard"
            return
        if state.phase is JobPhase.WAITING:
            assert len(state.members) < state.policy.min_nodes, "enough nodes wait for nothing"
            return
        if state.missing is not None and state.phase is JobPhase.PAUSED:
            assert self.unbacked, "waiting for nodes although a backup was left"
            return
        if state.phase is JobPhase.PAUSED:
            usable = [a.name for a in self.living if a.state.able and a.name in state.members]
            assert all(state.members[name].draining for name in usable), (
                f"paused although {usable} could train"
            )
            return
        assert state.phase in OVER, f"stuck: {state.phase}"
        assert self.over, f"{state.phase}, but {[a.name for a in self.living]} never heard of it"
        assert self.coordinator.finish is not None
        if state.phase is JobPhase.FAILED:
            assert self.coordinator.finish.code == 3 and self.unbacked, (
                "given up although a backup was left"
            )
        else:
            assert self.coordinator.finish.code == 0 and self.coordinator.finish.params_sha256

    @property
    def unbacked(self) -> bool:
        """Redundancy was exceeded: two vaults were lost, or one whose node had no peer."""
        return self.vaults_lost > 1 or self.alone

    def lose_vault(self, name: str) -> None:
        """A vault is lost. Set `alone` if no peer kept its backups under a plan in force."""
        self.vaults_lost += 1
        plans = [
            plan
            for plan in (self.coordinator.state.plan, self.coordinator.protected)
            if plan is not None
        ]
        self.alone |= any(name in plan.nodes() and plan.peer_of(name) is None for plan in plans)

    @property
    def uplink_cut(self) -> bool:
        """Whether the coordinator's network is cut."""
        return self.now < self.uplink_cut_until

    @property
    def over(self) -> bool:
        return self.coordinator.up and self.coordinator.state.phase in OVER and not self.living

    @property
    def living(self) -> list[Agent]:
        return [agent for agent in self.agents.values() if agent.alive]

    # ---- nodes and faults -----------------------------------------------------------------------

    def add_node(self, name: str = "") -> None:
        name = name or f"node{len(self.agents)}"
        self.agents[name] = Agent(self, name)
        self.at(self.soon(0, 0.3), self.agents[name].start)

    def inject(self, fault: Fault) -> None:
        self.at(fault.at, lambda: self._inject(fault))

    def _inject(self, fault: Fault) -> None:
        if self.coordinator.state.phase in OVER:
            return
        self.faults.append(fault.kind)
        self.log(f"FAULT {fault}")
        if fault.kind.startswith("coordinator"):
            self.coordinator.suffer(fault.kind, fault.seconds)
            return
        if fault.kind == "join":
            self.add_node()
        elif fault.kind == "reset":
            for agent in self.living:
                agent.blip()
        elif self.living:
            agent = self.living[fault.node % len(self.living)]
            self._hit(agent, fault)

    def cut_paths(self, seconds: float, *broken: tuple[str, str]) -> None:
        """Let the first node of each pair open no connections to the second, for `seconds`.
        Connections between the two are lost."""
        self.paths_cut = True
        self.log(f"FAULT path {broken} for {seconds}")
        self.broken |= set(broken)

        def heal() -> None:
            self.log(f"path {broken} is well")
            self.broken -= set(broken)
            for agent in self.living:
                for worker in agent.workers:
                    worker.poke()

        self.at(seconds, heal)

    def joined(self, one: str, other: str) -> bool:
        """Whether nodes can exchange data: some library may let either of them connect."""
        return not {(one, other), (other, one)} & self.broken

    def _hit(self, agent: Agent, fault: Fault) -> None:
        match fault.kind:
            case "kill" | "power" | "back":
                agent.die(silent=fault.kind == "power")
                if fault.kind == "back":
                    self.at(fault.seconds, lambda: self.add_node(agent.name))
            case "partition":
                agent.cut_off(fault.seconds)
            case "path":
                others = [one.name for one in self.living if one is not agent]
                peer = others[fault.node % len(others)] if others else agent.name
                self.cut_paths(fault.seconds, (agent.name, peer), (peer, agent.name))
            case "blip":
                agent.blip()
            case "drain":
                self.coordinator.hear(None, job.DrainRequested(agent.name, fault.seconds))
            case kind:
                agent.hurt_worker(kind, self.rng)


@dataclass
class CoordinatorShell:
    """The coordinator's queue, saved state and streams. Checks the invariants at each decision."""

    world: World
    policy: Policy
    state: JobState = field(init=False)
    up: bool = True
    die_at_save: float = 0.0
    stalled_until: float = 0.0
    generation: int = 0

    def __post_init__(self) -> None:
        self.state = self.saved = JobState(policy=self.policy)
        self.writes: list[tuple[float, JobState]] = [(0.0, self.saved)]
        self.sessions: dict[str, Link] = {}
        self.backlog: list[tuple[Link | None, Any]] = []
        self.assignments: dict[int, Assignment] = {}
        self.trimmed = 0
        """Newest epoch of an order to drop older copies."""
        self.dropped: dict[str, str] = {}
        """Node name per dropped incarnation."""
        self.finish: job.JobFinished | None = None
        self.recovered: list[job.ChangeCompleted] = []
        self.steps: list[tuple[float, int]] = []
        """(time, step) of each report of a finished step."""
        self.protected: Plan | None = None
        """The newest plan whose state is whole at the peers."""
        self.halts: list[tuple[int, bool, str]] = []
        """(epoch, boundary, kind of cause) per change."""
        self.samples: dict[JobPhase, list[JobState]] = {phase: [] for phase in JobPhase}
        self.world.at(TICK_S, self._tick)

    # ---- events ---------------------------------------------------------------------------------

    def hear(self, link: Link | None, message: Any) -> None:
        """A message arrived; while the process is stopped it waits in its queue."""
        if not self.up:
            return
        if self.world.now < self.stalled_until:
            self.backlog.append((link, message))
            return
        self._take(link, message)

    def refused(self, agent: Agent, incarnation: str) -> None:
        """The port of a dead agent refuses connections. The coordinator tries it again and again
        while the agent's stream is closed."""
        member = self.state.members.get(agent.name)
        if member is None or member.report.info.incarnation != incarnation:
            return
        reachable = self.up and not self.world.uplink_cut
        if reachable and not member.connected and self.world.now >= self.stalled_until:
            self._apply(job.PortRefused(agent.name, incarnation))
        else:
            self.world.at(0.1, lambda: self.refused(agent, incarnation))

    def _tick(self) -> None:
        self.world.at(TICK_S, self._tick)
        if self.up and self.world.now >= self.stalled_until:
            self._apply(job.Tick())

    def _wake(self) -> None:
        backlog, self.backlog = self.backlog, []
        for link, message in backlog:
            self.hear(link, message)

    def _take(self, link: Link | None, message: Any) -> None:
        """Turn a message into an event, as `elastic.coordinator.service` does."""
        match message:
            case m.NodeReport():
                assert link is not None
                self.sessions[message.info.node] = link
                self._apply(message)
            case m.StepDone():
                self.steps.append((self.world.now, message.record.step))
                self._apply(message)
            case m.Heartbeat():
                assert link is not None
                self.sessions.setdefault(message.node, link)
                self._apply(message)
            case "closed":
                for node in [n for n, s in self.sessions.items() if s is link]:
                    del self.sessions[node]
                    if node in self.state.members:
                        self._apply(
                            job.ConnectionClosed(
                                node, self.state.members[node].report.info.incarnation
                            )
                        )
            case _:
                self._apply(message)

    def _apply(self, event: Any) -> None:
        before = self.state
        self.state, actions, reason = transition(before, event, self.world.now)
        if self.world.rng.random() < self.world.checks:
            self._same_from_store(before, event)
        self._check(before, event, actions)
        if not isinstance(event, (job.Heartbeat, job.Tick)) or actions:
            self.saved = self.state
            self.writes = [*self.writes[-200:], (self.world.now, self.saved)]
        if actions and reason:
            self.world.log(f"coordinator {type(event).__name__}: {reason}")
        if self.die_at_save and any(isinstance(a, job.Send) for a in actions):
            self._die(self.die_at_save)
            return
        for action in actions:
            self._act(action)

    def _act(self, action: job.JobAction) -> None:
        match action:
            case job.Send(node, message):
                link = self.sessions.get(node)
                if link is not None:
                    link.down(message)
                if isinstance(message, m.Fenced) and link is not None:
                    del self.sessions[node]
            case job.JobFinished():
                self.finish = action
            case job.ChangeCompleted():
                self.recovered.append(action)

    # ---- faults ---------------------------------------------------------------------------------

    def suffer(self, kind: str, seconds: float) -> None:
        if kind == "coordinator-stall":
            self.stalled_until = self.world.now + seconds
            self.world.at(seconds, self._wake)
        elif kind == "coordinator-cut":
            self.world.uplink_cut_until = max(self.world.uplink_cut_until, self.world.now + seconds)
            self.world.at(seconds + 0.001, self._uplink_back)
        elif kind == "coordinator-save":
            self.die_at_save = seconds
        elif kind == "coordinator-amnesia" and self.up:
            self._forget(self.world.soon(0.1, 0.5))
            self._die(seconds)
        elif self.up:
            self._die(seconds)

    def _forget(self, seconds: float) -> None:
        """Lose the newest writes, back to the newest change of the members."""
        since = self.world.now - seconds
        for at, state in reversed(self.writes):
            same = {n: mb.report.info.incarnation for n, mb in state.members.items()}
            now = {n: mb.report.info.incarnation for n, mb in self.saved.members.items()}
            if same != now or at < since or state.phase in (JobPhase.WAITING, JobPhase.LAUNCHED):
                return
            self.saved = state
        self.writes.clear()

    def _die(self, seconds: float) -> None:
        self.world.log("coordinator died")
        self.up, self.die_at_save, self.stalled_until = False, 0.0, 0.0
        self.sessions.clear()
        self.backlog.clear()
        self.generation += 1
        for agent in self.world.living:
            agent.disconnect()
        self.world.at(seconds, self._return)

    def _uplink_back(self) -> None:
        if not self.world.uplink_cut:
            for agent in self.world.living:
                self.world.at(self.world.soon(0.0, 2.5), agent.blip)

    def _return(self) -> None:
        self.up = True
        self.state = codec.loads(JobState, codec.dumps(self.saved))
        assert self.state == self.saved
        self._apply(job.CoordinatorFailover())

    # ---- invariants ---------------------------------------------------------------

    def _same_from_store(self, before: JobState, event: Any) -> None:
        again = codec.loads(JobState, codec.dumps(before))
        assert again == before
        assert transition(again, event, self.world.now)[0] == self.state

    def _check(self, before: JobState, event: Any, actions: tuple[job.JobAction, ...]) -> None:
        state = self.state
        assert state.epoch >= before.epoch, "epochs only grow"
        if state.phase is not before.phase or state.epoch != before.epoch:
            self.samples[state.phase].append(state)
        phase = before.phase
        for action in actions:
            match action:
                case job.LogEntry("phase", {"phase": name}):
                    assert JobPhase(name) in RULES[phase][1], f"{phase} -> {name} is not declared"
                    phase = JobPhase(name)
                case job.LogEntry("halt", data):
                    self.halts.append((data["epoch"], data["boundary"], data["cause_kind"]))
                case job.Send(node, m.Install(epoch, assignment)):
                    self._check_install(epoch, assignment)
                case job.Send(_, m.Trim(epoch)):
                    self.trimmed = max(self.trimmed, epoch)
                case job.Send(node, m.Fenced()):
                    self._check_fence(before, node)
        assert phase is state.phase
        for node in before.members.keys() - state.members.keys():
            self.dropped[before.members[node].report.info.incarnation] = node
        for member in state.members.values():
            fresh = member.report.phase is m.NodePhase.EMPTY or member.rank >= 0
            assert member.report.info.incarnation not in self.dropped or fresh, (
                "a fenced incarnation is back"
            )
        if state.trimmed > before.trimmed:
            self.protected = state.plan
        if state.phase is JobPhase.FAILED is not before.phase:
            self._check_failure()

    def _check_install(self, epoch: int, assignment: Assignment) -> None:
        """One assignment per epoch, from copies that exist; no member runs an older epoch."""
        if epoch in self.assignments:
            assert self.assignments[epoch] == assignment, f"two plans for epoch {epoch}"
            return
        if not self.world.paths_cut:
            self._check_version(epoch, assignment)
        self.assignments[epoch] = assignment
        validate_plan(assignment.plan)
        for node, member in self.state.members.items():
            agent = self.world.agents[node]
            assert scope.has_answered(self.state, member) and member.report.epoch >= epoch, (
                f"{node} has not halted for {epoch}"
            )
            if scope.is_outside(self.state, node):
                continue
            running = [w for w in agent.workers if w.alive and not w.left and w.epoch < epoch]
            if agent.alive and agent.state.info.incarnation == member.report.info.incarnation:
                assert not running, f"{node} still runs epoch {running[0].epoch}"
        # What workers have promised is in no vault. The ledgers are compared in the commit.
        alive = all(self.world.agents[node].alive for node in self.state.members)
        if alive and not assignment.promised:
            check_assignment(
                assignment, self.world.spec, {n: a.vault for n, a in self.world.agents.items()}
            )

    def _check_fence(self, before: JobState, node: str) -> None:
        """A fenced node is dead, was cut off for about a lease, or was dropped before."""
        agent = self.world.agents[node]
        member = before.members.get(node)
        if (
            member is None
            or not agent.alive
            or agent.state.info.incarnation != member.report.info.incarnation
        ):
            return
        away = agent.away_s(before.policy.lease_s)
        assert away > before.limits.closed_s, f"healthy {node} is fenced at {self.world.now}"

    def _check_failure(self) -> None:
        """A job fails only if the vaults of all living nodes together do not suffice."""
        if all(agent.full for agent in self.world.living):
            return
        assert self.world.vaults_lost, "failed although no vault was lost"
        found = self._possible(self.world.living)
        assert not found, f"given up although the vaults suffice for versions {found}"

    def _check_version(self, epoch: int, assignment: Assignment) -> None:
        """No step is lost that the copies in the members' vaults prove."""
        best = max(self._possible([self.world.agents[n] for n in self.state.members]), default=0)
        assert assignment.step >= best, (
            f"epoch {epoch} begins at version {assignment.step} although {best} is possible"
        )

    def _possible(self, agents: list[Agent]) -> set[int]:
        """Versions for which the vaults of these nodes suffice, by an independent judgement.

        Records of steps are with the coordinator and with living workers.
        """
        began = {epoch: assignment.step for epoch, assignment in self.assignments.items()}
        copies = [
            copy
            for agent in agents
            for copy in agent.inventory()
            if self.trimmed <= copy.epoch <= self.state.epoch and of_present_history(copy, began)
        ]
        records = [worker.record for agent in agents for worker in agent.workers if worker.alive]
        if self.assignments:
            records.append(self.assignments[max(self.assignments)].record)
        recorded = {record.step for record in (*records, self.state.record) if record is not None}
        trained = recorded or any(copy.kind == UPDATE or copy.step > 0 for copy in copies)
        return reachable_versions(copies, self.world.spec, recorded, initial=not trained)
