"""The planner, first version: identical nodes, any number of them, any number of layers.

For every shape that comes into question the best cuts and shares of micro-batches are found exactly
(`partition`, `batches`), and the cheapest shape wins:

    cost = max over pipelines of (m + D - 1) * slowest stage + D - 1 hops     (micro-batches through the
    pipeline) + 2 (k - 1) / k * gradient bytes of the largest stage / bandwidth    (data-parallel reduction)

Streaming gradients to a peer counts where it is slower than the compute that hides it. Equal costs are
settled for the current number of pipelines, then for fewer. The same request always gives the same plan.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from itertools import pairwise
from math import inf, isfinite

from elastic.core.types import JobSpec, NodeInfo, Pipeline, Plan, Stage
from elastic.errors import FieldError, InfeasiblePlan
from elastic.planning import batches, partition
from elastic.planning.costs import TOTAL_TICKS, UNLIMITED, Costs, measure, reduction_ticks
from elastic.planning.interleave import scheduled
from elastic.planning.peers import choose_peers, domain_of, natural
from elastic.planning.placement import Holdings, Shape, place
from elastic.planning.plan import GRADIENT_SCHEMES, STATE_SCHEMES
from elastic.planning.profile import Profile
from elastic.planning.shapes import Depths, Room, candidates, format_depths, parse_shape


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Everything that a plan depends on."""

    spec: JobSpec
    nodes: tuple[NodeInfo, ...]
    """Identical for now: where they differ, the least of each counts for all."""
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
    """Bandwidth between nodes; 0: unknown, taken as infinite. Needs layer times in true seconds."""
    latency_s: float = 0.0
    backup: str = "auto"
    """auto, or GRADIENTS+STATE as stream+snapshot."""
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


@dataclass(frozen=True, slots=True)
class Option:
    """A shape with its cost; `ticks` is inf when it is infeasible."""

    depths: Depths
    ticks: float


