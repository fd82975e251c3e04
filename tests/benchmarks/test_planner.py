"""A small run of the planner benchmark: no rival is faster, and no plan beats the bound."""

from __future__ import annotations

import math

import pytest

from benchmarks.planning.planner import (
    QUICK,
    TYPES,
    PlanComparison,
    compare,
    deep_profile,
    measure,
    published,
    random_cluster,
    rivals,
    table,
)


def test_a_small_part_of_everything() -> None:
    rows, found = measure(QUICK)
    values = {row.metric: row.value for row in rows}
    assert all(math.isfinite(value) for value in values.values())
    assert [v for name, v in values.items() if name.endswith("its plan is faster")] == [0, 0]
    gaps = [
        v
        for name, v in values.items()
        if name.startswith("gap") and name.endswith(("median", "worst"))
    ]
    assert len(gaps) == 4 and all(-1e-6 <= gap < 100 for gap in gaps)
    assert len(found) == len(QUICK.models) * len(QUICK.nodes)
    assert len(table(found).splitlines()) == 1 + len(found)


def test_rows_of_rivals_summarise_the_table() -> None:
    found = [PlanComparison("a", 2, 1.0, 1.5, 0.9), PlanComparison("a", 30, 2.0, math.inf, 2.0)]
    values = {row.metric: row.value for row in rivals(found)}
    assert values["Oobleck: cases in which its plan is faster"] == 0
    assert values["Oobleck: cases without a plan where ours has one"] == 1
    assert values["Varuna: cases in which its plan is faster"] == 1
    assert values["Varuna: its step over ours, mean of 2"] == pytest.approx(0.95)
    assert list(published(found)) == []


def test_clusters_are_drawn_by_their_seed() -> None:
    first, again, other = (random_cluster(seed, (64, 512)) for seed in (3, 3, 4))
    assert first == again != other
    assert 64 - 2 <= len(first.nodes) <= 512 + 2
    assert {info.device for info in first.nodes} <= {d.name for d in first.profile.devices}  # type: ignore[union-attr]


def test_deep_models_have_the_layers_asked_for() -> None:
    profile = deep_profile(TYPES, 96)
    assert {len(device.layers) for device in profile.devices} == {len(profile.layers)} == {96}
    assert compare("gpt3-medium", 3).ours > 0
