"""Importers: small files of every format, and refused files."""

from __future__ import annotations

import json
import math
from copy import deepcopy

import pytest
from elastic_sim.traces import importers
from elastic_sim.traces.trace import ADD, REMOVE, Trace, format_trace, parse
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.protocol.fault_spec import parse_fault
from elastic.domain.codec import encode
from elastic.domain.errors import FieldError


def rows_of(trace: Trace) -> list[tuple[float, str, str]]:
    return [(e.seconds, e.kind, e.node) for e in trace.events]


def test_bamboo_and_oobleck() -> None:
    trace = importers.bamboo(
        "0,add,node1\n0,add,node2\n60000,remove,node1\n60000,add,node3\n", "p3.csv"
    )
    assert rows_of(trace) == [
        (0, ADD, "node1"),
        (0, ADD, "node2"),
        (60, REMOVE, "node1"),
        (60, ADD, "node3"),
    ]
    assert trace.end_s == 60


def test_counts_over_time() -> None:
    trace = importers.counts("0,0\n10,0\n10,2\n20,2\n20,1\n30,1\n", "counts.csv")
    assert rows_of(trace) == [(10, ADD, "node1"), (10, ADD, "node2"), (20, REMOVE, "node2")]
    assert importers.counts("0,1\n0.5,1\n", "hours.csv", unit_s=3600).end_s == 1800


def test_lost_nodes_of_counts_are_drawn_at_random() -> None:
    """If the newest were lost first, some nodes would live for ever and others for moments."""
    rows = "0,20\n" + "".join(f"{10 * i},10\n{10 * i + 5},20\n" for i in range(1, 9))
    trace = importers.counts(rows, "counts.csv")
    first = [e.node for e in trace.events if e.kind == REMOVE][:10]
    assert first == [e.node for e in importers.counts(rows, "x").events if e.kind == REMOVE][:10]
    assert 0 < sum(int(node.removeprefix("node")) <= 10 for node in first) < 10
    lost = {e.node for e in trace.events if e.kind == REMOVE}
    assert len(lost & {f"node{i}" for i in range(1, 21)}) > 15, "of the first 20"


def test_dated_counts() -> None:
    """A row takes the place of earlier ones that are not before it, as in Bamboo's logs."""
    text = (
        "2021-12-10, 23:59:45, 3\n2021-12-11, 00:00:45, 3\n2021-12-11, 00:01:45, 3\n"
        "2021-12-11, 00:00:45, 2\n\n2021-12-11, 00:01:45, 2\n2021-12-11, 00:03:45, 4\n"
    )
    trace = importers.dated_counts(text, "gcloud.txt")
    found = [(at, kind) for at, kind, _ in rows_of(trace)]
    assert found == [*[(0, ADD)] * 3, (60, REMOVE), *[(240, ADD)] * 2] and trace.end_s == 240


def test_parcae() -> None:
    rows = [
        [0, "add", {"nodes": ["n0", "n1"], "duration": 60000}],
        [60000, "no-op", {"nodes": [], "duration": 60000}],
        [120000, "remove", {"nodes": ["n0"], "duration": 60000}],
    ]
    trace = importers.parcae("\n".join(map(json.dumps, rows)), "segment.txt")
    assert rows_of(trace) == [(0, ADD, "n0"), (0, ADD, "n1"), (120, REMOVE, "n0")]
    assert trace.end_s == 180


def test_spot_prices_above_the_bid_take_the_nodes_of_a_zone() -> None:
    def row(minute: int, zone: str, price: str) -> dict[str, str]:
        time = f"2026-01-01T00:{minute:02}:00Z"
        return {
            "Timestamp": time,
            "AvailabilityZone": zone,
            "InstanceType": "p3.2xlarge",
            "SpotPrice": price,
        }

    rows = [
        row(30, "b", "1.2"),
        row(0, "a", "0.9"),
        row(10, "a", "1.5"),
        row(20, "a", "1.0"),
        row(5, "b", "0.5"),
    ]
    trace = importers.spot_prices(
        json.dumps({"SpotPriceHistory": rows}), "prices.json", 1.0, nodes=2
    )
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
    assert rows_of(trace) == [
        (0, ADD, "i-0"),
        (0, ADD, "i-1"),
        (780, REMOVE, "i-0"),
        (1080, REMOVE, "i-1"),
    ]
    assert trace.events[1].zone == "us-east-1a"


