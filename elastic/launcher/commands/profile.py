"""`elastic profile`: measured times and sizes of a script's layers, and of the links, as JSON.

The script runs unchanged; its Trainer measures instead of training. All flags are checked before
anything starts, and the file is written atomically.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click import IntRange

from elastic.command_line import Command, file_errors, make_folder, output_file
from elastic.domain import codec
from elastic.domain.errors import EXIT_OK, EXIT_USAGE, ElasticError, FieldError, UsageError
from elastic.launcher.flags.request import LOOPBACK
from elastic.launcher.flags.script import check_command
from elastic.launcher.flags.validators import ACCUMULATE, read_profile
from elastic.launcher.run.rundir import free_port
from elastic.planning.cost.profile import (
    LinkProfile,
    Measurement,
    MeasurementRequest,
    Profile,
    add_measurement,
    format_profile,
    new_profile,
)

OUT = "profile.json"
TELL_S = 4.0
"""Interval between two lines about what is measured."""
PROBE = "elastic.worker.transport.link_probe"


@click.command(
    cls=Command, context_settings={"allow_interspersed_args": False}, options_metavar="[flags]"
)
@click.option("--out", metavar="FILE", help=f"file to write (default {OUT})")
@click.option(
    "--into", metavar="FILE", help="add this device type, or links, to the profile in FILE"
)
@click.option("--force", is_flag=True, help="replace FILE, or the device type in it")
@click.option(
    "--device", metavar="NAME", help="name of this device type (default: the device's own)"
)
@click.option("--model", metavar="NAME", help="name of the model (default: the script's)")
@click.option(
    "--repeat",
    "--steps",
    type=IntRange(1),
    default=20,
    help="number of repetitions, which give the median",
)
@click.option("--warmup", type=IntRange(0), default=3, help="number of repetitions before those")
@click.option(
    "--nproc-per-node", type=IntRange(1, 1024), default=1, help="workers that share each layer (tp)"
)
@click.option(
    "--accumulate", type=ACCUMULATE, default="fast", help="exact: its gradient sums are larger"
)
@click.option(
    "--links", is_flag=True, help="measure the link too: two processes over training's transport"
)
@click.option("--json", is_flag=True, help="print JSON")
@click.option("--module", "-m", is_flag=True, help="SCRIPT is a module, run as python -m")
@click.argument("script", default="", metavar="[SCRIPT|-m MODULE]")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED, metavar="[args...]")
def profile(**given: Any) -> int:
    """Measure the layers of a training SCRIPT on this device, and links, into a profile."""
    flags = SimpleNamespace(**given, no_python=False, run_path=False)
    known = _check(flags)
    target = _target(flags)
    found = _measure(flags, check_command(flags).argv()) if flags.script else None
    links = _probe(flags) if flags.links else None
    result = _together(flags, known, found, links)
    with file_errors("--into" if flags.into else "--out", target):
        draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
        draft.write_text(format_profile(result) + "\n")
        os.replace(draft, target)
    print((_as_json if flags.json else _as_text)(target, result, found))
    return EXIT_OK


# ---- checks ----


def _check(flags: SimpleNamespace) -> Profile | None:
    """Return the profile of --into, or None. Raises FieldError for the first wrong flag."""
    if flags.out is not None and flags.into is not None:
        raise FieldError("--into", flags.into, "the file is also the output: leave out --out")
    if not flags.script and not (flags.links and flags.into):
        links = "only links: --links --into FILE"
        raise UsageError(f"SCRIPT is missing: give a script, or -m and a module ({links})")
    known = None if flags.into is None else read_profile("--into", flags.into)
    taken = {device.name for device in known.devices} if known is not None else set()
    if flags.device in taken and flags.script and not flags.force:
        remedy = "the profile has it already; give another name, or --force"
        raise FieldError("--device", flags.device, remedy)
    return known


def _target(flags: SimpleNamespace) -> Path:
    """Return the file to write, which replaces one of the same name."""
    flag, name = "--out", OUT if flags.out is None else flags.out
    if flags.into is not None:
        flag, name = "--into", flags.into
    target = output_file(flag, name)
    if target.exists() and flags.into is None and not flags.force:
        raise FieldError(flag, str(target), "it exists; give another, or --force")
    make_folder(flag, target.parent)
    return target


# ---- measuring ----


def _measure(flags: SimpleNamespace, argv: tuple[str, ...]) -> Measurement:
    """Run the script, one process per tensor-parallel rank; return its measurement."""
    with tempfile.TemporaryDirectory(prefix="elastic-profile-") as folder:
        order = MeasurementRequest(
            out=str(Path(folder) / "measured.json"),
            progress=str(Path(folder) / "progress"),
            device=flags.device or "",
            repeat=flags.repeat,
            warmup=flags.warmup,
        )
        path = Path(folder) / "order.json"
        path.write_text(codec.dumps(order))

        def progress() -> str:
            """Return what the script's Trainer does; "": the script has not made one yet."""
            done = Path(order.progress)
            return done.read_text() if done.exists() else ""

        codes = _run(flags, argv, folder, str(path), progress)
        if any(codes):
            code = next(code for code in codes if code)
            told = code == EXIT_USAGE or progress()
            when = "" if told else " before it made a Trainer"
            text = f"the script ended with {code}{when}; its output is above"
            raise (UsageError if code == EXIT_USAGE else ElasticError)(text)
        if not Path(order.out).exists():
            ended = "it ended before Trainer.run()" if progress() else "it made no Trainer"
            remedy = f"{ended}; give a script that uses elastic and calls Trainer(...).run()"
            raise FieldError("SCRIPT", flags.script, remedy)
        return codec.loads(Measurement, Path(order.out).read_bytes())


