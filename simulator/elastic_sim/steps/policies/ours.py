"""Our own policy: the decisions of the real coordinator code, on virtual time, step by step.

The state is the coordinator's `JobState`. The coordinator's functions decide on the plan, on nodes
that joined (`epoch_change.consider_joining`), on slow nodes (`straggler_policy`) and on backup
schemes (`backup_policy`). `ClusterPhysics` gives the duration of a change, and `lost_work` the work
that is repeated. `elastic_sim.microbatches` simulates messages and the ledger.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import inf

from elastic.core.health.backup_metrics import MIN_SAMPLES, BackupMetrics
from elastic.core.health.compute_speed import SAMPLES, ComputeSpeed
from elastic.core.job import epoch_change, join_policy
from elastic.core.job.state import JobState, JobTransition, Member, Policy
from elastic.core.policy.backup_policy import MIN_STEPS, change_backup
from elastic.core.policy.straggler_policy import rebalance_stragglers
from elastic.core.protocol.messages import NodePhase, NodeReport
from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import NodeInfo, Plan
from elastic.planning.backup.backup_cost import Weighing, estimate
from elastic.planning.placement.migration import CHECKPOINT, links_of, transition
from elastic_sim.steps.engine import JobView, PlanInForce, Reconfiguration, Setup
from elastic_sim.steps.policies.base import PolicyBase, PolicyDescription, pauses, to_ms
from elastic_sim.steps.policies.lost_work import LostWork, lost_work
from elastic_sim.steps.world import PricedPlan, SimulatedWorld
from elastic_sim.traces.trace import Event

SCHEMES = (
    "auto", "stream+snapshot", "stream:4+snapshot", "stream+replay", "log+snapshot", "log+replay",
    "recompute+snapshot", "stream+replica", "log+replica", "reduce+replica", "recompute+replica",
)  # fmt: skip
NO_NODE_LIMIT = 1 << 20
CLOCK_START_S = 1.0
"""Coordinator's time at the beginning of the trace: to its functions, a time of 0 is unknown."""
DEADLINE_MARGIN_S = 2.0
"""Seconds before the end of a notice at which a step is abandoned, as in the coordinator."""


def clock_s(job: JobView) -> float:
    """Return the coordinator's time."""
    return CLOCK_START_S + job.now / 1000


