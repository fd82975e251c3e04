"""Draw docs/design/states.md from the tables in the code: python docs/generate/make_states.py"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterable
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from types import ModuleType

from elastic.core.coordinator import transitions as coordinator
from elastic.core.job import state as job
from elastic.core.node import node
from elastic.core.protocol import messages

OUT = Path(__file__).parents[1] / "design" / "states.md"
HEAD = """# State machines

Drawn by `python docs/generate/make_states.py` from `elastic.core.coordinator.transitions.RULES` and
`elastic.core.node.node.MOVES`. Do not edit.

Both machines are pure functions (state, event, time) -> (state, actions, reason). The shells around them
(`elastic/coordinator/service.py`, `elastic/agent/service.py`) feed events in one at a time and carry the
actions out.
"""
JOB = """
## The job, as the coordinator sees it

Each event first updates what is known; then the rules of the current phase are applied until none has
anything to say. Rules look at conditions, not at messages: lost, repeated and reordered messages lead to the
same decisions. `halting` to itself: a fault while a planned change waits for the end of the running step; the
change then happens at once.
"""
NODE = """
## A node, as its agent sees it

The agent reports its whole condition after every change, so the coordinator never depends on having seen an
earlier report. A node that is fenced off forgets everything and begins again as a new member in `empty`.
"""


def meanings(module: ModuleType, kind: type[StrEnum]) -> dict[str, str]:
    """Value of each member -> the docstring under it in the source, or ""."""
    tree = ast.parse(inspect.getsource(module))
    body = next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__).body
    found = dict.fromkeys((member.value for member in kind), "")
    for before, after in pairwise(body):
        if not (isinstance(before, ast.Assign) and isinstance(before.value, ast.Constant)):
            continue
        if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
            found[str(before.value.value)] = " ".join(str(after.value.value).split())
    return found


def diagram(start: str, arrows: Iterable[tuple[str, str, str]], ends: Iterable[str]) -> str:
    lines = ["stateDiagram-v2", f"    [*] --> {start}"]
    for before, why, after in arrows:
        lines.append(f"    {before} --> {after}" + (f": {why}" if why else ""))
    lines += [f"    {end} --> [*]" for end in ends]
    return "\n".join(("```mermaid", *lines, "```"))


def job_part() -> str:
    rules, told = coordinator.RULES, meanings(job, job.JobPhase)
    arrows = [(p.value, "", follower.value) for p, (_, followers) in rules.items() for follower in followers]
    ends = [p.value for p, (_, followers) in rules.items() if not followers]
    rows = ["| phase | meaning | rules | may be followed by |", "| --- | --- | --- | --- |"]
    for phase, (named, followers) in rules.items():
        names = ", ".join(f"`{rule.__name__}`" for rule in named)
        after = ", ".join(follower.value for follower in followers) or "nothing"
        rows.append(f"| {phase.value} | {told[phase.value]} | {names} | {after} |")
    return "\n".join((JOB, diagram("waiting", arrows, ends), "", *rows))


def node_part() -> str:
    told = meanings(messages, messages.NodePhase)
    arrows = [(p.value, why, after.value) for befores, why, after in node.PHASE_CHANGES for p in befores]
    rows = ["| why | from | to |", "| --- | --- | --- |"]
    for befores, why, after in node.PHASE_CHANGES:
        rows.append(f"| {why} | {', '.join(p.value for p in befores)} | {after.value} |")
    phases = [f"- `{name}`: {text}" for name, text in told.items() if text]
    return "\n".join((NODE, diagram("empty", arrows, ()), "", *rows, "", *phases))


def text() -> str:
    return "\n".join((HEAD.rstrip(), job_part(), node_part(), ""))


if __name__ == "__main__":
    OUT.write_text(text())
