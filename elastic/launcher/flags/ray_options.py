"""Meaning of `--backend ray` and its flags. Checks need no ray and start nothing."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

from elastic.command_line import ParsedType
from elastic.core.protocol.fault_spec import FaultKind
from elastic.domain.errors import FieldError
from elastic.launcher.flags.validators import address

AUTO = "auto"
CLIENT = "ray://"


@dataclass(frozen=True, slots=True, kw_only=True)
class RayOptions:
    """Settings of agents on a Ray cluster."""

    address: str = AUTO
    """auto, host:port of the cluster, or ray://host:port of its client server."""
    resources: tuple[tuple[str, float], ...] = ()
    """Ray's resources per agent, by name; (): `default_resources` of `elastic.launcher.ray.ray`."""
    spares: int = 1
    """Number of hot spares beyond the largest --nnodes, if the cluster has that many nodes."""


def ray_options(flags: SimpleNamespace) -> RayOptions | None:
    """Return the options; None: agents run on this machine. Raises FieldError for wrong flags."""
    if not hasattr(flags, "backend"):  # a single service, not `elastic run`
        return None
    resources = flags.ray_resources or ()
    options = RayOptions(address=flags.address, resources=resources, spares=flags.ray_spares)
    if flags.backend == "local":
        if options != RayOptions():
            raise FieldError("--backend", "local", "--address and --ray-... need --backend ray")
        return None
    _check_combination(flags)
    return options


def _check_combination(flags: SimpleNamespace) -> None:
    chosen = "Ray chooses the machines; set the coordinator's address by --rdzv-endpoint"
    refused = {
        "--standalone": (
            flags.standalone and "on",
            "its nodes are on this machine: leave out it or --backend ray",
        ),
        "--node-rank": (flags.node_rank, chosen),
        "--master-port": (flags.master_port, chosen),
        "--link": (
            flags.link and "on",
            "only links within one machine can be slowed: --standalone",
        ),
        "--grace": (flags.grace, "this machine is no node, so SIGTERM ends the job: leave it out"),
    }
    for flag, (value, remedy) in refused.items():
        if value:
            raise FieldError(flag, value, remedy)
    if any(fault.kind is FaultKind.JOIN for fault in flags.fault):
        raise FieldError("--fault", "join", "a node joins when Ray has one: use `ray start`")


def _address(flag: str, text: str) -> str:
    if text == AUTO:
        return text
    if text.startswith(CLIENT):
        return CLIENT + address(flag, text.removeprefix(CLIENT), 10001)
    return address(flag, text, 6379)


def _resources(flag: str, text: str) -> tuple[tuple[str, float], ...]:
    """Return (name, amount) of each entry of a JSON object with amounts above 0, sorted by name."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not given:
        raise FieldError(flag, text, 'give a JSON object, as \'{"GPU": 1, "CPU": 4}\'')
    for name, amount in given.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not number or not math.isfinite(amount) or amount <= 0 or (amount > 1 and amount % 1):
            remedy = "give an amount above 0, and a whole number if it is above 1"
            raise FieldError(f"{flag} {name}", amount, remedy)
        if not re.fullmatch(r"[A-Za-z][\w.:-]*", name):
            raise FieldError(flag, name, "give a Ray resource: GPU, CPU, memory or your own")
    return tuple((name, float(amount)) for name, amount in sorted(given.items()))


ADDRESS, RESOURCES = ParsedType("HOST:PORT", _address), ParsedType("JSON", _resources)
