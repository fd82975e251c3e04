"""Parcae's rules on small traces. test_published.py has the published values."""

from __future__ import annotations

import pytest
from elastic_sim.reproduce.parcae_artifact import (
    NO_GRID,
    MigrationCosts,
    ideal,
    minutes,
    proactive,
    reactive,
    sending_ms,
)
from elastic_sim.reproduce.parcae_measurements import BERT, GPT_1_5B, GPT_6_7B, MODELS
from elastic_sim.traces.trace import ADD, REMOVE, Event, Trace, build_trace


def trace_of(*changes: tuple[int, int], end: int = 30) -> Trace:
    """(minute, nodes from then on)."""
    events, there, made = list[Event](), list[str](), 0
    for minute, nodes in changes:
        while len(there) < nodes:
            made += 1
            there.append(f"n{made}")
            events.append(Event(60.0 * minute, ADD, there[-1]))
        while len(there) > nodes:
            events.append(Event(60.0 * minute, REMOVE, there.pop()))
    return build_trace(events, 60.0 * end)


def test_minutes() -> None:
    assert minutes(trace_of((0, 4), (2, 3), end=4)) == [(4, 4, 0), (4, 0, 0), (3, 0, 1), (3, 0, 0)]


def test_sending_follows_the_measured_points() -> None:
    assert sending_ms(1 << 30) == pytest.approx(1198.2559)
    assert sending_ms(3 << 29) == pytest.approx(1.5 * 1198.2559)
    assert 305 < sending_ms(3 << 27) < 602


@pytest.mark.parametrize("model", MODELS)
def test_stages_cover_all_layers(model) -> None:  # type: ignore[no-untyped-def]
    for _, stages in model.throughput:
        ends = model.cut(stages)
        assert (
            ends[0] == 0
            and ends[-1] == len(model.sizes) == model.layers + 2
            and len(ends) == stages + 1
        )
        assert sum(model.stage_parameters(stages)) == sum(model.sizes)


@pytest.mark.parametrize("model", [GPT_1_5B, BERT])
def test_nothing_beats_the_ideal_and_a_forecast_beats_none(model) -> None:  # type: ignore[no-untyped-def]
    trace = trace_of((0, 32), (5, 29), (6, 26), (9, 24), (15, 30), (20, 21))
    best, known, surprised = (way(model, trace) for way in (ideal, proactive, reactive))
    assert best > known > surprised > 0


def test_without_changes_only_the_start_costs() -> None:
    trace = trace_of((0, 32), end=60)
    best = GPT_1_5B.throughput[GPT_1_5B.best(32) or NO_GRID]
    assert ideal(GPT_1_5B, trace) == pytest.approx(best)
    assert proactive(GPT_1_5B, trace) == pytest.approx(best, rel=0.03)


def test_training_pauses_without_enough_nodes() -> None:
    trace = trace_of((0, 16), (5, 8), (10, 16))
    found = proactive(GPT_6_7B, trace)
    assert 0 < found < ideal(GPT_6_7B, trace) < GPT_6_7B.throughput[GPT_6_7B.best(16) or NO_GRID]


def test_a_move_within_stages_is_cheaper_than_between_stages() -> None:
    costs = MigrationCosts(GPT_1_5B)
    stay, within, recut = (
        costs.moving(32, (4, 8), *more) for more in ((0, (4, 8)), (1, (3, 8)), (1, (3, 10)))
    )
    assert stay == 0 < within < recut
    assert costs.moving(32, (4, 8), 1, (3, 8)) == within, "the same draws"


@pytest.mark.parametrize(
    ("model", "grid", "adding", "removing"),
    [
        (GPT_1_5B, (4, 8), 32189.815, 4858.315),
        (GPT_6_7B, (2, 12), 36336, 12744.4),
        (BERT, (12, 2), 11417, 3817),
        (BERT, (11, 2), 10667, 3317),
        (BERT, (8, 4), 10010, 2660),
        (BERT, (5, 6), 9025, 1925),
        (BERT, (1, 16), 8696, 1596),
    ],
)
def test_restart_costs_equal_those_of_the_authors_program(model, grid, adding, removing) -> None:  # type: ignore[no-untyped-def]
    costs = MigrationCosts(model)
    assert costs.restart(grid, adding=True) == pytest.approx(adding, abs=0.01)
    assert costs.restart(grid, adding=False) == pytest.approx(removing, abs=0.01)


@pytest.mark.parametrize(
    ("nodes", "old", "lost", "new", "ms"),
    [
        (32, (8, 4), 0, (8, 4), 0),
        (32, (8, 4), 1, (7, 4), 1565),
        (32, (8, 4), 3, (9, 3), 4806.196),
        (28, (7, 4), 0, (8, 4), 11447.721),
        (18, (4, 4), 0, (10, 2), 14298.300),
    ],
)
def test_bert_migration_costs_equal_those_of_the_authors_program(nodes, old, lost, new, ms) -> None:  # type: ignore[no-untyped-def]
    assert MigrationCosts(BERT).moving(nodes, old, lost, new) == pytest.approx(ms, abs=0.01)


@pytest.mark.parametrize(
    ("nodes", "grid"),
    [
        (32, (8, 4)),
        (29, (9, 3)),
        (26, (13, 2)),
        (20, (10, 2)),
        (18, (4, 4)),
        (15, (5, 3)),
        (2, (1, 2)),
        (1, None),
    ],
)
def test_bert_s_best_grids(nodes, grid) -> None:  # type: ignore[no-untyped-def]
    assert BERT.best(nodes) == grid


def test_every_grid_of_a_timed_model_has_a_build_time() -> None:
    for model in (GPT_6_7B, BERT):
        assert {stages for _, stages in model.grids(32)} <= set(model.build_ms)
