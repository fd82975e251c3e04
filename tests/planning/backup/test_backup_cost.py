"""What pairs of backup schemes cost, and which is chosen when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.domain.types import LayerSpec, NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.backup.backup_cost import (
    CLOSE,
    Estimate,
    Weighing,
    choose_pair,
    estimate,
    estimates,
    is_replicated,
    options,
)
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile
from elastic.planning.search.assemble import assign_backups

NODES = tuple(NodeInfo(f"node{i}", f"i{i}", "") for i in range(4))
LAYERS, MICROBATCHES = 4, 8
MB = 1_000_000


def profile(
    *, link: float = 0.0, compute_s: float = 0.3, copy: float = 0.0, contention: float = 0.0
) -> Profile:
    """Four layers of a million parameters: 16 MB of state each, 4 MB of gradient."""
    layers = (LayerSpec(4 * MB, 12 * MB, 4 * MB, compute_s / 3, compute_s * 2 / 3),) * LAYERS
    times = (LayerTimes(compute_s / 3, compute_s * 2 / 3),) * LAYERS
    return Profile(
        model="toy",
        layers=layers,
        devices=(Device("a", times),),
        link=LinkProfile(link, 0.0),
        copy_bytes_per_s=copy,
        contention=contention,
    )


def plan(pipelines: int) -> Plan:
    depth = LAYERS // pipelines
    share = MICROBATCHES // pipelines
    made = tuple(
        Pipeline(
            tuple(
                Stage(Unit(f"node{p * depth + s}"), s * pipelines, (s + 1) * pipelines)
                for s in range(depth)
            ),
            tuple(range(p * share, (p + 1) * share)),
        )
        for p in range(pipelines)
    )
    peers = tuple((f"node{i}", f"node{(i + 1) % 4}") for i in range(4))
    return Plan(1, LAYERS, MICROBATCHES, 1, made, peers=peers)


def priced(pair: str, pipelines: int = 1, hazard: float = 1e-4, **figures: float) -> Estimate:
    return estimate(
        plan(pipelines), pair, Weighing(profile=profile(**figures), hazard_per_s=hazard), NODES
    )


def test_free_links_and_copies_cost_nothing() -> None:
    for pair in ("stream+snapshot", "stream:4+snapshot", "recompute+snapshot", "recompute+replica"):
        assert priced(pair).exposed_s == 0


def test_a_stream_is_exposed_by_copies_contention_and_its_last_transfer() -> None:
    """One layer a node, 4 MB at 40 MB/s beside 0.3 s of computing: 0.1 s, a fifth of it felt;
    copies at 400 MB/s."""
    found = priced("stream+replica", link=40 * MB, contention=0.2, copy=400 * MB)
    each = 0.2 * 0.1 + 0.01
    state = 16 / 400
    pipeline = (LAYERS - 1 + MICROBATCHES) * each
    assert found.exposed_s == pytest.approx(pipeline + 0.1 + state)
    assert found.sent_bytes == MICROBATCHES * 4 * MB


@pytest.mark.parametrize(
    "pair", ["stream:2+snapshot", "reduce+replica", "log+replay:4", "recompute+replica"]
)
def test_workers_of_a_node_copy_and_send_beside_each_other(pair: str) -> None:
    """Two workers that share layers of twice the bytes cost what one of the half costs; their node
    keeps and sends
    twice as much."""
    by = Weighing(profile=profile(link=100 * MB, contention=0.2, copy=400 * MB), hazard_per_s=1e-4)
    twice = tuple(
        replace(la, param_bytes=8 * MB, state_bytes=24 * MB, gradient_bytes=8 * MB)
        for la in by.profile.layers
    )
    pairs = replace(by, profile=replace(by.profile, tp=2, layers=twice))
    one, both = (
        estimate(plan(2), pair, by, NODES),
        estimate(replace(plan(2), tp=2), pair, pairs, NODES),
    )
    assert (both.exposed_s, both.lost_s) == pytest.approx((one.exposed_s, one.lost_s))
    assert (both.sent_bytes, both.memory_bytes) == pytest.approx(
        (2 * one.sent_bytes, 2 * one.memory_bytes)
    )


def test_copies_are_seldom_only_where_a_step_has_very_many_micro_batches() -> None:
    def tried(microbatches: int) -> list[str]:
        made = replace(plan(1).pipelines[0], microbatches=tuple(range(microbatches)))
        found = options(
            replace(plan(1), pipelines=(made,), n_microbatches=microbatches), replicated=False
        )
        return [pair for pair in found if pair.startswith("stream") and pair.endswith("snapshot")]

    few = ["stream+snapshot", *(f"stream:{k}+snapshot" for k in (2, 4, 8))]
    assert tried(256) == few
    assert tried(1024) == [*few, "stream:16+snapshot", "stream:32+snapshot"]


def test_copying_less_often_costs_less_and_loses_more() -> None:
    costs = [priced(f"stream:{k}+snapshot", link=200 * MB, contention=0.3) for k in (1, 2, 4)]
    assert costs == sorted(costs, key=lambda e: -e.exposed_s)
    assert costs == sorted(costs, key=lambda e: e.lost_s)
    nothing = priced("recompute+snapshot", link=200 * MB, contention=0.3)
    assert nothing.exposed_s < costs[-1].exposed_s and nothing.lost_s > costs[-1].lost_s


def test_replay_sends_less_keeps_more_and_fetches_more() -> None:
    """16 MB of state a node, 4 MB an update."""
    whole = priced("recompute+snapshot", link=100 * MB, copy=400 * MB)
    found = priced("recompute+replay:4", link=100 * MB, copy=400 * MB)
    assert (whole.sent_bytes, found.sent_bytes) == (16 * MB, 8 * MB)
    assert (whole.memory_bytes, found.memory_bytes) == (48 * MB, 80 * MB)
    assert found.exposed_s - whole.exposed_s == pytest.approx(4 / 400), "one copy more"
    slow = [priced(f"recompute+{state}", link=2 * MB) for state in ("snapshot", "replay:4")]
    assert slow[1].exposed_s < slow[0].exposed_s, "what the link cannot carry"


def test_sums_in_rounds_send_as_often_and_leave_little_to_run_again() -> None:
    """Two pipelines of two stages of two layers, 4 micro-batches each, whose pace is 0.6 s."""
    stream, reduce, less, nothing = (
        priced(f"{gradients}+replica", 2, link=400 * MB)
        for gradients in ("stream", "reduce", "reduce:2", "recompute")
    )
    assert reduce.sent_bytes == stream.sent_bytes == 2 * less.sent_bytes > nothing.sent_bytes == 0
    assert reduce.lost_s < less.lost_s <= nothing.lost_s
    assert reduce.memory_bytes == 0 < stream.memory_bytes


def test_what_the_link_cannot_carry_holds_the_step_up() -> None:
    """16 MB of state and eight gradients of 4 MB at 1 MB/s take 48 s; the step computes for a
    few."""
    found = priced("stream+snapshot", link=1 * MB)
    step = 3.3
    assert found.exposed_s == pytest.approx(48 - step, rel=0.1)
    assert found.sent_bytes == 48 * MB
    assert priced("recompute+snapshot", link=1 * MB).exposed_s == pytest.approx(16 - step, rel=0.1)
    assert priced("recompute+replica", link=1 * MB).exposed_s == 0


def test_a_loss_costs_more_where_links_are_slow_and_nothing_is_kept() -> None:
    assert (
        priced("stream+snapshot", link=10 * MB).lost_s
        > priced("stream+snapshot", link=1000 * MB).lost_s
    )
    assert priced("recompute+replica", 2).lost_s == pytest.approx(MICROBATCHES / 2 / 2 * 0.6)


@pytest.mark.parametrize(
    ("figures", "hazard", "wanted"),
    [
        pytest.param({"link": 10_000 * MB}, 1e-3, "stream+snapshot", id="fast-network"),
        pytest.param({"link": 12 * MB, "contention": 0.2}, 1e-6, "log+replay", id="slow-and-calm"),
        pytest.param(
            {"link": 12 * MB, "compute_s": 30.0}, 1e-3, "stream+snapshot", id="slow-but-long"
        ),
    ],
)
def test_the_network_the_steps_and_the_losses_decide(
    figures: dict[str, float], hazard: float, wanted: str
) -> None:
    by = Weighing(profile=profile(**figures), hazard_per_s=hazard)
    best, why = choose_pair(estimates(plan(1), by, NODES))
    assert best.pair == wanted
    assert why.startswith(f"{wanted}: ") and "; next " in why


def test_of_nearly_equals_the_one_that_loses_least() -> None:
    def priced_at(name: str, expected: float, lost: float) -> Estimate:
        return Estimate(name, "snapshot", 0.0, 0.0, 10.0, lost, expected)

    fast, safe = priced_at("recompute", 1.0, 9.0), priced_at("stream", 1 + CLOSE / 2, 1.0)
    slow = priced_at("stream:2", 1 + 2 * CLOSE, 0.5)
    assert choose_pair([fast, safe, slow])[0] is safe


def test_what_has_no_room_is_not_taken() -> None:
    big = Estimate("stream", "snapshot", 0.0, 0.0, 9.0, 1.0, 1.0)
    small = replace(big, gradients="log", memory_bytes=2.0)
    assert choose_pair([big, small])[0] is big
    assert choose_pair([big, small], room_bytes=5)[0] is small
    assert choose_pair([big, small], room_bytes=1)[0] is small, (
        "none fits: the one that needs least"
    )


def test_replicas_only_where_others_hold_every_layer() -> None:
    assert {pair.split("+")[1] for pair in options(plan(1), replicated=False)} == {
        "snapshot",
        "replay",
    }
    assert not any(pair.startswith("reduce") for pair in options(plan(1), replicated=False))
    assert {pair.split("+")[1] for pair in options(plan(2), replicated=True)} == {"replica"}


def test_auto_without_known_links_loses_least() -> None:
    found, why = assign_backups(plan(2), NODES, "auto")
    assert (found.gradients, found.state) == ("stream", "replica") and "several nodes" in why


def test_auto_with_known_links_takes_the_cheapest_and_says_why() -> None:
    slow = Weighing(profile=profile(link=MB, contention=0.5), hazard_per_s=1e-9)
    found, why = assign_backups(plan(2), NODES, "auto", slow)
    assert (found.gradients, found.state) == ("log", "replica")
    assert why.startswith("backup log+replica: ") and "; next " in why
    assert assign_backups(plan(2), NODES, "stream+snapshot", slow)[0].state == "snapshot", (
        "what the user says counts"
    )


def test_slow_nodes_and_interleaved_stages_are_priced() -> None:
    by = Weighing(profile=profile(link=40 * MB), slow=(("node1", 2.0),), hazard_per_s=1e-4)
    here = replace(plan(1), pipelines=(replace(plan(1).pipelines[0], schedule="zero-bubble"),))
    proper = priced("stream+snapshot", link=40 * MB)
    assert estimate(plan(1), "stream+snapshot", by, NODES).expected_s > proper.expected_s
    assert estimate(here, "recompute+replica", by, NODES).exposed_s == 0


def test_replicas_have_to_lie_in_other_domains_where_there_are_such() -> None:
    """The choice while training and the plan's own are one and the same rule."""
    apart = tuple(replace(info, domain="ab"[i % 2]) for i, info in enumerate(NODES))
    assert is_replicated(plan(2), NODES) == (True, "every layer is held by several nodes")
    held, why = is_replicated(plan(2), apart)
    assert not held and "one failure domain only" in why
    by = Weighing(profile=profile(link=40 * MB), hazard_per_s=1e-4)
    assert not any(e.state == "replica" for e in estimates(plan(2), by, apart))
    assert assign_backups(plan(2), apart, "auto", by)[0].state != "replica"
