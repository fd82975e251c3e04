"""The models of the rivals' planners follow their papers."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from elastic_sim.steps.rival_planners import (
    EqualNodes,
    best_template,
    plan_oobleck,
    plan_varuna,
)

from elastic.domain.types import LayerSpec, NodeInfo, Plan
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile
from elastic.planning.plan.plan import validate_plan

UNLIMITED = float(1 << 62)


def cluster(
    times: list[float], *, microbatches: int = 8, memory: float = UNLIMITED, activation: int = 1
) -> EqualNodes:
    """Layers of these seconds (a third of them forward); each holds ten bytes."""
    layers = tuple(
        LayerSpec(2, 4, 4, t / 3, 2 * t / 3, activation_bytes=activation, output_bytes=0)
        for t in times
    )
    device = Device("x", tuple(LayerTimes(t / 3, 2 * t / 3) for t in times))
    return EqualNodes(
        Profile(model="m", layers=layers, devices=(device,), link=LinkProfile(1e9)),
        microbatches,
        memory,
    )


def nodes(count: int) -> list[NodeInfo]:
    return [NodeInfo(f"node{i}", "", "") for i in range(count)]


def fastest(found: EqualNodes, plans: list[Plan]) -> Plan | None:
    """The fastest plan without communication, by the slowest pipeline under 1F1B."""

    def seconds(plan: Plan) -> float:
        ends = []
        for pipeline in plan.pipelines:
            time = found.time[pipeline.stages[0].recompute]
            times = [time[s.last] - time[s.first] for s in pipeline.stages]
            ends.append(sum(times) + (len(pipeline.microbatches) - 1) * max(times))
        return max(ends)

    return min(plans, key=seconds, default=None)


def published_time(found: EqualNodes, cuts: tuple[int, ...], recompute: bool) -> float:
    """T1 + T2 + T3 as in the paper, stages counted from 1."""
    time = found.time[recompute]
    w = [time[b] - time[a] for a, b in pairwise(cuts)]
    options = []
    for k in range(1, len(w) + 1):
        if w[k - 1] >= max(w) - 1e-12:
            options.append(sum(w) + (4 * len(w) - len(w) + k - 1) * w[k - 1] + sum(w[k - 1 :]))
    return min(options)


@pytest.mark.parametrize("seed", range(30))
@pytest.mark.parametrize("tight", [False, True])
def test_templates_are_the_best_cuts(seed: int, tight: bool) -> None:
    rng = np.random.default_rng(seed)
    times = [float(x) for x in rng.integers(1, 9, size=rng.integers(3, 9))]
    found = cluster(times, memory=float(rng.integers(25, 60)) if tight else UNLIMITED, activation=5)
    for depth in range(1, len(times) + 1):
        options = [
            published_time(found, (0, *inner, len(times)), recompute)
            for inner in combinations(range(1, len(times)), depth - 1)
            for recompute in (False, True)
            if found.fits((0, *inner, len(times)), 8, recompute)
        ]
        made = best_template(found, depth)
        assert (made is None) == (not options)
        if made is not None:
            assert made.seconds == pytest.approx(min(options))
            assert found.fits(made.cuts, 8, made.recompute)
            assert published_time(found, made.cuts, made.recompute) == pytest.approx(made.seconds)


@pytest.mark.parametrize("count", range(2, 14))
def test_oobleck_uses_all_nodes_in_two_pipelines_or_more(count: int) -> None:
    found = cluster([1.0] * 8, microbatches=16)
    plan = fastest(found, plan_oobleck(found, nodes(count)))
    assert plan is not None
    validate_plan(plan)
    assert len(plan.pipelines) >= 2
    assert not plan.spares


def test_oobleck_without_room_for_a_replica_runs_one_pipeline() -> None:
    found = cluster([1.0] * 4, memory=22.0)
    assert best_template(found, 1) is None
    (plan,) = plan_oobleck(found, nodes(3))
    assert len(plan.pipelines) == 1
    assert not plan_oobleck(found, nodes(1))


def test_varuna_is_a_grid_of_equal_cuts() -> None:
    found = cluster([0.1, *[1.0] * 6, 0.1], microbatches=12)
    for count in range(1, 14):
        plan = fastest(found, plan_varuna(found, nodes(count)))
        assert plan is not None
        validate_plan(plan)
        depths = {len(p.stages) for p in plan.pipelines}
        assert len(depths) == 1
        depth = depths.pop()
        assert len(plan.pipelines) == min(count // depth, 12)
        blocks = [min(s.last, 7) - max(s.first, 1) for s in plan.pipelines[0].stages]
        assert max(blocks) - min(blocks) <= 1
        shares = [len(p.microbatches) for p in plan.pipelines]
        assert max(shares) - min(shares) <= 1


def test_varuna_recomputes_only_if_memory_requires_it() -> None:
    found = cluster([1.0] * 4, memory=46.0, activation=5)
    assert not plan_varuna(found, nodes(1))
    roomy = cluster([1.0] * 4, memory=61.0, activation=5)
    plan = fastest(roomy, plan_varuna(roomy, nodes(1)))
    assert plan is not None and plan.pipelines[0].stages[0].recompute is False
    tight = cluster([1.0] * 4, memory=36.0, activation=5)
    plan = fastest(tight, plan_varuna(tight, nodes(2)))
    assert plan is not None and all(s.recompute for s in plan.pipelines[0].stages)
