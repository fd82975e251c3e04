"""One training job on one kind of cluster: plans and their durations.

The cost model (`elastic.planning.cost.predict`, action by action) gives the step time of every
plan, ours or a rival's. Plans are cached, because the same numbers of nodes recur in a trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from elastic.domain.errors import FieldError, InfeasiblePlan
from elastic.domain.types import JobSpec, NodeInfo, Plan
from elastic.planning.cost.predict import predict
from elastic.planning.cost.profile import Profile
from elastic.planning.cost.published_profiles import published_profile
from elastic.planning.search.search import PlanRequest, make_plan
from elastic_sim.steps.clusters import NodeType, TrainingSetup
from elastic_sim.steps.physics import ClusterPhysics
from elastic_sim.steps.rerouted_schedule import GridStage, rerouted_step_s, spread_losses
from elastic_sim.steps.rival_planners import EqualNodes, plan_grid, plan_oobleck, plan_varuna
from elastic_sim.traces.trace import Event

ENDLESS_STEPS = 1 << 40
"""Number of steps of a job that never ends."""
ASSUMED_CONTENTION = 0.2
"""Contention that planners assume; the simulated contention is in `ClusterPhysics`."""


@dataclass(frozen=True, slots=True)
class PricedPlan:
    """A plan with its predicted durations."""

    plan: Plan
    step_s: float
    nodes: int
    """Number of nodes that hold stages."""
    slowest_stage_s: float
    """Seconds of one micro-batch on the slowest stage, forward and backward, with its messages."""
    pipeline_latency_s: float
    """Seconds of one micro-batch through the slowest pipeline, forward and backward."""
    pipelines: int
    depth: int
    """Number of stages of the deepest pipeline."""

    @property
    def shape(self) -> tuple[int, int]:
        return self.pipelines, self.depth


class SimulatedWorld:
    """A job with its node types and physics; gives plans and their durations.

    A node has the first of `types` if the trace names no type for it. If `profile` is None, it is
    computed from public sizes and rates.
    """

    def __init__(
        self,
        training: TrainingSetup,
        types: tuple[NodeType, ...],
        physics: ClusterPhysics,
        profile: Profile | None = None,
    ) -> None:
        if any(kind.devices != types[0].devices for kind in types):
            counts = ", ".join(f"{kind.name}: {kind.devices}" for kind in types)
            remedy = "node types of one job need the same number of devices"
            raise FieldError("--nodes-of", counts, remedy)
        self.training, self.types, self.physics = training, types, physics
        self.profile = profile or self._published_profile()
        self.spec = JobSpec(
            layers=self.profile.layers,
            n_microbatches=training.microbatches,
            n_steps=ENDLESS_STEPS,
            tp=self.profile.tp,
            tokens_per_microbatch=self.profile.tokens_per_microbatch,
        )
        self.state_bytes = sum(la.param_bytes + la.state_bytes for la in self.profile.layers)
        """Bytes of parameters and optimizer state of the whole model."""
        memory = self.profile.devices[0].memory_bytes or 1 << 60
        self._cluster = EqualNodes(self.profile, self.spec.n_microbatches, memory)
        self._plans: dict[tuple[object, ...], PricedPlan | None] = {}
        self._rerouted: dict[tuple[Plan, int], float] = {}

    def _published_profile(self) -> Profile:
        profile = published_profile(
            self.training.model,
            [kind.device for kind in self.types],
            microbatch=self.training.microbatch,
            tp=self.types[0].devices,
            inside=self.types[0].inside,
            link=min((kind.link for kind in self.types), key=lambda link: link.bytes_per_s),
        )
        return replace(
            profile,
            contention=ASSUMED_CONTENTION,
            copy_bytes_per_s=self.physics.exposed_copy_bytes_per_s,
        )

    # ---- sizes ----

    @property
    def samples(self) -> int:
        """Samples per step."""
        return self.training.microbatches * self.training.microbatch

    def checkpoint_s(self, nodes: int) -> float:
        """Return the seconds to write or to read a durable checkpoint."""
        return self.physics.storage_s(self.state_bytes, self.devices(nodes))

    def host_copy_s(self, nodes: int) -> float:
        """Return the seconds to copy the state to host memory, each part on one device."""
        return self.physics.host_copy_s(self.state_bytes, self.devices(nodes))

    @property
    def link_bytes_per_s(self) -> float:
        """Bandwidth of one node, all its devices together."""
        return self.profile.link.bytes_per_s * self.profile.tp

    def devices(self, nodes: int) -> int:
        return nodes * self.types[0].devices

    @property
    def compute_s(self) -> float:
        """Node-seconds of computing per step on the first node type, without recomputation."""
        times = self.profile.devices[0].layers
        return self.spec.n_microbatches * sum(t.forward_s + t.backward_s for t in times)

    # ---- nodes ----

    def type_of(self, event: Event) -> NodeType:
        """Return the node type that the trace names; the first type if it names none of ours."""
        named = (kind for kind in self.types if event.type in (kind.name, kind.device))
        return next(named, self.types[0])

    def info(self, event: Event) -> NodeInfo:
        return NodeInfo(
            node=event.node,
            incarnation=f"{event.node}@{event.seconds:g}",
            vault="",
            domain=event.zone,
            workers=self.profile.tp,
            device=self.type_of(event).device if len(self.profile.devices) > 1 else "",
        )

    def equal_nodes(self, n: int) -> tuple[NodeInfo, ...]:
        """Return `n` nodes of the first type."""
        return tuple(self.info(Event(0, "add", f"n{i}")) for i in range(n))

    # ---- plans ----

    def running(
        self, plan: Plan, nodes: Sequence[NodeInfo], slow: Sequence[tuple[str, float]] = ()
    ) -> PricedPlan:
        """Return the durations of `plan` without backups. `slow`: (node, factor) of slow nodes."""
        found = predict(replace(plan, gradients="none", state="none"), self.profile, nodes, slow)
        stages = [
            [t.forward_s + t.backward_s + 2 * t.hop_s for t in times] for times in found.stages
        ]
        return PricedPlan(
            plan=plan,
            step_s=found.step_s,
            nodes=len(plan.nodes()),
            slowest_stage_s=max(map(max, stages)),
            pipeline_latency_s=max(map(sum, stages)),
            pipelines=len(plan.pipelines),
            depth=max(len(pipeline.stages) for pipeline in plan.pipelines),
        )

    def best(self, nodes: int) -> PricedPlan | None:
        """Return the fastest plan of all planners for `nodes` equal nodes; None: no plan fits."""
        ours = self._fastest(self._plan_ours, nodes)
        found = (plan for plan in (ours, self.varuna(nodes), self.oobleck(nodes)) if plan)
        return min(found, key=lambda plan: plan.step_s, default=None)

    def varuna(self, nodes: int) -> PricedPlan | None:
        """Return the best grid of equal pipelines, as Varuna plans it; None: no plan fits."""
        return self._fastest(plan_varuna, nodes)

    def oobleck(self, nodes: int) -> PricedPlan | None:
        """Return the best pipelines from Oobleck's templates; None: no plan fits."""
        return self._fastest(plan_oobleck, nodes)

    def grid(self, nodes: int, depth: int) -> PricedPlan | None:
        """Return as many equal pipelines of one depth as fit; None: no plan fits."""
        return self._fastest(plan_grid, nodes, depth)

    def rerouted_step_s(self, grid: PricedPlan, lost: int) -> float:
        """Return the seconds of a step of `grid` in which peers do the work of lost workers.

        The losses are spread over the stages. A step is not shorter than one without losses.
        Cached.
        """
        key = grid.plan, lost
        if key not in self._rerouted:
            shares = [len(pipeline.microbatches) for pipeline in grid.plan.pipelines]
            seconds = rerouted_step_s(
                self._grid_stages(grid.plan), shares, spread_losses(grid.depth, lost)
            )
            self._rerouted[key] = max(grid.step_s, seconds)
        return self._rerouted[key]

    def _grid_stages(self, plan: Plan) -> list[GridStage]:
        """Return the stages of a grid, all of whose pipelines have the same ones."""
        times = predict(plan, self.profile, self.equal_nodes(len(plan.nodes()))).stages[0]
        k = len(plan.pipelines)
        per_byte = 2 * (k - 1) / k * self.profile.link.s_per_byte
        return [
            GridStage(
                times=time,
                tail_s=self._cluster.tail(stage.first, stage.last, per_byte),
                ahead=self._cluster.most_ahead(stage.first, stage.last, stage.recompute),
            )
            for time, stage in zip(times, plan.pipelines[0].stages, strict=True)
        ]

    def _plan_ours(self, cluster: EqualNodes, nodes: tuple[NodeInfo, ...]) -> list[Plan]:
        request = PlanRequest(
            spec=self.spec, nodes=nodes, epoch=1, profile=cluster.profile, backup="none+none"
        )
        try:
            return [make_plan(request)]
        except InfeasiblePlan:
            return []

    def _fastest(
        self, planner: Callable[..., list[Plan]], nodes: int, *more: int
    ) -> PricedPlan | None:
        """Return the fastest of a planner's plans for `nodes` equal nodes, or None. Cached."""
        key = (planner, nodes, *more)
        if key not in self._plans:
            infos = self.equal_nodes(nodes)
            plans = planner(self._cluster, infos, *more) if nodes > 0 else []
            priced = (self.running(plan, infos) for plan in plans)
            self._plans[key] = min(priced, key=lambda plan: plan.step_s, default=None)
        return self._plans[key]
