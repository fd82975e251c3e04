"""Advice on nodes to rent: prices and order of mixes of spot and on-demand nodes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from elastic_sim.cli.cli import main
from elastic_sim.replay.advise import (
    MAX_NODES,
    Mix,
    affordable,
    answer_text,
    blended,
    composition,
    mixes,
    offers,
    resized,
)
from elastic_sim.replay.replay import mean_of
from elastic_sim.steps.clusters import node_type_of
from elastic_sim.steps.scenario import Scenario
from elastic_sim.traces.generate import Market, generate
from elastic_sim.traces.trace import ADD, Event, build_trace, format_trace
from hypothesis import example, given, settings
from hypothesis import strategies as st

from elastic.planning.cost.profile import format_profile
from elastic.planning.cost.published_profiles import published_profile

MARKET = Market(nodes=6, mtbf_s=600.0, repair_s=300.0)
SCENARIO = Scenario(
    market=MARKET, duration_s=3600.0, model="bert-large", microbatches=16, physics=("noise=0",)
)


def test_mixes_go_from_all_spot_to_all_on_demand() -> None:
    assert mixes([4], 2) == [Mix(0, 4), Mix(2, 2), Mix(4, 0)]
    assert mixes([2, 2], 4) == [Mix(0, 2), Mix(1, 1), Mix(2, 0)], "no mix twice"


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), fixed=st.integers(0, 5), spot=st.integers(0, 20))
@example(seed=2593, fixed=0, spot=4)  # a node joins in the last second
@example(seed=27223, fixed=0, spot=6)  # a node is lost in the second in which it joins
def test_trace_of_a_mix_is_valid_and_has_its_nodes(seed: int, fixed: int, spot: int) -> None:
    trace = generate(MARKET, 3600.0, seed)
    found = blended(trace, Mix(fixed, spot))
    checked = build_trace(found.events, found.end_s)
    n, most, least = 0, 0, math.inf
    for at, events in checked.steps():
        n += sum(1 if e.kind == ADD else -1 for e in events)
        most, least = max(most, n), min(least, n)
        assert at <= found.end_s
    assert fixed <= least if checked.events else True
    assert most <= fixed + spot
    assert all(e.kind == ADD for e in checked.events if e.zone == "on-demand")


def test_copies_of_a_market_are_not_lost_together() -> None:
    trace = generate(MARKET, 3600.0, 3)
    twice = blended(trace, Mix(0, 12))
    names = {e.node for e in twice.events if e.kind == ADD and e.seconds == 0}
    assert len(names) > 6, "more than the trace has"
    losses = [e.seconds for e in twice.events if e.kind != ADD]
    assert len(set(losses)) == len(losses)


def test_offers_are_priced_and_ordered() -> None:
    found = offers([SCENARIO], mixes([6], 1), ("ours", "varuna"), (0, 1))
    assert [o.per_million_samples.value for o in found] == sorted(
        o.per_million_samples.value for o in found
    )
    by = {(o.mix.on_demand, o.policy): o for o in found}
    assert by[6, "ours"].dollars_per_h.value == pytest.approx(6 * 3.06)
    assert by[0, "ours"].dollars_per_h.value < 6 * 0.91
    assert by[6, "ours"].samples_per_s.value > by[0, "ours"].samples_per_s.value
    assert (
        0
        < by[0, "varuna"].goodput.value
        < by[0, "ours"].goodput.value
        < by[6, "ours"].goodput.value
        <= 1.01
    )


def test_within_a_budget_the_fastest_comes_first() -> None:
    found = offers([SCENARIO], mixes([6], 3), ("ours",), (0,), 15.0)
    within = [o for o in found if o.within]
    assert found[: len(within)] == within and 0 < len(within) < len(found)
    assert [o.samples_per_s.value for o in within] == sorted(
        (o.samples_per_s.value for o in within), reverse=True
    )


def test_a_budget_buys_as_many_nodes_as_it_pays_for() -> None:
    shares = {node_type_of("a40"): 1.0}
    assert affordable(shares, 30.6, 2) == [Mix(0, 33), Mix(7, 8), Mix(10, 0)]
    assert affordable(shares, 0.5, 2) == [Mix(0, 1)], "even that is over it: said so"
    assert affordable(shares, 1e9, 1) == [Mix(0, MAX_NODES), Mix(MAX_NODES, 0)]
    both = {node_type_of("p3.2xlarge"): 0.5, node_type_of("g4dn.xlarge"): 0.5}
    assert affordable(both, 10.68, 1) == [Mix(0, 20), Mix(5, 0)], "0.534 and 1.793 a node"
    args = [
        "advise", "--mtbf", "1h", "--duration", "10m", "--nodes", "4", "--model", "bert-large",
        "--microbatches", "16", "--mixes", "1", "--seeds", "1", "--budget", "5",
    ]  # fmt: skip
    found = CliRunner().invoke(main, args)
    assert found.exit_code == 0 and found.output.startswith("Rent 0 on demand + "), found.output
    over = offers([SCENARIO], [Mix(6, 0), Mix(0, 6)], ("ours",), (0,), 0.1)
    assert [o.mix for o in over] == [Mix(0, 6), Mix(6, 0)], "nothing fits: the cheapest first"


@pytest.mark.parametrize("types", [("p3.2xlarge", "g4dn.xlarge"), ("g4dn.xlarge", "p3.2xlarge")])
def test_each_node_has_the_price_of_its_type(types: tuple[str, str], tmp_path: Path) -> None:
    """Whatever the order in which the types are named. All nodes are there for the whole hour."""
    kinds = ("p3.2xlarge", "g4dn.xlarge")
    events = [Event(0.0, ADD, f"n{i}", "a", kinds[i // 8]) for i in range(16)]
    (path := tmp_path / "trace.csv").write_text(format_trace(build_trace(events, 3600.0)))
    scenario = replace(SCENARIO, trace=str(path), market=None, nodes_of=types)
    options = [Mix(0, 16), Mix(16, 0), Mix(4, 0)]
    found = {o.mix: o.dollars_per_h.value for o in offers([scenario], options, ("varuna",), (0,))}
    assert found[Mix(0, 16)] == pytest.approx(8 * 0.91 + 8 * 0.158)
    assert found[Mix(16, 0)] == pytest.approx(8 * 3.06 + 8 * 0.526)
    assert found[Mix(4, 0)] == pytest.approx(2 * 3.06 + 2 * 0.526)
    assert composition(scenario, [scenario.trace_of(0)]) == {
        node_type_of(name): 0.5 for name in kinds
    }


def test_smaller_and_larger_mixes() -> None:
    assert resized(Mix(8, 24)) == [Mix(8, 20), Mix(8, 28)]
    assert resized(Mix(16, 0)) == [Mix(14, 0), Mix(18, 0)]
    assert resized(Mix(3, 1)) == [Mix(3, 0), Mix(3, 2)]
    assert resized(Mix(1, 0)) == [Mix(2, 0)], "never no node at all"


def test_the_backup_in_force_and_the_spares_are_named() -> None:
    """A fixed pair of schemes is named; rivals have none."""
    fixed, rival = (
        offers([SCENARIO], [Mix(6, 0)], ("ours:log+replica",), (0,)),
        offers([SCENARIO], [Mix(6, 0)], ("varuna",), (0,)),
    )
    assert (fixed[0].backup, fixed[0].backup_share) == ("log+replica", 1.0)
    assert "Backup: log+replica, in force 100 % of the time." in answer_text(fixed[0])
    assert rival[0].backup == "" and "Backup: varuna has none" in answer_text(rival[0])
    assert fixed[0].spares == pytest.approx(fixed[0].idle * 6, abs=1e-3)
    (chosen,) = offers([SCENARIO], [Mix(2, 4)], ("ours",), (0,))
    assert "+" in chosen.backup and 0 < chosen.backup_share <= 1


def test_advise_command(tmp_path: Path) -> None:
    out = tmp_path / "advice.json"
    args = [
        "advise", "--mtbf", "10m", "--nodes", "6", "--duration", "1h", "--model", "bert-large",
        "--microbatches", "16", "--buy", "4,6", "--mixes", "1", "--seeds", "1", "--json", str(out),
    ]  # fmt: skip
    found = CliRunner().invoke(main, args)
    assert found.exit_code == 0, found.output
    assert found.output.startswith("Rent ")
    advice = json.loads(out.read_text())["offers"]
    assert f"Backup: {advice[0]['backup']}, in force" in found.output and "Spares: " in found.output
    assert len(advice) == 4 and advice[0]["per_million_tokens"]["value"] > 0
    small = CliRunner().invoke(main, [*args, "--budget", "0.01"])
    assert small.exit_code == 0 and "Nothing fits 0.01 dollars" in small.output


def test_without_sizes_smaller_and_larger_mixes_are_tried(tmp_path: Path) -> None:
    out = tmp_path / "advice.json"
    args = [
        "advise", "--mtbf", "10m", "--nodes", "6", "--duration", "10m", "--model", "bert-large",
        "--microbatches", "16", "--mixes", "1", "--seeds", "1", "--policy", "varuna", "--json",
        str(out),
    ]  # fmt: skip
    found = CliRunner().invoke(main, args)
    assert found.exit_code == 0, found.output
    sizes = [offer["on_demand"] + offer["spot"] for offer in json.loads(out.read_text())["offers"]]
    assert sorted(sizes) == [28, 32, 32, 36]


def test_several_traces_have_equal_weight(tmp_path: Path) -> None:
    """Long and short traces have equal weight; intervals are over traces, not over their seeds."""
    calm, rough, out = tmp_path / "calm.csv", tmp_path / "rough.csv", tmp_path / "advice.json"
    calm.write_text(format_trace(generate(replace(MARKET, mtbf_s=7200.0), 7200.0, 1)))
    rough.write_text(format_trace(generate(replace(MARKET, mtbf_s=200.0), 1800.0, 1)))
    args = [
        "advise", "--model", "bert-large", "--microbatches", "16", "--buy", "6", "--mixes", "1",
        "--seeds", "2", "--json", str(out),
    ]  # fmt: skip
    alone = {}
    for path in (calm, rough):
        assert CliRunner().invoke(main, [*args, str(path)]).exit_code == 0
        advice = json.loads(out.read_text())
        alone[path.name] = next(o for o in advice["offers"] if o["spot"] == 6)["samples_per_s"][
            "value"
        ]
    found = CliRunner().invoke(main, [*args, str(calm), str(rough)])
    assert found.exit_code == 0, found.output
    advice = json.loads(out.read_text())
    assert advice["traces"] == ["calm.csv", "rough.csv"]
    both = next(o for o in advice["offers"] if o["spot"] == 6)
    assert {name: one["samples_per_s"] for name, one in both["by_trace"].items()} == pytest.approx(
        alone
    )
    assert alone["rough.csv"] < alone["calm.csv"]
    assert both["samples_per_s"]["value"] == pytest.approx(sum(alone.values()) / 2)
    assert both["samples_per_s"]["margin"] == pytest.approx(mean_of(list(alone.values())).margin)
    assert "95 % over traces" in found.output and "  calm.csv: " in found.output
    twice = CliRunner().invoke(main, [*args, str(calm), str(calm)])
    assert twice.exit_code == 2 and twice.output.startswith("elastic-sim advise: TRACE: 'calm.csv'")


def test_a_profile_costs_what_its_named_nodes_cost(tmp_path: Path) -> None:
    """Without a named type, all nodes would be free and fit any budget."""
    path, out = tmp_path / "prof.json", tmp_path / "advice.json"
    profile = published_profile("bert-large", ["A40"])
    path.write_text(format_profile(profile))
    args = [
        "advise", "--mtbf", "10m", "--nodes", "4", "--duration", "10m", "--model", str(path),
        "--microbatches", "16", "--buy", "4", "--mixes", "1", "--seeds", "1", "--json", str(out),
    ]  # fmt: skip
    free = CliRunner().invoke(main, args)
    assert free.exit_code == 2 and "--nodes-of" in free.output and "a40" in free.output
    priced = CliRunner().invoke(main, [*args, "--nodes-of", "a40"])
    assert priced.exit_code == 0, priced.output
    fixed = next(o for o in json.loads(out.read_text())["offers"] if o["on_demand"] == 4)
    assert fixed["dollars_per_h"]["value"] == pytest.approx(4 * 3.06)
    for name, why in (
        ("g4dn.xlarge", "have a T4"),
        ("p5.48xlarge", "have 8 devices, the profile's 1"),
    ):
        for command in ("advise", "replay"):
            there = args if command == "advise" else ["replay", *args[1:11]]
            wrong = CliRunner().invoke(main, [*there, "--nodes-of", name])
            assert wrong.exit_code == 2 and why in wrong.output, wrong.output
    unpriced = CliRunner().invoke(main, ["replay", *args[1:11], "--policy", "ours"])
    assert unpriced.exit_code == 0 and unpriced.output.splitlines()[1].split()[3:5] == ["-", "-"]
    several = CliRunner().invoke(main, [*args, "--nodes-of", "a40,g4dn.xlarge"])
    assert several.exit_code == 2 and "a profile is of one node type" in several.output
    two = replace(profile, devices=(*profile.devices, replace(profile.devices[0], name="other")))
    both = tmp_path / "both.json"
    both.write_text(format_profile(two))
    mixed = CliRunner().invoke(
        main,
        [
            "advise",
            "--mtbf",
            "10m",
            "--model",
            str(both),
            "--microbatches",
            "16",
            "--nodes-of",
            "a40",
        ],
    )
    assert (
        mixed.exit_code == 2 and "several device types" in mixed.output and "other" in mixed.output
    )


def test_an_invalid_model_file_is_reported_as_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = ["advise", "--mtbf", "10m", "--nodes-of", "a40", "--microbatches", "8", "--model"]
    absent = CliRunner().invoke(main, [*args, "nosuch.json"])
    assert absent.exit_code == 2 and absent.output.startswith(
        "elastic-sim advise: --model: 'nosuch.json'"
    )
    large = tmp_path / "large.json"
    large.write_text("{}" * 10)
    monkeypatch.setattr("elastic_sim.traces.trace.MAX_BYTES", 10)
    refused = CliRunner().invoke(main, [*args, str(large)])
    assert (
        refused.exit_code == 2
        and "--model: " in refused.output
        and "more than 10 bytes" in refused.output
    )
    events = tmp_path / "events.jsonl"
    events.write_text("{}" * 10)
    refused = CliRunner().invoke(main, ["advise", str(events)])
    assert (
        refused.exit_code == 2
        and "TRACE: " in refused.output
        and "more than 10 bytes" in refused.output
    )


@pytest.mark.parametrize(
    "more",
    [["--buy", "x"], ["--buy", "0"], ["--budget", "-1"], ["--policy", "nobody"], ["--model", "x"]],
)
def test_invalid_advice_requests_are_refused(more: list[str]) -> None:
    found = CliRunner().invoke(main, ["advise", "--mtbf", "10m", *more])
    assert (
        found.exit_code == 2
        and found.output.startswith("elastic-sim advise: ")
        and found.output.count("\n") == 1
    )
