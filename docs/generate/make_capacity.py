"""Update the outputs in docs/guide/capacity.md: python docs/generate/make_capacity.py

The text between `<!-- output: X -->` and `<!-- /output -->` is replaced by the output of the
command X, by the file X, or by the table X.
"""

from __future__ import annotations

import contextlib
import csv
import io
import re
import shlex
import textwrap
from collections import defaultdict
from collections.abc import Callable
from math import isfinite
from pathlib import Path
from statistics import fmean
from unittest import mock

from elastic.launcher.cli import main
from elastic.planning.cost.catalogue import HARDWARE, MODELS
from elastic.planning.cost.published_profiles import parameter_count

ROOT = Path(__file__).resolve().parents[2]
OUT = ROOT / "docs" / "guide" / "capacity.md"
BLOCK = re.compile(r"(<!-- output: (.*?) -->\n).*?(<!-- /output -->)", re.S)
WIDTH = 100
"""Columns of a code block."""
SHOWN = (8, 64)
"""Numbers of nodes in the table of rivals."""


def command(words: str) -> str:
    """The command and its output, run in the root of the repository."""
    out = io.StringIO()
    with (
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(out),
        mock.patch("sys.argv", ["elastic"]),
    ):
        main(shlex.split(words)[1:])
    return fenced(f"$ {words}\n{out.getvalue()}")


def fenced(text: str) -> str:
    """A code block; lines over WIDTH columns are continued on the next line."""
    lines = [
        part
        for line in text.rstrip().split("\n")
        for part in (textwrap.wrap(line, WIDTH, subsequent_indent="    ") if line else [""])
    ]
    return "\n".join(["```", *lines, "```"])


def catalogue() -> str:
    lines = [
        "| device | peak, 16-bit Tflop/s | achieved | GiB | GB/s | source of the achieved rate |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {d.name} | {d.peak / 1e12:g} | {d.achieved:.0%} | {d.memory} | {d.bandwidth / 1e9:g} "
        f"| {d.source.partition(';')[0]} |"
        for d in HARDWARE
    ]
    lines += [
        "",
        "| model | parameters | blocks | hidden | sequence | source |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    lines += [
        f"| {m.name} | {parameter_count(m.name) / 1e9:.2f} B | {m.blocks} | {m.hidden} "
        f"| {m.sequence} | {m.source.partition(':')[0]} |"
        for m in MODELS
    ]
    return "\n".join(lines)


def published() -> str:
    from benchmarks.planning import planner

    rows = planner.published([planner.compare(model, 30) for model in planner.PUBLISHED])
    told = [(row.metric.partition(", ")[2].partition(":")[0], row.value) for row in rows]
    lines = ["| " + " | ".join(name for name, _ in told) + " |", "|" + " --- |" * len(told)]
    return "\n".join([*lines, "| " + " | ".join(f"{value:.1f} x" for _, value in told) + " |"])


def rivals() -> str:
    """Our step times, and the others' relative to ours, from the last benchmark results."""
    found = defaultdict(list)
    with (ROOT / "benchmarks" / "results" / "planner-rivals.csv").open() as file:
        for row in csv.DictReader(file):
            times = {name: float(row[f"{name}_s"]) for name in ("ours", "oobleck", "varuna")}
            found[row["model"]].append((int(row["nodes"]), times))
    heads = [f"{nodes} nodes" for nodes in SHOWN]
    lines = ["| model | " + " | ".join(heads) + " | Oobleck | Varuna |"]
    lines.append("|" + " --- |" * (len(SHOWN) + 3))
    for model, rows in found.items():
        ours = {nodes: times["ours"] for nodes, times in rows}
        cells = [f"{ours[nodes]:.4g} s" for nodes in SHOWN]
        for name in ("oobleck", "varuna"):
            ratios = [t[name] / t["ours"] for _, t in rows if isfinite(t[name])]
            cells.append(f"{fmean(ratios):.3f} x")
        lines.append(f"| {model} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


TABLES: dict[str, Callable[[], str]] = {
    "catalogue": catalogue,
    "published": published,
    "rivals": rivals,
}


def block(name: str) -> str:
    if name in TABLES:
        return TABLES[name]()
    if name.startswith("elastic "):
        return command(name)
    return fenced((ROOT / name).read_text())


def text() -> str:
    return BLOCK.sub(lambda match: f"{match[1]}{block(match[2])}\n{match[3]}", OUT.read_text())


if __name__ == "__main__":
    OUT.write_text(text())
