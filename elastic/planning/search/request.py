"""The request to the planner, its checks, and the nodes that it may use."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from elastic.domain.errors import FieldError, InfeasiblePlan
from elastic.domain.types import JobSpec, NodeInfo, Plan
from elastic.planning.backup.backup_cost import Weighing
from elastic.planning.backup.peer_assignment import natural
from elastic.planning.cost.profile import LinkProfile, Profile, profile_of
from elastic.planning.plan.schemes import schemes_of
from elastic.planning.plan.shape import parse_shape
from elastic.planning.schedule.schedule import SCHEDULES

MAX_NODES_BOTH_SHARES = 128
"""Maximum nodes for which shapes are searched for several fractions of streamed gradients."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything that a plan depends on."""

    spec: JobSpec
    nodes: tuple[NodeInfo, ...]
    epoch: int
    tp: int = 0
    """Workers per unit; 0: as in the spec."""
    shape: str = "auto"
    """auto, a number of pipelines, or their depths such as 3+1."""
    current: Plan | None = None
    """The plan that is running: where layers are now."""
    dead: frozenset[str] = frozenset()
    """Lost nodes. They get no stage, and their copies are gone."""
    link_bytes_per_s: float = 0.0
    """Bandwidth between nodes if there is no profile; 0: unknown, treated as infinite. The spec's
    layer times must then be in seconds."""
    latency_s: float = 0.0
    backup: str = "auto"
    """auto, or GRADIENTS+STATE such as stream:4+snapshot."""
    max_nodes: int = 0
    """Maximum number of nodes that hold stages; 0: all."""
    profile: Profile | None = None
    """Times of device types, and links; None: the spec's own figures are used."""
    slow: tuple[tuple[str, float], ...] = ()
    """(node, factor) of nodes whose speed differs from their type's profile; above 1: slower."""
    schedule: str = "auto"
    """auto, 1f1b, interleaved or zero-bubble."""
    hazard_per_s: float = 0.0
    """Observed losses per node and second; 0: unknown, and pauses of changes are not weighed."""
    pause_s: float = 0.0
    """Seconds without training during a change of plan, besides the transfer of state."""
    keeps_pipelines: bool = True
    """Whether the whole pipelines of the current plan may stay as they are, without other nodes,
    if this makes more progress until the next loss."""
    weighing: Weighing | None = None
    """Input to the choice of backup schemes for `auto`; None: made from the profile and the hazard,
    if the profile knows links."""

    @property
    def workers(self) -> int:
        """Workers per unit."""
        return self.tp or self.spec.tp

    @property
    def stream_shares(self) -> tuple[float, ...]:
        """Fractions of gradient bytes streamed per micro-batch; shapes are searched for each.

        The best schemes depend on the shape, and the best shape on the schemes. Because closed
        forms are not exact, the search with another fraction may find a better shape.
        """
        fixed = () if self.backup == "auto" else (schemes_of(self.backup)[0].share,)
        if self.profile is None or not self.profile.link.bytes_per_s:
            return fixed or (1.0,)
        if len(self.nodes) > MAX_NODES_BOTH_SHARES:
            return fixed or (0.0,)
        return tuple(dict.fromkeys((*fixed, 1.0, 0.0)))

    def backup_weighing(self) -> Weighing | None:
        """Return the input to the choice of schemes; None: links are unknown, or schemes fixed."""
        if self.backup != "auto" or self.weighing is not None:
            return self.weighing
        if self.profile is None or not self.profile.link.bytes_per_s:
            return None
        return Weighing(
            profile=self.profile,
            slow=self.slow,
            hazard_per_s=self.hazard_per_s,
            pause_s=self.pause_s,
        )

    def effective_profile(self) -> Profile:
        """Return the given profile, or one made from the spec's own figures."""
        if self.profile is not None:
            return self.profile
        link = LinkProfile(self.link_bytes_per_s, self.latency_s)
        return profile_of(self.spec.layers, self.workers, self.spec.tokens_per_microbatch, link)


def check_request(request: PlanRequest) -> None:
    """Raise FieldError for a request that no plan can satisfy."""
    spec = request.spec
    if spec.n_layers < 1 or spec.n_microbatches < 1:
        counts = f"{spec.n_layers} layers, {spec.n_microbatches} micro-batches"
        raise FieldError("spec", counts, "at least one of each")
    for name in ("forward_s", "backward_s"):
        for i, layer in enumerate(spec.layers):
            value = getattr(layer, name)
            if not isfinite(value) or value < 0:
                remedy = "a finite time of at least 0 is needed"
                raise FieldError(f"spec.layers[{i}].{name}", value, remedy)
    if request.profile is not None and len(request.profile.layers) != spec.n_layers:
        remedy = f"the job has {spec.n_layers} layers: measure it again"
        raise FieldError("Profile.layers", len(request.profile.layers), remedy)
    parse_shape(request.shape)
    if request.backup != "auto":
        schemes_of(request.backup)
    if request.schedule not in ("auto", *SCHEDULES):
        remedy = f"auto, or one of {', '.join(SCHEDULES)}"
        raise FieldError("schedule", request.schedule, remedy)
    for node, factor in request.slow:
        if not isfinite(factor) or factor <= 0:
            raise FieldError(f"slow[{node}]", factor, "a factor above 0 is needed")


def select_nodes(request: PlanRequest) -> tuple[list[NodeInfo], list[NodeInfo]]:
    """Return (nodes that may hold stages, spares).

    If `max_nodes` excludes some, nodes that hold stages now come first, then those with a high
    standing after their pre-flight check. Raises InfeasiblePlan if no node can hold a stage.
    """
    tp = request.workers
    live = sorted(
        (info for info in request.nodes if info.node not in request.dead),
        key=lambda info: natural(info.node),
    )
    able = [info for info in live if info.workers >= tp]
    if not able:
        short = f"; {live[0].node} has {live[0].workers} workers, a unit needs {tp}" if live else ""
        alive = f"{len(live)} of {len(request.nodes)} nodes are alive"
        raise InfeasiblePlan(f"no node can take a stage: {alive}{short}")
    holding = set(request.current.nodes()) if request.current else set()
    able.sort(key=lambda info: (info.node not in holding, -info.standing))
    active = able[: request.max_nodes or len(able)]
    active.sort(key=lambda info: natural(info.node))
    chosen = {info.node for info in active}
    return active, [info for info in live if info.node not in chosen]