def test_skypilot() -> None:
    text = json.dumps({"metadata": {"gap_seconds": 600}, "data": [1, 1, 0, 2]})
    trace = importers.skypilot(text, "sky.json")
    assert rows_of(trace) == [
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
    assert rows_of(trace) == [*came, (25, REMOVE, "node0")]
    assert trace.events[0].zone == "a" and trace.end_s == 30


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        ("bamboo", "0,add\n", "line 1.*3 fields"),
        ("bamboo", "0,add,a\nx,remove,a\n", "line 2.*number from 0 up"),
        ("bamboo", "0,remove,a\n", "line 1: '0,remove,a'.*a is not present"),
        ("bamboo", "-5,add,a\n", "line 1"),
        ("counts", "0,1.5\n", "whole number"),
        ("dated-counts", "2021-12-10, 23:59:45\n", "line 1.*write DATE, TIME, COUNT"),
        ("dated-counts", "2021-12-10, 25:59:45, 3\n", "line 1.*a time as 2026-01-31T12:00:00Z"),
        ("dated-counts", "2021-12-10, 23:59:45, many\n", "line 1.*a number from 0 up"),
        ("counts", "5,1\n1,2\n", "line 2: '1,2'.*ascend; the row before is at 5"),
        (
            "counts",
            "0,0\n0,4\n500,4\n400,2\n",
            "file, line 4: '400,2'.*ascend; the row before is at 500",
        ),
        (
            "bamboo",
            "0,add,a\n6000,add,b\n\n5000,remove,a\n",
            "line 4: '5000,remove,a'.*before is at 6000",
        ),
        ("parcae", "nothing\n", "line 1.*not JSON"),
        ("parcae", '[0, "add"]\n', "write "),
        ("parcae", '[0, "melt", {"nodes": ["a"], "duration": 1}]\n', "add, remove or no-op"),
        ("scaling-activities", "{}", "Activities"),
        ("scaling-activities", '{"Activities": [{}]}', r"Activities\[0\]"),
        ("skypilot", "[]", "gap_seconds"),
        ("events", "[1]\n", "one object per line"),
    ],
)
def test_other_formats_are_refused(kind: str, text: str, why: str) -> None:
    with pytest.raises(FieldError, match=why):
        importers.FORMATS[kind](text, "file")


def test_prices_in_another_format_are_refused() -> None:
    with pytest.raises(FieldError, match="SpotPriceHistory"):
        importers.spot_prices("[]", "prices.json", 1.0)
    rows = {"SpotPriceHistory": [{"Timestamp": "yesterday"}]}
    with pytest.raises(FieldError, match=r"SpotPriceHistory\[0\]"):
        importers.spot_prices(json.dumps(rows), "prices.json", 1.0)


def prices(*rows: dict[str, object]) -> str:
    first = {
        "Timestamp": "2026-01-01T00:00:00Z",
        "AvailabilityZone": "a",
        "InstanceType": "p3",
        "SpotPrice": "0.5",
    }
    later = {"Timestamp": "2026-01-01T01:00:00Z"}
    return json.dumps({"SpotPriceHistory": [first, *({**first, **later, **row} for row in rows)]})


def activities(**changed: object) -> str:
    row = {
        "Description": "Launching a new EC2 instance: i-1",
        "StartTime": "2026-01-01T00:00:00Z",
        "EndTime": "2026-01-01T00:01:00Z",
        "Details": '{"Availability Zone": "us-east-1a"}',
    }
    gone = {
        **row,
        "Description": "Terminating EC2 instance: i-1",
        "StartTime": "2026-01-01T01:00:00Z",
    }
    return json.dumps(
        {
            "Activities": [
                row,
                gone,
                {**row, "Description": "Launching a new EC2 instance: i-2", **changed},
            ]
        }
    )


def run_of(*rows: dict[str, object]) -> str:
    joined = [
        {"kind": "joined", "at": 100.0, "node": node, "domain": ""} for node in ("node0", "node1")
    ]
    return "".join(json.dumps(row) + "\n" for row in (*joined, *rows))


PARCAE = """[30000, "add", {{"nodes": ["a"], "duration": 60000}}]
[{}, "remove", {{"nodes": ["{}"], "duration": 60000}}]"""

LOST_EARLY = """{"at": 100, "kind": "coordinator"}
{"at": 200, "kind": "joined", "node": "node2"}
{"at": 150, "kind": "lost", "node": "node2"}"""


