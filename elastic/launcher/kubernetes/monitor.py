"""`elastic kubernetes monitor`: the PodMonitor of a job, for the Prometheus operator.

It is not part of the rendered job, because it needs the operator's resource definition.
"""

from __future__ import annotations

import re

import click

from elastic.command_line import Command, ParsedType
from elastic.domain.errors import FieldError
from elastic.launcher.kubernetes.kustomize import load
from elastic.launcher.kubernetes.render import LABEL, manifests, renamed, show

_PAIR = re.compile(r"((?:[a-z0-9.-]+/)?[A-Za-z0-9][\w.-]{0,62})=([A-Za-z0-9][\w.-]{0,62})")


def _pair(flag: str, text: str) -> tuple[str, str]:
    match = _PAIR.fullmatch(text)
    if match is None:
        raise FieldError(flag, text, "give KEY=VALUE, as release=prometheus")
    return match[1], match[2]


# fmt: off
@click.command(cls=Command, options_metavar="[flags]")
@click.option("--name", type=LABEL, required=True, help="name of the job")
@click.option("--namespace", type=LABEL, help="namespace of the job (default: kubectl's)")
@click.option("--label", "labels", type=ParsedType("KEY=VALUE", _pair), multiple=True,
              help="label by which your Prometheus selects monitors; repeatable")
def monitor(name: str, namespace: str | None, labels: tuple[tuple[str, str], ...]) -> int:
    """Print the PodMonitor of a job, for kubectl apply -f -.

    It needs the Prometheus operator.
    """
    # fmt: on
    (item,) = renamed(load(manifests() / "monitor" / "pod-monitor.yaml"), name)
    if namespace:
        item["metadata"]["namespace"] = namespace
    item["metadata"]["labels"] |= dict(labels)
    item["spec"]["podMetricsEndpoints"][0]["tlsConfig"]["serverName"] = name
    return show([item])
