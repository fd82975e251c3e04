"""`elastic profile`: what a script's layers cost on this device, and the links, as a profile in JSON.

The script runs unchanged; its Trainer is told to measure instead of to train. Everything is checked before
anything is started, and the file is written whole or not at all.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from elastic.domain import codec
from elastic.domain.errors import EXIT_OK, EXIT_USAGE, FieldError, UsageError
from elastic.launcher.flags.flags import Parser
from elastic.launcher.flags.script import check_command
from elastic.launcher.flags.values import choice, read_profile, whole
from elastic.planning.cost.measurement import Measurement, Order, merge, new_profile
from elastic.planning.cost.profile import Link, Profile, format_profile

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
    workers: int


def profile(argv: list[str], environ: Mapping[str, str]) -> int:
    """Measure the layers of a script, and links."""
    args = _parser().parse_args(argv)
    wanted = _check(args)
    found = None
    if wanted.argv:
        found = _measure(args, wanted, environ)
    links = _probe(args) if args.links else None
    result = _together(args, wanted, found, links)
    draft = wanted.target.with_name(f".{wanted.target.name}.{os.getpid()}.tmp")
    draft.write_text(format_profile(result) + "\n")
    os.replace(draft, wanted.target)
    print(_as_json(wanted, result, found) if args.json else _as_text(wanted, result, found))
    return EXIT_OK


# ---- before anything is started ----


def _parser() -> Parser:
    parser = Parser(
        prog="elastic profile",
        usage="elastic profile [flags] [SCRIPT|-m MODULE [args...]]",
        description="Measure the layers of a training script on this device, and links, into a profile.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--out", default=None, metavar="FILE", help=f"file to write ({OUT})")
    add("--into", default=None, metavar="FILE", help="add this device type, or links, to the profile in FILE")
    add("--force", action="store_true", help="replace FILE, or the device type in it")
    add("--device", default="", metavar="NAME", help="name of this device type (default: the device's own)")
    add("--model", default="", metavar="NAME", help="name of the model (default: the script's)")
    add("--repeat", "--steps", default="20", metavar="N", help="repetitions, of which the median counts")
    add("--warmup", default="3", metavar="N", help="repetitions before those")
    add(
        "--nproc-per-node",
        "--nproc_per_node",
        default="1",
        metavar="N",
        help="workers that share each layer (tp)",
    )
    add("--accumulate", default="fast", metavar="X", help="fast, or exact: its gradient sums are larger")
    add("--links", action="store_true", help="measure the link too: two processes over training's transport")
    add("--json", action="store_true", help="print JSON")
    add("--module", "-m", action="store_true", help="SCRIPT is a module, run as python -m")
    add("script", nargs="?", default="", metavar="SCRIPT", help="the training script; none: links alone")
    add("script_args", nargs=argparse.REMAINDER, metavar="args", help="its arguments")
    return parser


def _check(args: argparse.Namespace) -> _Wanted:
    """Raises FieldError at the first flag that is wrong."""
    if args.out is not None and args.into is not None:
        raise FieldError("--into", args.into, "it is written back to: leave --out out")
    for flag, text, least in (("--repeat", args.repeat, 1), ("--warmup", args.warmup, 0)):
        if whole(flag, text) < least:
            raise FieldError(flag, text, f"a whole number from {least} up")
    workers = whole("--nproc-per-node", args.nproc_per_node)
    if not 1 <= workers <= 1024:
        raise FieldError("--nproc-per-node", args.nproc_per_node, "from 1 to 1024 workers")
    choice("--accumulate", args.accumulate, ("fast", "exact"))
    if not args.script and not (args.links and args.into):
        raise UsageError(
            "SCRIPT is missing: give a script, or -m and a module (links alone: --links --into FILE)"
        )
    known = None if args.into is None else read_profile("--into", args.into)
    if (
        known is not None
        and args.device in {d.name for d in known.devices}
        and args.script
        and not args.force
    ):
        raise FieldError("--device", args.device, "the profile has it already; give another name, or --force")
    target = _target(args)
    argv: tuple[str, ...] = ()
    if args.script:
        args.no_python = args.run_path = False
        argv = check_command(args).argv()
    model = args.model or (
        known.model if known else Path(args.script).stem if not args.module else args.script
    )
    return _Wanted(target=target, known=known, argv=argv, model=model, workers=workers)


def _target(args: argparse.Namespace) -> Path:
    if args.into is not None:
        return Path(args.into).expanduser()
    target = Path(args.out or OUT).expanduser()
    if target.is_dir() or not target.parent.is_dir():
        raise FieldError("--out", str(target), "a file in a directory that exists")
    if target.exists() and not args.force:
        raise FieldError("--out", str(target), "it exists; give another, or --force")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise FieldError("--out", str(target), f"{target.parent} is not writable")
    return target


# ---- measuring ----


def _measure(args: argparse.Namespace, wanted: _Wanted, environ: Mapping[str, str]) -> Measurement:
    """Run the script, one process a TP rank, and read what its Trainer measured."""
    with tempfile.TemporaryDirectory(prefix="elastic-profile-") as folder:
        order = Order(
            out=str(Path(folder) / "measured.json"),
            device=args.device,
            repeat=whole("--repeat", args.repeat),
            warmup=whole("--warmup", args.warmup),
        )
        path = Path(folder) / "order.json"
        path.write_text(codec.dumps(order))
        codes = _run(args, wanted, folder, str(path), environ)
        if any(codes):
            code = next(code for code in codes if code)
            text = f"the script ended with {code}; what it said is above"
            raise UsageError(text) if code == EXIT_USAGE else _Failed(text)
        if not Path(order.out).exists():
            raise FieldError(
                "SCRIPT", args.script, "it ended without a Trainer; scripts that use elastic can be measured"
            )
        return codec.loads(Measurement, Path(order.out).read_bytes())


def _run(
    args: argparse.Namespace, wanted: _Wanted, folder: str, order: str, environ: Mapping[str, str]
) -> list[int]:
    """Exit codes of the script's processes. What they print goes to standard error."""
    processes = []
    try:
        for rank in range(wanted.workers):
            env = {**environ, **_environment(args, wanted, folder, order, rank)}
            processes.append(
                subprocess.Popen(wanted.argv, env=env, stdin=subprocess.DEVNULL, stdout=sys.stderr)
            )
        return [process.wait() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()


def _environment(
    args: argparse.Namespace, wanted: _Wanted, folder: str, order: str, rank: int
) -> dict[str, str]:
    """A lone node's worker, as torchrun and the agent would describe it."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(wanted.workers),
        "LOCAL_WORLD_SIZE": str(wanted.workers),
        "ELASTIC_MEASURE": order,
        "ELASTIC_AGENT": "",
        "ELASTIC_NODE": "node0",
        "ELASTIC_LOCAL_RANK": str(rank),
        "ELASTIC_RUN_DIR": folder,
        "ELASTIC_MEMORY_DIR": folder,
        "ELASTIC_TP_STORE": str(Path(folder) / "store"),
        "ELASTIC_ACCUMULATE": args.accumulate,
    }


def _probe(args: argparse.Namespace) -> dict[str, Any]:
    """What two processes found about the link between them."""
    words = [sys.executable, "-m", PROBE, "--repeat", args.repeat]
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
    args: argparse.Namespace, wanted: _Wanted, found: Measurement | None, links: dict[str, Any] | None
) -> Profile:
    known = wanted.known
    if found is not None:
        known = new_profile(wanted.model, found) if known is None else merge(known, found, args.force)
    assert known is not None
    if links is not None:
        link = Link(links["bytes_per_s"], links["latency_s"])
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
