"""Recorded traces of others: small ones of every format, and what is refused."""

from __future__ import annotations

import json

import pytest

from elastic.errors import FieldError
from simulator import importers
from simulator.trace import ADD, REMOVE, Trace


def told(trace: Trace) -> list[tuple[float, str, str]]:
    return [(e.seconds, e.kind, e.node) for e in trace.events]


def test_bamboo_and_oobleck() -> None:
    trace = importers.bamboo("0,add,node1\n0,add,node2\n60000,remove,node1\n60000,add,node3\n", "p3.csv")
    assert told(trace) == [(0, ADD, "node1"), (0, ADD, "node2"), (60, REMOVE, "node1"), (60, ADD, "node3")]
    assert trace.end_s == 60


def test_counts_over_time() -> None:
    trace = importers.counts("0,0\n10,0\n10,2\n20,2\n20,1\n30,1\n", "counts.csv")
    assert told(trace) == [(10, ADD, "node1"), (10, ADD, "node2"), (20, REMOVE, "node2")]
    assert importers.counts("0,1\n0.5,1\n", "hours.csv", unit_s=3600).end_s == 1800


def test_parcae() -> None:
    rows = [
        [0, "add", {"nodes": ["n0", "n1"], "duration": 60000}],
        [60000, "no-op", {"nodes": [], "duration": 60000}],
        [120000, "remove", {"nodes": ["n0"], "duration": 60000}],
    ]
    trace = importers.parcae("\n".join(map(json.dumps, rows)), "segment.txt")
    assert told(trace) == [(0, ADD, "n0"), (0, ADD, "n1"), (120, REMOVE, "n0")]
    assert trace.end_s == 180


def test_spot_prices_above_the_bid_take_the_nodes_of_a_zone() -> None:
    def row(minute: int, zone: str, price: str) -> dict[str, str]:
        time = f"2026-01-01T00:{minute:02}:00Z"
        return {"Timestamp": time, "AvailabilityZone": zone, "InstanceType": "p3.2xlarge", "SpotPrice": price}

    rows = [
        row(30, "b", "1.2"),
        row(0, "a", "0.9"),
        row(10, "a", "1.5"),
        row(20, "a", "1.0"),
        row(5, "b", "0.5"),
    ]
    trace = importers.spot_prices(json.dumps({"SpotPriceHistory": rows}), "prices.json", 1.0, nodes=2)
    assert [(e.seconds, e.kind, e.zone) for e in trace.events[::2]] == [
        (0, ADD, "a"), (300, ADD, "b"), (600, REMOVE, "a"), (1200, ADD, "a"), (1800, REMOVE, "b"),
    ]  # fmt: skip
    assert len(trace.events) == 10 and trace.events[0].type == "p3.2xlarge"


def test_scaling_activities() -> None:
    def row(words: str, start: int, end: int, status: str = "Successful") -> dict[str, str]:
        return {
            "Description": words,
            "StartTime": f"2026-01-01T00:{start:02}:00Z",
            "EndTime": f"2026-01-01T00:{end:02}:00+00:00",
            "StatusCode": status,
            "Details": json.dumps({"Availability Zone": "us-east-1a"}),
        }

    rows = [
        row("Terminating EC2 instance: i-1", 20, 22),
        row("Terminating EC2 instance: i-0", 15, 16),
        row("Launching a new EC2 instance: i-1", 1, 2),
        row("Launching a new EC2 instance: i-2", 3, 4, "Failed"),
    ]
    trace = importers.scaling_activities(json.dumps({"Activities": rows}), "asg.json")
    assert told(trace) == [(0, ADD, "i-0"), (0, ADD, "i-1"), (780, REMOVE, "i-0"), (1080, REMOVE, "i-1")]
    assert trace.events[1].zone == "us-east-1a"


def test_skypilot() -> None:
    text = json.dumps({"metadata": {"gap_seconds": 600}, "data": [1, 1, 0, 2]})
    trace = importers.skypilot(text, "sky.json")
    assert told(trace) == [
        (0, ADD, "node1"),
        (1200, REMOVE, "node1"),
        (1800, ADD, "node2"),
        (1800, ADD, "node3"),
    ]
    assert trace.end_s == 2400


def test_our_own_events() -> None:
    rows = [
        {"kind": "coordinator", "at": 100.0},
        {"kind": "joined", "at": 101.0, "node": "node0", "domain": "a"},
        {"kind": "joined", "at": 101.5, "node": "node1", "domain": ""},
        {"kind": "lost", "at": 110.0, "node": "node1", "why": "silent"},
        {"kind": "joined", "at": 120.0, "node": "node1"},
        {"kind": "drained", "at": 125.0, "node": "node0"},
        {"kind": "step", "at": 130.0, "step": 3},
    ]
    trace = importers.elastic_events("\n".join(map(json.dumps, rows)) + "\n", "events.jsonl")
    came = [(1, ADD, "node0"), (1.5, ADD, "node1"), (10, REMOVE, "node1"), (20, ADD, "node1")]
    assert told(trace) == [*came, (25, REMOVE, "node0")]
    assert trace.events[0].zone == "a" and trace.end_s == 30


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("bamboo", "0,add\n", "line 1.*3 fields"),
        ("bamboo", "0,add,a\nx,remove,a\n", "line 2.*number from 0 up"),
        ("bamboo", "0,remove,a\n", "event 1.*a is not there"),
        ("bamboo", "-5,add,a\n", "line 1"),
        ("counts", "0,1.5\n", "whole number"),
        ("counts", "5,1\n1,2\n", "ascend"),
        ("parcae", "nothing\n", "line 1.*not JSON"),
        ("parcae", '[0, "add"]\n', "write "),
        ("parcae", '[0, "melt", {"nodes": ["a"], "duration": 1}]\n', "add, remove or no-op"),
        ("scaling-activities", "{}", "Activities"),
        ("scaling-activities", '{"Activities": [{}]}', r"Activities\[0\]"),
        ("skypilot", "[]", "gap_seconds"),
        ("events", "[1]\n", "an object a line"),
    ],
)
def test_what_is_of_another_form_is_refused(kind: str, text: str, why: str) -> None:
    with pytest.raises(FieldError, match=why):
        importers.FORMATS[kind](text, "file")


def test_prices_of_another_form_are_refused() -> None:
    with pytest.raises(FieldError, match="SpotPriceHistory"):
        importers.spot_prices("[]", "prices.json", 1.0)
    rows = {"SpotPriceHistory": [{"Timestamp": "yesterday"}]}
    with pytest.raises(FieldError, match=r"SpotPriceHistory\[0\]"):
        importers.spot_prices(json.dumps(rows), "prices.json", 1.0)
