"""Compute speed of nodes, from their heartbeats, and the slow factors that the planner gets.

A change of speed counts only if many steps in a row agree (`elastic.core.health.compute_speed`).
`elastic.core.policy.straggler_policy` then decides whether the plan changes.
"""

from __future__ import annotations

from typing import TypeVar

from elastic.core.health import compute_speed
from elastic.core.health.compute_speed import ComputeSpeed
from elastic.core.job.state import Heartbeat, JobState
from elastic.core.protocol import messages as m
from elastic.domain.types import Plan, Unit
from elastic.planning.cost.predict import predict
from elastic.planning.cost.profile import Profile, profile_of

T = TypeVar("T")
UNKNOWN = ComputeSpeed()
MOST_ALIKE = 32
"""Largest number of nodes with the same layers that a node is compared with."""
KEPT_MORE = 16
"""Number of departed nodes, beyond the number of members, whose measurements are kept."""


def observe_speed(state: JobState, event: Heartbeat) -> JobState:
    """Record the compute times of a heartbeat; a node has the ratio of its slowest worker."""
    member = state.members.get(event.node)
    if member is None or state.plan is None or state.spec is None or not event.measured:
        return state
    fresh = [one for one in event.measured if one.epoch == state.plan.epoch]
    slowest = max((_ratio(state, event.node, one) for one in fresh), default=0.0)
    if not slowest:
        return state
    key = member.report.info.incarnation
    pace = state.paces.get(key, ComputeSpeed(profiled=judges_by_profile(state)))
    step = min(one.step for one in fresh)
    pace = compute_speed.observe(pace, fresh[0].epoch, step, slowest, state.updated_at)
    pace = compute_speed.calibrate(pace, _speeds_of_same_layers(state, event.node))
    return state.of(paces={**of_members(state, state.paces), key: pace})


def of_members(state: JobState, known: dict[str, T]) -> dict[str, T]:
    """Return `known`, which is keyed by incarnation, without departed nodes if it is large."""
    if len(known) <= 2 * len(state.members) + KEPT_MORE:
        return known
    here = {mb.report.info.incarnation for mb in state.members.values()}
    return {key: value for key, value in known.items() if key in here}


def speed_of(state: JobState, node: str) -> ComputeSpeed:
    """Return the measured compute speed of a member; UNKNOWN if nothing was measured."""
    member = state.members.get(node)
    return UNKNOWN if member is None else state.paces.get(member.report.info.incarnation, UNKNOWN)


def judges_by_profile(state: JobState) -> bool:
    """Return whether nodes are compared with the user's profile, and not with each other."""
    return state.policy.profile is not None and not state.profile_error


def slowdowns(state: JobState) -> tuple[tuple[str, float], ...]:
    """Return (node, slow factor) of all nodes whose slow factor is not 1, for the planner.

    A slow link raises the slow factor, so that the node gets fewer layers and sends fewer copies.
    """
    links = {node: record.loaded for node, record in state.health.items()}
    factors = ((n, speed_of(state, n).factor * links.get(n, 1.0)) for n in state.members)
    return tuple((node, factor) for node, factor in factors if factor != 1.0)


def profile_for(state: JobState) -> Profile:
    """Return the user's profile, or one from the script's own figures."""
    assert state.spec is not None
    spec = state.spec
    return state.policy.profile or profile_of(spec.layers, spec.tp, spec.tokens_per_microbatch)


def predicted_step_s(state: JobState, plan: Plan) -> float:
    """Return the predicted seconds per step of `plan` on the present members."""
    return predict(plan, profile_for(state), state.infos, slowdowns(state)).step_s


def _ratio(state: JobState, node: str, measured: m.MicrobatchTiming) -> float:
    """Return measured / expected time of a micro-batch; 0 if the worker has no stage."""
    assert state.plan is not None and state.spec is not None
    device = "" if state.policy.profile is None else state.members[node].report.info.device
    unit = Unit(node, measured.local_rank // state.plan.tp)
    expected = _expected_s(state.plan, unit, profile_for(state), device)
    return (measured.forward_s + measured.backward_s) / expected if expected > 0 else 0.0


def _expected_s(plan: Plan, unit: Unit, profile: Profile, device: str) -> float:
    """Return the expected time of one micro-batch through all stages of `unit`.

    It is in seconds, or proportional to them without a profile. A layer takes its forward and
    backward time, and the forward time once more with recomputation.
    """
    times, total = profile.device(device).layers, 0.0
    for p, stage in plan.stages_by_unit.get(unit, ()):
        split = plan.pipelines[p].schedule == "zero-bubble"
        for layer in stage.layers:
            t = times[layer]
            apart = t.backward_input_s + t.backward_weight_s
            backward = apart if split and apart else t.backward_s
            total += t.forward_s * (1 + stage.recompute) + backward
    return total


def _speeds_of_same_layers(state: JobState, node: str) -> list[ComputeSpeed]:
    """Return the speeds in this epoch of other nodes that hold exactly the layers of `node`."""
    assert state.plan is not None
    others = [other for other in state.plan.alike.get(node, ()) if other != node][:MOST_ALIKE]
    found = [speed_of(state, other) for other in others]
    return [pace for pace in found if pace.epoch == state.plan.epoch]
