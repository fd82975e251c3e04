"""`elastic kubernetes`: the group of its commands."""

from __future__ import annotations

import click

from elastic.command_line import CommandLine
from elastic.launcher.kubernetes.claim import claim
from elastic.launcher.kubernetes.end import end
from elastic.launcher.kubernetes.monitor import monitor
from elastic.launcher.kubernetes.render import render


@click.group(cls=CommandLine)
def kubernetes() -> None:
    """Make the Kubernetes manifests of a job, and end it there."""


for command in (render, claim, monitor, end):
    kubernetes.add_command(command)
