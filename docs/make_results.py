"""Bring README's table of results up to date from benchmarks/results/*.json: python docs/make_results.py"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def table(results: list[dict[str, Any]]) -> str:
    """Rows that have a target, each with the command that measures it again; "" if there is none."""
    rows = []
    for result in results:
        for row in (row for row in result["rows"] if row["target"] is not None):
            sign = "at most" if row["better"] == "lower" else "at least"
            value, unit = f"{row['value']:.3g}", row["unit"]
            wanted, command = f"{sign} {row['target']:g}", f"`python -m benchmarks.{result['name']}`"
            rows.append(f"| {row['metric']} | {value} {unit} | {wanted} | {command} |")
    if not rows:
        return ""
    machines = "; ".join(dict.fromkeys(str(result["machine"]) for result in results))
    head = [f"Measured on {machines}.", "", "| what | result | wanted | again |", "| --- | --- | --- | --- |"]
    return "\n".join((*head, *rows)) + "\n"


def updated(readme: str, results: list[dict[str, Any]]) -> str:
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table(results)}{END}{after}"


if __name__ == "__main__":
    files = sorted((ROOT / "benchmarks" / "results").glob("*.json"))
    path = ROOT / "README.md"
    path.write_text(updated(path.read_text(), [json.loads(file.read_text()) for file in files]))
