"""Requested shapes of a plan: "auto", a number of pipelines ("2") or their depths ("3+1").

A depth is a number of stages.
"""

from __future__ import annotations

import re

from elastic.domain.errors import FieldError
from elastic.domain.types import Plan

Depths = tuple[int, ...]


def parse_shape(text: str, field: str = "pipelines") -> Depths | int | None:
    """Return a number of pipelines, or their depths; None for auto. FieldError names `field`."""
    if text == "auto":
        return None
    if not re.fullmatch(r"[1-9]\d{0,4}(\+[1-9]\d{0,4})*", text):
        remedy = "auto, a number of pipelines (2), or the depth of each (3+1)"
        raise FieldError(field, text, remedy)
    parts = tuple(int(part) for part in text.split("+"))
    return parts if len(parts) > 1 else parts[0]


def format_depths(depths: Depths) -> str:
    return "+".join(map(str, depths))


def nodes_for(depth: int, per_node: int) -> int:
    """Return the number of nodes that a pipeline of `depth` stages takes."""
    return -(-depth // per_node)


def check_shape(text: str, nodes: int, per_node: int, field: str) -> None:
    """Raise FieldError, which names `field`, if `nodes` nodes are too few for the shape.

    `per_node`: most stages per node.
    """
    wanted = parse_shape(text, field)
    if wanted is None:
        return
    depths = (1,) * wanted if isinstance(wanted, int) else wanted
    least = sum(nodes_for(depth, per_node) for depth in depths)
    if least > nodes:
        remedy = f"it takes {least} nodes at least, and there are at most {nodes}"
        raise FieldError(field, text, remedy)


def nearest_shape(text: str, plan: Plan) -> str:
    """Return the shape of `plan`, which was made for the shape `text`; "": it has that shape."""
    wanted, depths = parse_shape(text), tuple(len(p.stages) for p in plan.pipelines)
    if isinstance(wanted, int):
        return "" if len(depths) == wanted else str(len(depths))
    return "" if wanted is None or sorted(depths) == sorted(wanted) else format_depths(depths)
