"""The history of losses: bursts count once, old events fade, and the hazard follows the market."""

from __future__ import annotations

import random
from math import exp

import pytest

from elastic.planning.backup.amortization import PRIOR_NODE_S, hazard_per_s
from elastic.planning.backup.loss_history import MEMORY_S, TOGETHER, LossHistory

BEGAN = 1_000.0
HOUR_S = 3600.0


def calm(hours: float, nodes: int) -> LossHistory:
    """The history of a job that lost nothing for some hours."""
    return LossHistory().at(BEGAN, nodes).at(BEGAN + hours * HOUR_S, nodes)


def test_a_burst_is_one_event() -> None:
    history, now = calm(2.0, 32), BEGAN + 2.0 * HOUR_S
    for left in range(10):
        history = history.with_losses(now + 2.0 * left, 32 - left)
    assert history.events == pytest.approx(1.0, rel=1e-2)


def test_losses_at_one_moment_are_one_event() -> None:
    history = calm(1.0, 4)
    for left in range(3):
        history = history.with_losses(history.counted_at, 4 - left)
    assert history.events == 1.0


def test_losses_far_apart_are_events_of_their_own() -> None:
    history, now = calm(2.0, 32), BEGAN + 2.0 * HOUR_S
    apart_s = 1.1 * TOGETHER * 2.1 * HOUR_S
    for number in range(4):
        history = history.with_losses(now + number * apart_s, 32)
    assert history.events == pytest.approx(4.0, rel=0.1)


def test_a_calm_job_merges_what_a_rough_one_keeps_apart() -> None:
    """The limit follows the mean time between events."""
    gap_s, nodes = 120.0, 16
    quiet, rough = calm(4.0, nodes), calm(4.0, nodes)
    for number in range(400):
        rough = rough.with_losses(BEGAN + 4.0 * HOUR_S + number * 200.0, nodes)
    for history, added in ((quiet, 1), (rough, 2)):
        first = history.with_losses(history.counted_at + 1000.0, nodes)
        second = first.with_losses(first.counted_at + gap_s, nodes)
        assert second.events - history.at(second.counted_at, nodes).events == pytest.approx(
            added, rel=1e-2
        )


def test_independent_losses_are_nearly_all_counted() -> None:
    dice, nodes, mean_s = random.Random(5), 24, 900.0
    history = LossHistory().at(BEGAN, nodes)
    now = BEGAN
    for _ in range(2000):
        now += dice.expovariate(1 / mean_s)
        history = history.with_losses(now, nodes)
    assert history.hazard_per_s == pytest.approx(1 / (mean_s * nodes), rel=0.25)


def test_old_events_fade() -> None:
    history = calm(2.0, 8).with_losses(BEGAN + 2.0 * HOUR_S, 8)
    later = history.at(history.counted_at + MEMORY_S, 8)
    assert later.events == pytest.approx(exp(-1))
    assert later.node_seconds == pytest.approx(
        history.node_seconds * exp(-1) + 8 * MEMORY_S * (1 - exp(-1))
    )


def test_looking_in_between_changes_nothing() -> None:
    history = calm(1.0, 8).with_losses(BEGAN + HOUR_S, 8)
    at_once = history.at(history.counted_at + 5000.0, 7)
    in_parts = history
    for _ in range(50):
        in_parts = in_parts.at(in_parts.counted_at + 100.0, 7)
    assert in_parts.events == pytest.approx(at_once.events)
    assert in_parts.node_seconds == pytest.approx(at_once.node_seconds)


def test_nothing_is_counted_before_the_first_look() -> None:
    first = LossHistory().at(BEGAN, 5)
    assert (first.events, first.node_seconds, first.counted_at) == (0.0, 0.0, BEGAN)
    assert first.hazard_per_s == hazard_per_s(0, 0.0) == 1 / PRIOR_NODE_S


def test_a_clock_that_goes_back_takes_nothing_away() -> None:
    history = calm(1.0, 5)
    back = history.at(history.counted_at - 60.0, 5)
    assert (back.events, back.node_seconds) == (history.events, history.node_seconds)
