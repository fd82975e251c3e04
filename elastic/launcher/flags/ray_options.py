"""What `--backend ray` and its flags mean. Checked without ray, before anything is started."""

from __future__ import annotations

import argparse
import json
import math
import re
from dataclasses import dataclass

from elastic.core.protocol.fault_spec import FaultKind, parse_fault
from elastic.domain.errors import FieldError
from elastic.launcher.flags.values import address, choice, whole

AUTO = "auto"
CLIENT = "ray://"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Agents on a Ray cluster."""

    address: str = AUTO
    """auto, host:port of the cluster, or ray://host:port of its server for clients."""
    resources: tuple[tuple[str, float], ...] = ()
    """What an agent takes of a node, by Ray's names; (): a CPU, and a GPU where there are any, for each worker."""
    spares: int = 1
    """Nodes beyond the most of --nnodes that are kept if they are there."""


def ray_options(args: argparse.Namespace) -> RayOptions | None:
    """None: agents run here. Raises FieldError, also for what makes no sense on a Ray cluster."""
    if not hasattr(args, "backend"):  # a single service, not `elastic run`
        return None
    choice("--backend", args.backend, ("local", "ray"))
    options = RayOptions(
        address=_address(args.address),
        resources=_resources(args.ray_resources) if args.ray_resources is not None else (),
        spares=whole("--ray-spares", args.ray_spares),
    )
    if args.backend == "local":
        if options != RayOptions():
            raise FieldError("--backend", "local", "--address and --ray-... go with --backend ray")
        return None
    _refuse(args)
    return options


def _refuse(args: argparse.Namespace) -> None:
    if args.standalone:
        raise FieldError(
            "--standalone", "on", "it means nodes on this machine: leave it or --backend ray out"
        )
    if args.node_rank != "0" or args.master_port is not None:
        remedy = (
            "Ray says which machines there are; --rdzv-endpoint HOST:PORT fixes the coordinator's address"
        )
        flag, value = (
            ("--node-rank", args.node_rank) if args.node_rank != "0" else ("--master-port", args.master_port)
        )
        raise FieldError(flag, value, remedy)
    if args.link is not None:
        raise FieldError(
            "--link", args.link, "it slows links between the nodes of one machine: --standalone has them"
        )
    for text in args.fault:
        if parse_fault(text).kind is FaultKind.JOIN:
            raise FieldError(
                "--fault", text, "on Ray a node joins when Ray has one: start it with `ray start`"
            )


def _address(text: str) -> str:
    if text == AUTO:
        return text
    if text.startswith(CLIENT):
        return CLIENT + address("--address", text.removeprefix(CLIENT), 10001)
    return address("--address", text, 6379)


def _resources(text: str) -> tuple[tuple[str, float], ...]:
    """A JSON object of names and amounts above 0."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not given:
        raise FieldError("--ray-resources", text, 'a JSON object, as \'{"GPU": 1, "CPU": 4}\'')
    for name, amount in given.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not number or not math.isfinite(amount) or amount <= 0 or (amount > 1 and amount % 1):
            raise FieldError(f"--ray-resources {name}", amount, "an amount above 0; above 1 a whole number")
        if not re.fullmatch(r"[A-Za-z][\w.:-]*", name):
            raise FieldError(
                "--ray-resources", name, "names of Ray resources, as GPU, CPU, memory or your own"
            )
    return tuple((name, float(amount)) for name, amount in sorted(given.items()))
