"""Write docs/design/states.md from the transition tables: python docs/generate/make_states.py"""

from __future__ import annotations

import ast
import inspect
import textwrap
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
WIDTH = 100
HEAD = """# State machines

This page shows the two state machines of the runtime, for people who read event logs or change
transitions. For example, a lost node takes the job from `running` through `halting` and
`installing` back to `running`. Terms are in the [glossary](../glossary.md).

`python docs/generate/make_states.py` writes this page from the tables
`elastic.core.coordinator.transitions.RULES` and `elastic.core.node.node.PHASE_CHANGES`. Do not edit
it.

Both machines are pure functions (state, event, time) -> (state, actions, reason). The services in
`elastic/coordinator` and `elastic/agent` pass events to them one at a time and execute the actions.
"""
JOB = """
## The job, in the coordinator

Each event first updates the known facts. Then the rules of the current phase are applied until no
rule makes a decision. Rules test conditions, not messages, so lost, repeated and reordered messages
lead to the same decisions. The arrow from `halting` to itself is a fault while a planned change
waits for the end of the step; the change then happens at once.
"""
NODE = """
## A node, in its agent

The agent reports its whole condition after every change, so the coordinator does not depend on
earlier reports. A node that is fenced ends its workers and joins again as a new member in `empty`,
with the copies in its vault.
"""


def docstrings(module: ModuleType, kind: type[StrEnum]) -> dict[str, str]:
    """Docstring below each member of `kind` in the source, by value; "" if it has none."""
    tree = ast.parse(inspect.getsource(module))
    body = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == kind.__name__
    ).body
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


def phases(kind: type[StrEnum], meaning: dict[str, str], rules: dict[str, str]) -> list[str]:
    """One list item per phase that has a meaning or rules: both of them."""
    lines = []
    for phase in kind:
        words = [word for word in (meaning[phase.value], rules.get(phase.value, "")) if word]
        if words:
            item = f"- `{phase.value}`: {' '.join(words)}"
            lines += textwrap.wrap(item, WIDTH, subsequent_indent="  ")
    return lines


def job_part() -> str:
    rules = coordinator.RULES
    arrows = [(p.value, "", after.value) for p, (_, ends) in rules.items() for after in ends]
    ends = [p.value for p, (_, followers) in rules.items() if not followers]
    deciding = {p.value: f"Decided by `{rule.__name__}`." for p, (rule, _) in rules.items() if rule}
    items = phases(job.JobPhase, docstrings(job, job.JobPhase), deciding)
    return "\n".join((JOB, diagram("waiting", arrows, ends), "", *items))


def node_part() -> str:
    arrows = [
        (p.value, why, after.value) for befores, why, after in node.PHASE_CHANGES for p in befores
    ]
    items = phases(messages.NodePhase, docstrings(messages, messages.NodePhase), {})
    return "\n".join((NODE, diagram("empty", arrows, ()), "", *items))


def text() -> str:
    return "\n".join((HEAD.rstrip(), job_part(), node_part(), ""))


if __name__ == "__main__":
    OUT.write_text(text())
