"""Figures of a report, worked out by hand."""

from __future__ import annotations

import pytest

from elastic.domain.types import LayerSpec, NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.capacity.report import Report, picture, report
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile

LAYERS = tuple(
    LayerSpec(20, 40, 40, 1.0, 2.0, activation_bytes=10, output_bytes=8) for _ in range(4)
)
FAST, SLOW = LayerTimes(1.0, 2.0, 1.0, 1.0), LayerTimes(2.0, 4.0, 2.0, 2.0)
PROFILE = Profile(
    model="m",
    layers=LAYERS,
    devices=(Device("fast", (FAST,) * 4, 500), Device("slow", (SLOW,) * 4, 300)),
    inside=LinkProfile(80.0),
    link=LinkProfile(8.0),
    across=LinkProfile(4.0, 0.5),
    tokens_per_microbatch=7,
)
NODES = (
    NodeInfo("a", "", "", domain="east", workers=2, device="fast"),
    NodeInfo("b", "", "", domain="east", device="slow"),
    NodeInfo("c", "", "", domain="west", device="fast", memory_bytes=1000),
)


def plan(*stages: Stage, microbatches: int = 3, schedule: str = "1f1b") -> Plan:
    pipeline = Pipeline(stages, tuple(range(microbatches)), schedule)
    return Plan(1, 4, microbatches, 1, (pipeline,), gradients="none", state="none")


def figures(*stages: Stage, **options: object) -> Report:
    return report(plan(*stages, **options), PROFILE, NODES, slow=(("b", 1.5),), samples=2)  # type: ignore[arg-type]


FOUR = (
    Stage(Unit("a", 0), 0, 1),
    Stage(Unit("a", 1), 1, 2),
    Stage(Unit("b"), 2, 3),
    Stage(Unit("c"), 3, 4),
)


def test_stages_take_the_times_of_their_node_and_link() -> None:
    units = figures(*FOUR).pipelines[0].units
    assert [unit.unit for unit in units] == ["a/0", "a/1", "b", "c"]
    assert [unit.compute_s for unit in units] == [3.0, 3.0, 9.0, 3.0]
    assert [unit.hop_s for unit in units] == pytest.approx([2 * 0.1, 2 * 1.0, 2 * 2.5, 0.0])
    assert [unit.limit_bytes for unit in units] == [500, 500, 300, 1000]


def test_memory_counts_what_is_in_flight() -> None:
    """1F1B: as many micro-batches as there are stages from here on, at most all of them."""
    assert [unit.memory_bytes for unit in figures(*FOUR).pipelines[0].units] == [130, 130, 120, 110]
    zero = figures(*FOUR, schedule="zero-bubble", microbatches=9).pipelines[0].units
    assert all(110 <= unit.memory_bytes <= 140 for unit in zero)
    assert zero[0].memory_bytes == 140


def test_recomputation_keeps_inputs_and_costs_a_forward_pass() -> None:
    first, second = Stage(Unit("c"), 0, 2, recompute=True), Stage(Unit("a"), 2, 4, recompute=True)
    units = figures(first, second).pipelines[0].units
    assert [unit.compute_s for unit in units] == [8.0, 8.0]
    assert [unit.memory_bytes for unit in units] == [220, 200 + 20 + 8]
    assert all(unit.recompute for unit in units)


def test_stages_of_one_unit_are_one_line() -> None:
    stages = tuple(Stage(Unit("ac"[i % 2]), i, i + 1) for i in range(4))
    found = figures(*stages, schedule="interleaved", microbatches=4).pipelines[0]
    assert [unit.layers for unit in found.units] == ["0:1,2:3", "1:2,3:4"]
    assert [unit.compute_s for unit in found.units] == [6.0, 6.0]
    assert 200 + 40 <= found.units[0].memory_bytes <= 200 + 80


def test_whole() -> None:
    found = figures(*FOUR)
    busy = 3 * (3.0 + 3.0 + 9.0 + 3.0)
    assert found.step_s == pytest.approx(found.pipelines[0].finish_s + found.tail_s)
    assert found.bubble == pytest.approx(1 - busy / (4 * found.step_s))
    assert found.samples_per_s == pytest.approx(6 / found.step_s)
    assert found.tokens_per_s == pytest.approx(21 / found.step_s)
    assert "pipeline 0: 1f1b, 3 micro-batches" in picture(found, "title")
