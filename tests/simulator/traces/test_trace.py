"""Traces: reading, refusals that name the line, repairs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from elastic_sim.traces import trace as traces
from elastic_sim.traces.trace import (
    ADD,
    REMOVE,
    Event,
    Trace,
    build_trace,
    format_trace,
    parse,
    read,
    window,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.domain.errors import FieldError

HEADER = "seconds,event,node,zone,type,notice\n"
GOOD = HEADER + "0,add,a,z1,p3,\n0,add,b,,,\n10.5,remove,a,z1,p3,120\n20,add,a,z2,p3,\n30,end,,,,\n"


def test_a_written_trace_is_read_back() -> None:
    found, repairs = parse("# recorded somewhere\n" + GOOD)
    assert repairs == () and found.origin == "recorded somewhere"
    assert found.events[2] == Event(10.5, REMOVE, "a", "z1", "p3", 120.0)
    assert found.end_s == 30 and [e.node for e in found.events if e.seconds == 0] == ["a", "b"]
    assert [at for at, _ in found.steps()] == [0, 10.5, 20]
    assert parse(format_trace(found))[0] == found


@pytest.mark.parametrize(
    ("text", "line", "why"),
    [
        pytest.param("", 1, "the first line must be seconds", id="empty"),
        pytest.param("0,add,a\n", 1, "traces import", id="another-format"),
        pytest.param(GOOD.replace("20,add,a", "5,add,a"), 5, "times must ascend", id="wrong-order"),
        pytest.param(
            GOOD.replace("remove,a", "remove,c"), 4, "c is not present", id="unknown-node"
        ),
        pytest.param(GOOD.replace("0,add,b", "0,add,a"), 3, "a is present already", id="twice"),
        pytest.param(
            GOOD.replace("0,add,b", "-1,add,b"), 3, "seconds from 0 up", id="negative-time"
        ),
        pytest.param(GOOD.replace("10.5", "nan"), 4, "seconds from 0 up", id="no-number"),
        pytest.param(GOOD.replace("10.5", "1e400"), 4, "seconds from 0 up", id="endless"),
        pytest.param(
            GOOD.replace("10.5,remove", "10.5,vanish"), 4, "add, remove or end", id="unknown-event"
        ),
        pytest.param(GOOD.replace("p3,120", "p3,-5"), 4, "notice", id="negative-notice"),
        pytest.param(GOOD.replace(",z1,p3,\n", ",z1\n"), 2, "6 fields", id="missing-fields"),
        pytest.param(GOOD.replace("add,a,", "add,a b,"), 2, "names of letters", id="strange-name"),
        pytest.param(GOOD.replace("add,b,", "add,,"), 3, "a node must be named", id="no-name"),
        pytest.param(
            GOOD.replace("30,end", "15,end"), 5, "the trace ends at 15 s", id="after-the-end"
        ),
        pytest.param(GOOD + "40,add,c,,,\n", 7, "nothing may follow", id="more-after-the-end"),
        pytest.param(
            GOOD.replace("30,end,,", "30,end,a,"), 6, "the end has only a time", id="end-of-a-node"
        ),
    ],
)
def test_bad_rows_are_refused_with_their_line(text: str, line: int, why: str) -> None:
    with pytest.raises(FieldError, match=why) as refused:
        parse(text, "t.csv")
    assert f"t.csv, line {line}" in str(refused.value)


def test_a_bad_row_is_shown_as_the_file_has_it() -> None:
    with pytest.raises(
        FieldError, match=r"t\.csv, line 4: '1234567\.25,remove,c,z1,p3,120'.*c is not present"
    ):
        parse(
            GOOD.replace("10.5,remove,a", "1234567.25,remove,c").replace("30,end", "1e9,end"),
            "t.csv",
        )
    with pytest.raises(FieldError, match=r"line 5: '4e9,add,a,z2,p3,'.*at most a hundred years"):
        parse(GOOD.replace("20,add", "4e9,add").replace("30,end", "5e9,end"), "t.csv")


def test_a_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(GOOD, encoding="utf-8-sig")
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")
    assert read(path)[0] == parse(GOOD)[0]
    path.write_text("# from a spreadsheet\n" + GOOD, encoding="utf-8-sig")
    assert read(path)[0].origin == "from a spreadsheet"


def test_a_truncated_file_is_refused() -> None:
    with pytest.raises(FieldError, match=r"truncated.*20,end"):
        parse(GOOD.removesuffix("30,end,,,,\n"))
    with pytest.raises(FieldError, match="6 fields"):
        parse(GOOD[:-25])


def test_milliseconds_are_refused() -> None:
    rows = "".join(f"{1000 * 3600 * hour},add,n{hour},,,\n" for hour in range(24))
    with pytest.raises(FieldError, match="divide them by 1000"):
        parse(f"{HEADER}{rows}{86400000},end,,,,\n")
    hour = "0,add,a,,,\n600000,add,b,,,\n1200000,remove,b,,,\n3720000,end,,,,\n"  # 62 minutes
    with pytest.raises(FieldError, match="divide them by 1000"):
        parse(HEADER + hour)
    assert parse(HEADER + hour.replace("3720000", "3720001"))[0].end_s == 3720001
    assert parse(HEADER + "0,add,a,,,\n50000,remove,a,,,\n100000,end,,,,\n")[0].end_s == 100000


def test_number_of_nodes_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(traces, "MAX_NODES", 2)
    assert len(parse(GOOD)[0].events) == 4
    with pytest.raises(FieldError, match=r"line 4.*at most 2 nodes at once"):
        parse(GOOD.replace("10.5,remove,a", "10.5,add,c"))


def test_huge_and_unreadable_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.csv"
    path.write_text(GOOD)
    monkeypatch.setattr(traces, "MAX_BYTES", 20)
    with pytest.raises(FieldError, match="more than 20 bytes"):
        read(path)
    monkeypatch.undo()
    path.write_bytes(b"\xff\xfe" + GOOD.encode())
    with pytest.raises(FieldError, match="readable text"):
        read(path)
    with pytest.raises(FieldError, match="readable file"):
        read(tmp_path / "absent.csv")


def test_repairs_are_returned() -> None:
    text = HEADER + "5,add,b,,,\n0,add,a,,,\n7,remove,c,,,\nx,add,d,,,\n9,remove,b,,,\n"
    found, repairs = parse(text, repair=True)
    assert [(e.seconds, e.kind, e.node) for e in found.events] == [
        (0, ADD, "a"),
        (5, ADD, "b"),
        (9, REMOVE, "b"),
    ]
    assert found.end_s == 9
    changes = {repair.line: repair.text for repair in repairs}
    assert changes[2] == changes[3] == "sorted by time" and "c is not present" in changes[4]
    assert changes[5].startswith("dropped: a time") and changes[0] == "no end: set to 9 s"
    assert parse(format_trace(found))[0] == found


def test_a_window_begins_with_the_nodes_present() -> None:
    found = window(parse(GOOD)[0], 10.5, 25)
    assert [(e.seconds, e.kind, e.node) for e in found.events] == [(0, ADD, "b"), (9.5, ADD, "a")]
    assert found.end_s == 14.5


events = st.lists(
    st.tuples(
        st.floats(0, 1e6), st.sampled_from("abcdef"), st.sampled_from(["", "z"]), st.floats(0, 600)
    ),
    max_size=40,
)


@settings(max_examples=60)
@given(events)
def test_any_trace_comes_back_bit_for_bit(rows: list[tuple[float, str, str, float]]) -> None:
    there: set[str] = set()
    made = []
    for at, node, zone, notice in sorted(rows):
        kind = REMOVE if node in there else ADD
        there.symmetric_difference_update({node})
        made.append(Event(at, kind, node, zone, "", notice if kind == REMOVE else 0.0))
    trace = build_trace(made, 2e6, "one\ntwo")
    assert parse(format_trace(trace))[0] == trace


fields = st.one_of(
    st.sampled_from(
        ["0", "1", "-1", "1e999", "nan", "", "add", "remove", "end", "a", "b", '"', "\x00", "é"]
    ),
    st.text(max_size=5),
)


@settings(max_examples=200)
@given(st.lists(st.lists(fields, max_size=8), max_size=12), st.booleans(), st.booleans())
def test_any_file_gives_a_trace_or_a_clear_error(
    rows: list[list[str]], headed: bool, repair: bool
) -> None:
    text = (HEADER if headed else "") + "\n".join(",".join(row) for row in rows)
    try:
        found, _ = parse(text, "t.csv", repair=repair)
    except FieldError as error:
        assert "t.csv" in str(error) and len(str(error)) < 1000
        return
    assert isinstance(found, Trace) and math.isfinite(found.end_s)
    assert parse(format_trace(found))[0] == found
