"""Benchmark results: rows that print as a table and are saved in benchmarks/results/NAME.json."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

DIRECTORY = Path(__file__).parent / "results"


@dataclass(frozen=True, slots=True)
class Row:
    metric: str
    value: float
    unit: str
    target: float | None
    """Value to reach, in the direction `better`; None: the value is only reported."""
    better: str
    """lower or higher."""

    @property
    def met(self) -> str:
        if self.target is None:
            return ""
        good = self.value >= self.target if self.better == "higher" else self.value <= self.target
        return "met" if good else "missed"


def machine() -> str:
    """Return processor type, cores, system and Python version of this machine as text."""
    python = platform.python_version()
    return f"{platform.machine()}, {os.cpu_count()} cores, {platform.system()}, Python {python}"


def load(name: str) -> list[Row]:
    """Return the rows that an earlier run saved under this name."""
    return [Row(**row) for row in json.loads((DIRECTORY / f"{name}.json").read_text())["rows"]]


def show(rows: list[Row]) -> None:
    """Print `rows` as a table."""
    width = max(len(row.metric) for row in rows)
    for row in rows:
        target = (
            ""
            if row.target is None
            else f"target {row.target:g} ({row.better} is better): {row.met}"
        )
        print(f"{row.metric:<{width}}  {row.value:>10.4g} {row.unit:<6} {target}".rstrip())


def write(name: str, rows: list[Row], path: Path | None = None, **more: object) -> Path:
    """Write `rows` and `more` to a file, by default NAME.json in the results directory. Return
    the file."""
    DIRECTORY.mkdir(exist_ok=True)
    path = path or DIRECTORY / f"{name}.json"
    found = {"name": name, "machine": machine(), "rows": [asdict(row) for row in rows], **more}
    path.write_text(json.dumps(found, indent=2) + "\n")
    return path


def save(name: str, rows: list[Row]) -> Path:
    """Print `rows` and write them to the results directory. Return the file."""
    show(rows)
    return write(name, rows)
