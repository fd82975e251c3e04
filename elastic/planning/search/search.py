"""The planner: for any set of nodes the plan with the shortest step. Formulas and proofs: docs/design/planner.md.

Nodes are sorted into kinds. Small clusters are searched exactly (`exact`), larger ones by a linear programme
and a knapsack over all pipelines that could be made (`scale`); either says which kinds of nodes make which
pipelines, how these are cut, and how many micro-batches each takes. Then nodes are chosen for the slots such
that the fewest bytes move (`placement`), and the schedule that runs each pipeline fastest is taken. The same
request always gives the same plan."""

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
from elastic.planning.cost.node_kinds import NodeKinds, alike, classify_nodes
from elastic.planning.cost.predict import Prediction, predict
from elastic.planning.cost.profile import Profile
from elastic.planning.schedule.schedule import ONE_F_ONE_B, ZERO_BUBBLE
from elastic.planning.search import assemble as building
from elastic.planning.search import column_search as scale
from elastic.planning.search import columns as pool
from elastic.planning.search import evaluate as figures
from elastic.planning.search import evaluate as pricing
from elastic.planning.search import exact
from elastic.planning.search import fixed_shape as forced
from elastic.planning.search.assemble import build_pipelines, assign_backups, apply_schedule
from elastic.planning.search.fixed_shape import Depths, ShapeLimits, candidate_depths, format_depths
from elastic.planning.search.incremental import replan_free_nodes, prefer_current
from elastic.planning.search.infeasibility import explain_infeasible
from elastic.planning.search.problem import Problem, PipelineShape, Solution
from elastic.planning.search.request import PlanRequest, check_request, select_nodes

__all__ = ["Decision", "PlanRequest", "decide", "forget", "make_plan", "problem_of", "protect"]

EXACT_SIZE, EXACT_MICROBATCHES = 40_000, 512
"""Problems (`exact.size`) that are searched exactly."""
REPLAN_SIZE_DIVISOR = 16
MAX_KINDS = 4
"""Kinds of nodes that a large problem may have; more are merged."""


@dataclass(frozen=True, slots=True)
class PlanDecision:
    """A plan with what it was chosen from."""

    plan: Plan
    prediction: Prediction
    alternatives: tuple[tuple[str, float], ...]
    """(what, seconds of a step), best first; the plan itself is not among them."""


@dataclass(frozen=True, slots=True)
class _SearchResult:
    """A solution for one set of kinds."""

    solution: Solution
    kinds: NodeKinds
    model: CostModel
    note: str = ""
    """Why the shape is not quite what was asked."""
    others: tuple[tuple[str, float], ...] = ()
    kept: tuple[tuple[Pipeline, PipelineShape], ...] = ()
    """Pipelines of the current plan that stay; the solution is for the other nodes."""


def make_plan(request: PlanRequest) -> Plan:
    """Return the best plan. Raises InfeasiblePlan saying what is short, and FieldError for an unusable request."""
    return _plan(request)[0]


def decide(request: PlanRequest) -> PlanDecision:
    """As `make_plan`, with the plan's prediction and alternatives."""
    plan, others = _plan(request)
    return PlanDecision(plan, predict(plan, request.model(), request.nodes, request.slow), others)


def clear_caches() -> None:
    """Drop all that is remembered from one question to the next (tables, not results that matter): for measurements."""
    for remembered in CACHED:
        remembered.cache_clear()


def problem_of(request: PlanRequest) -> Problem:
    """What is solved for `request` where its shape is free: kinds, counts and costs."""
    check_request(request)
    active, _ = select_nodes(request)
    profile = request.model()
    kinds = classify_nodes(active, profile, request.workers, dict(request.slow), typed=request.profile is not None)
    return _problem(request, kinds, cost_model(profile, kinds.kinds, request.workers, request.shares[0]))


