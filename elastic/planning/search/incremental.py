"""Plans that keep pipelines of the current plan after a change of the nodes.

`replan_free_nodes` serves large clusters: pipelines that lost nothing stay, and only the free nodes
are planned again. With many pipelines the result is nearly as fast as the best plan, moves almost
nothing, and takes milliseconds. The optimum of the linear programme bounds every plan of the priced
groups; if the result is not within `MAX_GAP` of that bound, everything is planned again.

`prefer_current` decides whether a better plan is worth the pause of a change.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf, prod

from elastic.domain.types import Pipeline, Plan
from elastic.planning.backup.amortization import Option, choose, horizon_s
from elastic.planning.backup.peer_assignment import natural
from elastic.planning.cost.cost_model import CostModel, Ints, pipeline_seconds
from elastic.planning.cost.node_kinds import NodeKinds
from elastic.planning.cost.predict import pipeline_timer, predict
from elastic.planning.cost.profile import Profile
from elastic.planning.placement.migration import links_of, transition
from elastic.planning.schedule.microbatch_split import Cost, allot, deal
from elastic.planning.schedule.schedule import INTERLEAVED
from elastic.planning.search import column_search
from elastic.planning.search.assemble import assign_backups
from elastic.planning.search.columns import ColumnPool
from elastic.planning.search.evaluate import largest_tail, step_seconds
from elastic.planning.search.layer_partition import LayerPartitioner
from elastic.planning.search.master_problem import Relaxation
from elastic.planning.search.problem import PipelineShape, Problem
from elastic.planning.search.request import PlanRequest

MAX_GAP = 0.02
"""Fraction by which an incremental plan may be slower than the bound."""
PRECISION = 1e-3
MAX_SPEEDUP = 0.06
"""Fraction of time that the free nodes seldom save; the bisection tries this range first."""
MAX_NODES_TO_KEEP = 256
"""Maximum number of nodes for which a change is compared with the intact pipelines."""


@dataclass(frozen=True, slots=True)
class IncrementalPlan:
    """Current pipelines that stay, with their shapes, and new shapes for the free nodes."""

    kept: tuple[tuple[Pipeline, PipelineShape], ...]
    shapes: tuple[PipelineShape, ...]
    seconds: float


def replan_free_nodes(
    request: PlanRequest, problem: Problem, kinds: NodeKinds
) -> IncrementalPlan | None:
    """Return a plan for the free nodes beside the current pipelines that are intact.

    None: no pipeline is intact, too many nodes are free, or the plan would be too slow.
    """
    kept = _intact_shapes(request, problem.model, kinds)
    priced = column_search.price_problem(problem, inf) if kept else None
    if not kept or priced is None:
        return None
    nodes = Counter(kind for _, shape in kept for kind in shape.kinds)
    left = tuple(n - nodes[kind] for kind, n in enumerate(problem.counts))
    if prod(n + 1 for n in left) > column_search.MAX_KNAPSACK_STATES:
        return None
    search = _FreeNodeSearch(problem, priced, kept, left)
    seconds = search.least()
    found = search.finish(seconds) if seconds < inf else None
    return found if found and _within_gap(problem, priced, found.seconds) else None


def _within_gap(problem: Problem, priced: ColumnPool, seconds: float) -> bool:
    """Return whether no plan of the priced groups can be faster by more than `MAX_GAP`."""
    relaxation = Relaxation(priced.counts, problem.counts)
    for low, high in zip((0.0, *priced.tails), priced.tails, strict=False):
        target = seconds * (1 - MAX_GAP) - (low if low < inf else 0.0)
        if target <= 0:
            break
        value = priced.values(target, high, problem.counts)
        if relaxation.maximise(value).bound >= problem.microbatches:
            return False
    return True


def _intact_shapes(
    request: PlanRequest, model: CostModel, kinds: NodeKinds
) -> list[tuple[Pipeline, PipelineShape]]:
    """Return the pipelines that can stay (all nodes left, not interleaved), with their shapes."""
    current = request.current
    if current is None or current.n_layers != model.n_layers or current.tp != request.workers:
        return []
    found = []
    for pipeline in current.pipelines:
        nodes = Counter(stage.unit.node for stage in pipeline.stages)
        if pipeline.schedule == INTERLEAVED or not kinds.index_of.keys() >= nodes.keys():
            continue
        cuts = (*(stage.first for stage in pipeline.stages), model.n_layers)
        owners = tuple(kinds.index_of[node] for node in nodes)
        shape = PipelineShape(pipeline.schedule, owners, tuple(nodes.values()), cuts, 1)
        found.append((pipeline, shape))
    return found


class _FreeNodeSearch:
    """Finds the least time in which the kept pipelines and the free nodes do all micro-batches."""

    def __init__(
        self,
        problem: Problem,
        priced: ColumnPool,
        kept: list[tuple[Pipeline, PipelineShape]],
        left: tuple[int, ...],
    ) -> None:
        """`left`: number of free nodes of each kind."""
        self.problem, self.priced, self.kept, self.left = problem, priced, kept, left
        self.tail = largest_tail(problem.model, [shape for _, shape in kept])
        self._relaxation = Relaxation(priced.counts, left)
        self._numbers = Counter(shape for _, shape in kept)
        self._figures: dict[PipelineShape, tuple[float, float]] = {}
        for shape in self._numbers:
            partitioner = LayerPartitioner(
                problem.model, shape.schedule, shape.kinds, shape.stages, shape.depth
            )
            self._figures[shape] = partitioner.fill_and_slowest(shape.cuts)

    def _share(self, shape: PipelineShape, seconds: float) -> int:
        """Return the number of micro-batches that a kept pipeline does within `seconds`."""
        fill, slowest = self._figures[shape]
        if fill == inf or fill > seconds:
            return 0
        first = float(pipeline_seconds(shape.schedule, fill, slowest, 1))
        if seconds < first:
            return 0
        return max(0, int((seconds - first) / slowest * (1 + 1e-12)) + 1)

    def _free(self, seconds: float) -> tuple[Counter[int], int, Ints]:
        """Return (columns for the free nodes, their micro-batches, values of all columns)."""
        values = self.priced.values(seconds, self.tail, self.left)
        if not values.any():
            return Counter(), 0, values
        chosen, done = column_search.knapsack(self._relaxation, values)
        return chosen, done, values

    def _able(self, seconds: float, *, alone: bool = False) -> bool:
        """Return whether all micro-batches are done in time; `alone`: by kept pipelines only."""
        staying = sum(self._share(shape, seconds) * n for shape, n in self._numbers.items())
        missing = self.problem.microbatches - staying
        return missing <= 0 or (not alone and self._free(seconds)[1] >= missing)

    def least(self) -> float:
        """Return the least sufficient seconds, at most `PRECISION` too large; inf: none suffice."""
        figures = self._figures.items()
        start = max(float(pipeline_seconds(s.schedule, *pair, 1)) for s, pair in figures)
        low, high = start, 2 * start
        for _ in range(60):
            if self._able(high, alone=True):
                break
            low, high = high, 2 * high
        else:
            return inf
        high = self._bisect(low, high, alone=True)
        low = max(start, high * (1 - MAX_SPEEDUP))
        if low < high and self._able(low):
            low, high = start, low
        return self._bisect(low, high, alone=False)

    def _bisect(self, low: float, high: float, *, alone: bool) -> float:
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self._able(middle, alone=alone) else (middle, high)
        return high

    def finish(self, seconds: float) -> IncrementalPlan | None:
        """Return the plan with exactly M micro-batches; None if a new pipeline cannot be cut."""
        model, problem = self.problem.model, self.problem
        shares = [self._share(shape, seconds) for _, shape in self.kept]
        missing = problem.microbatches - sum(shares)
        fresh: list[PipelineShape] = []
        if missing > 0:
            chosen, _, values = self._free(seconds)
            for column in sorted(chosen.elements()):
                m = min(int(values[column]), missing)
                if m <= 0:
                    continue
                shape = column_search.cut_column(
                    model, self.priced, column, m, self.tail, len(shares) + 1
                )
                if shape is None:
                    return None
                fresh.append(shape)
                missing -= m
        kept = tuple(
            (pipeline, replace(shape, microbatches=m))
            for (pipeline, shape), m in zip(
                self.kept, self._without_surplus(shares, -missing), strict=True
            )
            if m
        )
        shapes = (*(shape for _, shape in kept), *fresh)
        return IncrementalPlan(kept, tuple(fresh), step_seconds(model, shapes))

    def _without_surplus(self, shares: list[int], surplus: int) -> list[int]:
        """Return `shares` less the surplus, taken in turn from the slowest pipelines."""
        slowest = [self._figures[shape][1] for _, shape in self.kept]
        order = sorted(range(len(shares)), key=lambda i: (-slowest[i], i))
        while surplus > 0:
            for i in order:
                if surplus > 0 and shares[i] > 0:
                    shares[i] -= 1
                    surplus -= 1
        return shares


def prefer_current(request: PlanRequest, best: Plan) -> Plan:
    """Return `best`, or the intact pipelines of the current plan if these make more progress.

    Keeping pipelines takes a shorter pause. The comparison needs observed losses and known links;
    without them the result is `best`.
    """
    current, profile = request.current, request.profile
    if current is None or profile is None or not profile.link.bytes_per_s:
        return best
    if request.hazard_per_s <= 0 or request.shape != "auto":
        return best
    if len(request.nodes) > MAX_NODES_TO_KEEP or current.n_layers != best.n_layers:
        return best
    kept = _intact_pipelines(request, current, profile)
    if kept is None:
        return best
    links = links_of(profile, request.nodes)
    plans, options = [best, kept], []
    for plan in plans:
        moved = transition(
            current, plan, request.spec.layers, dead=request.dead, links=links, gradients=True
        )
        step_s = predict(plan, profile, request.nodes, request.slow).step_s
        options.append(Option(step_s, request.pause_s + moved.seconds))
    horizon = horizon_s(request.hazard_per_s, len(best.nodes()))
    chosen, why = choose(options, horizon)
    plan = plans[chosen]
    return replace(plan, reason=f"{plan.reason}; {why}") if why else plan


def _intact_pipelines(request: PlanRequest, current: Plan, profile: Profile) -> Plan | None:
    """Return the intact current pipelines as a plan; None: none, or too few micro-batches."""
    alive = {info.node for info in request.nodes} - request.dead
    intact = [p for p in current.pipelines if all(s.unit.node in alive for s in p.stages)]
    if not intact or len(intact) > request.spec.n_microbatches:
        return None

    def cost(pipeline: Pipeline) -> Cost:
        """Return the finish time: simulated for few micro-batches, extrapolated for more."""
        seconds = pipeline_timer(pipeline, profile, request.nodes, request.slow, current.tp)
        few = 2 * len(pipeline.stages)
        base, each = seconds(few), (seconds(2 * few) - seconds(few)) / few
        return lambda m: seconds(m) if m < few else base + (m - few) * each

    counts = allot(request.spec.n_microbatches, [cost(pipeline) for pipeline in intact])
    shares = deal(range(request.spec.n_microbatches), counts)
    pipelines = tuple(replace(p, microbatches=m) for p, m in zip(intact, shares, strict=True))
    used = {stage.unit.node for p in pipelines for stage in p.stages}
    plan = replace(
        current,
        epoch=request.epoch,
        n_microbatches=request.spec.n_microbatches,
        pipelines=pipelines,
        spares=tuple(sorted(alive - used, key=natural)),
        peers=(),
    )
    nodes = tuple(n for n in request.nodes if n.node in alive)
    plan, why = assign_backups(plan, nodes, request.backup, request.backup_weighing())
    return replace(plan, reason=f"the pipelines that are whole stay as they are; {why}")