@pytest.mark.parametrize(
    ("kind", "text", "why"),
    [
        (
            "parcae",
            '[0, "add", {"nodes": 5, "duration": 1}]',
            "line 1: nodes: '5'.*a list of names",
        ),
        (
            "parcae",
            '[0, "add", {"nodes": "abc", "duration": 1}]',
            "line 1: nodes: 'abc'.*a list of names",
        ),
        (
            "parcae",
            f'[1{"0" * 400}, "add", {{"nodes": ["a"], "duration": 1}}]',
            "line 1.*from 0 up",
        ),
        (
            "parcae",
            PARCAE.format(960000, "ghost"),
            r"file, line 2: '960000,remove,ghost'.*ghost is not present",
        ),
        (
            "parcae",
            PARCAE.format(29999.5, "a"),
            r"file, line 2: '29999.5'.*ascend; the row before is at 30000",
        ),
        (
            "events",
            run_of({"at": 99, "kind": "lost", "node": "node0"}),
            "line 3: at: 99 .*the first row is at 100",
        ),
        ("events", LOST_EARLY, "line 3: at: 150.0 .*node2 joined later, at 200"),
        (
            "events",
            run_of({"at": 101, "kind": "joined", "node": "a b"}),
            r"line 3: 'a b, '.*names of letters",
        ),
        (
            "spot-prices",
            prices({"InstanceType": "p 3"}),
            r"History\[1\]: 'a, p 3'.*names of letters",
        ),
        (
            "scaling-activities",
            activities(Description="Launching i_1/%"),
            r"Activities\[2\]: 'Launching i_1/%'",
        ),
        ("events", '{"at": 1, "kind": "joined", "node": [1]}', "line 1: node: .*text is needed"),
        ("events", '{"at": 1, "kind": "joined", "node": 1}', "line 1: node: .*text is needed"),
        ("events", '{"at": 1, "kind": "joined"}', "line 1: node: 'None'"),
        (
            "skypilot",
            '{"metadata": {"gap_seconds": 60}, "data": [Infinity]}',
            r"data\[0\].*inf.*from 0 up",
        ),
        (
            "skypilot",
            '{"metadata": {"gap_seconds": 60}, "data": [1.5]}',
            r"data\[0\].*whole number",
        ),
        ("spot-prices", prices({"AvailabilityZone": ["a"]}), r"History\[1\]: AvailabilityZone"),
        ("spot-prices", prices({"AvailabilityZone": 5}), r"History\[1\]: AvailabilityZone"),
        ("spot-prices", prices({"SpotPrice": "nan"}), r"History\[1\].SpotPrice: 'nan'.*from 0 up"),
        (
            "scaling-activities",
            activities(Details='{"Availability Zone": 5}'),
            r"\[2\].Details: Availability Zone",
        ),
        ("scaling-activities", '{"Activities": [{"Description": "Rest"}]}', "no successful launch"),
        ("counts", "0,100000000000\n", "line 1.*at most 100000"),
        (
            "skypilot",
            '{"metadata": {"gap_seconds": 60}, "data": [100000000000]}',
            r"data\[0\].*at most 100000",
        ),
        (
            "counts",
            "0,1\n60000,2\n180000,1\n3720000,1\n",
            "whole thousands: if they are milliseconds",
        ),
    ],
)
def test_wrong_values_are_named(kind: str, text: str, why: str) -> None:
    more = {"bid": 1.0} if kind == "spot-prices" else {}
    with pytest.raises(FieldError, match=why):
        importers.FORMATS[kind](text, "file", **more)


def test_too_many_events_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importers, "MAX_EVENTS", 20)
    with pytest.raises(FieldError, match=r"line 3.*at most 20 events"):
        importers.counts("0,10\n1,0\n2,10\n3,0\n", "counts.csv")
    with pytest.raises(FieldError, match="at most 20 events"):
        importers.spot_prices(prices({"SpotPrice": "2"}), "prices.json", 1.0, nodes=11)


@pytest.mark.parametrize(
    ("bid", "nodes", "field"), [(float("nan"), 1, "--bid"), (0.0, 1, "--bid"), (1.0, -3, "--nodes")]
)
def test_invalid_bids_and_node_counts_are_refused(bid: float, nodes: int, field: str) -> None:
    with pytest.raises(FieldError, match=field):
        importers.spot_prices(prices(), "prices.json", bid, nodes)


