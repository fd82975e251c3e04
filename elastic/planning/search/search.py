"""The planner: the plan with the shortest step for any set of nodes. See docs/design/planner.md.

Nodes are sorted into kinds. Small clusters are searched exactly (`exact`), larger ones by a linear
programme and a knapsack over all possible pipelines (`column_search`). Both yield the node kinds,
cuts and micro-batches of each pipeline. Then nodes are assigned so that the fewest bytes move
(`assemble`), and each pipeline gets its fastest schedule. Equal requests yield equal plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import inf

from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import NodeInfo, Pipeline, Plan
from elastic.planning.backup.backup_cost import estimate
from elastic.planning.backup.peer_assignment import natural
from elastic.planning.cost.cost_model import CostModel, cost_model
from elastic.planning.cost.node_kinds import NodeKinds, classify_nodes
from elastic.planning.cost.predict import Prediction, predict
from elastic.planning.plan.shape import Depths, format_depths
from elastic.planning.schedule.schedule import ONE_F_ONE_B, ZERO_BUBBLE
from elastic.planning.search import (
    assemble,
    column_search,
    columns,
    equal_nodes,
    evaluate,
    exact,
    fixed_shape,
    incremental,
)
from elastic.planning.search.fixed_shape import ShapeLimits
from elastic.planning.search.infeasibility import explain_infeasible
from elastic.planning.search.problem import PipelineShape, Problem, Solution
from elastic.planning.search.request import PlanRequest, check_request, select_nodes

__all__ = ["PlanDecision", "PlanRequest", "clear_caches", "decide", "make_plan", "problem_of"]

EXACT_SIZE, EXACT_MICROBATCHES = 40_000, 512
"""Largest `exact.work_estimate` and number of micro-batches of a problem that is solved exactly."""
REPLAN_SIZE_DIVISOR = 16
"""Divides `EXACT_SIZE` for re-plans with limited memory, because training waits for them."""
MAX_KINDS = 4
"""Maximum number of node kinds in a large problem; further kinds are merged."""

_Alternatives = tuple[tuple[str, float], ...]
"""(description, seconds of a step), best first."""


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """A plan with its prediction and alternatives."""

    plan: Plan
    prediction: Prediction
    alternatives: _Alternatives
    """Plans with other numbers of pipelines."""


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """Result of a search: a solution, with the node kinds and the cost model that it refers to."""

    solution: Solution
    kinds: NodeKinds
    model: CostModel
    note: str = ""
    """How the shape differs from the requested one; "": it does not."""
    others: _Alternatives = ()
    kept: tuple[tuple[Pipeline, PipelineShape], ...] = ()
    """Pipelines of the current plan that stay; the solution is for the other nodes."""


def make_plan(request: PlanRequest) -> Plan:
    """Return the best plan.

    Raises InfeasiblePlan, which names the shortage, and FieldError for an unusable request.
    """
    return _plan(request)[0]


def decide(request: PlanRequest) -> PlanDecision:
    """Return the best plan with its prediction and alternatives. Raises as `make_plan` does."""
    plan, others = _plan(request)
    prediction = predict(plan, request.effective_profile(), request.nodes, request.slow)
    return PlanDecision(plan, prediction, others)


def with_whole_pipelines(request: PlanRequest, best: Plan) -> Plan:
    """Return `best`, or the whole pipelines of the current plan without other nodes, if these make
    more progress until the next loss."""
    return incremental.prefer_current(request, best)


def clear_caches() -> None:
    """Drop cached tables, for measurements. Plans do not depend on the caches."""
    for cached in CACHED:
        cached.cache_clear()


def problem_of(request: PlanRequest) -> Problem:
    """Return the problem that a request with a free shape poses."""
    check_request(request)
    kinds = _classify(request, select_nodes(request)[0])
    return _problem(request, kinds, request.stream_shares[0])


def _classify(request: PlanRequest, active: Sequence[NodeInfo]) -> NodeKinds:
    profile, typed = request.effective_profile(), request.profile is not None
    return classify_nodes(active, profile, request.workers, dict(request.slow), typed=typed)


def _problem(request: PlanRequest, kinds: NodeKinds, share: float) -> Problem:
    """Return the problem if nodes stream `share` of the gradient bytes per micro-batch."""
    model = cost_model(request.effective_profile(), kinds.kinds, request.workers, share)
    schedules: tuple[str, ...] = (ONE_F_ONE_B,)
    if request.schedule == ZERO_BUBBLE and model.has_split_times:
        schedules = (ZERO_BUBBLE,)
    elif request.schedule == "auto" and model.has_split_times and request.profile is not None:
        schedules = (ONE_F_ONE_B, ZERO_BUBBLE)
    return Problem(
        model=model,
        counts=kinds.counts,
        microbatches=request.spec.n_microbatches,
        schedules=schedules,
        current=len(request.current.pipelines) if request.current else 0,
        thorough=request.current is None,
    )


def _is_small(problem: Problem) -> bool:
    """Return whether the problem is solved exactly; re-plans with limited memory seldom are."""
    quick = problem.model.limited and not problem.thorough
    most = EXACT_SIZE // REPLAN_SIZE_DIVISOR if quick else EXACT_SIZE
    return exact.work_estimate(problem) <= most and problem.microbatches <= EXACT_MICROBATCHES


def _plan(request: PlanRequest) -> tuple[Plan, _Alternatives]:
    """Return the best plan, and the alternatives to it.

    A search is made for each fraction of gradients that may be streamed; the best result counts.
    """
    check_request(request)
    active, spares = select_nodes(request)
    kinds = _classify(request, active)
    shares = request.stream_shares
    if request.backup != "auto" and _is_small(_problem(request, kinds, shares[0])):
        shares = shares[:1]  # One exact search is enough.
    searched = [_search(request, kinds, share) for share in shares]
    distinct = {frozenset(Counter(r.solution.shapes).items()): r for r in reversed(searched)}
    found = [_assemble(request, result, active, spares) for result in distinct.values()]
    plan, others = found[0]
    if len(found) > 1:
        plan, others = min(found, key=lambda pair: _expected_seconds(request, pair[0]))
    return with_whole_pipelines(request, plan) if request.keeps_pipelines else plan, others


def _expected_seconds(request: PlanRequest, plan: Plan) -> float:
    """Return the seconds of a step, with expected losses if the planner chooses the schemes."""
    by = request.backup_weighing()
    if by is not None:
        return estimate(plan, f"{plan.gradients}+{plan.state}", by, request.nodes).expected_s
    return predict(plan, request.effective_profile(), request.nodes, request.slow).step_s


def _assemble(
    request: PlanRequest,
    found: _SearchResult,
    active: Sequence[NodeInfo],
    spares: Sequence[NodeInfo],
) -> tuple[Plan, _Alternatives]:
    """Return the plan of a solution (nodes, cuts, schedules, backups) and the alternatives."""
    pipelines = assemble.build_pipelines(
        request, found.solution, found.kinds, found.model, active, found.kept
    )
    profile = request.effective_profile()
    pipelines = assemble.apply_schedule(request, profile, pipelines, found.model.limited)
    used = {stage.unit.node for pipeline in pipelines for stage in pipeline.stages}
    unused = {info.node for info in (*spares, *active)} - used
    plan = Plan(
        epoch=request.epoch,
        n_layers=request.spec.n_layers,
        n_microbatches=request.spec.n_microbatches,
        tp=request.workers,
        pipelines=pipelines,
        spares=tuple(sorted(unused, key=natural)),
    )
    plan, why = assemble.assign_backups(
        plan, request.nodes, request.backup, request.backup_weighing()
    )
    choice = _describe_choice(request, found, plan)
    reason = "; ".join(text for text in (found.note, choice, why) if text)
    return replace(plan, reason=reason), found.others


def _search(request: PlanRequest, kinds: NodeKinds, share: float) -> _SearchResult:
    problem = _problem(request, kinds, share)
    if request.shape != "auto":
        return _search_fixed_shape(request, kinds, problem, share)
    small = _is_small(problem)
    if not small:
        if len(kinds.kinds) > MAX_KINDS:
            kinds = kinds.merged(MAX_KINDS, request.effective_profile())
            problem = _problem(request, kinds, share)
        partial = incremental.replan_free_nodes(request, problem, kinds)
        if partial is not None:
            solution = Solution(partial.shapes, partial.seconds)
            kept = _SearchResult(solution, kinds, problem.model, kept=partial.kept)
            whole = Solution((*(s for _, s in partial.kept), *partial.shapes), partial.seconds)
            faster = _faster(request, kinds, problem, whole) if _is_simulated(problem) else None
            return faster or kept
    return _search_free_shape(request, kinds, problem, small)


def _is_simulated(problem: Problem) -> bool:
    """Return whether pipelines are simulated also for re-plans: the results are cached, and depend
    on the number of nodes only through the micro-batches."""
    return len(problem.counts) == 1 and sum(problem.counts) <= column_search.LARGE_CLUSTER


def _faster(
    request: PlanRequest, kinds: NodeKinds, problem: Problem, whole: Solution
) -> _SearchResult | None:
    """Return the best plan if it is clearly faster than `whole`, which keeps pipelines; else None.
    Both are simulated."""
    try:
        best = _search_free_shape(request, kinds, problem, small=False)
    except InfeasiblePlan:
        return None
    kept_s, best_s = (
        evaluate.simulated_step_seconds(problem.model, one) for one in (whole, best.solution)
    )
    return best if kept_s > best_s * (1 + incremental.MAX_GAP) else None


def _search_free_shape(
    request: PlanRequest, kinds: NodeKinds, problem: Problem, small: bool
) -> _SearchResult:
    model, thorough = problem.model, column_search.thorough(problem)
    equal = not small and _is_simulated(problem)
    simulate = len(problem.schedules) > 1 and (small or thorough or equal)
    problems = [problem]
    if simulate and (small or thorough):
        problems.append(replace(problem, schedules=(ONE_F_ONE_B,)))
    found: list[Solution] = []
    others: dict[str, float] = {}
    for one in problems:
        if small:
            solutions, alternatives = _solve_exactly(one)
            found += solutions
            others |= alternatives
        else:
            found += column_search.candidate_solutions(one)
    if simulate or equal or (thorough and not small):
        found += equal_nodes.solutions(problem)
    if not found:
        raise InfeasiblePlan(explain_infeasible(problem, kinds, request))
    if simulate:
        best = min(found, key=lambda found: evaluate.simulated_step_seconds(model, found))
        best = evaluate.improve_cuts(model, best)
        best = replace(best, seconds=evaluate.simulated_step_seconds(model, best))
    else:
        best = min(found, key=lambda solution: solution.seconds)
    others.pop(_count(len(best.shapes)), None)
    ranked = tuple(sorted(others.items(), key=lambda other: other[1]))
    return _SearchResult(best, kinds, model, others=ranked)


@lru_cache(maxsize=512)
def _solve_exactly(problem: Problem) -> tuple[list[Solution], _Alternatives]:
    """Return the best and a near-best solution, and the seconds of each number of pipelines.

    The near-best solution bounds the exact search where that takes long.
    """
    hard = not problem.model.has_no_tail or problem.model.limited
    near = min(
        column_search.near_best_solutions(problem) if hard else (),
        key=lambda found: found.seconds,
        default=None,
    )
    limit = near.seconds if near else inf
    best, seconds = exact.solve(replace(problem, upper_bound_s=limit))
    others = tuple((_count(k), s) for k, s in seconds.items() if s < inf)
    return [solution for solution in (best, near) if solution is not None], others


CACHED = (
    cost_model,
    _solve_exactly,
    columns.cached_pool,
    column_search.near_best_solutions,
    evaluate.cached_figures,
    fixed_shape.cut_uniform,
    equal_nodes.cached_solutions,
    equal_nodes.simulated_lines,
    evaluate.simulated_seconds,
    assemble.recomputing_stages,
)


def _search_fixed_shape(
    request: PlanRequest, kinds: NodeKinds, problem: Problem, share: float
) -> _SearchResult:
    """Return the best plan of the requested shape, or of the nearest shape that fits.

    On large clusters every node is treated as the worst one.
    """
    limits = ShapeLimits(
        nodes=sum(problem.counts),
        per_node=min(kind.units for kind in kinds.kinds),
        n_layers=request.spec.n_layers,
        n_microbatches=problem.microbatches,
    )
    small = _is_small(problem)
    if not small:
        kinds = kinds.merged(1, request.effective_profile())
        problem = _problem(request, kinds, share)
    for depths, note in fixed_shape.candidate_depths(request.shape, limits):
        fixed = replace(problem, depths=depths)
        solution = exact.solve(fixed)[0] if small else fixed_shape.solve(fixed, limits.per_node)
        if solution is not None:
            return _SearchResult(solution, kinds, problem.model, note)
    raise InfeasiblePlan(explain_infeasible(problem, kinds, request))


def _count(pipelines: int) -> str:
    return f"{pipelines} pipeline{'s' if pipelines > 1 else ''}"


def _describe_choice(request: PlanRequest, found: _SearchResult, plan: Plan) -> str:
    """Return the choice and up to three alternatives as one line.

    Times are in seconds; without a profile, in passes of a micro-batch through all layers.
    """
    times = request.effective_profile().devices[0].layers
    whole = sum(t.forward_s + t.backward_s for t in times) or 1.0

    def figure(seconds: float) -> str:
        return f"{seconds / whole:.2f}" if request.profile is None else f"{seconds:.4g} s"

    depths = tuple(len({stage.unit for stage in pipeline.stages}) for pipeline in plan.pipelines)
    choice = f"{_count(len(depths))} of depth {_format_depths(depths)}"
    choice += f" ({figure(found.solution.seconds)})"
    others = [f"{text} ({figure(seconds)})" for text, seconds in found.others[:3]]
    return choice + (f", rather than {', '.join(others)}" if others else "")


def _format_depths(depths: Depths) -> str:
    """Return the depths as text; many are counted: 9x4+2 is nine pipelines of depth 4, one of 2."""
    if len(depths) <= 8:
        return format_depths(depths)
    counts = {depth: depths.count(depth) for depth in sorted(set(depths), reverse=True)}
    return "+".join(f"{n}x{depth}" if n > 1 else str(depth) for depth, n in counts.items())
