"""What to rent: mixes of spot and on-demand nodes are priced and ordered as asked."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.advise import Mix, blended, mixes, offers
from simulator.cli import main
from simulator.generate import Market, generate
from simulator.scenario import Scenario
from simulator.trace import ADD, check

MARKET = Market(nodes=6, mtbf_s=600.0, repair_s=300.0)
SCENARIO = Scenario(
    market=MARKET, duration_s=3600.0, model="bert-large", microbatches=16, physics=("noise=0",)
)


def test_mixes_go_from_all_spot_to_all_on_demand() -> None:
    assert mixes([4], 2) == [Mix(0, 4), Mix(2, 2), Mix(4, 0)]
    assert mixes([2, 2], 4) == [Mix(0, 2), Mix(1, 1), Mix(2, 0)], "no mix twice"


@settings(max_examples=40)
@given(seed=st.integers(0, 10**6), fixed=st.integers(0, 5), spot=st.integers(0, 20))
def test_a_blend_has_its_nodes_and_is_a_trace(seed: int, fixed: int, spot: int) -> None:
    trace = generate(MARKET, 3600.0, seed)
    found = blended(trace, Mix(fixed, spot))
    checked = check(found.events, found.end_s)
    n, most, least = 0, 0, math.inf
    for at, events in checked.steps():
        n += sum(1 if e.kind == ADD else -1 for e in events)
        most, least = max(most, n), min(least, n)
        assert at < found.end_s
    assert fixed <= least if checked.events else True
    assert most <= fixed + spot
    assert all(e.kind == ADD for e in checked.events if e.zone == "on-demand")


def test_more_of_the_same_market_is_not_lost_together() -> None:
    trace = generate(MARKET, 3600.0, 3)
    twice = blended(trace, Mix(0, 12))
    names = {e.node for e in twice.events if e.kind == ADD and e.seconds == 0}
    assert len(names) > 6, "more than the trace has"
    losses = [e.seconds for e in twice.events if e.kind != ADD]
    assert len(set(losses)) == len(losses)


def test_offers_are_priced_and_ordered() -> None:
    found = offers(SCENARIO, mixes([6], 1), ("ours", "varuna"), (0, 1))
    assert [o.per_million.value for o in found] == sorted(o.per_million.value for o in found)
    by = {(o.mix.on_demand, o.policy): o for o in found}
    assert by[6, "ours"].dollars_per_h.value == pytest.approx(6 * 3.06)
    assert by[0, "ours"].dollars_per_h.value < 6 * 0.91
    assert by[6, "ours"].samples_per_s.value > by[0, "ours"].samples_per_s.value
    assert (
        0 < by[0, "varuna"].goodput.value < by[0, "ours"].goodput.value < by[6, "ours"].goodput.value <= 1.01
    )


def test_within_a_budget_the_fastest_comes_first() -> None:
    found = offers(SCENARIO, mixes([6], 3), ("ours",), (0,), 15.0)
    within = [o for o in found if o.within]
    assert found[: len(within)] == within and 0 < len(within) < len(found)
    assert [o.samples_per_s.value for o in within] == sorted(
        (o.samples_per_s.value for o in within), reverse=True
    )


def test_the_command(tmp_path: Path) -> None:
    out = tmp_path / "advice.json"
    args = ["advise", "--mtbf", "10m", "--nodes", "6", "--duration", "1h", "--model", "bert-large", "--microbatches",
            "16", "--buy", "4,6", "--mixes", "1", "--seeds", "1", "--json", str(out)]  # fmt: skip
    found = CliRunner().invoke(main, args)
    assert found.exit_code == 0, found.output
    assert found.output.startswith("Rent ")
    told = json.loads(out.read_text())["offers"]
    assert len(told) == 4 and told[0]["per_million_tokens"]["value"] > 0
    small = CliRunner().invoke(main, [*args, "--budget", "0.01"])
    assert small.exit_code == 0 and "Nothing fits 0.01 dollars" in small.output


@pytest.mark.parametrize(
    "more", [["--buy", "x"], ["--buy", "0"], ["--budget", "-1"], ["--policy", "nobody"], ["--model", "x"]]
)
def test_what_cannot_be_advised_is_refused(more: list[str]) -> None:
    found = CliRunner().invoke(main, ["advise", "--mtbf", "10m", *more])
    assert found.exit_code == 2 and found.output.startswith("elastic-sim: ") and found.output.count("\n") == 1
