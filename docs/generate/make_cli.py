"""Write docs/guide/cli.md from the parsers of the command line: python docs/generate/make_cli.py"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from unittest import mock

from elastic.domain import errors
from elastic.launcher.commands import plans, preflight, profile, queries, services
from elastic.launcher.flags import certs
from elastic.launcher.flags.flags import Parser, run_parser
from elastic.launcher.kubernetes import render as kubernetes

OUT = Path(__file__).parents[1] / "guide" / "cli.md"
HEAD = """# Command line

Written by `python docs/generate/make_cli.py` from the parsers. Do not edit.

This page lists all commands, flags and exit codes. A first run trains a small GPT on four local
nodes and kills one of them:

    elastic run --standalone --nnodes 4 --fault "kill node=2 step=3" -m examples.train_gpt --steps 9

To use several machines, run the same command on each of them. The machine that owns the address of
`--rdzv-endpoint` starts the coordinator:

    elastic run --nnodes 2 --rdzv-backend c10d --rdzv-endpoint 10.0.0.1:29400 \\
        --certs certs/node1 --join-token-file join.token train.py

[Security](../operate/security.md) explains certificates and the token. `elastic coordinator` and
`elastic agent` start only one of the two services.

- Each flag can be written `--a-b` or `--a_b`.
- For `run`, `coordinator` and `agent`, the environment variable `PET_A_B` replaces the default of
  `--a-b`, as for torchrun.
- A wrong flag, value or file ends the command with exit code 2 and one line on standard error,
  before it starts or writes anything.
"""
EXITS = """
## Exit codes

| code | meaning |
| --- | --- |
| {EXIT_OK} | The job is done. |
| {EXIT_FAILURE} | The job failed: an error in the script or in elastic; see the last line. |
| {EXIT_USAGE} | A flag, file or message is wrong. Nothing was started. |
| {EXIT_UNRECOVERABLE} | State was lost with all its copies, and there is no checkpoint. |
| {EXIT_DRAINED} | This node was drained. The job continues without it. |
| {EXIT_JOB_FAILED} | `elastic coordinator` or `agent`: the job failed; a restart would fail too. |
| {EXIT_INTERRUPTED} | Interrupted (Ctrl-C). Other signals give 128 + their number. |

A script that does not use elastic ends as under torchrun: with 0, or with 1 after its last restart.
"""
QUERIES = ("profile", "status", "nodes", "preflight", "drain", "plan", "export", "certs")
SERVICES = ("coordinator", "agent")
Command = Callable[[list[str], Mapping[str, str]], int]


class _Found(Exception):
    """Carries the parser out of a command that was about to parse with it."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self.parser = parser


def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser that a command makes for itself."""

    def caught(parser: argparse.ArgumentParser, *_: object) -> None:
        raise _Found(parser)

    with mock.patch.object(Parser, "parse_args", caught):
        try:
            command([], {})
        except _Found as found:
            return found.parser
    raise AssertionError(f"{command} parses nothing")


def table(actions: list[argparse.Action], skip: frozenset[str] = frozenset()) -> str:
    rows = ["| flag | default | meaning |", "| --- | --- | --- |"]
    for action in actions:
        if action.dest == "help" or action.dest in skip:
            continue
        names = sorted((n for n in action.option_strings if "_" not in n), key=len, reverse=True)
        flag = ", ".join(f"`{name}`" for name in names) or f"`{action.metavar or action.dest}`"
        unset = action.default is None or action.default is False or action.default in ("", [])
        default = "" if unset else f"`{action.default}`"
        meaning = (action.help or "").replace("%%", "%").replace("|", "\\|")
        rows.append(f"| {flag} | {default} | {meaning} |")
    return "\n".join(rows) if len(rows) > 2 else ""


def run_part() -> str:
    parser = run_parser({})
    parts = ["\n## elastic run\n", f"    {parser.usage}\n"]
    for group in parser._action_groups:
        rows = table(group._group_actions)
        if rows and group.title and group.title.endswith("flags"):
            parts.append(f"{group.title[0].upper()}{group.title[1:]}:\n\n{rows}\n")
    return "\n".join(parts)


def query_part(name: str) -> str:
    homes = {
        "plan": plans.plan,
        "profile": profile.profile,
        "preflight": preflight.preflight,
        "certs": certs.certs,
    }
    parser = parser_of(homes.get(name) or getattr(queries, name))
    return f"\n## elastic {name}\n\n{parser.description}\n\n{table(parser._actions)}\n"


def render_part() -> str:
    parser = parser_of(kubernetes.render)
    title = f"\n## elastic kubernetes render\n\n    {parser.usage}\n"
    return f"{title}\n{parser.description}\n\n{table(parser._actions)}\n"


def service_part(name: str) -> str:
    command: Command = getattr(services, name)
    parser, run = parser_of(command), run_parser({}, f"elastic {name}")
    rows = table(parser._actions, skip=frozenset(action.dest for action in run._actions))
    text = (command.__doc__ or "").strip()
    return f"\n## elastic {name}\n\n{text} Besides the flags of `elastic run`:\n\n{rows}\n"


def example_part() -> str:
    from examples.train_gpt import parser

    title = "\n## python -m examples.train_gpt\n"
    return f"{title}\nRun it under `elastic run ... -m examples.train_gpt`.\n\n{table(parser()._actions)}\n"


def text() -> str:
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    parts = [
        HEAD.rstrip() + "\n",
        run_part(),
        *map(query_part, QUERIES),
        *map(service_part, SERVICES),
        render_part(),
    ]
    return "".join((*parts, example_part(), EXITS.format(**codes)))


if __name__ == "__main__":
    OUT.write_text(text())
