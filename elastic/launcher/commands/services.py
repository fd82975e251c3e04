"""`elastic coordinator` and `elastic agent`: one service of a job, in the foreground, for several
machines."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

from elastic.command_line import ParsedType, flag
from elastic.core.protocol.fault_spec import node_id
from elastic.domain.errors import FieldError
from elastic.launcher.flags.flags import RunCommand
from elastic.launcher.flags.request import Request, request
from elastic.launcher.flags.values import ENDPOINT, ENDPOINTS
from elastic.launcher.run.supervisor import launch


def _coordinator(address: str, **flags: Any) -> int:
    return launch(replace(_request("--address", address, flags), hosts=True, nodes=(), as_service=True))


def _agent(coordinator: str, node: str | None, **flags: Any) -> int:
    wanted = replace(_request("--coordinator", coordinator, flags), hosts=False, as_service=True)
    return launch(replace(wanted, nodes=(node,)) if node else wanted)


def _request(field: str, endpoint: str, flags: dict[str, Any]) -> Request:
    if flags["standalone"]:
        raise FieldError("--standalone", "on", f"it does not go with {field}; use `elastic run --standalone`")
    backend = "c10d" if flags["rdzv_backend"] == "static" else flags["rdzv_backend"]
    return request(
        SimpleNamespace(**{**flags, "rdzv_endpoint": endpoint, "rdzv_backend": backend}), os.environ
    )


def _node(flag: str, text: str) -> str:
    try:
        return node_id(text)
    except FieldError as error:
        raise FieldError(flag, text, error.remedy) from None


ADDRESS = flag(
    "--address", type=ENDPOINT, required=True, allow_from_autoenv=False, help="address to serve at"
)
COORDINATOR = flag(
    "--coordinator",
    type=ENDPOINTS,
    required=True,
    allow_from_autoenv=False,
    help="address of the coordinator, or of several",
)
NODE = flag(
    "--node",
    type=ParsedType("NAME", _node),
    allow_from_autoenv=False,
    help="name of this node (default: from the host's name)",
)
coordinator = RunCommand(
    "coordinator",
    _coordinator,
    "Run a coordinator alone; it is started again if it dies.",
    {"coordinator's flags": (ADDRESS,)},
)
agent = RunCommand(
    "agent",
    _agent,
    "Run one agent that joins a coordinator elsewhere.",
    {"agent's flags": (COORDINATOR, NODE)},
)
