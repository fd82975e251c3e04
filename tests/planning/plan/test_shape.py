"""Requested shapes, and the shape that a plan has instead."""

from __future__ import annotations

import pytest

from elastic.domain.errors import FieldError
from elastic.planning.plan.shape import check_shape, nearest_shape, parse_shape
from tests.worker.engine.plans import plan_of

PLAN = plan_of([[0, 2], [0, 1, 3]], 4, [(0, 1), (2, 3)])
"""Pipelines of two and of three stages."""


@pytest.mark.parametrize(("text", "wanted"), [("auto", None), ("2", 2), ("3+1", (3, 1))])
def test_shapes_are_parsed(text: str, wanted: object) -> None:
    assert parse_shape(text) == wanted


@pytest.mark.parametrize("text", ["", "0", "-1", "2+", "2+0", "two", "1.5", "2 + 2", "100000"])
def test_wrong_shapes_name_the_field(text: str) -> None:
    with pytest.raises(FieldError, match=r"^--shape: "):
        parse_shape(text, "--shape")


@pytest.mark.parametrize(
    ("text", "nodes", "per_node"), [("auto", 1, 1), ("2", 2, 1), ("2+1", 3, 1), ("4+3", 4, 2)]
)
def test_shapes_that_fit(text: str, nodes: int, per_node: int) -> None:
    check_shape(text, nodes, per_node, "--pipelines")


@pytest.mark.parametrize(
    ("text", "nodes", "per_node", "least"), [("3", 2, 4, 3), ("2+1", 2, 1, 3), ("4+3+1", 4, 2, 5)]
)
def test_shapes_that_take_more_nodes(text: str, nodes: int, per_node: int, least: int) -> None:
    with pytest.raises(FieldError, match=f"takes {least} nodes at least"):
        check_shape(text, nodes, per_node, "--pipelines")


@pytest.mark.parametrize(
    ("text", "nearest"),
    [("auto", ""), ("2", ""), ("3+2", ""), ("2+3", ""), ("3", "2"), ("1", "2"), ("2+2", "2+3")],
)
def test_the_shape_of_a_plan(text: str, nearest: str) -> None:
    assert nearest_shape(text, PLAN) == nearest
