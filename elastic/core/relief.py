"""The rule for slow nodes: re-plan so that they get fewer layers or micro-batches. Nobody is evicted for it."""

from __future__ import annotations

from dataclasses import replace

from elastic.core import change as epoch_change
from elastic.core.job import JobState, Note, Result
from elastic.core.pace import Pace, found
from elastic.core.stragglers import pace_of, profile_for, slow
from elastic.errors import InfeasiblePlan
from elastic.planning.predict import predict
from elastic.planning.search import make_plan

GAIN = 0.05
"""A new plan must be predicted to shorten the step by this share."""


def relieve(state: JobState, now: float) -> Result | None:
    """If nodes were found to have another speed, count with it, and change the plan if that gains enough.

    What was found becomes what plans count with, so the same evidence is weighed once.
    """
    assert state.plan is not None
    if not state.paces:
        return None
    paced = [(node, pace_of(state, node)) for node in state.plan.nodes()]
    changed = [(node, pace, factor) for node, pace in paced if (factor := found(pace)) is not None]
    if not changed:
        return None
    paces = dict(state.paces)
    for node, pace, factor in changed:
        paces[state.members[node].report.info.incarnation] = replace(pace, factor=factor)
    state = state.of(paces=paces)
    cause = ", ".join(_told(state, node, factor) for node, _, factor in changed)
    notes = tuple(_note(node, pace, factor) for node, pace, factor in changed)
    gain, why = _gain(state)
    if gain < GAIN:
        return state, notes, f"{cause}; the plan stays: {why}"
    state, actions, reason = epoch_change.begin(state, cause, now, boundary=True)
    return state, (*notes, *actions), f"{reason}; {why}"


def _gain(state: JobState) -> tuple[float, str]:
    """Share of the step that the best plan for the speeds as they are now saves, and that in words."""
    assert state.plan is not None
    request = epoch_change.request(state, state.epoch + 1)
    try:
        plan = make_plan(request)
    except InfeasiblePlan as error:
        return 0.0, str(error)
    profile, nodes = profile_for(state), tuple(mb.report.info for mb in state.members.values())
    here = predict(state.plan, profile, nodes, slow(state)).step_s
    then = predict(plan, profile, nodes, slow(state)).step_s
    gain = 1 - then / here if here > 0 else 0.0
    return gain, f"the best plan takes {then:.4g} s a step instead of {here:.4g} s ({gain:+.1%})"


def _told(state: JobState, node: str, factor: float) -> str:
    measure = "profiled" if state.policy.profile is not None else "before"
    return (
        f"{node} computes {factor:.1f}x slower than {measure}"
        if factor != 1.0
        else f"{node} is as fast as {measure}"
    )


def _note(node: str, pace: Pace, factor: float) -> Note:
    """The evidence: steps and their factors."""
    steps = {str(step): round(ratio / pace.unit, 3) for step, ratio in pace.samples}
    return Note("pace", {"node": node, "slow": factor, "before": pace.factor, "steps": steps})
