"""`elastic status|nodes|drain|export`: query a running job, drain a node, export a checkpoint."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from elastic.command_line import OUTPUT, TIME, Command
from elastic.config import load_config
from elastic.domain.errors import ElasticError, FieldError, UsageError
from elastic.launcher.flags.validators import (
    CERTS,
    ENDPOINTS,
    HOST,
    SAVED,
    client_security,
    member_token,
)
from elastic.launcher.run.event_tail import read_object
from elastic.launcher.run.rundir import LAUNCHER_EXIT, launcher_of
from elastic.launcher.run.wait_lines import STANDBY, WAITING_NODE, waiting_text
from elastic.reminder import EVERY_S
from elastic.rpc.security.roles import LESSER, Role, token_of
from elastic.rpc.security.tls import TOKEN_FILE, read_token

LATEST = Path("runs/latest")
TAIL_BYTES = 1 << 16
WIDE, LONGEST = 40, 120
"""Columns of a table with a text of more characters come last; longer texts are cut."""
"""The last line of progress.jsonl is within the last bytes of the file."""
DRAIN_POLL_S = 0.1
# fmt: off
ENDPOINT = click.option("--rdzv-endpoint", type=ENDPOINTS, envvar="PET_RDZV_ENDPOINT",
                        help="address of the coordinator, or of several")
SECRETS = (
    click.option("--certs", type=CERTS, envvar="PET_CERTS",
                 help="directory with ca.crt, tls.crt and tls.key"),
    click.option("--certs-name", type=HOST, envvar="PET_CERTS_NAME",
                 help="name that the coordinator's certificate must carry"),
    click.option("--join-token-file", metavar="FILE", envvar="PET_JOIN_TOKEN_FILE",
                 help="file with the job's join token"),
)
"""Flags of all commands that call a job's services; `client_security` reads them."""
RUN_DIR = click.option("--run-dir", type=click.Path(path_type=Path), envvar="PET_RUN_DIR",
                       help=f"a run (default {LATEST})")
# fmt: on
JSON = click.option("--json", is_flag=True, help="print JSON")
Query = Callable[..., Any]
Answer = dict[str, Any]


def with_options(*options: Callable[[Query], Query]) -> Callable[[Query], Query]:
    """Return a decorator that adds the options to a command."""

    def add(command: Query) -> Query:
        for option in reversed(options):
            command = option(command)
        return command

    return add


query_options = with_options(ENDPOINT, RUN_DIR, JSON, *SECRETS)
"""Flags of all commands that query a running job."""


@click.command(cls=Command)
@query_options
@click.option("--watch", is_flag=True, help="repeat until the job is over")
@click.option("--interval", type=TIME, default="1", help="seconds between two updates of --watch")
def status(watch: bool, interval: float, **flags: Any) -> int:
    """Show phase, step, loss, nodes and plan of a job, and what it waits for.

    Of a run that is over: its result.
    """
    job = SimpleNamespace(**flags)
    if not 0.05 <= interval <= 3600:
        raise FieldError("--interval", interval, "give 0.05 to 3600 seconds")
    over = None if job.rdzv_endpoint else result_of(job.run_dir or LATEST)
    if over is not None:
        return show(over, job.json)
    if watch:
        from elastic.launcher.commands.watch import watch as repeat

        return repeat(job, lambda: _status(job, reminds=False), interval, LATEST)
    answer = _status(job)
    return show(answer if job.json else main_view(answer), job.json)


def _status(job: SimpleNamespace, *, reminds: bool = True) -> Answer:
    """Return the coordinator's answer, or what this machine's processes wait for if it gives none.

    Raises the error of the query if they wait for nothing.
    """
    from elastic.rpc.control.client import Unreachable

    try:
        return query(job, "status", {}, reminds=reminds)
    except (Unreachable, FieldError):
        found = None if job.rdzv_endpoint else local_wait(job.run_dir or LATEST)
        if found is None:
            raise
        return found


def local_wait(run_dir: Path) -> Answer | None:
    """Return what the coordinators or the nodes of a run directory wait for while no coordinator
    leads, with the fields of `status`; None: nothing is known, or their launcher has ended."""
    try:
        if launcher_of(run_dir) is None:
            return None
    except OSError:  # no directory, or that of another user
        return None
    for pattern in (STANDBY.format("*"), WAITING_NODE.format("*")):
        found = [read_object(path) or {} for path in sorted(run_dir.glob(pattern))]
        waits = [one for one in found if isinstance(one.get("since"), int | float)]
        oldest = min(waits, key=lambda one: float(one["since"]), default=None)
        if oldest is not None and not oldest.get("lasting"):
            seconds = max(0.0, time.time() - oldest["since"])
            what = {"for": oldest.get("what"), "seconds": seconds, "ends": oldest.get("ends")}
            last = _last_line(run_dir)
            known: Answer = {name: last.get(name, 0) for name in ("step", "steps", "epoch")}
            return {"phase": "waiting", "waiting": what, **known, "nodes": []}
    return None


