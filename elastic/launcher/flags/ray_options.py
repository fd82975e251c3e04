"""What `--backend ray` and its flags mean. Checked without ray, before anything is started."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from types import SimpleNamespace

from elastic.command_line import ParsedType
from elastic.core.protocol.fault_spec import FaultKind
from elastic.domain.errors import FieldError
from elastic.launcher.flags.values import address

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


def ray_options(flags: SimpleNamespace) -> RayOptions | None:
    """None: agents run here. Raises FieldError, also for what makes no sense on a Ray cluster."""
    if not hasattr(flags, "backend"):  # a single service, not `elastic run`
        return None
    options = RayOptions(address=flags.address, resources=flags.ray_resources or (), spares=flags.ray_spares)
    if flags.backend == "local":
        if options != RayOptions():
            raise FieldError("--backend", "local", "--address and --ray-... go with --backend ray")
        return None
    _refuse(flags)
    return options


def _refuse(flags: SimpleNamespace) -> None:
    if flags.standalone:
        raise FieldError(
            "--standalone", "on", "it means nodes on this machine: leave it or --backend ray out"
        )
    for flag, value in (("--node-rank", flags.node_rank), ("--master-port", flags.master_port)):
        if value:
            remedy = (
                "Ray says which machines there are; --rdzv-endpoint HOST:PORT fixes the coordinator's address"
            )
            raise FieldError(flag, value, remedy)
    if flags.link is not None:
        raise FieldError(
            "--link", "on", "it slows links between the nodes of one machine: --standalone has them"
        )
    if any(fault.kind is FaultKind.JOIN for fault in flags.fault):
        raise FieldError("--fault", "join", "on Ray a node joins when Ray has one: start it with `ray start`")


def _address(flag: str, text: str) -> str:
    if text == AUTO:
        return text
    if text.startswith(CLIENT):
        return CLIENT + address(flag, text.removeprefix(CLIENT), 10001)
    return address(flag, text, 6379)


def _resources(flag: str, text: str) -> tuple[tuple[str, float], ...]:
    """A JSON object of names and amounts above 0."""
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict) or not given:
        raise FieldError(flag, text, 'a JSON object, as \'{"GPU": 1, "CPU": 4}\'')
    for name, amount in given.items():
        number = isinstance(amount, (int, float)) and not isinstance(amount, bool)
        if not number or not math.isfinite(amount) or amount <= 0 or (amount > 1 and amount % 1):
            raise FieldError(f"{flag} {name}", amount, "an amount above 0; above 1 a whole number")
        if not re.fullmatch(r"[A-Za-z][\w.:-]*", name):
            raise FieldError(flag, name, "names of Ray resources, as GPU, CPU, memory or your own")
    return tuple((name, float(amount)) for name, amount in sorted(given.items()))


ADDRESS, RESOURCES = ParsedType("HOST:PORT", _address), ParsedType("JSON", _resources)