def test_products_are_not_mixed() -> None:
    linux, windows = {"ProductDescription": "Linux/UNIX"}, {"ProductDescription": "Windows"}
    rows = json.loads(
        prices({**windows, "SpotPrice": "9"}, {**linux, "Timestamp": "2026-01-01T02:00:00Z"})
    )
    rows["SpotPriceHistory"][0] |= linux
    text = json.dumps(rows)
    with pytest.raises(FieldError, match=r"Linux/UNIX.*Windows.*--product"):
        importers.spot_prices(text, "prices.json", 1.0)
    trace = importers.spot_prices(text, "prices.json", 1.0, product="Linux/UNIX")
    assert rows_of(trace) == [(0, ADD, "a-p3-1")] and trace.end_s == 7200
    with pytest.raises(FieldError, match=r"--product.*SUSE.*the file has 'Linux/UNIX', 'Windows'"):
        importers.spot_prices(text, "prices.json", 1.0, product="SUSE")


def test_unfinished_activities_are_ignored() -> None:
    text = activities(StatusCode="InProgress", EndTime=None)
    trace = importers.scaling_activities(text, "asg.json")
    assert rows_of(trace) == [(0, ADD, "i-1"), (3540, REMOVE, "i-1")]


def left(trace: Trace) -> list[tuple[float, str, float]]:
    return [(e.seconds, e.node, e.notice_s) for e in trace.events if e.kind == REMOVE]


def test_a_drained_node_leaves_when_its_notice_ends() -> None:
    drain = {"kind": "drain", "at": 110.0, "node": "node0", "deadline_s": 120.0}
    drained = {"kind": "drained", "at": 115.0, "node": "node0"}
    trace = importers.elastic_events(run_of(drain, drained), "events.jsonl")
    assert left(trace) == [(130, "node0", 120)] and trace.end_s == 130

    again = {"kind": "joined", "at": 160.0, "node": "node0", "domain": "b"}
    trace = importers.elastic_events(run_of(drain, drained, again), "events.jsonl")
    assert left(trace) == [(60, "node0", 50)] and trace.events[-1].zone == "b" and trace.end_s == 60

    early = {"kind": "lost", "at": 112.0, "node": "node0"}
    assert left(importers.elastic_events(run_of(drain, early), "events.jsonl")) == [
        (12, "node0", 2)
    ]


def test_a_withdrawn_notice_is_ignored() -> None:
    drain = {"kind": "drain", "at": 110.0, "node": "node0", "deadline_s": 120.0}
    stays = {"kind": "notice", "at": 111.0, "node": "node0", "notice": "none"}
    lost = {"kind": "lost", "at": 150.0, "node": "node0"}
    assert left(importers.elastic_events(run_of(drain, stays, lost), "events.jsonl")) == [
        (50, "node0", 0)
    ]


def test_a_killed_node_is_lost_at_its_fault() -> None:
    rows = [
        {"kind": "lost", "at": 112.0, "node": "node0"},
        {"kind": "step", "at": 120.0},
        {"kind": "fault", "at": 110.5, "number": 1},
        {"kind": "fault", "at": 119.0, "number": 0},
    ]
    faults = [encode(parse_fault(text)) for text in ("kill node=1 step=9", "kill node=0 step=3")]
    config = json.dumps({"faults": faults, "devices": ["a40", "h100"]})
    trace = importers.elastic_events(run_of(*rows), "events.jsonl", config)
    assert left(trace) == [(10.5, "node0", 0), (19, "node1", 0)] and trace.end_s == 20
    assert [e.type for e in trace.events if e.kind == "add" and e.seconds == 0] == ["a40", "h100"]
    assert left(importers.elastic_events(run_of(*rows), "events.jsonl")) == [(12, "node0", 0)]
    with pytest.raises(FieldError, match=r"line 5: number.*the run has 1 faults"):
        importers.elastic_events(run_of(*rows), "events.jsonl", json.dumps({"faults": faults[:1]}))
    with pytest.raises(FieldError, match=r"config\.json"):
        importers.elastic_events(run_of(*rows), "events.jsonl", "[]")


def test_implausible_units_of_time_give_a_warning() -> None:
    hours = "".join(f"{hour},{4 + hour % 2}\n{hour + 1},{4 + hour % 2}\n" for hour in range(40))
    assert "losses per node and hour" in importers.plausibility_warning(
        importers.counts(hours, "file"), "seconds"
    )
    assert importers.plausibility_warning(importers.counts(hours, "file", 3600), "hours") == ""
    assert "longer than any" in importers.plausibility_warning(
        importers.counts("0,1\n40000,2\n40001,2\n", "file", 3600), "hours"
    )
    assert "no node" in importers.plausibility_warning(
        importers.counts("0,0\n10,0\n", "file"), "seconds"
    )


