"""Nodes that compute slower than they should: what heartbeats tell of it, and what the planner is told.

Only what many steps in a row agree on is believed (`elastic.core.health.compute_speed`); what follows from it is decided in
`elastic.core.policy.straggler_policy`.
"""

from __future__ import annotations

from typing import ClassVar, TypeVar

from elastic.core.health.compute_speed import Pace, calibrate
from elastic.core.health.compute_speed import observe_speed as note
from elastic.core.job.state import Heartbeat, JobState
from elastic.core.protocol import messages as m
from elastic.domain.types import Plan, Stage, Unit
from elastic.planning.cost.profile import Profile, profile_of

T = TypeVar("T")
UNKNOWN = Pace()
PLANS = 4
"""Whose places are remembered."""
MOST_ALIKE = 32
"""Nodes with the same layers that one is compared with."""
KEPT_MORE = 16
"""Nodes that left and may come back, besides as many as there are members."""


class _Places:
    """Stages of a plan by unit, and nodes by what they hold; made once a plan: every heartbeat asks."""

    remembered: ClassVar[dict[int, _Places]] = {}

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.stages: dict[Unit, list[tuple[int, Stage]]] = {}
        held: dict[str, list[tuple[int, int]]] = {}
        for p, _, stage in plan.stages():
            self.stages.setdefault(stage.unit, []).append((p, stage))
            held.setdefault(stage.unit.node, []).append((stage.first, stage.last))
        self.held = {node: tuple(ranges) for node, ranges in held.items()}
        self.alike: dict[tuple[tuple[int, int], ...], list[str]] = {}
        for node, ranges in self.held.items():
            self.alike.setdefault(ranges, []).append(node)

    @classmethod
    def of(cls, plan: Plan) -> _Places:
        found = cls.remembered.get(id(plan))
        if found is None:  # what is kept here holds its plan, so that no other one can have the same id
            if len(cls.remembered) >= PLANS:
                cls.remembered.clear()
            found = cls.remembered[id(plan)] = cls(plan)
        return found


def observe_speed(state: JobState, event: Heartbeat) -> JobState:
    """Take note of a node's measurements. A node is as slow as its slowest worker."""
    member = state.members.get(event.node)
    if member is None or state.plan is None or state.spec is None or not event.measured:
        return state
    fresh = [one for one in event.measured if one.epoch == state.plan.epoch]
    ratios = {one.local_rank: _ratio(state, event.node, one) for one in fresh}
    if not fresh or not any(ratios.values()):
        return state
    key = member.report.info.incarnation
    known = state.paces.get(key, Pace(profiled=state.policy.profile is not None))
    pace = note(known, fresh[0].epoch, min(one.step for one in fresh), max(ratios.values()), state.updated_at)
    pace = calibrate(pace, _same(state, event.node))
    return state.of(paces={**of_members(state, state.paces), key: pace})


def of_members(state: JobState, known: dict[str, T]) -> dict[str, T]:
    """What is known of nodes, by incarnation, without those that left, once they are many."""
    if len(known) <= 2 * len(state.members) + KEPT_MORE:
        return known
    here = {mb.report.info.incarnation for mb in state.members.values()}
    return {key: value for key, value in known.items() if key in here}


def speed_of(state: JobState, node: str) -> Pace:
    member = state.members.get(node)
    return UNKNOWN if member is None else state.paces.get(member.report.info.incarnation, UNKNOWN)


def compute_slowdown(state: JobState, node: str) -> float:
    """How much slower than it should be the plans take `node`."""
    return speed_of(state, node).factor


def loaded(state: JobState, node: str) -> float:
    """How much slower the plans take `node` because of its link."""
    record = state.health.get(node)
    return 1.0 if record is None else record.loaded


def slowdowns(state: JobState) -> tuple[tuple[str, float], ...]:
    """What the planner is told: (node, factor) of those that are not as their profile says."""
    factors = [(node, compute_slowdown(state, node) * loaded(state, node)) for node in state.members]
    return tuple((node, f) for node, f in factors if f != 1.0)


def profile_for(state: JobState) -> Profile:
    """The job's profile, or what its own figures make."""
    assert state.spec is not None
    spec = state.spec
    return state.policy.profile or profile_of(spec.layers, spec.tp, spec.tokens_per_microbatch)


def _ratio(state: JobState, node: str, measured: m.Measured) -> float:
    """Measured over expected seconds; 0 if nothing is expected of this worker."""
    assert state.plan is not None and state.spec is not None
    device = "" if state.policy.profile is None else state.members[node].report.info.device
    unit = Unit(node, measured.local_rank // state.plan.tp)
    expected = _expected(state.plan, unit, profile_for(state), device)
    return (measured.forward_s + measured.backward_s) / expected if expected > 0 else 0.0


def _expected(plan: Plan, unit: Unit, profile: Profile, device: str) -> float:
    """Seconds of one micro-batch through all stages of `unit`: f + b, or f + bi + bw when the parts run apart,
    and f once more with recomputation."""
    times, total = profile.device(device).layers, 0.0
    for p, stage in _Places.of(plan).stages.get(unit, ()):
        split = plan.pipelines[p].schedule == "zero-bubble"
        for layer in stage.layers:
            t = times[layer]
            apart = t.backward_input_s + t.backward_weight_s
            total += t.forward_s * (1 + stage.recompute) + (apart if split and apart else t.backward_s)
    return total


def _same(state: JobState, node: str) -> list[Pace]:
    """Of the other nodes that hold exactly the layers that `node` holds, in this epoch."""
    assert state.plan is not None
    places = _Places.of(state.plan)
    alike = places.alike[places.held[node]] if node in places.held else []
    others = [other for other in alike if other != node][:MOST_ALIKE]
    found = [speed_of(state, other) for other in others]
    return [pace for pace in found if pace.epoch == state.plan.epoch]
