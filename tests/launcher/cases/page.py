"""Page of all cases: docs/operate/messages.md."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from tests.launcher.cases.case import ITEMS, Case, Command, Covered
from tests.launcher.cases.execution import ROOT, Result, page_words
from tests.launcher.cases.scripts import TRAIN, train

OUT = ROOT / "docs" / "operate" / "messages.md"
Outcome = tuple[Path, list[tuple[Command, Result]]]
"""Folder of a case, and its commands with their results."""
LIMIT_S = 5
"""No command may print nothing for longer than this."""
HEAD = """# Messages

Written by `python -m tests.launcher.cases`, which runs all commands on this page. Do not edit.

This page is for users who look for a message, and for developers who change one. It shows mistakes
and waits, with the decisive lines of the output. Fixed words replace what varies: FOLDER is the
working directory, PORT a port, N a time, size or loss.

- A wait is told again every three seconds, until it ends. Here it is interrupted.
- `silent`: the longest time without output, from the start of the command to its end.
- The scripts are in `tests/launcher/cases/scripts.py`.
- No output has a traceback through the files of elastic.
"""


def head_of(case: Case | Covered) -> str:
    """Return the first cells of a case's row: its title and its command line, with the last line of
    the script if it is special."""
    line = case.command if isinstance(case, Covered) else case.command.line
    line = re.sub(r"\{(free|idle|held)\}", "PORT", line)
    source = "" if isinstance(case, Covered) else case.files.get("train.py", "")
    last = source.splitlines()[-1] if source.startswith(TRAIN) and source != train() else ""
    script = f"<br>last line of train.py: {_code(last)}" if last else ""
    return f"| {case.title} | {_code(line)}{script} |"


def text(outcomes: Mapping[str, Outcome], cases: Iterable[Case | Covered]) -> str:
    """Return the page. `outcomes`: by the name of the case."""
    lines, item = [HEAD.rstrip("\n")], 0
    for case in sorted(cases, key=lambda case: case.item):
        if case.item != item:
            item = case.item
            lines += ["", f"## {ITEMS[item]}", ""]
            lines += ["| case | command | prints | exit code | silent |", "| --- |" + " --- |" * 4]
        if isinstance(case, Covered):
            file, _, name = case.test.partition("::")
            lines.append(f"{head_of(case)} {_code(case.prints)}; `{name}` in `{file}` | | |")
        else:
            lines.append(_row(case, outcomes[case.name]))
    longest_s = max(silence_s(outcome) for outcome in outcomes.values())
    lines += ["", f"The longest silence was {seconds_text(longest_s)}."]
    return "\n".join(lines) + "\n"


def _row(case: Case, outcome: Outcome) -> str:
    shown: list[str] = []
    folder, results = outcome
    for command, result in results:
        if command is case.then:
            shown.append(f"then {_code(command.line)}:")
        shown += map(_code, decisive(command, page_words(result.output, folder)))
    code = "waits" if case.command.wait else str(case.command.code)
    silence = seconds_text(silence_s(outcome))
    return f"{head_of(case)} {'<br>'.join(shown)} | {code} | {silence} |"


def silence_s(outcome: Outcome) -> float:
    """Return the longest time without output, of all commands of a case."""
    return max(result.silence_s for _, result in outcome[1])


def seconds_text(seconds: float) -> str:
    """Return a silence in classes, so that two runs give the same page."""
    if seconds <= LIMIT_S:
        return f"under {LIMIT_S} s"
    return f"{math.ceil(seconds)} s"


def decisive(command: Command, output: str) -> list[str]:
    """Return the lines that have one of the texts that the command must show, each once."""
    texts = tuple(filter(None, (command.wait, *command.shows)))
    found = [line.strip() for line in output.splitlines() if any(t in line for t in texts)]
    return list(dict.fromkeys(re.sub(r"\s{2,}", "  ", line) for line in found))


def _code(line: str) -> str:
    """Return a line as code in a cell of a table."""
    mark = "``" if "`" in line else "`"
    space = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{mark}{space}{line}{space}{mark}".replace("|", "\\|")