SAMPLES = {
    "bamboo": "0,add,node1\n0,add,node2\n60000,remove,node1\n60000,add,node3\n",
    "dated-counts": "2021-12-10, 23:59:45, 2\n2021-12-11, 00:00:45, 1\n",
    "counts": "0,0\n10,0\n10,2\n20,2\n20,1\n30,1\n",
    "parcae": '[0, "add", {"nodes": ["a", "b"], "duration": 60000}]\n'
    '[60000, "remove", {"nodes": ["b"], "duration": 5}]\n',
    "spot-prices": prices({"SpotPrice": "2", "ProductDescription": ""}),
    "scaling-activities": activities(StatusCode="Failed"),
    "skypilot": '{"metadata": {"gap_seconds": 600}, "data": [1, 1, 0, 2]}',
    "events": run_of(
        {"kind": "drain", "at": 110.0, "node": "node0", "deadline_s": 120.0},
        {"kind": "drained", "at": 111.0, "node": "node0"},
        {"kind": "lost", "at": 112.0, "node": "node1"},
        {"kind": "fault", "at": 111.5, "number": 0},
    ),
}
A_LINE = ("parcae", "events")
strange = st.one_of(
    st.sampled_from(
        [None, True, False, 0, 1, -1, 2**63, 10**400, 1.5, math.inf, -math.inf, math.nan, 1e308]
    ),
    st.sampled_from(
        ["", "a", "b", "node1", "nan", "1e999", "\ud800", "a b", "add", "remove", "{}", "[", "[1]"]
    ),
    st.sampled_from([[], {}, [1], ["a"], [[]], {"a": []}, [math.inf], {"Availability Zone": 5}]),
)


def places(value: object) -> list[tuple[object, object]]:
    """(container, key) of everything in it."""
    keys = (
        list(value)
        if isinstance(value, dict)
        else range(len(value))
        if isinstance(value, list)
        else ()
    )
    assert keys == () or isinstance(value, (dict, list))
    below = [(value, key) for key in keys]
    return below + [place for key in keys for place in places(value[key])]  # type: ignore[index]


def broken_json(data: st.DataObject, kind: str) -> str:
    text = SAMPLES[kind]
    parts = [json.loads(line) for line in (text.splitlines() if kind in A_LINE else [text])]
    for _ in range(data.draw(st.integers(1, 3))):
        container, key = data.draw(st.sampled_from(places(parts)))
        if data.draw(st.integers(0, 3)):
            container[key] = deepcopy(data.draw(strange))  # type: ignore[index]
        else:
            del container[key]  # type: ignore[attr-defined]
        if not parts:
            break
    return "\n".join(map(json.dumps, parts))


def broken_csv(data: st.DataObject, kind: str) -> str:
    rows = [line.split(",") for line in SAMPLES[kind].splitlines()]
    for _ in range(data.draw(st.integers(1, 3))):
        row = data.draw(st.integers(0, len(rows) - 1))
        if len(rows) > 1 and not data.draw(st.integers(0, 3)):
            del rows[row]
        else:
            cells = st.one_of(strange.map(str), st.sampled_from(['"', "\x00", "\r", "a,b", "é"]))
            rows[row][data.draw(st.integers(0, len(rows[row]) - 1))] = data.draw(cells)
    return "\n".join(map(",".join, rows))


@settings(max_examples=80, deadline=None)
@given(st.data())
@pytest.mark.parametrize("kind", sorted(importers.FORMATS))
def test_any_file_gives_a_trace_or_a_clear_error(kind: str, data: st.DataObject) -> None:
    text = (broken_csv if kind in ("bamboo", "counts", "dated-counts") else broken_json)(data, kind)
    more: dict[str, object] = {"bid": 1.0} if kind == "spot-prices" else {}
    if kind == "events":
        more = {"config": json.dumps({"faults": [encode(parse_fault("kill node=1 step=3"))]})}
    try:
        trace = importers.FORMATS[kind](text, "file", **more)
    except FieldError as error:
        assert "file" in error.field or error.field == "--product"
        assert len(str(error)) < 1000 and str(error).encode()
        return
    assert parse(format_trace(trace))[0] == trace
    assert importers.plausibility_warning(trace, "seconds").isascii()


def test_sample_files_are_valid() -> None:
    for kind, text in SAMPLES.items():
        more = {"bid": 1.0} if kind == "spot-prices" else {}
        assert importers.FORMATS[kind](text, "file", **more).events
    assert set(SAMPLES) == set(importers.FORMATS) == set(importers.UNITS)