def main_view(answer: Answer) -> Answer:
    """Return the part of the answer to `status` that people read; JSON has all of it."""
    view = {key: value for key, value in answer.items() if key not in ("timeouts", "waiting")}
    # A model without tokens, a script without Trainer, a job without evaluations.
    for key in ("tokens_per_s", "mfu", "steps", "evaluation"):
        if not view.get(key):
            view.pop(key, None)
    leader = view.pop("coordinator", None)
    if leader:
        view["coordinator"] = f"{leader['name']} ({leader['address']}), term {view.pop('term', 0)}"
    waits = waiting_text(answer).removeprefix("waiting for ")
    return {"phase": view.pop("phase"), **({"waiting": waits} if waits else {}), **view}


def result_of(run_dir: Path) -> Answer | None:
    """Return the result of a run that is over, with the fields of `status`; None: it is not."""
    job, launcher = read_object(run_dir / "exit.json"), read_object(run_dir / LAUNCHER_EXIT)
    end = launcher or job
    if end is None:
        return None
    phase = "finished" if end.get("code") == 0 else "failed"
    path, last = run_dir / "summary.json", _last_line(run_dir)
    summary = read_object(path) or {}
    losses, recoveries = summary.get("loss") or [last.get("loss")], summary.get("recoveries") or []
    result = {
        "phase": phase if job is not None else "interrupted",
        "reason": end.get("reason", ""),
        "exit_code": end.get("code"),
        "step": last.get("step", summary.get("steps", 0)),
        "steps": last.get("steps", 0),
        "loss": losses[-1],
        "evaluation": next(iter((summary.get("evaluations") or [])[-1:]), None),
        "nodes": [],
        "tokens_per_s": summary.get("tokens_per_s") or None,
        "mfu": summary.get("mfu") or None,
        "wall_s": summary.get("wall_s"),
        "epoch_changes": len(recoveries) if summary else None,
        "params_sha256": summary.get("params_sha256", ""),
        "plan": summary.get("plan", ""),
    }
    if path.exists():
        result["summary"] = str(path) if summary else f"{path} is damaged"
    return result


