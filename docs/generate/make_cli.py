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

Written by `python docs/generate/make_cli.py` from the parsers themselves. Do not edit.

Every flag may be written `--a-b` or `--a_b`. For `run`, `coordinator` and `agent` an environment variable
`PET_A_B` replaces the default of `--a-b`, as for torchrun. Wrong flags, values and files end with exit code 2
and one line on standard error, before anything is started or written.

Several machines: run the same `elastic run` on each of them with the same `--rdzv-endpoint HOST:PORT` and
`--rdzv-backend c10d`, and with `--certs` and `--join-token-file` ([security](../operate/security.md)); the machine that owns the
address starts the coordinator. `elastic coordinator` and `elastic agent` start the two services by themselves instead.
"""
EXITS = """
## Exit codes

| code | meaning |
| --- | --- |
| {EXIT_OK} | the job is done |
| {EXIT_FAILURE} | it failed: an error in the script or a bug here; the last line tells |
| {EXIT_USAGE} | a flag, file or message is wrong; nothing was started |
| {EXIT_UNRECOVERABLE} | more was lost than there were copies, and there is no checkpoint to fall back to |
| {EXIT_DRAINED} | this node was drained; the job goes on without it |
| {EXIT_JOB_FAILED} | of `elastic coordinator` and `elastic agent`: it failed; started again they would end so again |
| {EXIT_INTERRUPTED} | interrupted (Ctrl-C); other signals: 128 + their number |

A script that does not use elastic ends as under torchrun: 0, or 1 once its restarts are used up.
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
