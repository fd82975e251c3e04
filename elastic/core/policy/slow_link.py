"""Slow-link policy: the remedy for a node whose link carries less than before.

none         steps take as long as before, because copies are sent while the node computes
replace      a spare is available
rebalance    fewer layers send fewer bytes: plans use a higher slow factor for the node
quarantine   the job is faster without the node
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
    """Remedy for a slow link."""

    action: HealthAction
    reason: str
    slowdown: float
    """Step time now divided by the step time before the link became slow."""


def step_slowdown(state: JobState) -> float:
    """Return the shortest of the newest `STEPS` step times, divided by the shortest earlier one.

    Both are of this epoch, without its first step, which is slower. 0: too few steps are known.
    """
    assert state.plan is not None
    known = [seconds for epoch, seconds in state.durations if epoch == state.plan.epoch][1:]
    before, now = known[:-STEPS], known[-STEPS:]
    return min(now) / min(before) if before and min(before) > 0 else 0.0


def choose_link_remedy(state: JobState, node: str, *, spare: bool) -> LinkDecision | None:
    """Return the best remedy for the slow link of `node`; None: too few steps are known."""
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
    """Return the step time of the best plan for `request` divided by that of the running plan. Both
    are predicted: the former for `state`, the latter for `now`. None: no plan fits."""
    assert now.plan is not None
    plan = plan_if_feasible(request)
    if plan is None:
        return None
    here_s, then_s = predicted_step_s(now, now.plan), predicted_step_s(state, plan)
    return then_s / here_s if here_s > 0 else None
