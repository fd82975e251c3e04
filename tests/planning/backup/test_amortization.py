"""Pauses against gains: the formulas, and a simulation that needs no formula."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.planning.backup.amortization import (
    Option,
    Outlook,
    choose,
    hazard_per_s,
    horizon_s,
    progress,
    worth,
)

LONG = Outlook(node_seconds=1e12)
"""Nothing is ever lost: only lifetimes count."""


def made(step_s: float, pause_s: float, until: float) -> float:
    return max(0.0, until - pause_s) / step_s


@given(
    speedup=st.floats(1.01, 4.0),
    stay=st.floats(0.1, 1000.0),
    pause_in=st.floats(0.0, 60.0),
    pause_out=st.floats(0.0, 60.0),
)
def test_a_short_stay_is_used_if_it_makes_more_steps(
    speedup: float, stay: float, pause_in: float, pause_out: float
) -> None:
    """Both ways are run until training goes on without the node: at stay + pause_out."""
    used = (stay - pause_in) * speedup
    aside = stay + pause_out
    if abs(used - aside) < 1e-6 * aside:
        return
    outlook = Outlook(node_seconds=1e12, pause_in_s=pause_in, pause_out_s=pause_out)
    verdict = worth(outlook, speedup=speedup, lifetime_s=stay, nodes=4)
    assert verdict.use == (used > aside)
    assert verdict.again_s == inf


def test_two_minutes_are_too_short_for_long_pauses() -> None:
    outlook = Outlook(node_seconds=1e9, pause_in_s=30.0, pause_out_s=30.0)
    verdict = worth(outlook, speedup=4 / 3, lifetime_s=120.0, nodes=4)
    assert not verdict.use
    assert verdict.reason == (
        "expected to stay 120 s, 33.3 % more speed: pauses of 30 s in and 30 s out need 210 s to pay"  # noqa: E501
    )
    assert worth(outlook, speedup=4 / 3, lifetime_s=240.0, nodes=4).use
    assert worth(outlook, speedup=2.0, lifetime_s=120.0, nodes=2).use


def test_no_gain_is_no_reason() -> None:
    assert not worth(LONG, speedup=1.0, lifetime_s=inf, nodes=4).use
    assert "no gain" in worth(LONG, speedup=0.9, lifetime_s=inf, nodes=4).reason


def test_nodes_that_go_often_make_joining_worth_less() -> None:
    calm = Outlook(events=0, node_seconds=4 * 3600.0, pause_in_s=20.0)
    rough = Outlook(events=99, node_seconds=4 * 3600.0, pause_in_s=20.0)
    assert worth(calm, speedup=4 / 3, lifetime_s=inf, nodes=4).use
    refused = worth(rough, speedup=4 / 3, lifetime_s=inf, nodes=4)
    assert not refused.use
    assert refused.reason == (
        "to the next change expected: 45 s, 33.3 % more speed: pauses of 20 s in and 0 s out need 80 s to pay"  # noqa: E501
    )


@given(
    st.integers(0, 20),
    st.floats(0, 1e6),
    st.integers(1, 64),
    st.floats(1.001, 2.0),
    st.floats(0.1, 100.0),
)
def test_a_refused_node_is_worth_it_when_it_was_said_to_be(
    losses: int, seconds: float, nodes: int, speedup: float, pause: float
) -> None:
    def judge(at: float) -> bool:
        outlook = Outlook(events=losses, node_seconds=seconds + nodes * at, pause_in_s=pause)
        return worth(outlook, speedup=speedup, lifetime_s=inf, nodes=nodes).use

    outlook = Outlook(events=losses, node_seconds=seconds, pause_in_s=pause)
    verdict = worth(outlook, speedup=speedup, lifetime_s=inf, nodes=nodes)
    if not verdict.use:
        assert judge(verdict.again_s * 1.001 + 0.01)
        assert not judge(verdict.again_s * 0.999 - 0.01)


def test_a_node_that_will_have_gone_by_then_is_not_looked_at_again() -> None:
    rough = Outlook(events=99, node_seconds=4 * 3600.0, pause_in_s=20.0)
    assert worth(rough, speedup=4 / 3, lifetime_s=1000.0, nodes=4).again_s == inf
    assert worth(rough, speedup=4 / 3, lifetime_s=10000.0, nodes=4).again_s == pytest.approx(3500.0)


def test_the_hazard_follows_what_was_seen() -> None:
    assert hazard_per_s(0, 0.0) == pytest.approx(1 / 3600)
    assert hazard_per_s(9, 32400.0) == pytest.approx(1 / 3600)
    assert horizon_s(hazard_per_s(0, 0.0), 4) == pytest.approx(900.0)
    assert horizon_s(0.0, 4) == inf


@given(
    st.lists(st.tuples(st.floats(0.1, 10.0), st.floats(0.0, 50.0)), min_size=2, max_size=5),
    st.floats(1.0, 1000.0),
)
def test_the_most_progress_is_chosen(pairs: list[tuple[float, float]], horizon: float) -> None:
    options = [Option(step, pause) for step, pause in pairs]
    best, _ = choose(options, horizon)
    assert progress(options[best], horizon) == max(
        made(step, pause, horizon) for step, pause in pairs
    )
    forever, _ = choose(options, inf)
    assert options[forever].step_s == min(step for step, _ in pairs)


def test_a_choice_tells_its_numbers() -> None:
    assert choose([Option(1.0, 0.0), Option(0.5, 60.0)], 100.0) == (
        0,
        "100 steps in the 100 s to the next change expected (1 s a step after a pause of 0 s), "
        "rather than 80 (0.5 s a step after a pause of 60 s)",
    )
    assert choose([Option(1.0, 0.0), Option(0.5, 60.0)], 200.0)[0] == 1
