"""Our policy, a step at a time: the coordinator's own decisions on virtual time.

State is the coordinator's `JobState`. What to do is decided by its code: which plan (`elastic.core.job.join_policy`,
`elastic.planning.search.search`), whether nodes that came are worth a change (`elastic.core.job.epoch_change.consider_joining`), whether
slow ones are (`elastic.core.policy.straggler_policy`), which backup schemes. What it costs is physics: when a loss is known, how long
moves take over the links, which micro-batches were not saved yet (`elastic_sim.steps.policies.protection`). Messages and the
ledger are the micro-batch level's (`elastic_sim.microbatches`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from elastic.core.health.backup_metrics import MIN_SAMPLES, BackupMetrics
from elastic.core.health.compute_speed import SAMPLES, ComputeSpeed
from elastic.core.job import epoch_change as epoch_change
from elastic.core.job import join_policy as stay
from elastic.core.job.state import JobState, Member, Policy
from elastic.core.policy.backup_policy import MIN_STEPS, change_backup
from elastic.core.policy.straggler_policy import rebalance_stragglers
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import NodeInfo, Plan
from elastic.planning.backup.backup_cost import Weighing, estimate
from elastic.planning.placement.migration import CHECKPOINT, links_of, transition
from elastic.planning.plan.schemes import schemes_of
from elastic_sim.steps.engine import Change, Job, Setup
from elastic_sim.steps.policies.base import About, Base, ms, pauses
from elastic_sim.steps.policies.protection import Loss
from elastic_sim.steps.policies.protection import lost as lost_work
from elastic_sim.steps.time_accounting import Use
from elastic_sim.steps.world import Running, World
from elastic_sim.traces.trace import Event

SCHEMES = (
    "auto", "stream+snapshot", "stream:4+snapshot", "stream+replay", "log+snapshot", "log+replay", "recompute+snapshot",
    "stream+replica", "log+replica", "reduce+replica", "recompute+replica",
)  # fmt: skip
EVERYBODY = 1 << 20


class Ours(Base):
    detect_s = 3.0

    def __init__(self, world: World, seed: int = 0, pair: str = "auto") -> None:
        self.about = self.told_of(pair)
        super().__init__(world, seed)
        policy = Policy(
            max_nodes=EVERYBODY, workers_per_node=world.profile.tp, backup=pair, profile=world.profile
        )
        self.state = JobState(policy=policy, spec=world.spec)
        self._truth = replace(world.profile, contention=world.physics.contention)
        self._running: Running | None = None
        self._held: tuple[Plan | None, dict[str, Event]] = None, {}
        """The last plan whose moves were complete, and its nodes."""
        self._hosts: dict[str, Event] = {}
        """Nodes of the running plan, by their coming."""
        self._needed_by: Plan | None = None
        self._nodes: set[str] = set()
        self._drains: set[str] = set()
        self._pulled = False
        """Nodes that are to join have their layers."""
        self._slow_steps = 0
        self._planned = 0
        """Step in which the running plan was made."""
        self._exposed: dict[object, float] = {}

    @staticmethod
    def told_of(pair: str) -> About:
        return About(
            name="ours" if pair == "auto" else f"ours:{pair}",
            what="adaptive pipelines, micro-batch recovery, backup " + pair,
            source="elastic.core and elastic.planning themselves; a silent node is lost after its lease of 3 s; "
            "times of deciding and building groups from physics",
            ours=True,
        )

    @classmethod
    def checked(cls, pair: str) -> str:
        """Raises FieldError for what is no pair of schemes."""
        schemes_of(pair)
        return pair

    # ---- answers ----

    def begin(self, job: Job) -> Change:
        self._meet(job, job.alive.values(), ())
        return self._replan(job, (), "start", boundary=True)

    def changed(self, job: Job, came: Sequence[Event], gone: Sequence[Event]) -> Change | None:
        held = self._needed()
        self._meet(job, came, gone)
        lost = tuple(event.node for event in gone if event.node in held)
        if self._plain is None and job.alive:
            return self._replan(job, (), "nodes came" if came else "nodes went", boundary=False)
        if lost:
            return self._replan(job, lost, f"{' '.join(lost)} lost", boundary=False)
        self._consider(job)
        return None

    def told(self, job: Job, going: Sequence[Event]) -> Change | None:
        """Drain at the end of the step; at once if the notice runs out before."""
        now = job.now / 1000
        self._drains |= {event.node for event in going}
        members = {
            n: replace(mb, draining=True) if n in self._drains else mb for n, mb in self.state.members.items()
        }
        self.state = self.state.of(members=members)
        left = min(event.seconds for event in going) - now
        if job.setup is None or not self._needed() & self._drains:
            return None
        rest = (job.length_ms - job.progress_ms) / 1000
        if (
            left < rest + 2.0
        ):  # as `elastic.core.coordinator.transitions` leaves two seconds before the deadline
            self.ask(max(0.0, left - 2.0), "deadline")
        return None

    def rang(self, job: Job, name: str) -> Change | None:
        if name == f"pulled {self.state.epoch}":
            self._pulled = True
        elif name == "deadline" and self._needed() & self._drains & job.alive.keys():
            return self._replan(job, (), "notice runs out", boundary=False, known=True)
        return None

    def slowed(self, job: Job) -> Change | None:
        self._slow_steps = 0
        if self.state.plan is None or self._plain is None:
            return None
        return Change(setup=self._run(job, self.state.plan), reason="a node changed its speed", go_on=True)

    def stepped(self, job: Job) -> Change | None:
        self.checkpoint_beside(job)
        if self._drains and self._drains & self._needed():
            return self._replan(job, (), "drain", boundary=True)
        if self._pulled and self.state.joining:
            return self._replan(job, (), f"join {' '.join(self.state.joining)}", boundary=True)
        if job.slow or any(pace.factor != 1.0 for pace in self.state.paces.values()):
            self._slow_steps += 1
            if self._slow_steps == SAMPLES and self._relieved(job):
                return self._replan(job, (), "slow nodes", boundary=True)
        if self._pair_changes(job):
            return self._replan(job, (), "other backup schemes", boundary=True)
        if self.state.reconsider_at and job.now / 1000 >= self.state.reconsider_at:
            self._consider(job)
        return None

    # ---- members ----

    def _needed(self) -> set[str]:
        """Nodes without which the running plan cannot go on."""
        plan = self.state.plan
        if plan is not self._needed_by:
            self._needed_by = plan
            self._nodes = {*plan.nodes(), *(peer for _, peer in plan.peers)} if plan is not None else set()
        return self._nodes

    def _meet(self, job: Job, came: Collection[Event], gone: Sequence[Event]) -> None:
        now = job.now / 1000
        state = stay.count_node_seconds(self.state, now, left=len(gone)).of(updated_at=now)
        members = {n: mb for n, mb in state.members.items() if n in job.alive}
        for event in came:
            info = self.world.info(event)
            report = NodeReport(info=info, phase=NodePhase.RUNNING, epoch=state.epoch, able=True)
            members[info.node] = Member(report, seen=now)
        self._drains -= {event.node for event in gone}
        joining = tuple(node for node in state.joining if node in members)
        self.state = state.of(members=members, joining=joining)

    def _infos(self) -> tuple[NodeInfo, ...]:
        return tuple(mb.report.info for mb in self.state.members.values())

    # ---- decisions ----

    def _replan(
        self, job: Job, lost: Sequence[str], cause: str, *, boundary: bool, known: bool = False
    ) -> Change:
        """A new epoch: the plan for who is there, the moves to it, and what they cost."""
        if not job.paused:  # moves that were under way came to nothing: who held what is as before them
            self._held = self.state.plan, self._hosts
        now, old = job.now / 1000, self._held[0]
        state = self.state.of(epoch=self.state.epoch + 1, updated_at=now, change=None, plan=old)
        detect_s = 0.0 if boundary or known or not lost else self.detect_s
        self._pulled = False
        loss = Loss()
        if not boundary and self._plain is not None and self._running is not None:
            fresh = not job.paused  # else nothing was computed since the last recovery
            loss = lost_work(self.world, self._running, lost, job.fraction, self.draw, updated=fresh)
        back_to = job.steps - 1 if loss.whole_step and job.steps else -1
        try:
            if not epoch_change.candidates(state):
                raise InfeasiblePlan("no node can take a stage at present")
            choice = stay.plan_for_change(state, epoch_change.plan_request(state, state.epoch), now)
        except InfeasiblePlan as error:
            self.state, self._plain = state.of(joining=()), None
            parts = pauses((Use.DETECT, detect_s))
            return Change(parts, None, ms(loss.seconds), back_to, f"{cause}; paused: {error}")
        plan = choice.plan
        assert plan is not None
        infos = tuple(mb.report.info for mb in state.members.values())
        dead = self._dead(old, job)
        moved = transition(
            old,
            plan,
            self.world.spec.layers,
            dead=dead,
            links=links_of(self.world.profile, infos),
            gradients=not boundary,
        )
        considered = tuple(stay.member_key(mb) for mb in state.members.values())
        self.state = state.of(
            plan=plan, joining=(), considered=considered, reconsider_at=0.0, trimmed=state.epoch
        )
        self._planned = job.steps
        self._hosts = {node: job.alive[node] for node in (*plan.nodes(), *plan.spares)}
        paced, setup = job.setup is not None, self._run(job, plan)
        running = self._running
        assert running is not None
        work_s = self.physics.decide_s + self.physics.groups_s(running.pipelines, running.depth)
        reason = f"{cause}; {plan.reason}"
        if old is None:
            return Change(pauses((Use.PLAN, work_s)), setup, reason=reason)
        if any(move.kind == CHECKPOINT for move in moved.moves):
            return self._fall_back(job, setup, detect_s, work_s, reason)
        parts = pauses((Use.DETECT, detect_s), (Use.PLAN, work_s), (Use.TRANSFER, moved.seconds))
        if paced:
            lasted = sum(length for _, length in parts) / 1000
            self.state = self.state.of(pauses=(*self.state.pauses, lasted)[-stay.MAX_PAUSES :])
        return Change(parts, setup, ms(loss.seconds), back_to, reason)

    def _fall_back(
        self, job: Job, setup: Setup | None, detect_s: float, work_s: float, reason: str
    ) -> Change:
        read_s = self.world.checkpoint_s(len(job.alive))
        parts = pauses((Use.DETECT, detect_s), (Use.PLAN, work_s), (Use.TRANSFER, read_s))
        return Change(
            parts, setup, back_to=self.last_durable(job), reason=f"{reason}; back to the checkpoint"
        )

    def _dead(self, old: Plan | None, job: Job) -> set[str]:
        """Nodes of the old plan that have nothing any more: gone, or come anew under the same name."""
        if old is None:
            return set()
        hosts = self._held[1]
        return {node for node in hosts if job.alive.get(node) is not hosts[node]}

    def _consider(self, job: Job) -> None:
        """Whether nodes that came are worth a change; if so they pull their layers first."""
        if self._plain is None or self.state.joining or self.state.plan is None:
            return
        state = self.state.of(updated_at=job.now / 1000)
        result = epoch_change.consider_joining(state, job.now / 1000)
        if result is None:
            return
        self.state = result[0]
        if self.state.joining:
            layers = self.world.spec.layers
            share = sum(la.param_bytes + la.state_bytes for la in layers) / max(1, self._depth)
            self._pulled = False
            self.ask(self.moving_s(share), f"pulled {self.state.epoch}")

    def _relieved(self, job: Job) -> bool:
        """What heartbeats would have told of slow nodes, for the coordinator's own rule."""
        state, paces = self.state, dict(self.state.paces)
        assert state.plan is not None
        for node in state.plan.nodes():
            info = state.members[node].report.info
            factor = job.slow.get(node, 1.0)
            known = paces.get(info.incarnation, ComputeSpeed())
            samples = tuple((job.steps - SAMPLES + i, factor) for i in range(SAMPLES))
            paces[info.incarnation] = replace(
                known, epoch=state.plan.epoch, samples=samples, step=job.steps, unit=1.0
            )
        self.state = state.of(paces=paces)
        result = rebalance_stragglers(self.state, job.now / 1000)
        if result is None:
            return False
        self.state = result[0].of(change=None)
        return result[0].change is not None

    def _pair_changes(self, job: Job) -> bool:
        """What heartbeats would have told of links, copies and contention, for the coordinator's own rule."""
        plan, looks = self.state.plan, (job.steps - self._planned) / MIN_STEPS
        doubled = looks >= 1 and looks == int(looks) and not int(looks) & (int(looks) - 1)
        if plan is None or self.state.policy.backup != "auto" or not doubled:
            return False  # links and contention stay as they are, and the observed hazard changes by and by
        truth, infos = self._truth, self._infos()
        gauge = BackupMetrics(
            epoch=plan.epoch,
            steps=MIN_STEPS,
            sending=(truth.link.bytes_per_s,) * MIN_SAMPLES,
            copying=(truth.copy_bytes_per_s,) * MIN_SAMPLES,
            slowed=(1 / (1 - min(truth.contention, 0.99)),) * MIN_SAMPLES,
        )
        gauges = {info.incarnation: gauge for info in infos}
        result = change_backup(self.state.of(gauges=gauges, updated_at=job.now / 1000), job.now / 1000)
        if result is None:
            return False
        self.state = result[0].of(change=None)
        return result[0].change is not None

    # ---- what runs ----

    @property
    def _depth(self) -> int:
        return self._running.depth if self._running else 1

    def _run(self, job: Job, plan: Plan) -> Setup | None:
        """The plan as it truly runs: slow nodes, and what backups expose under the true contention."""
        infos = self._infos()
        slow = tuple((node, factor) for node, factor in job.slow.items() if node in plan.nodes())
        running = self.world.running(plan, infos, slow)
        step_s = running.step_s + self._exposed_s(plan, infos)
        self._running = replace(running, step_s=step_s)
        self._plain = Setup(
            nodes=running.nodes,
            step_ms=max(1, ms(step_s)),
            samples=self.world.samples,
            text=f"{'+'.join(str(len(p.stages)) for p in plan.pipelines)} {plan.gradients}+{plan.state}",
        )
        return self._plain

    def paced(self, job: Job) -> Setup | None:
        return self._plain

    def _exposed_s(self, plan: Plan, infos: Sequence[NodeInfo]) -> float:
        """Seconds of a step; the same for all plans that differ in names only."""
        if not plan.peers:
            return 0.0
        shapes = tuple(
            (p.schedule, len(p.microbatches), tuple((s.first, s.last, s.recompute) for s in p.stages))
            for p in plan.pipelines
        )
        devices = tuple(info.device for info in infos) if len(self.world.types) > 1 else ()
        key = (shapes, plan.gradients, plan.state, devices)
        if key not in self._exposed:
            by = Weighing(profile=self._truth)
            self._exposed[key] = estimate(plan, f"{plan.gradients}+{plan.state}", by, infos).exposed_s
        return max(0.0, self._exposed[key])
