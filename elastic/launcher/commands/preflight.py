"""`elastic preflight`: the checks that a node runs before it joins a job."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import click

from elastic.command_line import Command
from elastic.config import is_url
from elastic.domain.errors import EXIT_FAILURE, EXIT_OK
from elastic.launcher.commands.queries import ENDPOINT, JSON, SECRETS, Answer, show, with_options
from elastic.launcher.flags.request import memory_root
from elastic.launcher.flags.validators import FOLDER, LOCATION, SIZE, client_security
from elastic.rpc.security import tls


@click.command(cls=Command)
@click.option("--run-dir", type=FOLDER, default=".", help="directory of runs")
@click.option("--checkpoint-dir", type=LOCATION, help="directory or URL of checkpoints")
@click.option(
    "--node-memory",
    type=SIZE,
    default=0,
    help="memory that plans may use, as 16GiB; 0: not checked",
)
@with_options(ENDPOINT, *SECRETS)
@click.option("--strict", is_flag=True, help="treat warnings as errors")
@JSON
def preflight(
    run_dir: Path,
    checkpoint_dir: str | None,
    node_memory: int,
    rdzv_endpoint: str | None,
    strict: bool,
    json: bool,
    **secrets: Any,
) -> int:
    """Check whether this machine can be a node; exit code 1 if not."""
    directories = [("run", run_dir), ("memory", memory_root())]
    url = checkpoint_dir if checkpoint_dir and is_url(checkpoint_dir) else ""
    directories += [("checkpoints", Path(checkpoint_dir))] if checkpoint_dir and not url else []
    tls.use(client_security(SimpleNamespace(**secrets), os.environ, None))

    from elastic.agent.health.preflight import local_checks, network_checks, score_class
    from elastic.core.protocol.health_report import Preflight

    began = perf_counter()
    checks, score = local_checks(
        directories, node_memory, trial=True, tell=_tell, checkpoint_url=url
    )
    checks += network_checks(rdzv_endpoint) if rdzv_endpoint else []
    flight = Preflight("strict" if strict else "on", perf_counter() - began, tuple(checks), score)
    rows = [
        {"check": c.name, "value": c.value if json else f"{c.value:.4g}"}
        | {name: getattr(c, name) for name in ("unit", "ok", "fatal", "remedy")}
        for c in flight.checks
    ]
    answer: Answer = {"ok": not flight.failed, "seconds": round(flight.seconds, 3)}
    answer |= {"score": round(score, 2), "standing": score_class(score), "checks": rows}
    show(answer, json)
    return EXIT_FAILURE if flight.failed else EXIT_OK


def _tell(text: str) -> None:
    print(f"elastic preflight: {text}", file=sys.stderr)
