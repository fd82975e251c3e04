"""How an agent is started: the words that the launcher gives it."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from elastic.command_line import Command, flag, read_flags
from elastic.config import JobConfig
from elastic.domain.types import NodeInfo

FLAGS = [
    flag("--run-dir", required=True),
    flag("--node", required=True),
    flag("--coordinator", required=True),
    flag("--domain", default=""),
    flag("--host", default="127.0.0.1"),
    flag("--device", default=""),
    flag("--lifetime", default=0.0),
    flag("--memory", default=0),
    flag("--metrics-port", default=-1),
    flag("--parent-pipe", default=-1),
]


def words(argv: Sequence[str] | None) -> SimpleNamespace:
    return read_flags(Command("elastic.agent.service", params=FLAGS), argv)


def who(args: SimpleNamespace, config: JobConfig) -> NodeInfo:
    """The node, before its agent knows its vault's address."""
    return NodeInfo(
        node=args.node,
        incarnation="",
        vault="",
        domain=args.domain,
        workers=config.nproc_per_node,
        memory_bytes=args.memory,
        host=args.host,
        device=args.device,
        lifetime_s=args.lifetime,
    )
