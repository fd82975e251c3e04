"""`elastic run`, and its services on their own: `elastic coordinator` and `elastic agent`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from elastic.command_line import ParsedType, flag
from elastic.core.protocol.fault_spec import node_id
from elastic.domain.errors import EXIT_FAILURE, FieldError, needs_extra, service_exit
from elastic.launcher.flags.flags import RAY, SECTIONS, UNUSED_BY_SERVICES, RunCommand
from elastic.launcher.flags.request import Request, request
from elastic.launcher.flags.unused import unused_flags, unused_variables
from elastic.launcher.flags.validators import ENDPOINT, ENDPOINTS
from elastic.launcher.run.event_tail import read_object
from elastic.logs import source_of

LATEST = Path("runs/latest")


def _run(**flags: Any) -> int:
    given = SimpleNamespace(**flags)
    task = request(given, os.environ)
    _warn(given, task)
    return _launch(task)


def _coordinator(address: str, once: bool, name: str | None, **flags: Any) -> int:
    over = read_object(LATEST / "exit.json") if once else None
    task = _service_request("--address", address, flags)
    config = replace(task.config, coordinator_name=name or "")
    if over is not None:
        text = f"the job of {LATEST} has ended: {over.get('reason', '')}"
        source = source_of(config, config.coordinator_name or "coordinator")
        if source is None:
            print(text, file=sys.stderr)
        else:
            sys.stdout.buffer.write(source.note(text, "elastic.launcher"))
        return service_exit(int(over.get("code", EXIT_FAILURE)))
    return _launch(replace(task, config=config, hosts=True, nodes=(), as_service=True))


def _agent(coordinator: str, node: str | None, **flags: Any) -> int:
    task = _service_request("--coordinator", coordinator, flags)
    return _launch(
        replace(task, hosts=False, as_service=True, nodes=(node,) if node else task.nodes)
    )


def _launch(task: Request) -> int:
    if task.ray is None:
        from elastic.launcher.run.supervisor import launch  # slow to import: not for --help

        return launch(task)
    with needs_extra("ray", "--backend ray"):
        from elastic.launcher.ray.ray import launch as launch_on_ray
    return launch_on_ray(task)


def _service_request(field: str, endpoint: str, flags: dict[str, Any]) -> Request:
    if flags["standalone"]:
        remedy = f"it does not go with {field}; use `elastic run --standalone`"
        raise FieldError("--standalone", "on", remedy)
    changed = {"rdzv_endpoint": endpoint, "rdzv_backend": "c10d", "coordinators": 1}
    given = SimpleNamespace(**{**flags, **changed}, endpoint_flag=field)
    task = request(given, os.environ)
    _warn(given, task, UNUSED_BY_SERVICES)
    return task


def _warn(flags: SimpleNamespace, task: Request, unused: Sequence[str] = ()) -> None:
    """Print a line for each flag and variable that has no effect."""
    for text in unused_flags(flags, task.config, unused) + unused_variables(os.environ):
        print(f"elastic: warning: {text}", file=sys.stderr)


def _node(flag: str, text: str) -> str:
    try:
        return node_id(text)
    except FieldError as error:
        raise FieldError(flag, text, error.remedy) from None


# fmt: off
ADDRESS = flag("--address", type=ENDPOINT, required=True, allow_from_autoenv=False,
               help="address to serve at")
ONCE = flag("--once", is_flag=True,
            help="if the last job in runs/latest has ended, end with its code: for containers that "
                 "are started again when they end")
NAME = flag("--name", type=ParsedType("NAME", _node), allow_from_autoenv=False,
            help="name of this coordinator in logs and in `elastic status` (default: coordinator)")
COORDINATOR = flag("--coordinator", type=ENDPOINTS, required=True, allow_from_autoenv=False,
                   help="address of the coordinator, or of several")
NODE = flag("--node", type=ParsedType("NAME", _node), allow_from_autoenv=False,
            help="name of this node (default: from the host's name)")
run = RunCommand(
    "run", _run, "Train a script or module on elastic nodes.", {**SECTIONS, "Ray's flags": RAY})
coordinator = RunCommand(
    "coordinator", _coordinator, "Run a coordinator alone; it is started again if it dies.",
    {"coordinator's flags": (ADDRESS, ONCE, NAME), **SECTIONS}, UNUSED_BY_SERVICES)
agent = RunCommand(
    "agent", _agent, "Run one agent that joins a coordinator elsewhere.",
    {"agent's flags": (COORDINATOR, NODE), **SECTIONS}, UNUSED_BY_SERVICES)
# fmt: on
