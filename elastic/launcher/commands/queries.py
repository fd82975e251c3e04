"""`elastic status|nodes|drain|export`: ask a running job, write out a checkpoint."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from elastic.command_line import TIME, Command
from elastic.domain.errors import FieldError, UsageError
from elastic.launcher.flags.guarding import CERTS
from elastic.launcher.flags.values import ENDPOINTS, HOST
from elastic.launcher.run.event_tail import read_object
from elastic.launcher.run.reports import as_text

LATEST = Path("runs/latest")
ENDPOINT = click.option(
    "--rdzv-endpoint",
    type=ENDPOINTS,
    envvar="PET_RDZV_ENDPOINT",
    help="address of the coordinator, or of several",
)
SECRETS = (
    click.option(
        "--certs", type=CERTS, envvar="PET_CERTS", help="directory with ca.crt, tls.crt and tls.key"
    ),
    click.option(
        "--certs-name",
        type=HOST,
        envvar="PET_CERTS_NAME",
        help="name that the coordinator's certificate must carry",
    ),
    click.option(
        "--join-token-file",
        metavar="FILE",
        envvar="PET_JOIN_TOKEN_FILE",
        help="file with the job's join token",
    ),
)
"""The flags of all commands that call a job's services; see `elastic.launcher.flags.guarding.asking`."""
RUN_DIR = click.option(
    "--run-dir", type=click.Path(path_type=Path), envvar="PET_RUN_DIR", help=f"a run (default {LATEST})"
)
JSON = click.option("--json", is_flag=True, help="print JSON")
Query = Callable[..., Any]


def with_options(*options: Callable[[Query], Query]) -> Callable[[Query], Query]:
    def add(command: Query) -> Query:
        for option in reversed(options):
            command = option(command)
        return command

    return add


query_options = with_options(ENDPOINT, RUN_DIR, JSON, *SECRETS)
"""The flags of all commands that ask a running job."""


@click.command(cls=Command)
@query_options
@click.option("--watch", is_flag=True, help="show it again and again until the job is over")
@click.option("--interval", type=TIME, default="1", help="seconds between two updates of --watch")
def status(watch: bool, interval: float, **flags: Any) -> int:
    """Show the phase, step, loss, nodes and plan of a running job."""
    job = SimpleNamespace(**flags)
    if not 0.05 <= interval <= 3600:
        raise FieldError("--interval", interval, "from 0.05 to 3600 seconds")
    if watch:
        from elastic.launcher.commands.watch import watch as follow

        return follow(job, lambda: ask(job, "status", {}), interval, LATEST)
    answer = ask(job, "status", {})
    return show(answer if job.json else {**answer, "nodes": _short(answer.get("nodes", []))}, job.json)


@click.command(cls=Command)
@query_options
def nodes(**flags: Any) -> int:
    """List the nodes of a running job."""
    job = SimpleNamespace(**flags)
    answer = ask(job, "nodes", {})
    return show(answer if job.json else {"nodes": _short(answer.get("nodes", [])) or "none yet"}, job.json)


def _short(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for people: evidence is for programs."""
    return [{key: value for key, value in row.items() if not isinstance(value, list)} for row in rows]


@click.command(cls=Command)
@query_options
@click.argument("node", required=False)
@click.option("--deadline", type=TIME, default="30", help="seconds after which the node goes anyhow")
@click.option(
    "--self", "own", is_flag=True, help="drain this machine's node of --run-dir; wait until it left"
)
def drain(node: str | None, deadline: float, own: bool, **flags: Any) -> int:
    """Move all state off NODE (a name that `elastic nodes` shows), then release it; nothing is lost."""
    job = SimpleNamespace(**flags)
    if own == (node is not None):
        raise FieldError("NODE", node or "", "the name of a node, or --self")
    if own:
        from elastic.launcher.commands.selfdrain import drain_self

        return show(drain_self(job.run_dir or LATEST, deadline), job.json)
    return show(ask(job, "drain", {"node": node, "deadline_s": deadline}), job.json)


@click.command(cls=Command)
@click.argument("checkpoint", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--force", is_flag=True, help="replace OUT if it exists")
@JSON
def export(checkpoint: Path, out: Path, force: bool, json: bool) -> int:
    """Write the parameters of CHECKPOINT, a directory step-..., to the safetensors file OUT."""
    if not out.parent.is_dir():
        raise FieldError("OUT", str(out), "a file in a directory that exists")
    if out.exists() and not force:
        raise FieldError("OUT", str(out), "it exists; give another, or --force")
    from elastic.worker.replica.export import export_checkpoint

    return show({"out": str(out), **export_checkpoint(checkpoint, out, force=force)}, json)


def ask(job: SimpleNamespace, kind: str, body: dict[str, Any]) -> dict[str, Any]:
    """The coordinator's answer. `job`: the values of `query_options`."""
    where = _where(job)
    from elastic.launcher.flags.guarding import asking
    from elastic.rpc.control.client import call

    local = job.run_dir or not job.rdzv_endpoint
    secure = asking(job, os.environ, (job.run_dir or LATEST) if local else None)
    return call(where, kind, body, secure=secure)


def _where(job: SimpleNamespace) -> str:
    """Address of the coordinator. Raises UsageError when it cannot be known, or the run is over."""
    if job.rdzv_endpoint:
        return str(job.rdzv_endpoint)
    path = job.run_dir or LATEST
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
