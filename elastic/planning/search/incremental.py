"""After a change in a large cluster: pipelines that lost nothing stay, only the nodes that are free now are
planned anew.

With many pipelines, this is nearly as fast as the best plan, moves next to nothing, and is found in milliseconds. How
near it is, the linear programme says, whose optimum bounds what any plan of the priced groups could reach: unless the
repaired plan is within `MAX_GAP` of that, everything is planned again.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from math import inf, prod

import numpy as np

from elastic.domain.types import Pipeline, Plan
from elastic.planning.backup.amortization import Option, choose, horizon_s
from elastic.planning.backup.peer_assignment import natural
from elastic.planning.cost.cost_model import CostModel, pipeline_seconds
from elastic.planning.cost.node_kinds import NodeKinds
from elastic.planning.cost.predict import pipeline_timer, predict
from elastic.planning.placement.migration import links_of, transition
from elastic.planning.schedule.microbatch_split import Cost, allot, deal
from elastic.planning.schedule.schedule import INTERLEAVED
from elastic.planning.search import column_search as scale
from elastic.planning.search.assemble import assign_backups
from elastic.planning.search.columns import ColumnPool
from elastic.planning.search.evaluate import step_seconds, largest_tail
from elastic.planning.search.layer_partition import LayerPartitioner
from elastic.planning.search.master_problem import Relaxation
from elastic.planning.search.problem import Problem, PipelineShape
from elastic.planning.search.request import PlanRequest

MAX_GAP = 0.02
"""A repaired plan may be slower than the bound by this fraction."""
PRECISION = 1e-3
MAX_SPEEDUP = 0.06
"""By how much of the time the free nodes help at most, as a rule."""


@dataclass(frozen=True, slots=True)
class IncrementalPlan:
    """The current pipelines that stay, with what they take, and shapes for the nodes that are free."""

    kept: tuple[tuple[Pipeline, PipelineShape], ...]
    shapes: tuple[PipelineShape, ...]
    seconds: float


def replan_free_nodes(request: PlanRequest, problem: Problem, kinds: NodeKinds) -> IncrementalPlan | None:
    """Repair the current plan, or None: there is none, it does not fit the request, or it would be too slow."""
    kept = _kept(request, problem.model, kinds)
    priced = scale.price_problem(problem, inf) if kept else None
    if not kept or priced is None:
        return None
    nodes = Counter(kind for _, shape in kept for kind in shape.kinds)
    left = tuple(n - nodes[kind] for kind, n in enumerate(problem.counts))
    if prod(n + 1 for n in left) > scale.MAX_KNAPSACK_STATES:
        return None
    tail = largest_tail(problem.model, [shape for _, shape in kept])
    search = _FreeNodeSearch(problem, priced, kept, left, tail)
    seconds = search.least()
    if seconds == inf:
        return None
    found = search.finish(seconds)
    if found is None or not _near(problem, priced, found.seconds):
        return None
    return found


def _near(problem: Problem, priced: ColumnPool, seconds: float) -> bool:
    """Whether no plan of the priced groups can be faster by more than `MAX_GAP`."""
    relaxation = Relaxation(priced.counts, problem.counts)
    for low, high in zip((0.0, *priced.tails), priced.tails, strict=False):
        target = seconds * (1 - MAX_GAP) - (low if low < inf else 0.0)
        if target <= 0:
            break
        value = priced.values(target, high, problem.counts)
        if relaxation.maximise(value).bound >= problem.microbatches:
            return False
    return True


def _kept(request: PlanRequest, model: CostModel, kinds: NodeKinds) -> list[tuple[Pipeline, PipelineShape]]:
    """Pipelines of the current plan whose nodes are all there, with their shapes."""
    current = request.current
    if current is None or current.n_layers != model.n_layers or current.tp != request.workers:
        return []
    found = []
    for pipeline in current.pipelines:
        nodes = Counter(stage.unit.node for stage in pipeline.stages)
        if pipeline.schedule == INTERLEAVED or not all(node in kinds.of for node in nodes):
            continue
        cuts = (*(stage.first for stage in pipeline.stages), model.n_layers)
        owners = tuple(kinds.of[node] for node in nodes)
        found.append((pipeline, PipelineShape(pipeline.schedule, owners, tuple(nodes.values()), cuts, 1)))
    return found


class _FreeNodeSearch:
    """The least time within which the pipelines that stay and the free nodes do all micro-batches."""

    def __init__(
        self,
        problem: Problem,
        priced: ColumnPool,
        kept: list[tuple[Pipeline, PipelineShape]],
        left: tuple[int, ...],
        tail: float,
    ) -> None:
        self.problem, self.priced, self.kept, self.left, self.tail = problem, priced, kept, left, tail
        self._relaxation = Relaxation(priced.counts, left)
        self._figures: dict[PipelineShape, tuple[float, float]] = {}
        for _, shape in kept:
            if shape not in self._figures:
                cutter = LayerPartitioner(problem.model, shape.schedule, shape.kinds, shape.stages, shape.depth)
                self._figures[shape] = cutter.seconds(shape.cuts)
        self._numbers = Counter(shape for _, shape in kept)

    def share(self, shape: PipelineShape, seconds: float) -> int:
        """Micro-batches that a pipeline that stays does in time."""
        fill, slowest = self._figures[shape]
        if fill == inf or fill > seconds:
            return 0
        first = float(pipeline_seconds(shape.schedule, fill, slowest, 1))
        return max(0, int((seconds - first) / slowest * (1 + 1e-12)) + 1) if seconds >= first else 0

    def free(self, seconds: float) -> tuple[Counter[int], int, np.ndarray[tuple[int], np.dtype[np.int64]]]:
        """(columns for the free nodes, what they do, values of all columns)."""
        values = self.priced.values(seconds, self.tail, self.left)
        if not values.any():
            return Counter(), 0, values
        chosen, done = scale.knapsack(self._relaxation, values)
        return chosen, done, values

    def able(self, seconds: float, *, alone: bool = False) -> bool:
        """Whether all micro-batches are done in time; `alone`: by the pipelines that stay."""
        prefer_current = sum(self.share(shape, seconds) * n for shape, n in self._numbers.items())
        missing = self.problem.microbatches - prefer_current
        return missing <= 0 or (not alone and self.free(seconds)[1] >= missing)

    def least(self) -> float:
        """Bisection to within `PRECISION`, from what the pipelines that stay need alone."""
        start = max(float(pipeline_seconds(s.schedule, *self._figures[s], 1)) for s in self._numbers)
        low, high = start, 2 * start
        for _ in range(60):
            if self.able(high, alone=True):
                break
            low, high = high, 2 * high
        else:
            return inf
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.able(middle, alone=True) else (middle, high)
        low = max(start, high * (1 - MAX_SPEEDUP))
        if low < high and self.able(low):
            low, high = start, low
        while high - low > PRECISION * high:
            middle = (low + high) / 2
            low, high = (low, middle) if self.able(middle) else (middle, high)
        return high

    def finish(self, seconds: float) -> IncrementalPlan | None:
        """Share out exactly M micro-batches, and cut what is new."""
        model, problem = self.problem.model, self.problem
        shares = [self.share(shape, seconds) for _, shape in self.kept]
        missing = problem.microbatches - sum(shares)
        fresh: list[PipelineShape] = []
        if missing > 0:
            chosen, _, values = self.free(seconds)
            for column in sorted(chosen):
                for _ in range(chosen[column]):
                    m = min(int(values[column]), missing)
                    shape = (
                        scale.cut_column(model, self.priced, column, m, self.tail, len(shares) + 1)
                        if m > 0
                        else None
                    )
                    if shape is None and m > 0:
                        return None
                    if shape is not None:
                        fresh.append(shape)
                        missing -= m
        kept = self._fewer(shares, -missing)
        shapes = tuple(
            PipelineShape(s.schedule, s.kinds, s.stages, s.cuts, m)
            for (_, s), m in zip(self.kept, kept, strict=True)
            if m
        )
        pairs = tuple(
            (p, s)
            for p, s in zip((p for (p, _), m in zip(self.kept, kept, strict=True) if m), shapes, strict=True)
        )
        return IncrementalPlan(pairs, tuple(fresh), step_seconds(model, (*shapes, *fresh)))

    def _fewer(self, shares: list[int], surplus: int) -> list[int]:
        """Take what is too much from those that end last: one each, in turn."""
        ends = [self._figures[shape][1] for _, shape in self.kept]
        order = sorted(range(len(shares)), key=lambda i: (-ends[i], i))
        while surplus > 0:
            for i in order:
                if surplus > 0 and shares[i] > 0:
                    shares[i] -= 1
                    surplus -= 1
        return shares


MAX_NODES_TO_KEEP = 256


def prefer_current(request: PlanRequest, best: Plan) -> Plan:
    """Return `best`, or the pipelines of the current plan that are whole, if their shorter pause makes more
    progress until the next change. Weighed only where losses were observed and links are known: else changes
    cost alike."""
    current, profile = request.current, request.profile
    if current is None or profile is None or not profile.link.bytes_per_s or request.hazard_per_s <= 0:
        return best
    if request.shape != "auto" or len(request.nodes) > MAX_NODES_TO_KEEP or current.n_layers != best.n_layers:
        return best
    kept = _whole(request, current)
    if kept is None:
        return best
    links = links_of(profile, request.nodes)
    plans, options = [best, kept], []
    for plan in plans:
        moved = transition(current, plan, request.spec.layers, dead=request.dead, links=links, gradients=True)
        step_s = predict(plan, profile, request.nodes, request.slow).step_s
        options.append(Option(step_s, request.pause_s + moved.seconds))
    horizon = horizon_s(request.hazard_per_s, len(best.nodes()))
    chosen, why = choose(options, horizon)
    plan = plans[chosen]
    return replace(plan, reason=f"{plan.reason}; {why}") if why else plan


def _whole(request: PlanRequest, current: Plan) -> Plan | None:
    """The current pipelines that lost nothing, with all micro-batches shared out among them."""
    alive = {info.node for info in request.nodes} - request.dead
    whole = [p for p in current.pipelines if all(stage.unit.node in alive for stage in p.stages)]
    if not whole or len(whole) > request.spec.n_microbatches or request.profile is None:
        return None
    profile = request.profile

    def step_seconds(pipeline: Pipeline) -> Cost:
        """Run against the clock for a few micro-batches; each further one takes as long as those before."""
        seconds = pipeline_timer(pipeline, profile, request.nodes, request.slow, current.tp)
        few = 2 * len(pipeline.stages)
        base, pace = seconds(few), (seconds(2 * few) - seconds(few)) / few
        return lambda m: seconds(m) if m < few else base + (m - few) * pace

    counts = allot(request.spec.n_microbatches, [step_seconds(pipeline) for pipeline in whole])
    shares = deal(range(request.spec.n_microbatches), counts)
    pipelines = tuple(replace(p, microbatches=share) for p, share in zip(whole, shares, strict=True))
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
