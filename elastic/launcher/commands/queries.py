"""`elastic status|nodes|drain|export`: ask a running job, write out a checkpoint."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from elastic.domain.errors import FieldError, UsageError
from elastic.launcher.flags.flags import Parser
from elastic.launcher.flags.request import DYNAMIC_PORT
from elastic.launcher.flags.values import addresses, seconds
from elastic.launcher.run.event_tail import read_object
from elastic.launcher.run.reports import as_text

LATEST = "runs/latest"


def status(argv: list[str], environ: Mapping[str, str]) -> int:
    """How the job is."""
    parser = query_parser("status", "Show the phase, step, loss, nodes and plan of a running job.", environ)
    parser.add_argument("--watch", action="store_true", help="again and again until the job is over")
    parser.add_argument("--interval", default="1", help="seconds between two looks of --watch (1)")
    args = parser.parse_args(argv)
    interval_s = seconds("--interval", args.interval)
    if not 0.05 <= interval_s <= 3600:
        raise FieldError("--interval", args.interval, "from 0.05 to 3600 seconds")
    if args.watch:
        from elastic.launcher.commands.watch import watch

        return watch(args, lambda: ask(args, "status", {}), interval_s, LATEST)
    answer = ask(args, "status", {})
    return show(answer if args.json else {**answer, "nodes": _short(answer.get("nodes", []))}, args.json)


def nodes(argv: list[str], environ: Mapping[str, str]) -> int:
    """Who takes part."""
    args = query_parser("nodes", "List the nodes of a running job.", environ).parse_args(argv)
    answer = ask(args, "nodes", {})
    return show(answer if args.json else {"nodes": _short(answer.get("nodes", [])) or "none yet"}, args.json)


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for people: evidence is for programs."""
    return [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]


def drain(argv: list[str], environ: Mapping[str, str]) -> int:
    """Move a node's state out, then let it go."""
    parser = query_parser("drain", "Move all state off a node, then release it; nothing is lost.", environ)
    parser.add_argument(
        "node", metavar="NODE", nargs="?", help="name of the node, as `elastic nodes` shows it"
    )
    parser.add_argument("--deadline", default="30", help="seconds after which the node goes anyhow (30)")
    parser.add_argument(
        "--self",
        action="store_true",
        dest="own",
        help="this machine's node of --run-dir; returns when it has left",
    )
    args = parser.parse_args(argv)
    if args.own == (args.node is not None):
        raise FieldError("NODE", args.node or "", "the name of a node, or --self")
    deadline = seconds("--deadline", args.deadline)
    if deadline < 0:
        raise FieldError("--deadline", args.deadline, "seconds from 0 up")
    if args.own:
        from elastic.launcher.commands.selfdrain import drain_self

        return show(drain_self(Path(args.run_dir or LATEST), deadline), args.json)
    return show(ask(args, "drain", {"node": args.node, "deadline_s": deadline}), args.json)


def export(argv: list[str], environ: Mapping[str, str]) -> int:
    """A checkpoint as one safetensors file."""
    parser = Parser(
        prog="elastic export", description="Write a checkpoint's parameters to a safetensors file."
    )
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="a checkpoint directory, step-...")
    parser.add_argument("out", metavar="OUT", help="file to write")
    parser.add_argument("--force", action="store_true", help="replace OUT if it exists")
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args(argv)
    source, out = Path(args.checkpoint), Path(args.out)
    if not source.is_dir():
        raise FieldError("CHECKPOINT", args.checkpoint, "there is no such directory; give one as step-...")
    if out.is_dir() or not out.parent.is_dir():
        raise FieldError("OUT", args.out, "a file in a directory that exists")
    if out.exists() and not args.force:
        raise FieldError("OUT", args.out, "it exists; give another, or --force")
    from elastic.worker.replica.export import export_checkpoint

    return show({"out": str(out), **export_checkpoint(source, out, force=args.force)}, args.json)


def query_parser(name: str, description: str, environ: Mapping[str, str]) -> Parser:
    """A parser with the flags of all commands that ask a running job."""
    parser = Parser(prog=f"elastic {name}", description=description, allow_abbrev=False)
    endpoint = environ.get("PET_RDZV_ENDPOINT")
    parser.add_argument(
        "--rdzv-endpoint",
        "--rdzv_endpoint",
        default=endpoint,
        help="HOST:PORT of the coordinator, or several",
    )
    parser.add_argument(
        "--run-dir", "--run_dir", default=environ.get("PET_RUN_DIR"), help=f"a run ({LATEST})"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_secrets(parser, environ)
    parser.set_defaults(environ=environ)
    return parser


def add_secrets(parser: argparse.ArgumentParser, environ: Mapping[str, str]) -> None:
    """The flags of whoever calls a job's services; see `elastic.launcher.flags.guarding.asking`."""
    for flag, text in (
        ("--certs", "directory with ca.crt, tls.crt and tls.key"),
        ("--certs-name", "name that the coordinator's certificate must carry"),
        ("--join-token-file", "file with the job's join token"),
    ):
        default = environ.get(f"PET_{flag.strip('-').replace('-', '_').upper()}")
        parser.add_argument(flag, "--" + flag[2:].replace("-", "_"), default=default, help=text)


def ask(args: Any, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The coordinator's answer."""
    where = _where(args)
    from elastic.launcher.flags.guarding import asking
    from elastic.rpc.client import call

    local = args.run_dir or not args.rdzv_endpoint
    secure = asking(args, args.environ, Path(args.run_dir or LATEST) if local else None)
    return call(where, kind, body, secure=secure)


def _where(args: Any) -> str:
    """Address of the coordinator. Raises UsageError when it cannot be known, or the run is over."""
    if args.rdzv_endpoint:
        return addresses("--rdzv-endpoint", args.rdzv_endpoint, DYNAMIC_PORT)
    path = Path(args.run_dir or LATEST)
    found = read_object(path / "coordinator.json")
    verdict = read_object(path / "exit.json")
    if verdict is not None:
        raise UsageError(
            f"the run in {path} is over: {verdict.get('reason')} (exit code {verdict.get('code')})"
        )
    if found is None or not isinstance(found.get("address"), str):
        raise FieldError(
            "--run-dir", str(path), "no coordinator runs there; give --run-dir or --rdzv-endpoint"
        )
    return str(found["address"])


def show(answer: dict[str, Any], as_json: bool) -> int:
    """Print an answer; return the exit code."""
    print(json.dumps(answer) if as_json else as_text(answer))
    return 0
