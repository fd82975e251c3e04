"""One job on one kind of cluster: what plans take there, for whoever asks.

Every policy's step is priced by the same cost model (`elastic.planning.cost.predict`, action by action), be the plan ours or
a rival's. Answers are remembered: traces visit the same numbers of nodes again and again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from elastic.domain.errors import FieldError, InfeasiblePlan
from elastic.domain.types import JobSpec, NodeInfo, Plan
from elastic.planning.cost.predict import predict
from elastic.planning.cost.profile import Profile
from elastic.planning.cost.published_profiles import published_profile
from elastic.planning.search.search import PlanRequest, make_plan
from elastic_sim.steps import rivals
from elastic_sim.steps.clusters import NodeType, Training
from elastic_sim.steps.physics import Physics
from elastic_sim.traces.trace import Event

ENDLESS = 1 << 40
"""Steps of a job that never ends."""
PLANNED_CONTENTION = 0.2
"""What planners take contention to be; what it is, physics says."""


@dataclass(frozen=True, slots=True)
class Running:
    """A plan as it runs."""

    plan: Plan
    step_s: float
    nodes: int
    """That hold stages."""
    pace_s: float
    """A micro-batch through the slowest stage."""
    fill_s: float
    """A micro-batch through all stages of the slowest pipeline, forth and back."""
    pipelines: int
    depth: int
    """Stages of the deepest."""


@dataclass(eq=False)
class World:
    """A job, node types (the first is that of nodes whose trace names none), physics.

    `profile`: measured; None: from public sizes and rates.
    """

    training: Training
    types: tuple[NodeType, ...]
    physics: Physics = field(default_factory=Physics)
    profile: Profile = None  # type: ignore[assignment]
    spec: JobSpec = field(init=False)
    state_bytes: int = field(init=False)
    """Parameters and optimizer state of the whole model."""
    _cluster: rivals.Equal = field(init=False)
    _found: dict[tuple[str, int, int], Running | None] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        first = self.types[0]
        if any(kind.devices != first.devices for kind in self.types):
            counts = ", ".join(f"{kind.name}: {kind.devices}" for kind in self.types)
            raise FieldError("--nodes-of", counts, "node types of one job need the same number of devices")
        if self.profile is None:
            profile = published_profile(
                self.training.model,
                [kind.device for kind in self.types],
                microbatch=self.training.microbatch,
                tp=first.devices,
                inside=first.inside,
                link=min((kind.link for kind in self.types), key=lambda link: link.bytes_per_s),
            )
            self.profile = replace(
                profile, contention=PLANNED_CONTENTION, copy_bytes_per_s=self.physics.copying_bytes_per_s
            )
        self.spec = JobSpec(
            layers=self.profile.layers,
            n_microbatches=self.training.microbatches,
            n_steps=ENDLESS,
            tp=self.profile.tp,
            tokens_per_microbatch=self.profile.tokens_per_microbatch,
        )
        self.state_bytes = sum(layer.param_bytes + layer.state_bytes for layer in self.profile.layers)
        memory = self.profile.devices[0].memory_bytes or 1 << 60
        self._cluster = rivals.Equal(self.profile, self.spec.n_microbatches, memory)

    # ---- sizes ----

    @property
    def samples(self) -> int:
        """Of a step."""
        return self.training.microbatches * self.training.microbatch

    def checkpoint_s(self, nodes: int) -> float:
        """Writing a durable checkpoint, or reading one."""
        return self.physics.storage_s(self.state_bytes, self.devices(nodes))

    @property
    def link_bytes_per_s(self) -> float:
        """Of a node, all its devices together."""
        return self.profile.link.bytes_per_s * self.profile.tp

    def devices(self, nodes: int) -> int:
        return nodes * self.types[0].devices

    # ---- nodes ----

    def type_of(self, event: Event) -> NodeType:
        """By the type that the trace names, where the cluster has it."""
        return next((kind for kind in self.types if event.type in (kind.name, kind.device)), self.types[0])

    def info(self, event: Event) -> NodeInfo:
        return NodeInfo(
            node=event.node,
            incarnation=f"{event.node}@{event.seconds:g}",
            vault="",
            domain=event.zone,
            workers=self.profile.tp,
            device=self.type_of(event).device if len(self.profile.devices) > 1 else "",
        )

    # ---- what plans take ----

    def running(
        self, plan: Plan, nodes: Sequence[NodeInfo], slow: Sequence[tuple[str, float]] = ()
    ) -> Running:
        """`plan` without its backups."""
        found = predict(replace(plan, gradients="none", state="none"), self.profile, nodes, slow)
        paces = [max(t.forward_s + t.backward_s + 2 * t.hop_s for t in times) for times in found.stages]
        fills = [sum(t.forward_s + t.backward_s + 2 * t.hop_s for t in times) for times in found.stages]
        depth = max(len(pipeline.stages) for pipeline in plan.pipelines)
        return Running(
            plan, found.step_s, len(plan.nodes()), max(paces), max(fills), len(plan.pipelines), depth
        )

    def best(self, nodes: int) -> Running | None:
        """The fastest plan known for so many equal nodes, whoever found it."""
        return self._remember("best", nodes, 0)

    def varuna(self, nodes: int) -> Running | None:
        """The best grid of equal pipelines: what Varuna's planner takes."""
        return self._remember("varuna", nodes, 0)

    def oobleck(self, nodes: int) -> Running | None:
        """The best pipelines from Oobleck's templates."""
        return self._remember("oobleck", nodes, 0)

    def grid(self, nodes: int, depth: int) -> Running | None:
        """As many equal pipelines of one depth as fit."""
        return self._remember("grid", nodes, depth)

    def _remember(self, whose: str, nodes: int, depth: int) -> Running | None:
        key = (whose, nodes, depth)
        if key not in self._found:
            self._found[key] = self._price(whose, nodes, depth) if nodes > 0 else None
        return self._found[key]

    def _price(self, whose: str, n: int, depth: int) -> Running | None:
        if whose == "best":
            known = [self._ours(n), self.varuna(n), self.oobleck(n)]
            return min((r for r in known if r is not None), key=lambda r: r.step_s, default=None)
        nodes, cluster = self.equal(n), self._cluster
        if whose == "grid":
            plan = rivals.grid(cluster, nodes, depth)
        else:
            find = rivals.varuna if whose == "varuna" else rivals.oobleck
            plan = find(cluster, nodes, lambda plan: self.running(plan, nodes).step_s)
        return self.running(plan, nodes) if plan is not None else None

    def equal(self, n: int) -> tuple[NodeInfo, ...]:
        """Nodes of the first type."""
        return tuple(self.info(Event(0, "add", f"n{i}")) for i in range(n))

    def _ours(self, n: int) -> Running | None:
        nodes = self.equal(n)
        request = PlanRequest(spec=self.spec, nodes=nodes, epoch=1, profile=self.profile, backup="none+none")
        try:
            return self.running(make_plan(request), nodes)
        except InfeasiblePlan:
            return None

    @property
    def compute_s(self) -> float:
        """Device seconds of a step's computing on the first type alone, whatever memory says."""
        times = self.profile.devices[0].layers
        return self.spec.n_microbatches * sum(t.forward_s + t.backward_s for t in times)