class OurPolicy(PolicyBase):
    """This project's runtime; `our_policy` makes a class for each pair of backup schemes."""

    detect_s = 3.0
    pair: str

    def __init__(self, world: SimulatedWorld, seed: int = 0) -> None:
        super().__init__(world, seed)
        policy = Policy(
            max_nodes=NO_NODE_LIMIT,
            workers_per_node=world.profile.tp,
            backup=self.pair,
            profile=world.profile,
        )
        self.state = JobState(policy=policy, spec=world.spec)
        self._true_profile = replace(world.profile, contention=world.physics.contention)
        self._running: PricedPlan | None = None
        self._held: tuple[Plan | None, dict[str, Event]] = None, {}
        """The last plan whose transfers were complete, and its nodes. A node that was lost and
        joined again under the same name has another event, and none of the state."""
        self._hosts: dict[str, Event] = {}
        """Nodes of the running plan, with the event at which they joined."""
        self._drains: set[str] = set()
        self._prefetched = False
        """Whether the joining nodes have their layers."""
        self._slow_steps = 0
        self._planned_at = 0
        """Step at which the running plan was made."""

    # ---- events ----

    def on_start(self, job: JobView) -> Reconfiguration:
        self._update_members(job, job.alive.values(), ())
        return self._replan(job, (), "start", boundary=True)

    def on_membership(
        self, job: JobView, joined: Sequence[Event], lost: Sequence[Event]
    ) -> Reconfiguration | None:
        needed = self._needed()
        self._update_members(job, joined, lost)
        lost_needed = tuple(event.node for event in lost if event.node in needed)
        if self._nominal is None and job.alive:
            cause = "nodes joined" if joined else "nodes lost"
            return self._replan(job, (), cause, boundary=False)
        if lost_needed:
            return self._replan(job, lost_needed, f"{' '.join(lost_needed)} lost", boundary=False)
        self._consider_joining(job)
        return None

    def on_notice(self, job: JobView, leaving: Sequence[Event]) -> Reconfiguration | None:
        """Drain at the end of the step, or shortly before the notice ends if that is earlier."""
        self._drains |= {event.node for event in leaving}
        members = {
            node: replace(member, draining=True) if node in self._drains else member
            for node, member in self.state.members.items()
        }
        self.state = self.state.of(members=members)
        left_s = min(event.seconds for event in leaving) - job.now / 1000
        if job.setup is None or not self._needed() & self._drains:
            return None
        if left_s < (job.length_ms - job.progress_ms) / 1000 + DEADLINE_MARGIN_S:
            job.set_timer(max(0.0, left_s - DEADLINE_MARGIN_S), "deadline")
        return None

    def on_timer(self, job: JobView, name: str) -> Reconfiguration | None:
        if name == f"prefetched {self.state.epoch}":
            self._prefetched = True
        elif name == "deadline" and self._needed() & self._drains & job.alive.keys():
            return self._replan(job, (), "notice runs out", boundary=False, known=True)
        return None

    def on_speed_change(self, job: JobView) -> Reconfiguration | None:
        self._slow_steps = 0
        if self.state.plan is not None and self._nominal is not None:
            self._run(job, self.state.plan)
        return super().on_speed_change(job)

    def on_step_end(self, job: JobView) -> Reconfiguration | None:
        self.write_checkpoint_in_background(job)
        if self._drains and self._drains & self._needed():
            return self._replan(job, (), "drain", boundary=True)
        if self._prefetched and self.state.joining:
            cause = f"join {' '.join(self.state.joining)}"
            return self._replan(job, (), cause, boundary=True, joins=True)
        if job.slow or any(pace.factor != 1.0 for pace in self.state.paces.values()):
            self._slow_steps += 1
            if self._slow_steps == SAMPLES and self._replans_for_stragglers(job):
                return self._replan(job, (), "slow nodes", boundary=True)
        if self._rechooses_backup(job):
            return self._replan(job, (), "other backup schemes", boundary=True)
        if self.state.reconsider_at and clock_s(job) >= self.state.reconsider_at:
            self._consider_joining(job)
        return None

    # ---- members ----

    def _needed(self) -> set[str]:
        """Return the nodes without which the running plan cannot continue."""
        plan = self.state.plan
        return {*plan.nodes(), *(peer for _, peer in plan.peers)} if plan else set()

    def _update_members(
        self, job: JobView, joined: Collection[Event], lost: Sequence[Event]
    ) -> None:
        now = clock_s(job)
        state = join_policy.count_node_seconds(self.state, now, left=len(lost)).of(updated_at=now)
        members = {n: member for n, member in state.members.items() if n in job.alive}
        for event in joined:
            info = self.world.info(event)
            report = NodeReport(
                info=info, phase=NodePhase.RUNNING, epoch=state.epoch, able=True, accelerated=True
            )
            members[info.node] = Member(report, seen=now)
        self._drains -= {event.node for event in lost}
        joining = tuple(node for node in state.joining if node in members)
        self.state = state.of(members=members, joining=joining)

    def _infos(self) -> tuple[NodeInfo, ...]:
        return tuple(member.report.info for member in self.state.members.values())

    # ---- decisions ----

    def _replan(
        self,
        job: JobView,
        lost: Sequence[str],
        cause: str,
        *,
        boundary: bool,
        known: bool = False,
        joins: bool = False,
    ) -> Reconfiguration:
        """Begin a new epoch for the nodes present and return its plan, transfers, and their time.

        `boundary`: at the end of a step. `known`: the loss was announced and needs no detection.
        `joins`: nodes join, which was found to pay.
        """
        if not job.paused:  # until transfers are complete, the state stays where it was
            self._held = self.state.plan, self._hosts
        now, (old, hosts) = clock_s(job), self._held
        state = self.state.of(epoch=self.state.epoch + 1, updated_at=now, change=None, plan=old)
        detect_s = 0.0 if boundary or known or not lost else self.detect_s
        self._prefetched = False
        loss = LostWork()
        if not boundary and self._nominal is not None and self._running is not None:
            updated = not job.paused  # if paused, nothing was computed since the last recovery
            done = job.progress_ms / job.length_ms
            loss = lost_work(self.world, self._running, lost, done, self.rng, updated=updated)
        back_to = job.steps - 1 if loss.whole_step and job.steps else -1
        try:
            if not epoch_change.candidates(state):
                raise InfeasiblePlan("no node can take a stage at present")
            request = epoch_change.plan_request(state, state.epoch)
            request = replace(request, keeps_pipelines=not joins)
            choice = join_policy.plan_for_change(state, request, now)
        except InfeasiblePlan as error:
            self.state, self._nominal = state.of(joining=()), None
            parts, reason = pauses(detect_s=detect_s), f"{cause}; paused: {error}"
            return Reconfiguration(parts, None, to_ms(loss.seconds), back_to, reason)
        plan = choice.plan
        assert plan is not None
        moved = transition(
            old,
            plan,
            self.world.spec.layers,
            dead={node for node in hosts if job.alive.get(node) is not hosts[node]},
            links=links_of(self.world.profile, self._infos()),
            gradients=not boundary,
        )
        again_at = now + choice.retry_s if choice.retry_s < inf else 0.0
        work_s = self._adopt(job, state, plan, again_at)
        reason = f"{cause}; {plan.reason}"
        if old is None:
            parts = pauses(plan_s=work_s)
            return Reconfiguration(parts, self._nominal, reason=reason, in_force=self._in_force)
        transfer_s, lost_ms = moved.seconds, to_ms(loss.seconds)
        fallback = any(move.kind == CHECKPOINT for move in moved.moves)
        if fallback:
            transfer_s = self.checkpoint_s(job)
            lost_ms, back_to = 0, self.durable_step(job)
            reason += "; back to the checkpoint"
        parts = pauses(detect_s=detect_s, plan_s=work_s, transfer_s=transfer_s)
        if job.setup is not None and not fallback:
            lasted = sum(length for _, length in parts) / 1000
            recent = (*self.state.pauses, lasted)[-join_policy.MAX_PAUSES :]
            self.state = self.state.of(pauses=recent)
        return Reconfiguration(
            parts, self._nominal, lost_ms, back_to, reason, in_force=self._in_force
        )

    def _adopt(self, job: JobView, state: JobState, plan: Plan, again_at: float) -> float:
        """Run `plan` from now on and return the seconds of planning and building groups.

        `again_at`: time at which nodes that it leaves idle are considered again; 0: never."""
        considered = tuple(join_policy.member_key(member) for member in state.members.values())
        self.state = state.of(
            plan=plan,
            joining=(),
            considered=considered,
            reconsider_at=again_at,
            trimmed=state.epoch,
        )
        self._planned_at = job.steps
        self._hosts = {node: job.alive[node] for node in (*plan.nodes(), *plan.spares)}
        running = self._run(job, plan)
        return self.regroup_s(running.pipelines, running.depth)

    def _consider_joining(self, job: JobView) -> None:
        """If new nodes are worth a change, let them prefetch their layers first."""
        if self._nominal is None or self.state.joining or self.state.plan is None:
            return
        now = clock_s(job)
        result = epoch_change.consider_joining(self.state.of(updated_at=now), now)
        if result is None:
            return
        self.state = result[0]
        if self.state.joining:
            depth = self._running.depth if self._running else 1
            self._prefetched = False
            prefetch_s = self.transfer_s(self.world.state_bytes / depth)
            job.set_timer(prefetch_s, f"prefetched {self.state.epoch}")

    def _replans_for_stragglers(self, job: JobView) -> bool:
        """Apply the coordinator's straggler rule to true speeds; return whether the plan
        changes."""
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
        return self._takes_effect(rebalance_stragglers(self.state, clock_s(job)))

    def _rechooses_backup(self, job: JobView) -> bool:
        """Apply the coordinator's backup rule to true bandwidths; return whether the plan changes.

        Links and contention are constant, so the rule is evaluated after 1, 2, 4, ... periods.
        """
        plan, (periods, rest) = self.state.plan, divmod(job.steps - self._planned_at, MIN_STEPS)
        doubled = not rest and periods > 0 and periods.bit_count() == 1
        if plan is None or self.pair != "auto" or not doubled:
            return False
        profile = self._true_profile
        gauge = BackupMetrics(
            epoch=plan.epoch,
            steps=MIN_STEPS,
            sending=(profile.link.bytes_per_s,) * MIN_SAMPLES,
            copying=(profile.copy_bytes_per_s,) * MIN_SAMPLES,
            slowed=(1 / (1 - min(profile.contention, 0.99)),) * MIN_SAMPLES,
        )
        gauges = {info.incarnation: gauge for info in self._infos()}
        now = clock_s(job)
        state = self.state.of(gauges=gauges, updated_at=now)
        return self._takes_effect(change_backup(state, now))

    def _takes_effect(self, result: JobTransition | None) -> bool:
        """Store the state that a rule returned, and return whether the rule began a change."""
        if result is None:
            return False
        self.state = result[0].of(change=None)
        return result[0].change is not None

    # ---- the running plan ----

    def _run(self, job: JobView, plan: Plan) -> PricedPlan:
        """Run `plan` with its true step time: with slow nodes and the backups' true contention."""
        infos = self._infos()
        slow = tuple((node, factor) for node, factor in job.slow.items() if node in plan.nodes())
        running = self.world.running(plan, infos, slow)
        step_s = running.step_s
        if plan.peers:
            by, pair = Weighing(profile=self._true_profile), f"{plan.gradients}+{plan.state}"
            step_s += max(0.0, estimate(plan, pair, by, infos).exposed_s)
        self._running = replace(running, step_s=step_s)
        self._in_force = PlanInForce(plan, infos)
        depths = "+".join(str(len(p.stages)) for p in plan.pipelines)
        self._nominal = Setup(
            nodes=running.nodes,
            step_ms=max(1, to_ms(step_s)),
            samples=self.world.samples,
            text=f"{depths} {plan.gradients}+{plan.state}",
        )
        return self._running

    def with_stragglers(self, job: JobView) -> Setup | None:
        return self._nominal


def our_policy(pair: str) -> type[OurPolicy]:
    """Return our policy with one pair of backup schemes, or with `auto`."""
    about = PolicyDescription(
        name="ours" if pair == "auto" else f"ours:{pair}",
        what="adaptive pipelines, micro-batch recovery, backup " + pair,
        source="elastic.core and elastic.planning themselves; a silent node is lost after its "
        "lease of 3 s; times of planning and building groups from physics",
        ours=True,
    )
    return type("OurPolicy", (OurPolicy,), {"about": about, "pair": pair})
