"""`elastic profile`: what a script's layers cost on this device, and the links, as a profile in JSON.

The script runs unchanged; its Trainer is told to measure instead of to train. Everything is checked before
anything is started, and the file is written whole or not at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
from click import IntRange

from elastic.command_line import Command
from elastic.domain import codec
from elastic.domain.errors import EXIT_OK, EXIT_USAGE, FieldError, UsageError
from elastic.launcher.flags.script import check_command
from elastic.launcher.flags.values import ACCUMULATE, read_profile
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
PROBE = "elastic.worker.transport.link_probe"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """What is asked for, checked."""

    target: Path
    known: Profile | None
    """The profile to merge into."""
    argv: tuple[str, ...]
    """The script's process; (): links alone."""
    model: str


@click.command(cls=Command, context_settings={"allow_interspersed_args": False}, options_metavar="[flags]")
@click.option("--out", metavar="FILE", help=f"file to write (default {OUT})")
@click.option("--into", metavar="FILE", help="add this device type, or links, to the profile in FILE")
@click.option("--force", is_flag=True, help="replace FILE, or the device type in it")
@click.option("--device", metavar="NAME", help="name of this device type (default: the device's own)")
@click.option("--model", metavar="NAME", help="name of the model (default: the script's)")
@click.option(
    "--repeat", "--steps", type=IntRange(1), default=20, help="number of repetitions; the median counts"
)
@click.option("--warmup", type=IntRange(0), default=3, help="number of repetitions before those")
@click.option(
    "--nproc-per-node", type=IntRange(1, 1024), default=1, help="workers that share each layer (tp)"
)
@click.option("--accumulate", type=ACCUMULATE, default="fast", help="exact: its gradient sums are larger")
@click.option("--links", is_flag=True, help="measure the link too: two processes over training's transport")
@click.option("--json", is_flag=True, help="print JSON")
@click.option("--module", "-m", is_flag=True, help="SCRIPT is a module, run as python -m")
@click.argument("script", default="", metavar="[SCRIPT|-m MODULE]")
@click.argument("script_args", nargs=-1, type=click.UNPROCESSED, metavar="[args...]")
def profile(**given: Any) -> int:
    """Measure the layers of a training SCRIPT on this device, and links, into a profile."""
    flags = SimpleNamespace(**given, no_python=False, run_path=False)
    wanted = _check(flags)
    found = _measure(flags, wanted) if wanted.argv else None
    links = _probe(flags) if flags.links else None
    result = _together(flags, wanted, found, links)
    draft = wanted.target.with_name(f".{wanted.target.name}.{os.getpid()}.tmp")
    draft.write_text(format_profile(result) + "\n")
    os.replace(draft, wanted.target)
    print(_as_json(wanted, result, found) if flags.json else _as_text(wanted, result, found))
    return EXIT_OK


# ---- before anything is started ----


def _check(flags: SimpleNamespace) -> _Wanted:
    """Raises FieldError at the first flag that is wrong."""
    if flags.out is not None and flags.into is not None:
        raise FieldError("--into", flags.into, "it is written back to: leave --out out")
    if not flags.script and not (flags.links and flags.into):
        raise UsageError(
            "SCRIPT is missing: give a script, or -m and a module (links alone: --links --into FILE)"
        )
    known = None if flags.into is None else read_profile("--into", flags.into)
    taken = {device.name for device in known.devices} if known is not None else set()
    if flags.device in taken and flags.script and not flags.force:
        remedy = "the profile has it already; give another name, or --force"
        raise FieldError("--device", flags.device, remedy)
    target = _target(flags)
    argv = check_command(flags).argv() if flags.script else ()
    named = flags.script if flags.module else Path(flags.script).stem
    model = flags.model or (known.model if known else named)
    return _Wanted(target=target, known=known, argv=argv, model=model)


def _target(flags: SimpleNamespace) -> Path:
    if flags.into is not None:
        return Path(flags.into).expanduser()
    target = Path(flags.out or OUT).expanduser()
    if target.is_dir() or not target.parent.is_dir():
        raise FieldError("--out", str(target), "a file in a directory that exists")
    if target.exists() and not flags.force:
        raise FieldError("--out", str(target), "it exists; give another, or --force")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise FieldError("--out", str(target), f"{target.parent} is not writable")
    return target


# ---- measuring ----


