"""`elastic coordinator` and `elastic agent`: one service of a job, in the foreground, for several
machines."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace

from elastic.domain.errors import FieldError
from elastic.launcher.flags.flags import Parser, run_parser
from elastic.launcher.flags.request import DYNAMIC_PORT, Request, request
from elastic.launcher.flags.values import address, addresses
from elastic.launcher.run.supervisor import launch


def coordinator(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run a coordinator alone; it is started again if it dies."""
    parser = _parser("coordinator", environ, "--address", "HOST:PORT to serve at")
    return launch(replace(_request(parser, argv, environ, "address"), hosts=True, nodes=(), as_service=True))


def agent(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run one agent that joins a coordinator elsewhere."""
    parser = _parser(
        "agent", environ, "--coordinator", "HOST:PORT of the coordinator, of several separated by commas"
    )
    parser.add_argument("--node", default="", help="name of this node (default: from the host's name)")
    args = parser.parse_args(argv)
    wanted = _request(parser, argv, environ, "coordinator")
    if args.node:
        wanted = replace(wanted, nodes=(_name(args.node),))
    return launch(replace(wanted, hosts=False, as_service=True))


def _parser(command: str, environ: Mapping[str, str], flag: str, text: str) -> Parser:
    parser = run_parser(environ, f"elastic {command}")
    parser.add_argument(flag, required=True, help=text)
    return parser


def _request(parser: Parser, argv: list[str], environ: Mapping[str, str], field: str) -> Request:
    args: argparse.Namespace = parser.parse_args(argv)
    if args.standalone:
        raise FieldError(
            "--standalone", "on", f"it does not go with --{field}; use `elastic run --standalone`"
        )
    read = addresses if field == "coordinator" else address
    args.rdzv_endpoint = read(f"--{field}", getattr(args, field), DYNAMIC_PORT)
    args.rdzv_backend = "c10d" if args.rdzv_backend == "static" else args.rdzv_backend
    return request(args, environ)


def _name(text: str) -> str:
    from elastic.core.protocol.fault_spec import node_id

    try:
        return node_id(text)
    except FieldError as error:
        raise FieldError("--node", text, error.remedy) from None
