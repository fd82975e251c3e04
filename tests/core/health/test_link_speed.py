"""Slow links: compared with their past and with others, robust to load, and the actions taken."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.coordinator.transitions import transition
from elastic.core.health.diagnosis import (
    FaultClass,
    Finding,
    HealthAction,
    HealthLimits,
    NodeHealth,
)
from elastic.core.health.link_speed import LinkSpeed, record_rate, slow_factor
from elastic.core.job import quarantine
from elastic.core.job import state as job
from elastic.core.job.state import JobState
from elastic.core.policy import slow_link as slowlink
from elastic.core.protocol.health_report import HealthReport, LinkTraffic
from tests.core.health.test_diagnosis import halts, health_notes, running
from tests.core.state_access import plan_of

MIB, LIMITS = float(1 << 20), HealthLimits()
"""Rates below make a copy of 1 MiB take hours; delays of milliseconds have their own test."""
FACTOR, WINDOWS = LIMITS.link_factor, LIMITS.link_windows


def link(
    *rates: float, peer: str = "p", size: float = MIB, speed: LinkSpeed | None = None
) -> LinkSpeed:
    speed = speed or LinkSpeed()
    for rate in rates:
        speed = record_rate(speed, peer, rate, size, FACTOR, WINDOWS)
    return speed


def slow(speed: LinkSpeed, *others: LinkSpeed) -> float:
    return slow_factor(speed, others, FACTOR, WINDOWS, LIMITS.link_least_s)


WELL = link(*[100.0] * 5)


def test_a_link_that_carries_less_than_before_is_slow() -> None:
    assert slow(link(10.0, 10.0, 10.0, speed=WELL), WELL, WELL) == 10.0
    assert slow(link(10.0, 10.0, 10.0, speed=WELL)) == 10.0, "alone, too"


@pytest.mark.parametrize(
    ("what", "rates"),
    [
        ("two windows are too few", (10.0, 10.0)),
        ("one fast copy shows that the link is fine", (10.0, 90.0, 10.0)),
        ("half as fast is a busy machine", (50.0, 50.0, 50.0)),
        ("a slow decline moves the baseline", (80.0, 64.0, 51.0, 45.0, 45.0)),
    ],
)
def test_rates_that_are_not_slow(what: str, rates: tuple[float, ...]) -> None:
    assert slow(link(*rates, speed=WELL), WELL, WELL) == 0.0, what


def test_a_slowdown_of_all_links_is_no_slow_link() -> None:
    """The cause is a busy network, or one busy machine with all nodes."""
    busy = link(10.0, 10.0, 10.0, speed=WELL)
    assert slow(busy, busy, busy) == 0.0
    assert slow(busy, WELL, WELL) == 10.0


def test_a_link_slow_from_the_beginning_is_compared_with_others() -> None:
    slow_link = link(10.0, 10.0, 10.0)
    assert slow(slow_link, WELL, WELL) == 10.0
    assert slow(slow_link, WELL) == 0.0, "the one other link may be unusual"


@pytest.mark.parametrize("beside", [(), (link(*[500 * MIB] * 5),) * 2])
def test_delays_of_milliseconds_come_from_the_scheduler(beside: tuple[LinkSpeed, ...]) -> None:
    """A copy of 2 ms may wait 40 ms for a processor, but a copy of 200 ms never a second."""
    before = [] if beside else [500 * MIB] * 5
    assert slow(link(*before, *[25 * MIB] * 3), *beside) == 0.0
    assert slow(link(*before, *[8 * MIB] * 3), *beside) == 500 / 8
    large = link(*[500 * MIB] * 5, size=100 * MIB)
    assert slow(link(*[100 * MIB] * 3, size=100 * MIB, speed=large)) == 5.0


def test_small_copies_are_not_compared_with_large_ones() -> None:
    small = link(10.0, 10.0, 10.0, size=MIB / 16)
    assert slow(small, WELL, WELL) == 0.0
    assert link(10.0, 10.0, 10.0, size=MIB / 16, speed=WELL).usual == 10.0, (
        "the measurement starts again"
    )


def test_another_peer_starts_a_new_measurement() -> None:
    assert slow(link(10.0, 10.0, peer="q", speed=link(10.0, speed=WELL)), WELL, WELL) == 0.0


@given(
    st.lists(st.floats(40.0, 1000.0), max_size=30),
    st.lists(st.floats(40.0, 110.0), min_size=3, max_size=9),
)
def test_noise_within_the_factor_is_never_slow(rates: list[float], others: list[float]) -> None:
    """Rates between 1 and 2.75 times the least."""
    capped = [min(rate, 110.0) for rate in rates]
    assert slow(link(*capped), link(*others), link(*others)) == 0.0


# ---- the job -----------------------------------------------------------------------------------


def play(
    state: JobState, rates: list[float], durations: list[float], node: str = "node1"
) -> tuple[JobState, Any]:
    """Record steps with these durations, then report these rates of the link of `node`."""
    assert state.plan is not None
    state = state.of(durations=tuple((state.plan.epoch, one) for one in durations))
    notes: list[Any] = []
    for rate in rates:
        for name in state.members:
            assert state.plan is not None
            seen = rate if name == node else 100.0
            info = state.members[name].report.info
            links = (LinkTraffic("p", 4, 4 << 20, 1.0, seen),)
            given = HealthReport(
                name, info.incarnation, state.updated_at, state.plan.epoch, links=links
            )
            state, actions, _ = transition(state, given, state.updated_at + 0.1)
            notes += actions
    return state, tuple(notes)


PROPER, BROKEN = [100.0] * 4, [10.0] * 3
ALIKE, LONGER = [2.0, 1.0, 1.0, 1.0, 1.02], [2.0, 1.0, 1.0, 3.0, 3.1]


def test_a_slow_link_that_costs_nothing_leads_to_a_warning() -> None:
    _, actions = play(running(), PROPER + BROKEN, ALIKE)
    (note,) = health_notes(actions)
    assert (note["node"], note["class"], note["action"]) == ("node1", "link", "none")
    evidence = note["evidence"]
    assert (evidence["peer"], evidence["bytes_per_s"], evidence["usual_bytes_per_s"]) == (
        "p",
        10,
        100,
    )
    assert (
        evidence["factor"] == 10.0 and evidence["others_bytes_per_s"] == 100 and not halts(actions)
    )


def test_a_slow_link_that_costs_time_takes_a_spare() -> None:
    state = running(3, most=2)
    node = state.plan.nodes()[0] if state.plan else ""
    state, actions = play(state, PROPER + BROKEN, LONGER, node)
    (note,) = health_notes(actions)
    assert (note["class"], note["action"]) == ("link", "replace") and halts(actions) == [True]
    assert note["evidence"]["steps_slower"] == 3.0 and quarantine.is_quarantined(state, node)


def test_without_a_spare_the_plan_changes_if_that_is_better() -> None:
    state, actions = play(running(3), PROPER + BROKEN, LONGER)
    (note,) = health_notes(actions)
    assert note["action"] in ("rebalance", "quarantine") and halts(actions) == [True]
    assert "after the change" in note["reason"]
    if note["action"] == "rebalance":
        assert quarantine.record_of(state, "node1").slow_until > state.updated_at


def test_the_decision_waits_for_measured_steps() -> None:
    state, actions = play(running(), PROPER + BROKEN, [2.0, 1.0])
    assert not health_notes(actions)
    state, actions = play(state, [10.0], ALIKE)
    assert [note["action"] for note in health_notes(actions)] == ["none"]


def test_a_link_that_recovered_is_reported() -> None:
    state, _ = play(running(), PROPER + BROKEN, ALIKE)
    state, actions = play(state, PROPER, ALIKE)
    (note,) = health_notes(actions)
    assert note["evidence"] == {"well": True}


def relieved(state: JobState, node: str) -> JobState:
    """The plan changed because of the node's slow link, and copies are half as large since."""
    evidence = {"usual_bytes_per_s": 100}
    finding = Finding(FaultClass.LINK, HealthAction.REBALANCE, "copies go slower", evidence, 1.0)
    return quarantine.with_record(state, node, replace(NodeHealth(loaded=2.0), findings=(finding,)))


