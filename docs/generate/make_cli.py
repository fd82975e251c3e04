"""Write docs/guide/cli.md from the commands of `elastic`: python docs/generate/make_cli.py"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator
from pathlib import Path

import click

from elastic.domain import errors
from elastic.launcher.cli import elastic
from elastic.launcher.flags.flags import SECTIONS, UNUSED_BY_SERVICES, RunCommand

OUT = Path(__file__).parents[1] / "guide" / "cli.md"
HEAD = """# Command line

Written by `python docs/generate/make_cli.py` from the commands. Do not edit.

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
- A flag that has no effect in the job, and a variable `PET_...` of no flag, cause a warning.
- TIME is a number of seconds, or text such as 10us, 30s, 2m or 1h. SIZE is a number of bytes, or
  text such as 500MB or 16GiB. A value that ends in `,...` may be a list.
"""
EXITS = """
## Exit codes

| code | meaning |
| --- | --- |
| {EXIT_OK} | The job is done. |
| {EXIT_FAILURE} | The job, or the script after it, failed; see the last line. |
| {EXIT_USAGE} | A flag, file, message, checkpoint or object of the script is wrong. |
| {EXIT_UNRECOVERABLE} | State was lost with all its copies, and there is no checkpoint. |
| {EXIT_DRAINED} | This node was drained. The job continues without it. |
| {EXIT_JOB_FAILED} | `elastic coordinator` or `agent`: the job failed; a restart would fail too. |
| {EXIT_INCOMPATIBLE} | This version of elastic does not fit the job; the last line names both. |
| {EXIT_INTERRUPTED} | Interrupted (Ctrl-C). Other signals give 128 + their number. |

A script that does not use elastic ends as under torchrun: with 0, or with 1 after its last restart.
If it fails on some nodes only, this is decided 30 s after its start: until then workers of other
nodes may still attach.
"""
BAR = "\\|"
Row = tuple[str, str, object, str]
"""Name of a flag, its value's form, its default, its meaning."""


def table(rows: Iterable[Row]) -> str:
    lines = ["| flag | value | default | meaning |", "| --- | --- | --- | --- |"]
    for name, value, default, meaning in rows:
        unset = default is None or isinstance(default, bool) or default in ("", (), [])
        cells = (name, value, "" if unset else f"`{default}`", meaning)
        lines.append(f"| {' | '.join(cell.replace('|', BAR) for cell in cells)} |")
    return "\n".join(lines) + "\n"


def option_row(option: click.Option) -> Row:
    names = ", ".join(f"`{name}`" for name in sorted(option.opts, key=len, reverse=True))
    value = "" if option.is_flag else option.metavar or option.type.name.upper()
    if isinstance(option.type, click.Choice):
        value = ", ".join(option.type.choices)
    elif isinstance(option.type, click.IntRange):
        low, high = option.type.min, option.type.max
        value = f"{low} to {high}" if high is not None else f"from {low}"
    meaning = f"{option.help} (required)" if option.required else option.help or ""
    default = option.to_info_dict()["default"]
    if isinstance(default, tuple):  # of an option that may be repeated
        default = ", ".join(map(str, default))
    return names, value, default, meaning


def commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    """All commands below `group`, with their full names."""
    context = click.Context(group)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if isinstance(command, click.Group):
            yield from commands(command, f"{path} {name}")
        elif command is not None:
            yield f"{path} {name}", command


def command_part(path: str, command: click.Command) -> str:
    usage = " ".join(command.collect_usage_pieces(click.Context(command)))
    title = f"\n## {path}\n\n    {path} {usage}\n\n{inspect.cleandoc(command.help or '')}"
    if not isinstance(command, RunCommand):
        options = [
            param
            for param in command.params
            if isinstance(param, click.Option) and not param.hidden
        ]
        return f"{title}\n\n{table(map(option_row, options))}"
    if path == "elastic run":
        tables = [(title, options) for title, options in command.sections.items()]
        parts = [
            f"{name[0].upper()}{name[1:]}:\n\n{table(map(option_row, rows))}"
            for name, rows in tables
        ]
        return f"{title}\n\n" + "\n".join(parts)
    own = [
        option for name, rows in command.sections.items() if name not in SECTIONS for option in rows
    ]
    rows, unused = (
        table(map(option_row, own)),
        ", ".join(f"`{name}`" for name in UNUSED_BY_SERVICES),
    )
    others = f"the flags of `elastic run`, except Ray's, but has no use for {unused}"
    return f"{title}\n\n{rows}\nIt also takes {others}.\n"


def example_part() -> str:
    from examples.train_gpt import parser

    rows = [
        (
            f"`{action.option_strings[0]}`",
            "" if action.nargs == 0 else "X",
            action.default,
            action.help or "",
        )
        for action in parser()._actions
        if action.dest != "help"
    ]
    title = "\n## python -m examples.train_gpt\n"
    return f"{title}\nRun it under `elastic run ... -m examples.train_gpt`.\n\n{table(rows)}"


def text() -> str:
    codes = {name: value for name, value in vars(errors).items() if name.startswith("EXIT_")}
    parts = [command_part(path, command) for path, command in commands(elastic, "elastic")]
    return "".join((HEAD.rstrip() + "\n", *parts, example_part(), EXITS.format(**codes)))


if __name__ == "__main__":
    OUT.write_text(text())
