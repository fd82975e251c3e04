"""How an agent is started: the words that the launcher gives it."""

from __future__ import annotations

import argparse

from elastic.config import JobConfig
from elastic.domain.types import NodeInfo


def words(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="elastic.agent.service")
    parser.add_argument("--run-dir", required=True)
    parser.add_argument("--node", required=True)
    parser.add_argument("--coordinator", required=True)
    parser.add_argument("--domain", default="")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--device", default="")
    parser.add_argument("--lifetime", type=float, default=0.0)
    parser.add_argument("--memory", type=int, default=0)
    parser.add_argument("--metrics-port", type=int, default=-1)
    parser.add_argument("--parent-pipe", type=int, default=-1)
    return parser.parse_args(argv)


def who(args: argparse.Namespace, config: JobConfig) -> NodeInfo:
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
