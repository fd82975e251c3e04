"""Parcae's rules on small traces; against its published values: tests/simulator/test_published.py."""

from __future__ import annotations

import pytest

from simulator.reproduce.parcae import NONE, Costs, forecasting, ideal, minutes, reactive, sending_ms
from simulator.reproduce.parcae_models import GPT_1_5B, GPT_6_7B, MODELS
from simulator.trace import ADD, REMOVE, Event, Trace, check


def trace_of(*changes: tuple[int, int], end: int = 30) -> Trace:
    """(minute, nodes from then on)."""
    events, there, made = [], [], 0
    for minute, nodes in changes:
        while len(there) < nodes:
            made += 1
            there.append(f"n{made}")
            events.append(Event(60.0 * minute, ADD, there[-1]))
        while len(there) > nodes:
            events.append(Event(60.0 * minute, REMOVE, there.pop()))
    return check(events, 60.0 * end)


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
        assert ends[0] == 0 and ends[-1] == len(model.sizes) == model.layers + 2 and len(ends) == stages + 1
        assert sum(model.stage_parameters(stages)) == sum(model.sizes)


def test_nothing_beats_the_ideal_and_a_forecast_beats_none() -> None:
    trace = trace_of((0, 32), (5, 29), (6, 26), (9, 24), (15, 30), (20, 21))
    best, known, surprised = (way(GPT_1_5B, trace) for way in (ideal, forecasting, reactive))
    assert best > known > surprised > 0


def test_without_changes_only_the_start_costs() -> None:
    trace = trace_of((0, 32), end=60)
    best = GPT_1_5B.throughput[GPT_1_5B.best(32) or NONE]
    assert ideal(GPT_1_5B, trace) == pytest.approx(best)
    assert forecasting(GPT_1_5B, trace) == pytest.approx(best, rel=0.03)


def test_too_few_nodes_train_nothing_and_begin_again() -> None:
    trace = trace_of((0, 16), (5, 8), (10, 16))
    found = forecasting(GPT_6_7B, trace)
    assert 0 < found < ideal(GPT_6_7B, trace) < GPT_6_7B.throughput[GPT_6_7B.best(16) or NONE]


def test_a_move_within_stages_is_cheaper_than_one_between_them() -> None:
    costs = Costs(GPT_1_5B)
    stay, within, recut = (
        costs.moving(32, (4, 8), *more) for more in ((0, (4, 8)), (1, (3, 8)), (1, (3, 10)))
    )
    assert stay == 0 < within < recut
    assert costs.moving(32, (4, 8), 1, (3, 8)) == within, "the same draws"
