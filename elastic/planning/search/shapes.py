"""Which shapes (depths of pipelines) come into question for a number of nodes.

A shape is asked for as "auto", as a number of pipelines ("2") or as their depths ("3+1"). Depths count
stages; a node with several units takes that many neighbouring stages of one pipeline, because a node never
holds a layer twice.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.domain.errors import FieldError

Depths = tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """What pipelines have to be made of."""

    nodes: int
    per_node: int
    """Units of a node."""
    n_layers: int
    n_microbatches: int

    @property
    def most(self) -> int:
        """The most pipelines that can be kept busy."""
        return min(self.nodes, self.n_microbatches)

    def hosts(self, depth: int) -> int:
        """Nodes that a pipeline of `depth` stages takes."""
        return -(-depth // self.per_node)

    def even(self, pipelines: int) -> Depths:
        """Spread all nodes as evenly as possible; never deeper than there are layers."""
        base, more = divmod(self.nodes, pipelines)
        return tuple(min((base + (i < more)) * self.per_node, self.n_layers) for i in range(pipelines))


def parse_shape(text: str) -> Depths | int | None:
    """Return None for auto, a number of pipelines, or depths. Raises FieldError."""
    if text == "auto":
        return None
    if not re.fullmatch(r"[1-9]\d{0,5}(\+[1-9]\d{0,5})*", text):
        raise FieldError("pipelines", text, "auto, a number of pipelines (2), or the depth of each (3+1)")
    parts = tuple(int(part) for part in text.split("+"))
    return parts if len(parts) > 1 else parts[0]


def format_depths(depths: Depths) -> str:
    return "+".join(map(str, depths))


def candidates(shape: str, room: Room) -> Iterator[tuple[tuple[Depths, ...], str]]:
    """Yield groups of shapes, each with why it is not quite what was asked ("" if it is): a later group is
    for when
    nothing in the earlier ones is feasible."""
    wanted = parse_shape(shape)
    if wanted is None:
        yield tuple(room.even(k) for k in range(1, room.most + 1)), ""
        return
    pipelines = wanted if isinstance(wanted, int) else len(wanted)
    for k in range(min(pipelines, room.most), 0, -1):
        depths = room.even(k) if isinstance(wanted, int) else fit(wanted[:k], room)
        asked = k == wanted if isinstance(wanted, int) else depths == wanted
        yield (
            (depths,),
            "" if asked else f"shape {shape} does not fit {room.nodes} nodes; {format_depths(depths)} does",
        )


def fit(wanted: Depths, room: Room) -> Depths:
    """Bring depths to what the nodes allow: shorten the deepest pipelines or deepen the shallowest ones."""
    depths = [min(depth, room.n_layers) for depth in wanted]
    while sum(map(room.hosts, depths)) > room.nodes:
        deepest = max(range(len(depths)), key=lambda i: (depths[i], i))
        depths[deepest] -= 1
    while sum(map(room.hosts, depths)) < room.nodes and min(depths) < room.n_layers:
        shallowest = min(range(len(depths)), key=lambda i: (depths[i], i))
        depths[shallowest] = min(
            room.hosts(depths[shallowest]) * room.per_node + room.per_node, room.n_layers
        )
    return tuple(depths)
