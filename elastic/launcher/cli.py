"""The `elastic` command. The module of a subcommand is imported on use, so that help is fast."""

from __future__ import annotations

import sys
from collections import UserDict
from collections.abc import Sequence
from importlib import import_module
from typing import Any

import click

from elastic.command_line import CommandLine
from elastic.domain.version import VERSION

COMMANDS = {
    "run": ("commands.run", "train a script or module on elastic nodes; torchrun's flags and more"),
    "profile": (
        "commands.profile",
        "measure a script's layers and the links, for the planner and --emulate",
    ),
    "status": (
        "commands.queries",
        "phase, step, loss, nodes and plan of a job, and what it waits for",
    ),
    "nodes": ("commands.queries", "nodes of a running job"),
    "preflight": ("commands.preflight", "check whether this machine can be a node"),
    "drain": ("commands.queries", "move a node's state to others, then release it"),
    "plan": (
        "commands.plans",
        "plan of a running job or of a file, or the best plan for a cluster file",
    ),
    "export": ("commands.queries", "write a checkpoint's parameters to a safetensors file"),
    "convert": ("commands.convert", "write a checkpoint's parameters as a Hugging Face model"),
    "track": ("commands.track", "tell TensorBoard, W&B, MLflow or a callback what a run does"),
    "certs": ("flags.certs", "make an authority and certificates for --certs"),
    "token": ("commands.queries", "print the token of a role that may not run nodes"),
    "coordinator": ("commands.run", "run a coordinator in the foreground, for several machines"),
    "agent": ("commands.run", "run an agent in the foreground, for several machines"),
    "kubernetes": ("kubernetes.commands", "make the Kubernetes manifests of a job"),
}
"""Per command: its module below elastic.launcher, and its help."""
EXAMPLE = """\b
Try:
  elastic run --standalone --nnodes 4 -m examples.train_gpt --steps 10 --fault "kill node=2 step=3"
"""


class CommandsOnUse(UserDict[str, Any]):
    """The subcommands in COMMANDS, by name. An access to one imports its module."""

    def __getitem__(self, name: str) -> click.Command:
        module = import_module(f"elastic.launcher.{COMMANDS[name][0]}")
        command: click.Command = getattr(module, name)
        return command


class Elastic(CommandLine):
    """Group of the subcommands in COMMANDS."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


@click.group("elastic", cls=Elastic, commands=CommandsOnUse(COMMANDS), epilog=EXAMPLE)
@click.version_option(VERSION, "-V", "--version", message="%(prog)s %(version)s")
def elastic() -> None:
    """Fault-tolerant elastic training. `elastic COMMAND --help` shows the flags of a command."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code."""
    return elastic.run(sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())