def _run(
    flags: SimpleNamespace,
    argv: tuple[str, ...],
    folder: str,
    order: str,
    progress: Callable[[], str],
) -> list[int]:
    """Run the script's processes, with output to standard error; return their exit codes."""
    port = free_port()
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(flags.nproc_per_node):
            env = {**os.environ, **_environment(flags, folder, order, rank, port)}
            processes.append(
                subprocess.Popen(argv, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
            )
        waiting = f"waiting for {flags.script} to make its Trainer"
        return [_wait(process, lambda: progress() or waiting) for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _wait(process: subprocess.Popen[bytes], activity: Callable[[], str]) -> int:
    """Wait for `process`, and print what it does every TELL_S; return its exit code."""
    began = time.monotonic()
    while True:
        try:
            return process.wait(TELL_S)
        except subprocess.TimeoutExpired:
            line = f"elastic profile: {activity()} ({time.monotonic() - began:.0f} s)"
            print(line, file=sys.stderr, flush=True)


def _environment(
    flags: SimpleNamespace, folder: str, order: str, rank: int, port: int
) -> dict[str, str]:
    """Return the variables that torchrun and the agent set for the worker of a single node."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(flags.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(flags.nproc_per_node),
        "GROUP_RANK": "0",
        "MASTER_ADDR": LOOPBACK,
        "MASTER_PORT": str(port),
        "ELASTIC_MEASURE": order,
        "ELASTIC_AGENT": "",
        "ELASTIC_NODE": "node0",
        "ELASTIC_LOCAL_RANK": str(rank),
        "ELASTIC_RUN_DIR": folder,
        "ELASTIC_MEMORY_DIR": folder,
        "ELASTIC_TP_STORE": str(Path(folder) / "store"),
        "ELASTIC_ACCUMULATE": flags.accumulate,
    }


def _probe(flags: SimpleNamespace) -> dict[str, Any]:
    """Measure the link between two processes; return the measurements by name."""
    words = [sys.executable, "-m", PROBE, str(flags.repeat)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as process:
        code = _wait(process, lambda: "measuring the link")
        assert process.stdout is not None
        output = process.stdout.read()
    if code:
        raise ElasticError(f"the link could not be measured ({PROBE} ended with {code})")
    found: dict[str, Any] = json.loads(output)
    return found


# ---- the result ----


def _together(
    flags: SimpleNamespace,
    known: Profile | None,
    found: Measurement | None,
    links: dict[str, Any] | None,
) -> Profile:
    if found is not None and known is not None:
        known = add_measurement(known, found, flags.force)
    elif found is not None:
        script = flags.script if flags.module else Path(flags.script).stem
        known = new_profile(flags.model or script, found)
    assert known is not None
    if links is not None:
        link = LinkProfile(links["bytes_per_s"], links["latency_s"])
        measured = {name: links[name] for name in ("contention", "copy_bytes_per_s")}
        known = replace(known, inside=link, link=link, **measured)
    return known


def _as_json(target: Path, result: Profile, found: Measurement | None) -> str:
    answer: dict[str, Any] = {"out": str(target), "profile": codec.encode(result)}
    if found is not None:
        answer |= {
            "device": found.device.name,
            "like": list(found.like),
            "stated": codec.encode(found.stated),
        }
    return json.dumps(answer)


def _as_text(target: Path, result: Profile, found: Measurement | None) -> str:
    lines = [f"{target}: {result.model}, {len(result.layers)} layers"]
    if found is not None:
        name = found.device.name
        lines += [
            f"device type {name}; times in ms, sizes in MB (of the script in brackets)",
            "layer  forward  backward   input  weight  update  parameters   state  activations",
        ]
        lines += [_row(found, i) for i in range(len(found.layers)) if found.like[i] == i]
        equal = [f"{i} as {at}" for i, at in enumerate(found.like) if at != i]
        lines += [f"equal layers: {', '.join(equal)}"] if equal else []
    if result.link.bytes_per_s:
        link = result.link
        speed = f"{link.bytes_per_s / 1e6:.0f} MB/s, {link.latency_s * 1e6:.0f} us"
        lines.append(f"link {speed}; 1 s of transfer adds {result.contention:.2f} s to compute")
    if result.copy_bytes_per_s:
        lines.append(f"copies for backups are made at {result.copy_bytes_per_s / 1e6:.0f} MB/s")
    return "\n".join(lines)


def _row(found: Measurement, i: int) -> str:
    la, stated = found.layers[i], found.stated[i]
    times = (la.forward_s, la.backward_s, la.backward_input_s, la.backward_weight_s, la.update_s)
    widths = (9, 10, 8, 8, 8)
    text = "".join(f"{t * 1e3:{w}.2f}" for t, w in zip(times, widths, strict=True))
    kept = f"{la.activation_bytes / 1e6:.2f} ({stated.activation_bytes / 1e6:.2f})"
    return f"{i:5}{text}{la.param_bytes / 1e6:12.2f}{la.state_bytes / 1e6:8.2f}  {kept:>11}"
