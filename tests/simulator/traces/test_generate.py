"""Generated traces: the same seed gives the same trace, with the rates of the market."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from elastic_sim.traces.generate import Market, fit_market, generate, shared_with_inference
from elastic_sim.traces.statistics import node_counts, statistics, weibull_shape
from elastic_sim.traces.trace import ADD, REMOVE, Trace, build_trace, format_trace, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.errors import FieldError

HOUR = 3600.0


def test_the_same_seed_gives_the_same_bytes() -> None:
    market = Market(nodes=8, mtbf_s=600, repair_s=900, bulk=((1, 3), (2, 1)), zones=("a", "b"))
    first, again, other = (format_trace(generate(market, 20 * HOUR, seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert "generated, not recorded" in first and parse(first)[0] == generate(market, 20 * HOUR, 1)


def test_rates_match_the_market() -> None:
    market = Market(nodes=64, mtbf_s=600, repair_s=1200, bulk=((1, 1), (3, 1)), notice_s=120)
    found = statistics(generate(market, 500 * HOUR, 3))
    assert found.between_losses_mean_s == pytest.approx(600, rel=0.05)
    assert found.bulk_mean == pytest.approx(2.0, rel=0.05) and found.bulk_most == 3
    assert found.nodes_mean == pytest.approx(64 - 2 * 1200 / 600, rel=0.05)
    assert found.notices == found.losses


def test_loss_rate_is_higher_by_day() -> None:
    market = Market(nodes=200, mtbf_s=300, repair_s=60, diurnal=0.9)
    trace = generate(market, 20 * 24 * HOUR, 0)
    hours = [event.seconds % (24 * HOUR) / HOUR for event in trace.events if event.kind == REMOVE]
    day, night = sum(6 <= hour < 18 for hour in hours), sum(not 6 <= hour < 18 for hour in hours)
    assert day > 2 * night


def test_a_bulk_loss_stays_in_a_zone() -> None:
    market = Market(nodes=12, mtbf_s=600, repair_s=60, bulk=((3, 1.0),), zones=("a", "b", "c"))
    bulks = [
        {event.zone for event in events if event.kind == REMOVE}
        for _, events in generate(market, 50 * HOUR, 4).steps()
    ]
    losses = [zones for zones in bulks if zones]
    assert len(losses) > 100 and sum(len(zones) == 1 for zones in losses) > 0.8 * len(losses)


def test_a_fitted_market_is_like_the_trace() -> None:
    original = generate(
        Market(nodes=32, mtbf_s=500, repair_s=900, bulk=((1, 2), (4, 1)), shape=0.7), 300 * HOUR, 1
    )
    market = fit_market(original)
    assert market.shape == pytest.approx(0.7, abs=0.08)
    one, other = statistics(original), statistics(generate(market, 300 * HOUR, 2))
    assert other.losses_per_node_hour == pytest.approx(one.losses_per_node_hour, rel=0.1)
    assert other.nodes_mean == pytest.approx(one.nodes_mean, rel=0.1)
    assert other.bulk_mean == pytest.approx(one.bulk_mean, rel=0.1)


@pytest.mark.parametrize("shape", [0.5, 1.0, 2.0])
def test_lifetimes_are_weibull_and_fitted(shape: float) -> None:
    """The shape is approximate: at each loss a node must be lost, even if all are old."""
    market = Market(nodes=32, mtbf_s=600.0, repair_s=600.0, lifetime_shape=shape)
    made = generate(market, 200 * HOUR, 4)
    found = statistics(made)
    assert found.losses > 1000 and found.lifetime_shape == pytest.approx(shape, rel=0.2)
    assert fit_market(made).lifetime_shape == (1.0 if shape == 1 else found.lifetime_shape)
    assert fit_market(generate(market, 3 * HOUR, 4)).lifetime_shape == 1.0, "few losses do not tell"


def test_shape_of_known_lifetimes() -> None:
    """Lifetimes drawn from the distribution itself; the record's end censors a third of them."""
    draw = random.Random(5)
    for shape in (0.6, 1.0, 3.0):
        drawn = [(draw.weibullvariate(1000.0, shape), draw.uniform(0, 3000.0)) for _ in range(3000)]
        ended = [life for life, end in drawn if life <= end]
        lasting = [end for life, end in drawn if life > end]
        assert lasting and weibull_shape(ended, lasting) == pytest.approx(shape, rel=0.06)