def _measure(flags: SimpleNamespace, wanted: _Wanted) -> Measurement:
    """Run the script, one process a TP rank, and read what its Trainer measured."""
    with tempfile.TemporaryDirectory(prefix="elastic-profile-") as folder:
        order = MeasurementRequest(
            out=str(Path(folder) / "measured.json"),
            device=flags.device or "",
            repeat=flags.repeat,
            warmup=flags.warmup,
        )
        path = Path(folder) / "order.json"
        path.write_text(codec.dumps(order))
        codes = _run(flags, wanted, folder, str(path))
        if any(codes):
            code = next(code for code in codes if code)
            text = f"the script ended with {code}; what it said is above"
            raise UsageError(text) if code == EXIT_USAGE else _Failed(text)
        if not Path(order.out).exists():
            raise FieldError(
                "SCRIPT", flags.script, "it ended without a Trainer; scripts that use elastic can be measured"
            )
        return codec.loads(Measurement, Path(order.out).read_bytes())


def _run(flags: SimpleNamespace, wanted: _Wanted, folder: str, order: str) -> list[int]:
    """Exit codes of the script's processes. What they print goes to standard error."""
    processes = []
    try:
        for rank in range(flags.nproc_per_node):
            env = {**os.environ, **_environment(flags, folder, order, rank)}
            processes.append(
                subprocess.Popen(wanted.argv, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
            )
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _environment(flags: SimpleNamespace, folder: str, order: str, rank: int) -> dict[str, str]:
    """A lone node's worker, as torchrun and the agent would describe it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(flags.nproc_per_node),
        "LOCAL_WORLD_SIZE": str(flags.nproc_per_node),
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
    """What two processes found about the link between them."""
    words = [sys.executable, "-m", PROBE, str(flags.repeat)]
    done = subprocess.run(words, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, check=False)
    if done.returncode:
        raise _Failed(f"the link could not be measured ({PROBE} ended with {done.returncode})")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


class _Failed(UsageError):
    """Something that was started failed."""

    exit_code = 1


# ---- the result ----


def _together(
    flags: SimpleNamespace, wanted: _Wanted, found: Measurement | None, links: dict[str, Any] | None
) -> Profile:
    known = wanted.known
    if found is not None:
        known = new_profile(wanted.model, found) if known is None else add_measurement(known, found, flags.force)
    assert known is not None
    if links is not None:
        link = LinkProfile(links["bytes_per_s"], links["latency_s"])
        measured = {name: links[name] for name in ("contention", "copy_bytes_per_s")}
        known = replace(known, inside=link, link=link, **measured)
    return known


def _as_json(wanted: _Wanted, result: Profile, found: Measurement | None) -> str:
    told: dict[str, Any] = {"out": str(wanted.target), "profile": codec.encode(result)}
    if found is not None:
        told |= {"device": found.device.name, "like": list(found.like), "stated": codec.encode(found.stated)}
    return json.dumps(told)


def _as_text(wanted: _Wanted, result: Profile, found: Measurement | None) -> str:
    lines = [f"{wanted.target}: {result.model}, {len(result.layers)} layers"]
    if found is not None:
        lines += [
            f"device type {found.device.name}; times in ms, bytes in MB (stated by the script in brackets)"
        ]
        lines += ["layer  forward  backward   input  weight  update  parameters   state  activations"]
        lines += [_row(found, i) for i in range(len(found.layers)) if found.like[i] == i]
        same = [f"{i} as {at}" for i, at in enumerate(found.like) if at != i]
        lines += [f"of the same make: layer {', '.join(same)}"] if same else []
    if result.link.bytes_per_s:
        link = result.link
        speed = f"{link.bytes_per_s / 1e6:.0f} MB/s, {link.latency_s * 1e6:.0f} us"
        lines.append(f"link {speed}; a second of transfer lengthens compute by {result.contention:.2f} s")
    if result.copy_bytes_per_s:
        lines.append(f"copies for the backup are made at {result.copy_bytes_per_s / 1e6:.0f} MB/s")
    return "\n".join(lines)


def _row(found: Measurement, i: int) -> str:
    la, stated = found.layers[i], found.stated[i]
    times = (la.forward_s, la.backward_s, la.backward_input_s, la.backward_weight_s, la.update_s)
    widths = (9, 10, 8, 8, 8)
    text = "".join(f"{t * 1e3:{w}.2f}" for t, w in zip(times, widths, strict=True))
    kept = f"{la.activation_bytes / 1e6:.2f} ({stated.activation_bytes / 1e6:.2f})"
    return f"{i:5}{text}{la.param_bytes / 1e6:12.2f}{la.state_bytes / 1e6:8.2f}  {kept:>11}"