class _Pricer:
    """Costs of pipelines and shapes, remembered."""

    def __init__(self, costs: Costs, n_microbatches: int, link_bytes_per_s: float) -> None:
        self.costs, self._total, self._bandwidth = costs, n_microbatches, link_bytes_per_s
        self._unlimited = replace(costs, memory=UNLIMITED, loads={})
        self._fastest = cache(lambda depth: partition.bottleneck(self._unlimited, depth, 1))
        self._limited = cache(self._bottleneck)

    def slowest(self, depth: int, microbatches: int) -> int | None:
        """Ticks of the slowest stage; how many micro-batches are in flight matters only where memory is
        short."""
        if self.costs.memory == UNLIMITED:
            return self._fastest(depth)
        return self._limited(depth, min(depth, microbatches))

    def _bottleneck(self, depth: int, in_flight: int) -> int | None:
        fastest = self._fastest(depth)
        if fastest is None or partition.furthest(self.costs, depth, in_flight, fastest) is not None:
            return fastest
        return partition.bottleneck(self.costs, depth, in_flight)

    def pipeline(self, depth: int) -> Callable[[int], float]:
        """Finishing time of a pipeline of `depth` as a function of its micro-batches."""

        def finish(microbatches: int) -> float:
            slowest = self.slowest(depth, microbatches)
            if slowest is None:
                return inf
            return (microbatches + depth - 1) * slowest + (depth - 1) * self.costs.hop

        return finish

    def shape(self, depths: Depths) -> float:
        kinds = [(self.pipeline(depth), depths.count(depth)) for depth in sorted(set(depths))]
        span = batches.makespan(self._total, kinds)
        return span if span == inf else span + self._reduction(depths)

    def _reduction(self, depths: Depths) -> int:
        if len(depths) < 2 or self._bandwidth <= 0:
            return 0
        depth, share = min(depths), -(-self._total // len(depths))
        limit = self.slowest(depth, share)
        ends = partition.furthest(self.costs, depth, share, limit) if limit else None
        ends = ends or [0, self.costs.n_layers]
        largest = max(self.costs.gradient[b] - self.costs.gradient[a] for a, b in pairwise(ends))
        return reduction_ticks(self.costs, largest, len(depths), self._bandwidth)


def make_plan(request: PlanRequest) -> Plan:
    """Return the best plan. Raises InfeasiblePlan saying what is short, and FieldError for an unusable
    request."""
    _check(request)
    tp = request.tp or request.spec.tp
    active, spares = _pick(request, tp)
    room = Room(
        nodes=len(active),
        per_node=min(info.workers // tp for info in active),
        n_layers=request.spec.n_layers,
        n_microbatches=request.spec.n_microbatches,
    )
    costs = _costs(request, active, tp)
    pricer = _Pricer(costs, room.n_microbatches, request.link_bytes_per_s)
    best, options, note = _search(request, room, pricer, active)
    seconds = [layer.forward_s + layer.backward_s for layer in request.spec.layers]
    pipelines = tuple(
        scheduled(pipeline, request.schedule, [seconds] * len(pipeline.stages))
        for pipeline in _build(request, best, pricer, active, room)
    )
    used = {stage.unit.node for pipeline in pipelines for stage in pipeline.stages}
    spares += [info for info in active if info.node not in used]
    plan = Plan(
        epoch=request.epoch,
        n_layers=room.n_layers,
        n_microbatches=room.n_microbatches,
        tp=tp,
        pipelines=pipelines,
        spares=tuple(info.node for info in sorted(spares, key=lambda info: natural(info.node))),
    )
    plan, why = protect(plan, request.nodes, request.backup)
    reason = "; ".join(text for text in (note, _compare(best, options), why) if text)
    return replace(plan, reason=reason)


def protect(plan: Plan, nodes: tuple[NodeInfo, ...], backup: str) -> tuple[Plan, str]:
    """Return the plan with peers and backup schemes, and why these."""
    layers: dict[str, frozenset[int]] = {}
    for _, _, stage in plan.stages():
        layers[stage.unit.node] = layers.get(stage.unit.node, frozenset()) | frozenset(stage.layers)
    peers = choose_peers(nodes, layers, plan.spares)
    if not peers:
        gradients, state = ("stream+snapshot" if backup == "auto" else backup).split("+")
        return replace(plan, gradients=gradients, state=state), "copies stay on their own node: no peer"
    domains = {info.node: domain_of(info) for info in nodes}
    replicated, reason = _replicated(
        plan, domains, len({d for d in domains.values() if not d.startswith("\0")})
    )
    gradients, state = (
        ("stream", "replica" if replicated else "snapshot") if backup == "auto" else backup.split("+")
    )
    if state == "replica" and not replicated:
        state = "snapshot"
    return replace(
        plan, peers=peers, gradients=gradients, state=state
    ), f"backup {gradients}+{state}: {reason}"


def _replicated(plan: Plan, domains: dict[str, str], n_domains: int) -> tuple[bool, str]:
    for layer in range(plan.n_layers):
        holders = {unit.node for unit in plan.holders(layer)}
        if len(holders) < 2:
            return False, f"layer {layer} is held by one node only"
        if n_domains > 1 and len({domains[node] for node in holders}) < 2:
            return False, f"layer {layer} is held in one failure domain only"
    return True, "every layer is held by several nodes"


def _check(request: PlanRequest) -> None:
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
    parse_shape(request.shape)
    gradients, _, state = request.backup.partition("+")
    if request.backup != "auto" and (gradients not in GRADIENT_SCHEMES or state not in STATE_SCHEMES):
        remedy = f"auto, or one of {'|'.join(GRADIENT_SCHEMES)} + one of {'|'.join(STATE_SCHEMES)}"
        raise FieldError("backup", request.backup, remedy)


def _pick(request: PlanRequest, tp: int) -> tuple[list[NodeInfo], list[NodeInfo]]:
    """Return (nodes that may hold stages, spares); those that hold stages now come first when not all may."""
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
    able.sort(key=lambda info: info.node not in holding)
    active = able[: request.max_nodes or len(able)]
    active.sort(key=lambda info: natural(info.node))
    return active, [info for info in live if info not in active]


def _costs(request: PlanRequest, active: list[NodeInfo], tp: int) -> Costs:
    limits = [info.memory_bytes for info in active if info.memory_bytes > 0]
    return measure(
        request.spec.layers,
        tp=tp,
        memory_bytes=min(limits, default=0),
        link_bytes_per_s=request.link_bytes_per_s,
        latency_s=request.latency_s,
        stream=len(request.nodes) > 1 and not request.backup.startswith("none"),
    )


def _search(
    request: PlanRequest, room: Room, pricer: _Pricer, active: list[NodeInfo]
) -> tuple[Option, list[Option], str]:
    now = len(request.current.pipelines) if request.current else 0
    tried: list[Option] = []
    for shapes, note in candidates(request.shape, room):
        options = [Option(depths, pricer.shape(depths)) for depths in shapes]
        tried += options
        best = min(options, key=lambda o: (o.ticks, len(o.depths) != now, len(o.depths)))
        if best.ticks < inf:
            return best, tried, note
    raise InfeasiblePlan(_shortage(pricer.costs, room, active))


def _shortage(costs: Costs, room: Room, active: list[NodeInfo]) -> str:
    depth = room.even(1)[0]
    need, stage, (first, last) = partition.memory_needed(costs, depth, room.n_microbatches)
    limited = [info for info in active if info.memory_bytes > 0]
    least = min(limited, key=lambda info: info.memory_bytes)
    return (
        f"memory is short: even one pipeline of {depth} stages on all {room.nodes} nodes needs {need} bytes "
        f"a worker (stage {stage}, layers {first} to {last - 1}), but {least.node} may use "
        f"{least.memory_bytes}: short by {need - least.memory_bytes} bytes"
    )


def _build(
    request: PlanRequest, best: Option, pricer: _Pricer, active: list[NodeInfo], room: Room
) -> tuple[Pipeline, ...]:
    layers = request.spec.layers
    counts = batches.allot(room.n_microbatches, [pricer.pipeline(depth) for depth in best.depths])
    shapes = []
    for depth, count in zip(best.depths, counts, strict=True):
        slowest = pricer.slowest(depth, count)
        assert slowest is not None, "a shape that was priced is feasible"
        shapes.append(Shape(depth, count, slowest))
    full = [layer.param_bytes + layer.state_bytes + layer.gradient_bytes for layer in layers]
    names = [info.node for info in active]
    holdings = Holdings.of(request.current, layers)
    placed: list[tuple[Stage, ...]] = place(pricer.costs, shapes, names, room.per_node, holdings, full)
    dealt = batches.deal(range(room.n_microbatches), counts)
    return tuple(Pipeline(stages, share) for stages, share in zip(placed, dealt, strict=True))


def _compare(best: Option, options: list[Option]) -> str:
    """One line: the choice and up to three alternatives, with costs in passes of one micro-batch through
    all layers."""

    def text(option: Option) -> str:
        cost = f"{option.ticks / TOTAL_TICKS:.2f}" if option.ticks < inf else "too little memory"
        return f"{format_depths(option.depths)} ({cost})"

    others = sorted((o for o in options if o != best), key=lambda o: (o.ticks, len(o.depths)))[:3]
    k = len(best.depths)
    head = f"{k} pipeline{'s' if k > 1 else ''} of depth {text(best)}"
    return head + (f", rather than {', '.join(map(text, others))}" if others else "")
