"""Properties of every plan: valid, within memory, deterministic, monotone in nodes and speed."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import JobSpec, LayerSpec, NodeInfo, Plan
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile
from elastic.planning.plan.plan import validate_plan
from elastic.planning.schedule.schedule import actions_of, units_of
from elastic.planning.search.request import PlanRequest
from elastic.planning.search.search import decide, make_plan
from tests.planning.schedule.deadlock_check import most_in_flight, validate
from tests.planning.search.brute_force import Brute, Node

TYPES = ("slow", "middle", "fast")


def layer_times(row: list[int], updates: int, factor: int) -> LayerTimes:
    forward, backward, backward_input, backward_weight = (t * factor for t in row)
    return LayerTimes(forward, backward, backward_input, backward_weight, updates * factor)


@st.composite
def profiles(draw: st.DrawFn, most_layers: int = 8) -> Profile:
    """Three device types, each faster than the one before on every layer."""
    n_layers = draw(st.integers(1, most_layers))
    specs = [
        LayerSpec(
            10,
            20,
            draw(st.integers(1, 10)),
            0,
            0,
            draw(st.integers(0, 20)),
            draw(st.integers(0, 8)),
        )
        for _ in range(n_layers)
    ]
    times = [[draw(st.integers(1, 8)) for _ in range(4)] for _ in range(n_layers)]
    updates = draw(st.integers(0, 1))
    devices = tuple(
        Device(name, tuple(layer_times(row, updates, factor) for row in times))
        for name, factor in zip(TYPES, (4, 2, 1), strict=True)
    )
    link = draw(st.sampled_from((LinkProfile(), LinkProfile(16.0, 0.25))))
    return Profile(
        model="drawn",
        layers=tuple(specs),
        devices=devices,
        link=link,
        inside=LinkProfile(0.0, 0.125),
    )


@st.composite
def requests(
    draw: st.DrawFn, *, least: int = 1, most: int = 6, units: int = 1, schedule: str = "1f1b"
) -> PlanRequest:
    """A cluster of the three types; memory is tight in about half of the draws."""
    profile = draw(profiles())
    whole = sum(
        la.param_bytes + la.state_bytes + la.gradient_bytes + la.activation_bytes
        for la in profile.layers
    )
    memory = {name: draw(st.sampled_from((0, 0, whole, whole // 2 + 20))) for name in TYPES}
    devices = {name: draw(st.integers(1, units)) for name in TYPES}
    names = draw(st.lists(st.sampled_from(TYPES), min_size=least, max_size=most))
    nodes = tuple(
        NodeInfo(f"node{i}", "", "", workers=devices[n], memory_bytes=memory[n], device=n)
        for i, n in enumerate(names)
    )
    spec = JobSpec(profile.layers, draw(st.integers(1, 8)), n_steps=1)
    return PlanRequest(
        spec=spec, nodes=nodes, epoch=1, profile=profile, schedule=schedule, backup="none+none"
    )


def priced(request: PlanRequest) -> float | None:
    """Seconds of the best plan by the closed form; None where there is none."""
    try:
        plan = make_plan(request)
    except InfeasiblePlan:
        return None
    return cost(request, plan)


def cost(request: PlanRequest, plan: Plan) -> float:
    assert request.profile is not None
    slow = dict(request.slow)
    nodes: dict[str, Node] = {
        i.node: (i.device, slow.get(i.node, 1.0), i.memory_bytes, i.workers) for i in request.nodes
    }
    return Brute(request.profile, tuple(nodes.values()), plan.n_microbatches).cost_of(plan, nodes)


def check_memory(request: PlanRequest, plan: Plan) -> None:
    """Check every unit by running its actions: parameters, state, gradients, activations."""
    infos = {info.node: info for info in request.nodes}
    layers = request.spec.layers
    widest = max((la.output_bytes for la in layers[:-1]), default=0)
    for pipeline in plan.pipelines:
        lists = actions_of(pipeline)
        validate(lists)
        for number, unit in enumerate(units_of(pipeline)):
            stages = [(s, stage) for s, stage in enumerate(pipeline.stages) if stage.unit == unit]
            needed, weights = 0.0, {}
            for s, stage in stages:
                held = [layers[i] for i in stage.layers]
                needed += sum(la.param_bytes + la.state_bytes + la.gradient_bytes for la in held)
                kept = sum(la.activation_bytes for la in held)
                needed += kept if stage.recompute else 0
                weights[s if len(stages) > 1 else -1] = widest if stage.recompute else kept
            limit = infos[unit.node].memory_bytes
            assert not limit or needed + most_in_flight(lists[number], weights) <= limit


@given(requests(units=2))
@settings(max_examples=15, deadline=None)
def test_plans_are_valid_and_within_memory(request: PlanRequest) -> None:
    for schedule in ("auto", "1f1b", "zero-bubble", "interleaved"):
        try:
            plan = make_plan(replace(request, schedule=schedule))
        except InfeasiblePlan as error:
            assert "memory" in str(error) and "node" in str(error)
            continue
        validate_plan(plan)
        assert sorted(m for p in plan.pipelines for m in p.microbatches) == list(
            range(request.spec.n_microbatches)
        )
        for pipeline in plan.pipelines:
            assert sorted(i for stage in pipeline.stages for i in stage.layers) == list(
                range(plan.n_layers)
            )
        assert {*plan.nodes(), *plan.spares} == {info.node for info in request.nodes}
        if schedule != "interleaved":
            check_memory(request, plan)


@given(requests(), st.randoms(use_true_random=False))
@settings(max_examples=30, deadline=None)
def test_equal_requests_have_equal_plans(request: PlanRequest, random: object) -> None:
    try:
        plan = make_plan(request)
    except InfeasiblePlan:
        return
    nodes = list(request.nodes)
    random.shuffle(nodes)  # type: ignore[attr-defined]
    assert make_plan(replace(request, nodes=tuple(nodes))) == plan


@given(requests(least=1, most=5), st.sampled_from(TYPES))
@settings(max_examples=30, deadline=None)
def test_one_more_node_is_never_slower(request: PlanRequest, name: str) -> None:
    alike = next((info for info in request.nodes if info.device == name), None)
    more = replace(alike or NodeInfo("", "", "", device=name), node="extra")
    before, after = priced(request), priced(replace(request, nodes=(*request.nodes, more)))
    assert before is None or (after is not None and after <= before * (1 + 1e-9))


@given(requests(), st.data())
@settings(max_examples=30, deadline=None)
def test_a_faster_node_is_never_slower(request: PlanRequest, data: st.DataObject) -> None:
    """The node changes to the next faster type and keeps its memory."""
    number = data.draw(st.integers(0, len(request.nodes) - 1))
    node = request.nodes[number]
    faster = replace(node, device=TYPES[min(TYPES.index(node.device) + 1, 2)])
    nodes = (*request.nodes[:number], faster, *request.nodes[number + 1 :])
    before, after = priced(request), priced(replace(request, nodes=nodes))
    assert before is None or (after is not None and after <= before * (1 + 1e-9))


@given(requests(), st.data())
@settings(max_examples=30, deadline=None)
def test_a_node_that_turned_slow_never_makes_it_faster(
    request: PlanRequest, data: st.DataObject
) -> None:
    node = data.draw(st.sampled_from(request.nodes)).node
    factor = data.draw(st.sampled_from((1.25, 2.0, 5.0)))
    before, after = priced(request), priced(replace(request, slow=((node, factor),)))
    assert (before is None) == (after is None)
    assert before is None or after is None or after >= before * (1 - 1e-9)


@given(requests(schedule="auto"))
@settings(max_examples=15, deadline=None)
def test_decisions_carry_predictions_and_alternatives(request: PlanRequest) -> None:
    try:
        decision = decide(request)
    except InfeasiblePlan:
        return
    assert decision.prediction.step_s > 0
    assert len(decision.prediction.pipelines) == len(decision.plan.pipelines)
    assert all(seconds > 0 for _, seconds in decision.alternatives)
    assert decision.plan.reason
