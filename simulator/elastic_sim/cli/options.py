"""What the commands of `elastic-sim` have in common: types of options, writing files."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from elastic.command_line import ParsedType, time_of
from elastic.domain.errors import FieldError


@dataclass(frozen=True, slots=True)
class PerNode:
    """A mean time between two losses of one node."""

    seconds: float


def _rate(flag: str, text: str) -> float | PerNode:
    """Mean time between losses: of the whole cluster as 10m, of each node as 200h/node."""
    time, slash, whose = text.partition("/")
    if slash and whose != "node":
        raise FieldError(flag, text, "10m for the whole cluster, or 200h/node for each node")
    seconds = time_of(flag, time)
    return PerNode(seconds) if slash else seconds


def mtbf_of(rate: float | PerNode, nodes: int, bulk: Sequence[tuple[int, float]]) -> float:
    """Seconds between two losses of the cluster: n nodes are lost n times as often as one, several at once as bulk
    says."""
    if not isinstance(rate, PerNode):
        return rate
    mean = sum(size * weight for size, weight in bulk) / sum(weight for _, weight in bulk)
    return rate.seconds * mean / max(nodes, 1)


class Several(click.ParamType):  # type: ignore[type-arg]
    """Values of another type with commas between them; a tuple, without doubles."""

    def __init__(self, of: click.ParamType) -> None:  # type: ignore[type-arg]
        self._of, self.name = of, f"{of.name},..."

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in str(value).split(",")]
        return tuple(dict.fromkeys(self._of.convert(word, param, ctx) for word in words if word))


RATE = ParsedType("TIME[/node]", _rate)
FILE = click.Path(path_type=Path)


def sizes_of(text: str) -> tuple[tuple[int, float], ...]:
    """(nodes lost at once, weight) from 1 or 1:3,4:1. Raises FieldError."""
    remedy = "sizes from 1 up, with weights above 0 if several: 1, or 1:3,4:1"
    try:
        pairs = [part.partition(":") for part in text.split(",")]
        found = tuple((int(size), float(weight) if colon else 1.0) for size, colon, weight in pairs)
    except ValueError:
        raise FieldError("--bulk", text, remedy) from None
    if not all(n >= 1 and w > 0 for n, w in found) or not math.isfinite(sum(w for _, w in found)):
        raise FieldError("--bulk", text, remedy)
    return found


def stored(out: Path, text: str) -> None:
    """Write a file. Raises FieldError."""
    try:
        out.write_text(text)
    except OSError as error:
        raise FieldError("output", str(out), f"it must be writable: {error}") from error


def writable(*paths: Path | None) -> None:
    """Say at once, and not after hours, that a file cannot be written. Raises FieldError."""
    for path in paths:
        if path is not None and not path.parent.is_dir():
            raise FieldError("output", str(path), f"the folder {path.parent} does not exist; make it first")
        if path is not None and path.is_dir():
            raise FieldError("output", str(path), "it is a folder; name a file")