def _last_line(run_dir: Path) -> Answer:
    """Return the last progress of a run; {}: there is none."""
    try:
        with (run_dir / "progress.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            line = json.loads(file.read().splitlines()[-1])
    except (OSError, ValueError, IndexError):
        return {}
    return line if isinstance(line, dict) else {}


@click.command(cls=Command)
@query_options
def nodes(**flags: Any) -> int:
    """List the nodes of a running job."""
    job = SimpleNamespace(**flags)
    answer = query(job, "nodes", {})
    return show(answer if job.json else {"nodes": answer["nodes"] or "none yet"}, job.json)


@click.command(cls=Command)
@query_options
@click.argument("node", required=False)
@click.option("--deadline", type=TIME, default="30",
              help="seconds after which the node is released in any case")  # fmt: skip
@click.option("--self", "own", is_flag=True,
              help="drain this machine's node of --run-dir; wait until it has left")  # fmt: skip
def drain(node: str | None, deadline: float, own: bool, **flags: Any) -> int:
    """Move all state off NODE (a name that `elastic nodes` shows), then release it.

    Nothing is lost.
    """
    job = SimpleNamespace(**flags)
    if own == (node is not None):
        raise FieldError("NODE", node or "", "give the name of a node, or --self")
    if own:
        return show(_drain_self(job.run_dir or LATEST, deadline), job.json)
    return show(query(job, "drain", {"node": node, "deadline_s": deadline}), job.json)


@click.command(cls=Command)
@click.option("--role", type=click.Choice([role.value for role in LESSER]), required=True,
              help="operator: read, and drain nodes; viewer: read only")  # fmt: skip
@click.option("--join-token-file", metavar="FILE", envvar="PET_JOIN_TOKEN_FILE",
              help="file with the job's join token")  # fmt: skip
@RUN_DIR
def token(role: str, run_dir: Path | None, **flags: Any) -> int:
    """Print the token of a role, for --join-token-file of status, nodes, plan and drain.

    Its holder cannot run a node, and cannot learn the join token from it.
    """
    joined = member_token(SimpleNamespace(**flags), os.environ)
    if not joined:
        file = (run_dir or LATEST) / TOKEN_FILE
        joined = read_token(file)
        if not joined:
            remedy = "no join token is there: give --join-token-file, or --run-dir of a running job"
            raise FieldError("--run-dir", str(file.parent), remedy)
    print(token_of(Role(role), joined))
    return 0


def _drain_self(run_dir: Path, deadline_s: float) -> Answer:
    """Make the launcher of `run_dir` leave its job; return when it has ended.

    Raises UsageError if no launcher is there or it cannot leave; ElasticError after the deadline.
    """
    pid = launcher_of(run_dir)
    if pid is None:
        raise UsageError(f"nothing runs in {run_dir} on this machine: give its --run-dir")
    if not load_config(run_dir).grace_s:
        raise FieldError("--self", str(run_dir), "only a run started with --grace can leave")
    os.kill(pid, signal.SIGTERM)
    end = time.monotonic() + deadline_s
    while launcher_of(run_dir) == pid:
        if time.monotonic() >= end:
            raise ElasticError(f"the node has not left within {deadline_s:g} s")
        time.sleep(DRAIN_POLL_S)
    return {"run_dir": str(run_dir), "left": True}


@click.command(cls=Command)
@click.argument("checkpoint", type=SAVED)
@click.argument("out", type=OUTPUT)
@click.option("--force", is_flag=True, help="replace OUT if it exists")
@JSON
def export(checkpoint: str, out: Path, force: bool, json: bool) -> int:
    """Write the parameters of CHECKPOINT to the safetensors file OUT.

    CHECKPOINT is a directory or URL that ends with step-..., or one that contains some.
    """
    if out.exists() and not force:
        raise FieldError("OUT", str(out), "it exists; give another, or --force")
    from elastic.worker.replica.export import export_checkpoint

    return show({"out": str(out), **export_checkpoint(checkpoint, out, force=force)}, json)


def query(job: SimpleNamespace, kind: str, body: Answer, *, reminds: bool = True) -> Answer:
    """Return the coordinator's answer to a query. `job` holds the values of `query_options`.

    `reminds`: lines on standard error tell of a wait.
    """
    address = _coordinator_address(job)
    from elastic.rpc.control.client import call

    run_dir = None if job.rdzv_endpoint and not job.run_dir else job.run_dir or LATEST
    secure = client_security(job, os.environ, run_dir)
    with _reminders(address) if reminds else contextlib.nullcontext():
        return call(address, kind, body, secure=secure)


@contextlib.contextmanager
def _reminders(address: str) -> Iterator[None]:
    """Say again and again that an answer of `address` is awaited, until the block ends."""
    answered = threading.Event()
    text = f"elastic: waiting for an answer of the coordinator at {address}"

    def remind() -> None:
        while not answered.wait(EVERY_S):
            print(text, file=sys.stderr, flush=True)

    threading.Thread(target=remind, name="reminders", daemon=True).start()
    try:
        yield
    finally:
        answered.set()


def _coordinator_address(job: SimpleNamespace) -> str:
    """Return the address. Raises UsageError if it is unknown or the run is over."""
    if job.rdzv_endpoint:
        return str(job.rdzv_endpoint)
    path = job.run_dir or LATEST
    found = read_object(path / "coordinator.json")
    result = read_object(path / "exit.json")
    if result is not None:
        why = f"{result.get('reason')} (exit code {result.get('code')})"
        raise UsageError(f"the run in {path} is over: {why}")
    if found is not None and isinstance(found.get("address"), str):
        return str(found["address"])
    # A run directory of an agent alone has no coordinator of its own. After the agent's end another
    # job may use the address.
    alone = (path / "config.json").exists() and not (path / "coordinator.json").exists()
    if alone and launcher_of(path) is not None:
        elsewhere = load_config(path).coordinator
        if elsewhere:
            return elsewhere
    raise FieldError("--run-dir", str(path), _why_no_run(path))


def _why_no_run(path: Path) -> str:
    """Return why a run directory gives no address of a coordinator, and the remedy."""
    remedy = "give the directory of a run, or --rdzv-endpoint"
    if not path.is_dir():
        return f"there is no such directory; {remedy}"
    if (path / "coordinator.json").exists():
        return f"its coordinator.json is damaged; {remedy}"
    return f"no coordinator has led there yet; {remedy}"


# ---- output ----


def show(answer: Answer, as_json: bool) -> int:
    """Print an answer; return the exit code."""
    print(json.dumps(answer) if as_json else as_text(answer))
    return 0


def as_text(answer: Answer) -> str:
    """Return an answer as text: short values first, then tables of objects, and longer texts."""
    lines, below = [], []
    for key, value in answer.items():
        if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
            below.append(_table(value))
        elif isinstance(value, str) and "\n" in value:
            below.append(value.rstrip("\n"))
        elif isinstance(value, dict) and value:
            pairs = (f"{name} {_cell(entry)}" for name, entry in value.items())
            lines.append(f"{key}: {', '.join(pairs)}")
        elif value not in (None, "", [], {}):
            lines.append(f"{key}: {value}")
    return "\n\n".join(part for part in ("\n".join(lines), *below) if part)


def _table(rows: Sequence[Answer]) -> str:
    """Return a table of rows with equal keys; lists in rows, such as evidence, are only in JSON.

    Columns with long texts are the last ones, so that the figures stay readable, and their texts
    are cut.
    """
    heads = [key for key, value in rows[0].items() if not isinstance(value, list)]
    columns = [[head, *(_cell(row.get(head)) for row in rows)] for head in heads]
    columns.sort(key=lambda column: max(map(len, column)) > WIDE)
    cut = [
        [cell if len(cell) <= LONGEST else f"{cell[:LONGEST]}..." for cell in c] for c in columns
    ]
    widths = [max(map(len, column)) for column in cut]
    lines = zip(*cut, strict=True)
    aligned = ("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)
    return "\n".join(aligned)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else str(value)
