"""Bring docs/results.md, and the few rows of it that README shows, up to date from benchmarks/results/*.json:
python docs/generate/make_results.py"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BEGIN, END = "<!-- results -->", "<!-- /results -->"
SHOWN = (
    ("recovery", "total, median"),
    ("engine", "4 stages: speed over Schedule1F1B"),
    ("backup_overhead", "step time, auto"),
    ("backup_overhead", "step time, backup on / off, 4 nodes, 512 tokens"),
    ("planner", "1,024 nodes of 3 types"),
    ("planner", "re-plan after one loss, 1,024 nodes of 3 types"),
    ("planner", "gap to the lower bound, 100 random mixed clusters of 64 to 512 nodes: median"),
    ("planner", "gap to the lower bound, 100 random mixed clusters of 64 to 512 nodes: worst"),
    ("planner", "Oobleck: its step over ours, mean"),
    ("planner", "Varuna: its step over ours, mean"),
    ("prediction", "worst error"),
    ("headline", "scenarios in which ours is ahead"),
)
"""(benchmark, beginning of the metric) of the rows in README."""

Result = dict[str, Any]


def table(results: list[Result], wanted: Callable[[str, Result], bool]) -> str:
    """Rows that are wanted (benchmark, row), each with the command that measures it again; "" if there is none."""
    rows = []
    for result in results:
        for row in (row for row in result["rows"] if wanted(str(result["name"]), row)):
            value, unit = f"{row['value']:.3g}", row["unit"]
            sign = "at most" if row["better"] == "lower" else "at least"
            target = "" if row["target"] is None else f"{sign} {row['target']:g}"
            command = f"`python -m benchmarks.{result['name']}`"
            rows.append(f"| {row['metric']} | {value} {unit} | {target} | {command} |")
    if not rows:
        return ""
    machines = "; ".join(dict.fromkeys(str(result["machine"]) for result in results))
    head = [f"Measured on {machines}.", "", "| what | result | wanted | again |", "| --- | --- | --- | --- |"]
    return "\n".join((*head, *rows)) + "\n"


def shown(name: str, row: Result) -> bool:
    return any(name == benchmark and row["metric"].startswith(begin) for benchmark, begin in SHOWN)


def updated(readme: str, results: list[Result]) -> str:
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results, shown)}{END}{after}"


def page(results: list[Result]) -> str:
    """Everything that was measured, targets missed included."""
    head = "Written by `python docs/generate/make_results.py` from `benchmarks/results/`; `make bench` measures all again."
    return f"# Results\n\n{head}\n\n" + table(results, lambda name, row: True)


if __name__ == "__main__":
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    found = [json.loads(file.read_text()) for file in files]
    readme = ROOT / "README.md"
    readme.write_text(updated(readme.read_text(), found))
    (ROOT / "docs" / "results.md").write_text(page(found))
