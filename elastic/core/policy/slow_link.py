"""What to do about a link that carries less than it did: what it costs, and what else there is.

none         steps take as long as before: copies hide behind computing
replace      a spare is at hand
rebalance    with fewer layers the node has fewer bytes to send: it counts as slower by what steps got slower
quarantine   the job is quicker without the node than with it
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.core.health.diagnosis import Record, Remedy
from elastic.core.job import epoch_change as epoch_change
from elastic.core.job.state import JobState
from elastic.core.job.stragglers import profile_for, slowdowns
from elastic.domain.errors import InfeasiblePlan
from elastic.planning.cost.predict import predict
from elastic.planning.search.search import PlanRequest, make_plan

GAIN = 0.05
"""A change must be expected to shorten the step by this share."""
STEPS = 2
"""Newest steps that count as slow ones; as many are needed before."""


@dataclass(frozen=True, slots=True)
class LinkDecision:
    action: Remedy
    reason: str
    slowdown: float
    """Seconds of a step now over before."""


def slowdown(state: JobState) -> float:
    """Of the newest steps, the quickest each time; 0: too few are known. The first of an epoch warms up."""
    assert state.plan is not None
    known = [seconds for epoch, seconds in state.durations if epoch == state.plan.epoch][1:]
    before, now = known[:-STEPS], known[-STEPS:]
    return min(now) / min(before) if before and len(now) == STEPS and min(before) > 0 else 0.0


def choose_link_remedy(state: JobState, node: str, *, spare: bool) -> LinkDecision | None:
    """What is best for a job whose node has a slow link; None: what it costs is not known yet."""
    cost = slowdown(state)
    if not cost:
        return None
    if cost < state.policy.health.slowed:
        return LinkDecision(Remedy.NONE, f"steps take {cost:.2f} of the time before: the plan stays", cost)
    request = epoch_change.plan_request(state, state.epoch + 1)
    without = _relative(state, replace(request, dead=frozenset({node})), state)
    if spare and without is not None:
        text = f"steps take {cost:.2f} times as long, and a spare is at hand"
        return LinkDecision(Remedy.REPLACE, text, cost)
    loaded = _as_slower(state, node, cost)
    lighter = _relative(loaded, epoch_change.plan_request(loaded, state.epoch + 1), state)
    options = [(lighter, Remedy.REBALANCE), (without, Remedy.QUARANTINE)]
    known = [(after, action) for after, action in options if after is not None]
    best, action = min(known, default=(cost, Remedy.NONE))
    if action is Remedy.NONE or best > cost * (1 - GAIN):
        return LinkDecision(Remedy.NONE, f"steps take {cost:.2f} times as long, and no plan is better", cost)
    return LinkDecision(action, f"steps take {cost:.2f} times as long; {best:.2f} after the change", cost)


def _relative(state: JobState, request: PlanRequest, now: JobState) -> float | None:
    """Predicted step of the best plan, over that of the running one with all links as they should be."""
    assert now.plan is not None
    try:
        plan = make_plan(request)
    except InfeasiblePlan:
        return None
    profile, nodes = profile_for(now), tuple(mb.report.info for mb in now.members.values())
    here, then = (
        predict(now.plan, profile, nodes, slowdowns(now)),
        predict(plan, profile, nodes, slowdowns(state)),
    )
    return then.step_s / here.step_s if here.step_s > 0 else None


def _as_slower(state: JobState, node: str, factor: float) -> JobState:
    record = replace(state.health.get(node, Record()), loaded=factor)
    return state.of(health={**state.health, node: record})
