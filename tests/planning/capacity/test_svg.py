"""The picture of a timeline is sound XML that shows every action where it belongs."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from elastic.planning.capacity.svg import (
    CHART,
    COLOURS,
    COMFORT,
    ROW,
    WIDEST,
    Panel,
    draw,
    marks,
    seconds,
)
from elastic.planning.schedule.schedule import Action, Kind
from elastic.planning.schedule.timeline import Span, Timeline

SVG = "{http://www.w3.org/2000/svg}"
SPANS = (
    Span(0, Action(Kind.F, 0), 0.0, 1.0),
    Span(1, Action(Kind.F, 0), 1.0, 2.0),
    Span(1, Action(Kind.B, 0), 2.0, 4.0),
    Span(0, Action(Kind.B, 0), 4.0, 6.0),
)
TIMELINE = Timeline(SPANS, 6.0, (3.0, 3.0))


def picture(*panels: Panel, title: str = "plan") -> ElementTree.Element:
    return ElementTree.fromstring(draw(title, panels))


def boxes(root: ElementTree.Element) -> dict[str, ElementTree.Element]:
    """Boxes of actions by the text that they carry."""
    found = {}
    for box in root.iter(f"{SVG}rect"):
        told = box.find(f"{SVG}title")
        if told is not None and told.text:
            found[told.text.partition(":")[0]] = box
    return found


def test_every_action_is_a_box_in_its_row_at_its_time() -> None:
    found = boxes(picture(Panel("pipeline 0", TIMELINE, ("a", "b"))))
    assert set(found) == {"F0 on a", "F0 on b", "B0 on b", "B0 on a"}
    x = {name: float(box.get("x", "")) for name, box in found.items()}
    y = {name: float(box.get("y", "")) for name, box in found.items()}
    assert x["F0 on b"] - x["F0 on a"] == pytest.approx(CHART / 6, abs=0.02)
    assert x["B0 on a"] - x["F0 on a"] == pytest.approx(CHART * 4 / 6, abs=0.02)
    assert float(found["B0 on b"].get("width", "")) == pytest.approx(CHART / 3, abs=0.5)
    assert y["F0 on b"] - y["F0 on a"] == y["B0 on b"] - y["B0 on a"] == ROW
    assert (
        found["F0 on a"].get("fill") == COLOURS["F"] != found["B0 on a"].get("fill") == COLOURS["B"]
    )


def test_stages_of_one_unit_share_its_row() -> None:
    """Interleaved: with two units stage 2 lies on unit 0."""
    spans = (*SPANS, Span(2, Action(Kind.F, 1), 2.0, 3.0))
    found = boxes(picture(Panel("p", Timeline(spans, 6.0, (4.0, 3.0)), ("a", "b"))))
    assert found["F1 on a"].get("y") == found["F0 on a"].get("y")


def test_panels_stand_below_each_other_on_one_scale() -> None:
    short = Timeline((Span(0, Action(Kind.F, 7), 0.0, 3.0),), 3.0, (3.0,))
    root = picture(Panel("p0", TIMELINE, ("a", "b")), Panel("p1", short, ("c",)))
    found = boxes(root)
    assert float(found["F7 on c"].get("width", "")) == pytest.approx(CHART / 2, abs=0.5)
    assert float(found["F7 on c"].get("y", "")) > float(found["F0 on b"].get("y", "")) + ROW
    height = float(root.get("height", ""))
    assert all(float(box.get("y", "")) + ROW < height for box in found.values())


def test_names_are_escaped_and_the_picture_is_told_in_words() -> None:
    root = picture(Panel('p <1> & "q"', TIMELINE, ("<a>", "b\x00")), title="<script>&")
    assert root.find(f"{SVG}title").text == "<script>&"  # type: ignore[union-attr]
    told = root.find(f"{SVG}desc").text  # type: ignore[union-attr]
    assert told == 'p <1> & "q": 2 units, 6 s, 50.0% of it computing'
    assert root.get("role") == "img"
    assert "<script>" not in draw("<script>&", ())


def test_legend_names_the_kinds_in_use() -> None:
    texts = [text.text for text in picture(Panel("p", TIMELINE, ("a", "b"))).iter(f"{SVG}text")]
    assert "forward" in texts and "backward" in texts
    assert not any(text and "weight" in text for text in texts)


def test_numbers_only_where_they_fit() -> None:
    spans = tuple(Span(0, Action(Kind.F, m), m * 1.0, m + 1.0) for m in range(4000))
    text = draw("many", [Panel("p", Timeline(spans, 4000.0, (4000.0,)), ("a",))])
    assert len(re.findall(r"<rect [^>]*><title>F", text)) == 4000
    assert "pointer-events" not in text


@pytest.mark.parametrize("until", [1e-7, 0.003, 0.99, 1.0, 1.01, 9.99, 10.0, 123.0, 5e6])
def test_marks_are_few_and_round(until: float) -> None:
    found = marks(until)
    assert 3 <= len(found) <= 10 and found[0] == 0.0
    assert found[-1] <= until * (1 + 1e-9) < found[-1] + found[1] * 1.001
    assert f"{found[1]:.0e}"[0] in "125"


def test_seconds() -> None:
    told = [seconds(x) for x in (0.0, 12.345678, 0.0123456, 3.4e-5, 5e-9)]
    assert told == ["0 s", "12.35 s", "12.35 ms", "34 us", "5 ns"]


def test_same_plan_same_picture() -> None:
    panel = Panel("p", TIMELINE, ("a", "b"))
    assert draw("t", [panel]) == draw("t", [panel])


def test_many_boxes_widen_the_picture() -> None:
    spans = tuple(Span(0, Action(Kind.F, m), m * 1.0, m + 1.0) for m in range(100))
    root = picture(Panel("p", Timeline(spans, 100.0, (100.0,)), ("a",)))
    assert COMFORT * 100 < float(root.get("width", "")) < WIDEST
    assert float(boxes(root)["F7 on a"].get("width", "")) == pytest.approx(COMFORT, abs=0.5)