def _plan(request: PlanRequest) -> tuple[Plan, tuple[tuple[str, float], ...]]:
    """The best of the plans for each share of a gradient that may be streamed."""
    check_request(request)
    shares = request.shares
    if request.backup != "auto" and _small(problem_of(request)):  # found exactly
        shares = shares[:1]
    active, spares = select_nodes(request)
    profile = request.model()
    kinds = classify_nodes(active, profile, request.workers, dict(request.slow), typed=request.profile is not None)
    searched = [_search(request, profile, kinds, share) for share in shares]
    unlike = {frozenset(Counter(one.solution.shapes).items()): one for one in reversed(searched)}
    found = [_planned(request, one, active, spares) for one in unlike.values()]
    plan, others = min(found, key=lambda one: _expected(request, one[0])) if len(found) > 1 else found[0]
    return prefer_current(request, plan), others


def _small(problem: Problem) -> bool:
    """Whether it is searched exactly. Where memory is short, each number of micro-batches in flight is a search of its
    own: nobody waits for that while training stands still."""
    most = EXACT_SIZE if problem.thorough or not problem.model.limited else EXACT_SIZE // REPLAN_SIZE_DIVISOR
    return exact.work_estimate(problem) <= most and problem.microbatches <= EXACT_MICROBATCHES


def _expected(request: PlanRequest, plan: Plan) -> float:
    """Seconds of a step with the plan's own schemes; losses and their cost counted where schemes are weighed."""
    by = request.backup_weighing()
    if by is not None:
        return estimate(plan, f"{plan.gradients}+{plan.state}", by, request.nodes).expected_s
    return predict(plan, request.model(), request.nodes, request.slow).step_s


def _planned(
    request: PlanRequest, found: _SearchResult, active: Sequence[NodeInfo], spares: Sequence[NodeInfo]
) -> tuple[Plan, tuple[tuple[str, float], ...]]:
    """The plan of a solution: nodes, cuts that move little, backups."""
    profile, tp = request.model(), request.workers
    pipelines = build_pipelines(request, found.solution, found.kinds, found.model, active, found.kept)
    pipelines = apply_schedule(request, profile, pipelines, found.model.limited)
    used = {stage.unit.node for pipeline in pipelines for stage in pipeline.stages}
    spares = [*spares, *(info for info in active if info.node not in used)]
    plan = Plan(
        epoch=request.epoch,
        n_layers=request.spec.n_layers,
        n_microbatches=request.spec.n_microbatches,
        tp=tp,
        pipelines=pipelines,
        spares=tuple(info.node for info in sorted(spares, key=lambda info: natural(info.node))),
    )
    plan, why = assign_backups(plan, request.nodes, request.backup, request.backup_weighing())
    told, others = _compare(request, profile, found, plan)
    return replace(plan, reason="; ".join(text for text in (found.note, told, why) if text)), others


def _problem(request: PlanRequest, kinds: NodeKinds, model: CostModel) -> Problem:
    if request.schedule == ZERO_BUBBLE and model.splits:
        schedules: tuple[str, ...] = (ZERO_BUBBLE,)
    elif request.schedule == "auto" and model.splits and request.profile is not None:
        schedules = (ONE_F_ONE_B, ZERO_BUBBLE)
    else:
        schedules = (ONE_F_ONE_B,)
    return Problem(
        model=model,
        counts=kinds.counts,
        microbatches=request.spec.n_microbatches,
        schedules=schedules,
        current=len(request.current.pipelines) if request.current else 0,
        thorough=request.current is None,
    )


def _search(request: PlanRequest, profile: Profile, kinds: NodeKinds, share: float) -> _SearchResult:
    model = cost_model(profile, kinds.kinds, request.workers, share)
    problem = _problem(request, kinds, model)
    if request.shape != "auto":
        return _forced(request, profile, kinds, problem, share)
    small = _small(problem)
    if not small and len(kinds.kinds) > MAX_KINDS:
        kinds = kinds.merged(MAX_KINDS, profile)
        model = cost_model(profile, kinds.kinds, request.workers, share)
        problem = _problem(request, kinds, model)
    if not small:
        repaired = replan_free_nodes(request, problem, kinds)
        if repaired is not None:
            return _SearchResult(Solution(repaired.shapes, repaired.seconds), kinds, model, kept=repaired.kept)
    tries = [_exactly(problem) if small else (scale.candidate_solutions(problem), ())]
    careful = len(problem.schedules) > 1 and (small or scale.thorough(problem))
    if careful:
        plain = replace(problem, schedules=(ONE_F_ONE_B,))
        tries.append(_exactly(plain) if small else (scale.candidate_solutions(plain), ()))
    found = [solution for solutions, _ in tries for solution in solutions]
    if scale.thorough(problem) and not small:
        found += forced.even_solutions(problem)
    if not found:
        raise InfeasiblePlan(explain_infeasible(problem, kinds, request))
    if careful:
        best = pricing.improve_cuts(model, min(found, key=lambda solution: pricing.simulated_step_seconds(model, solution)))
    else:
        best = min(found, key=lambda solution: solution.seconds)
    others = {text: s for _, told in tries for text, s in told if text != _pipelines(len(best.shapes))}
    return _SearchResult(best, kinds, model, others=tuple(sorted(others.items(), key=lambda other: other[1])))


