"""What the planner is asked, and its checks."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite

from elastic.domain.errors import FieldError, InfeasiblePlan
from elastic.domain.types import JobSpec, NodeInfo, Plan
from elastic.planning.backup.backup_cost import Weighing
from elastic.planning.backup.peer_assignment import natural
from elastic.planning.cost.profile import LinkProfile, Profile, profile_of
from elastic.planning.plan.schemes import schemes_of
from elastic.planning.schedule.schedule import SCHEDULES
from elastic.planning.search.fixed_shape import parse_shape

MAX_NODES_BOTH_SHARES = 128
"""Above this shapes are searched once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything that a plan depends on."""

    spec: JobSpec
    nodes: tuple[NodeInfo, ...]
    epoch: int
    tp: int = 0
    """Workers of a unit; 0: as the spec says."""
    shape: str = "auto"
    """auto | number of pipelines | depths, as 3+1."""
    current: Plan | None = None
    """Where layers are now."""
    dead: frozenset[str] = frozenset()
    """Nodes that can take nothing."""
    link_bytes_per_s: float = 0.0
    """Bandwidth between nodes where there is no profile; 0: unknown, taken as infinite. Needs layer times in true
    seconds."""
    latency_s: float = 0.0
    backup: str = "auto"
    """auto, or GRADIENTS+STATE as stream:4+snapshot."""
    max_nodes: int = 0
    """Nodes that may hold stages; 0: all."""
    profile: Profile | None = None
    """Times of device types, and links; None: the spec's own figures."""
    slow: tuple[tuple[str, float], ...] = ()
    """(node, factor) of nodes that were seen to compute slower than their type's profile says."""
    schedule: str = "auto"
    """auto | 1f1b | interleaved | zero-bubble."""
    hazard_per_s: float = 0.0
    """Losses per node and second, as observed; 0: unknown, nodes are taken to stay."""
    pause_s: float = 0.0
    """Seconds for which a change of plan stops training, bytes to move aside."""
    weighing: Weighing | None = None
    """What the schemes of `auto` are chosen by; None: the profile and the hazard above, if the profile knows links."""

    @property
    def workers(self) -> int:
        """Workers of a unit."""
        return self.tp or self.spec.tp

    @property
    def shares(self) -> tuple[float, ...]:
        """Of a gradient's bytes, what may go to a peer a micro-batch: shapes are searched for each of these.

        Which schemes are best depends on the shape, and which shape on the schemes. Shapes found for another share can
        be better for the right one, too, since a search by closed forms is not exact.
        """
        fixed = () if self.backup == "auto" else (schemes_of(self.backup)[0].share,)
        if self.profile is None or not self.profile.link.bytes_per_s:
            return fixed or (1.0,)
        if len(self.nodes) > MAX_NODES_BOTH_SHARES:
            return fixed or (0.0,)
        return tuple(dict.fromkeys((*fixed, 1.0, 0.0)))

    def backup_weighing(self) -> Weighing | None:
        """What `auto` chooses by; None: links are unknown, or the schemes are fixed."""
        if self.backup != "auto" or self.weighing is not None:
            return self.weighing
        if self.profile is None or not self.profile.link.bytes_per_s:
            return None
        return Weighing(
            profile=self.profile, slow=self.slow, hazard_per_s=self.hazard_per_s, pause_s=self.pause_s
        )

    def model(self) -> Profile:
        """The profile that counts: the one given, or what the spec says of itself."""
        if self.profile is not None:
            return self.profile
        link = LinkProfile(self.link_bytes_per_s, self.latency_s)
        return profile_of(self.spec.layers, self.workers, self.spec.tokens_per_microbatch, link)


def check_request(request: PlanRequest) -> None:
    """Raise FieldError for a request that no plan can answer."""
    spec = request.spec
    if spec.n_layers < 1 or spec.n_microbatches < 1:
        raise FieldError(
            "spec", f"{spec.n_layers} layers, {spec.n_microbatches} micro-batches", "at least one of each"
        )
    for name in ("forward_s", "backward_s"):
        for i, layer in enumerate(spec.layers):
            value = getattr(layer, name)
            if not isfinite(value) or value < 0:
                raise FieldError(f"spec.layers[{i}].{name}", value, "a finite time of at least 0 is needed")
    if request.profile is not None and len(request.profile.layers) != spec.n_layers:
        remedy = f"the job has {spec.n_layers} layers: measure it again"
        raise FieldError("Profile.layers", len(request.profile.layers), remedy)
    parse_shape(request.shape)
    if request.backup != "auto":
        schemes_of(request.backup)
    if request.schedule not in ("auto", *SCHEDULES):
        raise FieldError("schedule", request.schedule, f"auto, or one of {', '.join(SCHEDULES)}")
    for node, factor in request.slow:
        if not isfinite(factor) or factor <= 0:
            raise FieldError(f"slow[{node}]", factor, "a factor above 0 is needed")


def select_nodes(request: PlanRequest) -> tuple[list[NodeInfo], list[NodeInfo]]:
    """Return (nodes that may hold stages, spares); when not all may, those come first that hold stages now, then those
    whose pre-flight found them quick.

    Raises InfeasiblePlan.
    """
    tp = request.workers
    live = sorted(
        (info for info in request.nodes if info.node not in request.dead), key=lambda i: natural(i.node)
    )
    able = [info for info in live if info.workers >= tp]
    if not able:
        short = f"; {live[0].node} has {live[0].workers} workers, a unit needs {tp}" if live else ""
        raise InfeasiblePlan(
            f"no node can take a stage: {len(live)} of {len(request.nodes)} nodes are alive{short}"
        )
    holding = set(request.current.nodes()) if request.current else set()
    able.sort(key=lambda info: (info.node not in holding, -info.standing))
    active = able[: request.max_nodes or len(able)]
    active.sort(key=lambda info: natural(info.node))
    chosen = {info.node for info in active}
    return active, [info for info in live if info.node not in chosen]
