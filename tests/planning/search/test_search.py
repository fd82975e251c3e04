"""The planner: best shapes, forced shapes, memory, placement, backups."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.errors import FieldError, InfeasiblePlan
from elastic.domain.types import JobSpec, LayerSpec, NodeInfo, Plan
from elastic.planning.plan.plan import format_plan, parse_plan, validate_plan
from elastic.planning.search.search import PlanRequest, make_plan


def spec(times: list[float], microbatches: int, tp: int = 1, activation: int = 0) -> JobSpec:
    layers = tuple(LayerSpec(10, 20, 10, t / 3, t * 2 / 3, activation) for t in times)
    return JobSpec(layers=layers, n_microbatches=microbatches, n_steps=3, tp=tp)


def nodes(n: int, workers: int = 1, memory: int = 0, domains: str = "") -> tuple[NodeInfo, ...]:
    return tuple(
        NodeInfo(
            f"node{i}",
            "i",
            f"h:{i}",
            workers=workers,
            memory_bytes=memory,
            domain=domains[i : i + 1],
        )
        for i in range(n)
    )


def plan_for(job: JobSpec, infos: tuple[NodeInfo, ...], **more: object) -> Plan:
    plan = make_plan(PlanRequest(spec=job, nodes=infos, epoch=1, **more))  # type: ignore[arg-type]
    validate_plan(plan)
    assert parse_plan(format_plan(plan)) == plan
    return plan


def depths(plan: Plan) -> list[int]:
    return [len(pipeline.stages) for pipeline in plan.pipelines]


def makespan(plan: Plan, job: JobSpec) -> float:
    times = [layer.forward_s + layer.backward_s for layer in job.layers]
    return max(
        sum(times) + (len(p.microbatches) - 1) * max(sum(times[s.first : s.last]) for s in p.stages)
        for p in plan.pipelines
    )


def brute(job: JobSpec, n: int) -> float:
    """Least makespan over all numbers of pipelines of even depths, all cuts and all shares."""
    times = [layer.forward_s + layer.backward_s for layer in job.layers]
    n_layers, total, best = len(times), job.n_microbatches, float("inf")

    def slowest(depth: int) -> float:
        cuts = ((0, *c, n_layers) for c in itertools.combinations(range(1, n_layers), depth - 1))
        return min(max(sum(times[a:b]) for a, b in itertools.pairwise(cut)) for cut in cuts)

    for k in range(1, min(n, total) + 1):
        shape = [min(n // k + (i < n % k), n_layers) for i in range(k)]
        stage = [slowest(depth) for depth in shape]
        for share in itertools.product(range(1, total + 1), repeat=k):
            if sum(share) == total:
                best = min(
                    best, max(sum(times) + (m - 1) * b for m, b in zip(share, stage, strict=True))
                )
    return best


@given(
    st.lists(st.integers(1, 9).map(float), min_size=1, max_size=6),
    st.integers(1, 6),
    st.integers(1, 5),
)
@settings(max_examples=60, deadline=None)
def test_auto_is_at_least_as_fast_as_even_shapes(
    times: list[float], microbatches: int, n: int
) -> None:
    job = spec(times, microbatches)
    plan = plan_for(job, nodes(n))
    assert makespan(plan, job) <= brute(job, n) * (1 + 1e-9)


@given(
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(1, 2),
    st.integers(1, 2),
    st.sampled_from(["auto", "1", "2", "3", "2+2", "3+1", "1+1+4"]),
    st.integers(0, 5),
    st.data(),
)
@settings(max_examples=120, deadline=None)
def test_any_number_of_nodes_and_layers_gives_a_valid_plan(
    n_layers: int,
    n: int,
    microbatches: int,
    tp: int,
    groups: int,
    shape: str,
    max_nodes: int,
    data: st.DataObject,
) -> None:
    job = spec([1.0] * n_layers, microbatches, tp)
    infos = nodes(n, workers=tp * groups, domains=data.draw(st.text("ab", min_size=n, max_size=n)))
    first = plan_for(job, infos, shape=shape, max_nodes=max_nodes)
    dead = frozenset(data.draw(st.sets(st.sampled_from([i.node for i in infos]), max_size=n - 1)))
    second = plan_for(job, infos, shape=shape, max_nodes=max_nodes, current=first, dead=dead)
    assert not dead & {*second.nodes(), *second.spares, *(peer for _, peer in second.peers)}
    assert {*second.nodes(), *second.spares} == {i.node for i in infos} - dead
    assert max(depths(second)) <= n_layers
    assert not max_nodes or len(second.nodes()) <= max_nodes
    again = make_plan(
        PlanRequest(
            spec=job,
            nodes=infos,
            epoch=1,
            shape=shape,
            max_nodes=max_nodes,
            current=first,
            dead=dead,
        )
    )
    assert again == second
    alive = len(infos) - len(dead)
    if alive > 1 and second.gradients != "none":
        assert {node for node, _ in second.peers} == set(second.nodes())
    else:
        assert alive == 1


@pytest.mark.parametrize(
    ("shape", "n", "expected"),
    [
        ("1", 4, [4]),
        ("2", 4, [2, 2]),
        ("2", 5, [3, 2]),
        ("2+2", 4, [2, 2]),
        ("2+2", 3, [2, 1]),
        ("2+2", 2, [1, 1]),
        ("2+2", 1, [1]),
        ("2+2", 5, [3, 2]),
        ("3+1", 4, [3, 1]),
        ("3+1", 3, [2, 1]),
        ("3+1", 5, [3, 2]),
        ("6", 4, [1, 1, 1, 1]),
        ("1", 9, [6]),
    ],
)
def test_forced_shapes(shape: str, n: int, expected: list[int]) -> None:
    plan = plan_for(spec([1.0] * 6, 8), nodes(n), shape=shape)
    assert depths(plan) == expected
    assert ("does not fit" in plan.reason) == (
        shape in ("2+2", "3+1", "6") and "+".join(map(str, expected)) != shape
    )


def test_pipelines_are_limited_by_microbatches() -> None:
    plan = plan_for(spec([1.0] * 6, 2), nodes(4), shape="4")
    assert depths(plan) == [2, 2]
    assert "shape 4 does not fit" in plan.reason


def test_nodes_beyond_the_layers_are_spares_and_keep_backups() -> None:
    plan = plan_for(spec([1.0] * 2, 4), nodes(4), shape="1")
    assert plan.spares == ("node2", "node3")
    assert {peer for _, peer in plan.peers} == {"node2", "node3"}


def test_layers_stay_where_they_are() -> None:
    job = spec([1.0] * 6, 6)
    first = plan_for(job, nodes(4), shape="1")
    same = plan_for(job, nodes(4), shape="1", current=first)
    assert same.pipelines == first.pipelines
    lost = plan_for(job, nodes(4), shape="1", current=first, dead=frozenset({"node1"}))
    kept = {(s.unit.node, layer) for _, _, s in first.stages() for layer in s.layers}
    now = {(s.unit.node, layer) for _, _, s in lost.stages() for layer in s.layers}
    assert len(now - kept) <= 3, format_plan(lost)


def test_a_lost_stage_goes_to_where_its_backup_is() -> None:
    job = spec([1.0] * 4, 4)
    first = plan_for(job, nodes(3), shape="1")
    spare = plan_for(
        job, nodes(5), shape="1", current=first, max_nodes=3, dead=frozenset({"node1"})
    )
    assert first.peer_of("node1") == "node2"
    assert depths(spare) == [3]


def test_the_current_number_of_pipelines_wins_ties() -> None:
    job = spec([1.0] * 6, 8)
    # With three nodes, 2+1 and 1+1+1 cost the same.
    three = plan_for(job, nodes(3), shape="3")
    assert depths(plan_for(job, nodes(3), current=three)) == [1, 1, 1]
    assert depths(plan_for(job, nodes(3), current=plan_for(job, nodes(3), shape="2"))) == [2, 1]


def test_memory_decides_the_depth() -> None:
    job = spec([1.0] * 4, 4)
    assert depths(plan_for(job, nodes(4))) == [1, 1, 1, 1]
    assert depths(plan_for(job, nodes(4, memory=80))) == [2, 2]
    assert depths(plan_for(job, nodes(4, memory=40))) == [4]


def test_activations_in_flight_count() -> None:
    job = spec([1.0] * 2, 4, activation=10)
    # First of two stages keeps two micro-batches: 40 + 2 * 10; the last keeps one.
    kept = plan_for(job, nodes(2, memory=60), shape="1")
    assert depths(kept) == [2] and not any(s.recompute for _, _, s in kept.stages())
    # With less it keeps one at a time, and runs the forward pass again.
    again = plan_for(job, nodes(2, memory=59), shape="1")
    assert [s.recompute for _, _, s in again.stages()] == [True, False]
    with pytest.raises(InfeasiblePlan, match="short by 1 bytes"):
        plan_for(job, nodes(2, memory=49), shape="1")


def test_a_shape_that_memory_forbids_gives_way() -> None:
    plan = plan_for(spec([1.0] * 4, 4), nodes(4, memory=40), shape="2")
    assert depths(plan) == [4]
    assert "shape 2 does not fit" in plan.reason


def test_infeasible_says_what_is_short_and_where() -> None:
    infos = (*nodes(1, memory=70), replace(nodes(1)[0], node="small", memory_bytes=50))
    with pytest.raises(
        InfeasiblePlan,
        match=r"needs 80 bytes per worker .* small may use 50 bytes: short by 30 bytes",
    ):
        plan_for(spec([1.0] * 4, 4), infos)
    with pytest.raises(InfeasiblePlan, match="0 of 2 nodes are alive"):
        plan_for(spec([1.0], 1), nodes(2), dead=frozenset({"node0", "node1"}))
    with pytest.raises(InfeasiblePlan, match="node0 has 1 workers, a unit needs 2"):
        plan_for(spec([1.0], 1, tp=2), nodes(2))


def test_tp_divides_what_a_worker_keeps() -> None:
    assert depths(plan_for(spec([1.0] * 4, 4, tp=2), nodes(4, workers=2, memory=80))) == [
        1,
        1,
        1,
        1,
    ]


def test_units_of_one_node_are_neighbouring_stages() -> None:
    plan = plan_for(spec([1.0] * 4, 4, tp=2), nodes(2, workers=4), shape="2")
    assert [[s.unit.group for s in p.stages] for p in plan.pipelines] == [[0, 1], [0, 1]]
    assert [{s.unit.node for s in p.stages} for p in plan.pipelines] == [{"node0"}, {"node1"}]


@pytest.mark.parametrize(
    ("n", "shape", "domains", "backup", "expected", "reason"),
    [
        (1, "1", "", "auto", ("stream", "snapshot"), "no peer"),
        (1, "1", "", "stream+snapshot", ("stream", "snapshot"), "no peer"),
        (2, "1", "", "auto", ("stream", "snapshot"), "held by one node only"),
        (2, "2", "", "auto", ("stream", "replica"), "held by several nodes"),
        (2, "2", "ab", "auto", ("stream", "replica"), "held by several nodes"),
        (3, "2", "aab", "auto", ("stream", "snapshot"), "one failure domain"),
        (2, "2", "aa", "auto", ("stream", "replica"), "held by several nodes"),
        (2, "2", "", "stream+snapshot", ("stream", "snapshot"), ""),
        (2, "1", "", "stream+replica", ("stream", "snapshot"), "held by one node only"),
        (2, "1", "", "none+none", ("none", "none"), ""),
        (2, "2", "", "reduce+replica", ("reduce", "replica"), "held by several nodes"),
        (2, "2", "", "reduce:4+snapshot", ("reduce:4", "snapshot"), "held by several nodes"),
        (
            2,
            "1",
            "",
            "reduce:4+replica",
            ("stream:4", "snapshot"),
            "so reduce and replica would not do",
        ),
        (2, "1", "", "reduce+snapshot", ("stream", "snapshot"), "so reduce would not do"),
        (1, "1", "", "reduce+snapshot", ("stream", "snapshot"), "no peer"),
    ],
)
def test_backup_schemes(
    n: int, shape: str, domains: str, backup: str, expected: tuple[str, str], reason: str
) -> None:
    # Layers of 3 + 1: of three nodes in domains a, a, b the deep pipeline takes one of each.
    plan = plan_for(spec([1.0] * 4, 8), nodes(n, domains=domains), shape=shape, backup=backup)
    if domains == "aab":
        shared = [set(plan.holders(layer)) for layer in range(4)]
        by_domain = dict(zip(("node0", "node1", "node2"), domains, strict=True))
        apart = all(len({by_domain[u.node] for u in holders}) > 1 for holders in shared)
        assert plan.state == ("replica" if apart else "snapshot")
        return
    assert (plan.gradients, plan.state) == expected
    assert reason in plan.reason


def test_slow_links_favour_fewer_pipelines() -> None:
    job = spec([1.0] * 4, 8)
    assert len(plan_for(job, nodes(4)).pipelines) == 4
    assert len(plan_for(job, nodes(4), link_bytes_per_s=1.0, backup="none+none").pipelines) == 1


def test_streaming_beyond_compute_counts() -> None:
    fast = spec([1.0, 1.0], 4)
    heavy = replace(fast, layers=(replace(fast.layers[0], gradient_bytes=300), fast.layers[1]))
    plan = plan_for(
        replace(heavy, layers=heavy.layers * 2), nodes(2), shape="1", link_bytes_per_s=100.0
    )
    assert [s.last - s.first for s in plan.pipelines[0].stages] == [2, 2]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"shape": "2x2"}, "pipelines"),
        ({"shape": "0"}, "pipelines"),
        ({"backup": "stream"}, "backup"),
        ({"backup": "stream+what"}, "backup"),
        ({"spec": spec([float("nan")], 1)}, "spec.layers[0].forward_s"),
        ({"spec": spec([], 1)}, "spec"),
    ],
)
def test_bad_requests_name_the_field(changes: dict[str, object], field: str) -> None:
    request = replace(PlanRequest(spec=spec([1.0], 1), nodes=nodes(1), epoch=0), **changes)  # type: ignore[arg-type]
    with pytest.raises(FieldError) as caught:
        make_plan(request)
    assert caught.value.field == field


def test_large_clusters_lose_a_node() -> None:
    job = spec([1.0 + 0.1 * (i % 7) for i in range(96)], 512)
    first = plan_for(job, nodes(64))
    assert depths(first) == [1] * 64
    lost = plan_for(job, nodes(64), current=first, dead=frozenset({"node7"}))
    assert "node7" not in lost.nodes() and len(lost.nodes()) == 63
