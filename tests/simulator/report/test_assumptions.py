"""Texts of pages: assumptions with sources, durations, means, command lines."""

from __future__ import annotations

from dataclasses import replace

import pytest
from elastic_sim.replay.replay import Mean
from elastic_sim.report import assumptions
from elastic_sim.report.command_line import replay_command
from elastic_sim.report.durations import axis_unit, clock, duration, round_step
from elastic_sim.report.replay_page import MAX_WINDOWS, format_cost
from elastic_sim.steps.physics import ClusterPhysics
from elastic_sim.steps.scenario import Scenario
from elastic_sim.traces.generate import Market

from elastic.domain.errors import FieldError

SCENARIO = Scenario(
    market=Market(nodes=4, mtbf_s=600.0, repair_s=300.0), duration_s=2400.0, model="bert-large"
)


def test_the_command_line_gives_the_same_scenario_again() -> None:
    market = Market(nodes=5, mtbf_s=600.0, repair_s=300.0, bulk=((1, 3.0), (2, 1.0)))
    scenario = replace(SCENARIO, market=market, notice_s=30.0, physics=("boot_s=90",))
    assert replay_command(scenario, ("ours", "varuna"), 2) == (
        "elastic-sim replay --model bert-large --policy ours,varuna --seeds 2 "
        "--notice 30s --nodes 5 --repair 300s "
        "--duration 2400s --bulk 1:3,2:1 --physics boot_s=90 --mtbf 600s"
    )
    part = Scenario(trace="a b.csv", first_s=60.0, last_s=120.0)
    assert replay_command(part, ("ours",), 1).startswith("elastic-sim replay 'a b.csv' ")


def test_every_constant_has_its_source() -> None:
    assert all(fact.source for fact in assumptions.constants(ClusterPhysics()))
    changed = [
        fact.name for fact in assumptions.constants(ClusterPhysics(boot_s=90.0)) if fact.changed
    ]
    assert changed == ["boot_s"]


def test_policies_say_what_they_are() -> None:
    assert assumptions.about("ours:stream:2+snapshot").ours
    assert assumptions.about("varuna").model and not assumptions.about("ceiling").model
    with pytest.raises(FieldError, match="--policy"):
        assumptions.about("absent")


def test_means_print() -> None:
    assert [str(Mean(12.5)), f"{Mean(12.5, 0.25)}"] == ["12.5", "12.5 ± 0.25"]
    assert f"{Mean(0.12345, 0.002).percent:.1f}" == "12.3 ± 0.2"
    costs = [Mean(1234.5, 20.0), Mean(12.5), Mean(float("inf"))]
    assert [format_cost(cost) for cost in costs] == ["$1,234 ± 20", "$12.50", "none made"]


def test_durations_are_round() -> None:
    for end in (1.0, 90.0, 3600.0, 86400.0, 90 * 86400.0):
        assert end / round_step(end, MAX_WINDOWS) <= MAX_WINDOWS
    assert [axis_unit(s)[1] for s in (1, 119, 120, 7200, 172800)] == ["s", "s", "min", "h", "d"]
    assert [duration(s) for s in (30, 600, 5400, 172800, 601)] == [
        "30 s",
        "10 min",
        "1.5 h",
        "2 d",
        "601 s",
    ]
    assert [clock(s) for s in (61, 90061)] == ["00:01:01", "1 d 01:01:01"]