def test_zones_notice_and_diurnal_amplitude_are_fitted() -> None:
    market = Market(
        nodes=32, mtbf_s=600, repair_s=600, notice_s=120, diurnal=0.5, zones=("a", "b", "c")
    )
    found = fit_market(generate(market, 20 * 24 * HOUR, 1))
    assert (found.notice_s, found.zones) == (120, ("a", "b", "c"))
    assert found.diurnal == pytest.approx(0.5, abs=0.1) and found.shape == pytest.approx(
        1.0, abs=0.1
    )
    assert fit_market(generate(market, 20 * 24 * HOUR, 1), zones=("x",)).zones == ("x",)
    assert fit_market(generate(market, 12 * HOUR, 1)).diurnal == 0, "half a day does not tell"
    for seed in range(5):
        assert fit_market(generate(replace(market, diurnal=0.0), 60 * HOUR, seed)).diurnal < 0.25
    silent = generate(replace(market, zones=("",), notice_s=0.0), 12 * HOUR, 1)
    assert fit_market(silent).zones == ("a",) and fit_market(silent).notice_s == 0


def test_a_partial_day_is_not_a_diurnal_rate() -> None:
    """A day and a half has two mornings: the fit uses losses per second of each hour."""
    market = Market(nodes=64, mtbf_s=60, repair_s=60, diurnal=0.8)
    assert fit_market(generate(market, 36 * HOUR, 2)).diurnal == pytest.approx(0.8, abs=0.12)
    assert fit_market(generate(replace(market, diurnal=0.0), 36 * HOUR, 2)).diurnal == 0


def test_without_losses_there_is_nothing_to_fit() -> None:
    trace = build_trace(generate(Market(nodes=2, mtbf_s=1e9), HOUR).events, HOUR)
    with pytest.raises(FieldError, match="no losses to fit"):
        fit_market(trace)


def test_inference_takes_nodes_by_day_and_returns_them() -> None:
    trace = shared_with_inference(16, 48 * HOUR, least=4, noise=0.0)
    steps = node_counts(trace)
    assert min(n for _, n in steps) == 4 and max(n for _, n in steps) == 16
    assert max(((at, n) for at, n in steps if at <= 12 * HOUR))[1] == 4
    assert all(event.notice_s == 30 for event in trace.events if event.kind == REMOVE)
    with pytest.raises(FieldError, match="--inference"):
        shared_with_inference(4, HOUR, least=5)


@settings(max_examples=25)
@given(
    st.integers(1, 12),
    st.floats(30, 1e5),
    st.floats(0, 1e4),
    st.floats(0.4, 3),
    st.floats(0, 1),
    st.integers(0, 9),
)
def test_any_market_gives_a_trace(
    nodes: int, mtbf_s: float, repair_s: float, shape: float, diurnal: float, seed: int
) -> None:
    market = Market(nodes=nodes, mtbf_s=mtbf_s, repair_s=repair_s, shape=shape, diurnal=diurnal)
    trace = generate(market, 12 * HOUR, seed)
    assert isinstance(trace, Trace) and max(n for _, n in node_counts(trace)) <= nodes
    assert sum(event.kind == ADD and event.seconds == 0 for event in trace.events) == nodes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("nodes", 0),
        ("nodes", 10**9),
        ("mtbf_s", math.inf),
        ("mtbf_s", math.nan),
        ("repair_s", 1e308),
        ("notice_s", math.nan),
        ("shape", math.nan),
        ("diurnal", math.nan),
        ("bulk", ((1, math.inf),)),
        ("bulk", ((1, math.nan),)),
        ("bulk", ((1, 1e308), (2, 1e308))),
        ("mtbf_s", 0.0),
        ("repair_s", -1.0),
        ("shape", 0.0),
        ("lifetime_shape", 0.0),
        ("lifetime_shape", math.nan),
        ("diurnal", 1.5),
        ("zones", ()),
        ("bulk", ()),
    ],
)
def test_invalid_markets_are_refused(field: str, value: object) -> None:
    good = {"nodes": 4, "mtbf_s": 600.0, field: value}
    with pytest.raises(FieldError, match=rf"market\.{field.removesuffix('_s')}"):
        Market(**good)  # type: ignore[arg-type]


def test_statistics_of_a_small_trace() -> None:
    trace = parse(
        "seconds,event,node,zone,type,notice\n"
        "0,add,a,,,\n0,add,b,,,\n1800,remove,a,,,\n1800,remove,b,,,\n1800,add,c,,,\n2700,remove,c,,,30\n3600,end,,,,\n"
    )[0]
    found = statistics(trace)
    assert (found.losses, found.loss_events, found.bulk_most, found.joins, found.notices) == (
        3,
        2,
        2,
        1,
        1,
    )
    assert found.node_hours == pytest.approx(
        (2 * 1800 + 900) / 3600
    ) and found.nodes_mean == pytest.approx(1.25)
    assert found.losses_per_node_hour == pytest.approx(3 / 1.25)
    assert (found.lifetime_median_s, found.between_losses_mean_s) == (1800, 900)
    assert (found.nodes_least, found.nodes_most) == (0, 2)
