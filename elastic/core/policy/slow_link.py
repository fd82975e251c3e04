"""Slow-link policy: the remedy for a node whose link carries less than before.

none         steps take as long as before: computing hides the copies
replace      a spare is available
rebalance    with fewer layers the node sends fewer bytes, so plans count it as slower
quarantine   the job is faster without the node than with it
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from elastic.core.health.diagnosis import HealthAction
from elastic.core.job.epoch_change import plan_request
from elastic.core.job.join_policy import plan_if_feasible
from elastic.core.job.quarantine import record_of, with_record
from elastic.core.job.state import JobState
from elastic.core.job.stragglers import predicted_step_s
from elastic.planning.search.search import PlanRequest

GAIN = 0.05
"""Fraction of the step that a change must be expected to save."""
STEPS = 2
"""Number of the newest steps that count as slow. One earlier step is needed to compare."""


@dataclass(frozen=True, slots=True)
class LinkDecision:
    action: HealthAction
    reason: str
    slowdown: float
    """Step time now over the step time before."""


def step_slowdown(state: JobState) -> float:
    """Fastest of the newest steps over the fastest earlier one; 0: too few steps are known.

    The first step of an epoch does not count, because it warms up.
    """
    assert state.plan is not None
    known = [seconds for epoch, seconds in state.durations if epoch == state.plan.epoch][1:]
    before, now = known[:-STEPS], known[-STEPS:]
    return min(now) / min(before) if before and min(before) > 0 else 0.0


def choose_link_remedy(state: JobState, node: str, *, spare: bool) -> LinkDecision | None:
    """Best remedy for the slow link of `node`; None: its cost is not known yet."""
    cost = step_slowdown(state)
    if not cost:
        return None
    if cost < state.policy.health.slowed:
        text = f"steps take {cost:.2f} of the time before: the plan stays"
        return LinkDecision(HealthAction.NONE, text, cost)
    request = plan_request(state, state.epoch + 1)
    without = _relative_step(state, replace(request, dead=frozenset({node})), state)
    if spare and without is not None:
        text = f"steps take {cost:.2f} times as long, and a spare is available"
        return LinkDecision(HealthAction.REPLACE, text, cost)
    loaded = with_record(state, node, replace(record_of(state, node), loaded=cost))
    lighter = _relative_step(loaded, plan_request(loaded, state.epoch + 1), state)
    options = [(lighter, HealthAction.REBALANCE), (without, HealthAction.QUARANTINE)]
    known = [(after, action) for after, action in options if after is not None]
    best, action = min(known, default=(cost, HealthAction.NONE))
    if action is HealthAction.NONE or best > cost * (1 - GAIN):
        text = f"steps take {cost:.2f} times as long, and no plan is better"
        return LinkDecision(HealthAction.NONE, text, cost)
    text = f"steps take {cost:.2f} times as long; {best:.2f} after the change"
    return LinkDecision(action, text, cost)


def _relative_step(state: JobState, request: PlanRequest, now: JobState) -> float | None:
    """Predicted step of the best plan over that of the running plan with all links well."""
    assert now.plan is not None
    plan = plan_if_feasible(request)
    if plan is None:
        return None
    here_s, then_s = predicted_step_s(now, now.plan), predicted_step_s(state, plan)
    return then_s / here_s if here_s > 0 else None
