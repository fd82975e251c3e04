"""Repairs: damaged pipelines are made anew, and the others stay as they are."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.errors import InfeasiblePlan
from elastic.domain.types import JobSpec, NodeInfo, Pipeline, Plan
from elastic.planning.plan.plan import validate_plan
from elastic.planning.search.repair import repair
from elastic.planning.search.request import PlanRequest
from elastic.planning.search.search import make_plan
from tests.planning.search.test_search import nodes, spec

JOB = spec([1.0] * 6, 12)


def planned(job: JobSpec, infos: tuple[NodeInfo, ...], shape: str, **more: object) -> Plan:
    return make_plan(PlanRequest(spec=job, nodes=infos, epoch=1, shape=shape, **more))  # type: ignore[arg-type]


def repaired(
    plan: Plan, job: JobSpec, infos: tuple[NodeInfo, ...], *lost: str, **more: object
) -> Plan | None:
    left = tuple(info for info in infos if info.node not in lost)
    found = repair(PlanRequest(spec=job, nodes=left, epoch=2, current=plan, **more))  # type: ignore[arg-type]
    if found is not None:
        validate_plan(found)
    return found


def owners(pipeline: Pipeline) -> list[str]:
    return [stage.unit.node for stage in pipeline.stages]


def test_the_damaged_pipeline_is_cut_anew_in_its_place() -> None:
    plan = planned(JOB, nodes(9), "3+3+3")
    lost = owners(plan.pipelines[1])[1]
    found = repaired(plan, JOB, nodes(9), lost)
    assert found is not None and found.epoch == 2
    assert [found.pipelines[i].stages for i in (0, 2)] == [plan.pipelines[i].stages for i in (0, 2)]
    assert sorted(owners(found.pipelines[1])) == sorted({*owners(plan.pipelines[1])} - {lost})
    shares = [len(pipeline.microbatches) for pipeline in found.pipelines]
    assert sum(shares) == 12 and shares[1] == min(shares) < max(shares), "two nodes are slower"
    assert "1 pipelines made anew, 2 stay" in found.reason


def test_a_spare_takes_the_place_of_the_lost_node() -> None:
    plan = planned(JOB, nodes(7), "3+3", max_nodes=6)
    (spare,) = plan.spares
    lost = owners(plan.pipelines[0])[2]
    found = repaired(plan, JOB, nodes(7), lost)
    assert found is not None and found.pipelines[1].stages == plan.pipelines[1].stages
    assert sorted(owners(found.pipelines[0])) == sorted(
        {*owners(plan.pipelines[0]), spare} - {lost}
    )
    kept = [s for s in found.pipelines[0].stages if s in plan.pipelines[0].stages]
    assert len(kept) == 2 and found.spares == (), "the two that are left keep their layers"


def test_two_damaged_pipelines_become_one_if_the_nodes_suffice_for_one_only() -> None:
    plan = planned(JOB, nodes(6), "2+2+2")
    lost = [*owners(plan.pipelines[0]), owners(plan.pipelines[2])[0]]
    found = repaired(plan, JOB, nodes(6), *lost)
    assert found is not None and len(found.pipelines) == 2
    assert found.pipelines[1].stages == plan.pipelines[1].stages
    assert owners(found.pipelines[0]) == [owners(plan.pipelines[2])[1]]


def test_peers_of_nodes_that_stay_are_kept() -> None:
    plan = planned(JOB, nodes(8), "4+4", backup="stream+snapshot")
    lost = owners(plan.pipelines[0])[0]
    found = repaired(plan, JOB, nodes(8), lost)
    assert found is not None
    before, after = dict(plan.peers), dict(found.peers)
    assert (found.gradients, found.state) == ("stream", "snapshot")
    for node, peer in before.items():
        if lost not in (node, peer):
            assert after[node] == peer
    assert after.keys() == set(found.nodes()) and lost not in after.values()


@pytest.mark.parametrize(
    ("shape", "lost"), [("6", [0]), ("3+3", []), ("3+3", [0, 3]), ("2+2+2", [0, 2, 4])]
)
def test_there_is_no_repair_without_a_whole_and_a_damaged_pipeline(
    shape: str, lost: list[int]
) -> None:
    plan = planned(JOB, nodes(6), shape)
    assert repaired(plan, JOB, nodes(6), *(plan.units()[i].node for i in lost)) is None


def test_there_is_no_repair_if_no_node_is_left_for_it() -> None:
    plan = planned(JOB, nodes(3), "2+1")
    assert repaired(plan, JOB, nodes(3), owners(plan.pipelines[1])[0]) is None


def test_memory_that_does_not_suffice_is_no_repair() -> None:
    tight = nodes(4, memory=130)  # three layers of 40 bytes fit, six do not
    plan = planned(JOB, tight, "2+2")
    assert repaired(plan, JOB, tight, owners(plan.pipelines[0])[0]) is None


@pytest.mark.parametrize("backup", ["stream+replica", "reduce:2+replica"])
def test_schemes_that_need_other_holders_are_no_repair_without_them(backup: str) -> None:
    """Two pipelines in two domains: the new one would be in the domain of the other."""
    infos = tuple(replace(info, domain="a" if i < 2 else "b") for i, info in enumerate(nodes(5)))
    infos = (*infos[:4], replace(infos[4], domain="b"))
    plan = planned(JOB, infos, "2+2", backup=backup, max_nodes=4)
    first = {next(i.domain for i in infos if i.node == n) for n in owners(plan.pipelines[0])}
    assert first == {"a"} and plan.spares == ("node4",)
    assert repaired(plan, JOB, infos, "node0") is None, "some layers would be in b only"


def test_a_shared_optimizer_state_needs_as_many_holders() -> None:
    plan = planned(JOB, nodes(6), "2+2+2", backup="stream+snapshot/sharded")
    assert repaired(plan, JOB, nodes(6), owners(plan.pipelines[0])[0]) is not None
    assert repaired(plan, JOB, nodes(6), *owners(plan.pipelines[0])) is None


@given(st.integers(2, 10), st.integers(1, 4), st.integers(1, 2), st.data())
@settings(max_examples=80, deadline=None)
def test_every_repair_leaves_the_others_alone(
    n: int, k: int, workers: int, data: st.DataObject
) -> None:
    infos = nodes(n, workers=workers)
    try:
        plan = planned(JOB, infos, str(min(k, n)), backup="stream+snapshot")
    except InfeasiblePlan:
        return
    lost = data.draw(st.sets(st.sampled_from([info.node for info in infos]), max_size=n - 1))
    found = repaired(plan, JOB, infos, *lost)
    if found is None:
        return
    assert not lost & {*found.nodes(), *found.spares, *(p for pair in found.peers for p in pair)}
    damaged = {node for p in plan.pipelines if lost & {*owners(p)} for node in owners(p)}
    for pipeline in plan.pipelines:
        stays = any(
            (pipeline.stages, pipeline.schedule) == (one.stages, one.schedule)
            for one in found.pipelines
        )
        assert stays or damaged & {*owners(pipeline)}


def test_pipelines_that_must_stay() -> None:
    plan = planned(JOB, nodes(9), "3+3+3")
    lost, other = owners(plan.pipelines[1])[1], owners(plan.pipelines[0])
    left = tuple(info for info in nodes(9) if info.node != lost)
    request = PlanRequest(spec=JOB, nodes=left, epoch=2, current=plan)
    assert repair(request, other) == repair(request)
    assert repair(request, [lost]) is None, "it cannot stay"


def test_all_pipelines_stay_if_the_workers_are_back() -> None:
    plan = planned(JOB, nodes(6), "3+3")
    request = PlanRequest(spec=JOB, nodes=nodes(6), epoch=2, current=plan)
    found = repair(request, owners(plan.pipelines[0]))
    assert found is not None and found.epoch == 2
    assert [p.stages for p in found.pipelines] == [p.stages for p in plan.pipelines]


def test_a_pipeline_goes_if_no_node_is_left_for_it() -> None:
    plan = planned(JOB, nodes(3), "3")
    gone = owners(plan.pipelines[1])
    stay = [node for pipeline in plan.pipelines for node in owners(pipeline) if node not in gone]
    left = tuple(info for info in nodes(3) if info.node not in gone)
    request = PlanRequest(spec=JOB, nodes=left, epoch=2, current=plan)
    found = repair(request, stay)
    assert found is not None and repair(request) is None
    assert [p.stages for p in found.pipelines] == [plan.pipelines[i].stages for i in (0, 2)]
    assert sum(len(pipeline.microbatches) for pipeline in found.pipelines) == 12