def test_smaller_copies_do_not_make_a_relieved_link_healthy() -> None:
    """Smaller copies start a new measurement, but the rate from before still counts."""
    state, actions = play(relieved(running(3), "node1"), BROKEN * 2, ALIKE)
    assert not health_notes(actions) and quarantine.record_of(state, "node1").loaded == 2.0
    state, actions = play(state, PROPER, ALIKE)
    assert [note["evidence"] for note in health_notes(actions)] == [{"well": True}]
    assert quarantine.record_of(state, "node1").loaded == 1.0 and halts(actions) == [True]


def test_a_relieved_node_without_layers_is_tried_again_after_a_pause() -> None:
    """It sends no copies, so no report can show that its link is well."""
    state = running(3, most=2)
    spare = next(node for node in state.members if node not in plan_of(state).nodes())
    state = relieved(state, spare)
    until = state.updated_at + 30.0
    record = replace(quarantine.record_of(state, spare), slow_until=until)
    state = quarantine.with_record(state, spare, record).of(paces={})
    state, _, _ = transition(state, job.Tick(), until - 0.1)
    assert quarantine.record_of(state, spare).loaded == 2.0
    state, actions, _ = transition(state, job.Tick(), until + 0.1)
    (note,) = health_notes(actions)
    assert (note["class"], note["evidence"]) == ("link", {"well": True})
    assert "2.0x slower, and is tried again" in note["reason"]
    assert quarantine.record_of(state, spare).loaded == 1.0


def test_a_new_spare_replaces_a_relieved_node() -> None:
    state = running(3, most=2)
    node = state.plan.nodes()[0] if state.plan else ""
    state = relieved(state, node)
    state = quarantine.with_record(
        state, node, replace(quarantine.record_of(state, node), link=link(*BROKEN, speed=WELL))
    )
    state, actions = play(state, BROKEN, ALIKE, node)
    (note,) = health_notes(actions)
    assert (
        note["action"] == "replace"
        and "a spare came" in note["reason"]
        and halts(actions) == [True]
    )


def test_the_cost_follows_the_newest_steps() -> None:
    state = running()
    assert state.plan is not None
    current = state.plan.epoch

    def cost(*seconds: float, epoch: int = current) -> float:
        return slowlink.step_slowdown(state.of(durations=tuple((epoch, s) for s in seconds)))

    assert cost(9.0, 1.0, 1.2, 2.0, 2.5) == 2.0
    assert cost(9.0, 1.0, 1.2) == 0.0, "too few steps"
    assert cost(9.0, 1.0, 1.2, 2.0, 2.5, epoch=0) == 0.0, "steps of another plan"
    assert slowlink.choose_link_remedy(replace(state, durations=()), "node1", spare=False) is None
    assert HealthAction.REBALANCE.value == "rebalance"