@lru_cache(maxsize=512)
def _exactly(problem: Problem) -> tuple[list[Solution], tuple[tuple[str, float], ...]]:
    """The best solution, and what other numbers of pipelines take. A near-best one shortens the search."""
    hard = not problem.model.has_no_tail or problem.model.limited
    near = min(scale.near_best_solutions(problem) if hard else (), key=lambda found: found.seconds, default=None)
    whole, seconds = exact.solve(replace(problem, above=near.seconds if near else inf))
    told = tuple((_pipelines(k), s) for k, s in seconds.items() if s < inf)
    return [solution for solution in (whole, near) if solution is not None], told


CACHED = (
    cost_model,
    _exactly,
    pool.cached_pool,
    scale.near_best_solutions,
    figures.priced_shape,
    forced.cut_uniform,
    pricing.simulated_seconds,
    building.recomputing_stages,
)


def _forced(request: PlanRequest, profile: Profile, kinds: NodeKinds, problem: Problem, share: float) -> _SearchResult:
    """The best plan of the shape that was asked for, or of the nearest that fits."""
    room = ShapeLimits(
        nodes=sum(problem.counts),
        per_node=min(kind.units for kind in kinds.kinds),
        n_layers=request.spec.n_layers,
        n_microbatches=problem.microbatches,
    )
    large = not _small(problem)
    if large:
        kinds = alike(kinds, profile)
        problem = _problem(request, kinds, cost_model(profile, kinds.kinds, request.workers, share))
    for shapes, note in candidate_depths(request.shape, room):
        for depths in shapes:
            asked = replace(problem, depths=depths)
            solution = forced.solve(asked, room.per_node) if large else exact.solve(asked)[0]
            if solution is not None:
                return _SearchResult(solution, kinds, problem.model, note)
    raise InfeasiblePlan(explain_infeasible(problem, kinds, request))


def _pipelines(number: int) -> str:
    return f"{number} pipeline{'s' if number > 1 else ''}"


def _compare(
    request: PlanRequest, profile: Profile, found: _SearchResult, plan: Plan
) -> tuple[str, tuple[tuple[str, float], ...]]:
    """One line: the choice and up to three alternatives, in seconds, or in passes of a micro-batch through all layers
    where nothing was measured."""
    times = profile.devices[0].layers
    unit = 1.0 if request.profile is not None else sum(t.forward_s + t.backward_s for t in times) or 1.0
    word = " s" if request.profile is not None else ""

    def figure(seconds: float) -> str:
        return f"{seconds / unit:.4g}{word}" if word else f"{seconds / unit:.2f}"

    depths = tuple(len({stage.unit for stage in pipeline.stages}) for pipeline in plan.pipelines)
    head = f"{_pipelines(len(depths))} of depth {_depths(depths)} ({figure(found.solution.seconds)})"
    others = [f"{text} ({figure(seconds)})" for text, seconds in found.others[:3]]
    return head + (f", rather than {', '.join(others)}" if others else ""), found.others


def _depths(depths: Depths) -> str:
    if len(depths) <= 8:
        return format_depths(depths)
    counts = {depth: depths.count(depth) for depth in sorted(set(depths), reverse=True)}
    return "+".join(f"{n}x{depth}" if n > 1 else str(depth) for depth, n in counts.items())
