"""Cost of backups without failures: step time with each pair of schemes over step time without.

    python -m benchmarks.backup.backup_overhead [--pairs 30] [--tokens 512]

Four nodes run one pipeline, then two. One job trains throughout; its backup is switched on and off
in blocks of steps, so that both sides share the processes, the memory and the other load of the
machine. The first step of a block is not counted, because transfers cross the border of the
block. The result is the median over pairs of neighbouring blocks.

`auto` runs first, until it has compared its pairs by measured times. The pair that it takes is then
measured like the others. "Exposed" is the time that a worker's main thread spent copying or
waiting. "Sent" is the number of bytes that all nodes sent per step.

`reduce` cannot be switched within a job. Its row compares whole jobs, one after the other, with
`recompute`, which sums once.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import psutil

from benchmarks.results import Row, load, save
from elastic.worker.backup.protection import Protection

BLOCK = 4
"""Steps per block; the first step is not counted."""
NODES = 4
TARGET = 1.02
WEIGHED = 80
"""Steps after which `auto` has compared its pairs."""
PAIRS = {
    1: (
        "stream+snapshot", "stream:4+snapshot", "log+snapshot", "recompute+snapshot",
        "stream+replay", "log+replay",
    ),
    2: ("stream+replica", "log+replica", "recompute+replica"),
}  # fmt: skip
"""Measured pairs of schemes, by number of pipelines."""


def switched_on(step: int) -> bool:
    """Return whether the backup is on at a step: in every second block, from the first one on."""
    return step < BLOCK or (step // BLOCK) % 2 == 0


class SwitchedProtection(Protection):
    """Backup that publishes only in the blocks with backup on. A job with it cannot recover."""

    on = True
    used: ClassVar[list[float]] = []
    sent: ClassVar[list[int]] = []
    exposed: ClassVar[list[float]] = []

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if self.log is not None:
            keep = self.log.keep
            setattr(self.log, "keep", lambda *told: keep(*told) if self.on else None)  # noqa: B010

    def after_microbatch(self, step: int) -> None:
        self.on = switched_on(step)
        if self.on:
            super().after_microbatch(step)
        else:
            self.enter()

    def after_microbatches(self) -> None:
        if self.on:
            super().after_microbatches()

    def before_commit(self, step: int, reduced: Any) -> None:
        if self.on:
            super().before_commit(step, reduced)

    def before_update(self, reduced: Any, clip: float, *, skipped: bool = False) -> None:
        if self.on:
            super().before_update(reduced, clip, skipped=skipped)

    def after_update(self) -> None:
        if self.on:
            super().after_update()
        traffic = self._publisher.traffic.take()
        if self.on:
            self.sent.append(traffic.sent_bytes)
            self.exposed.append(traffic.copied_s + traffic.waited_s)
        self.used.append(cpu_s())

    def finish(self) -> None:
        told = {
            "sent": statistics.mean(self.sent),
            "exposed": statistics.median(self.exposed),
            "cpu_s": self.used,
        }
        path = Path(os.environ["ELASTIC_RUN_DIR"]) / f"node-{os.environ['ELASTIC_NODE']}.json"
        path.write_text(json.dumps(told))
        super().after_update()
        super().finish()


def train(pairs: int, sizes: argparse.Namespace) -> None:
    """Train the example's model in a worker, with the backup switched on and off."""
    from elastic.worker import epoch_session as runtime
    from examples import train_gpt

    setattr(runtime, "Protection", SwitchedProtection)  # noqa: B010
    train_gpt.main(script_flags(n_steps(pairs), sizes))


def cpu_s() -> float:
    """Return the processor seconds that this worker and its agent have used."""
    agent = psutil.Process(os.getppid()).cpu_times()
    return time.process_time() + float(agent.user + agent.system)


def n_steps(pairs: int) -> int:
    return 2 * BLOCK * (pairs + 1)


def script_flags(steps: int, sizes: argparse.Namespace) -> list[str]:
    flags = {
        "layers": sizes.layers, "hidden": sizes.hidden, "heads": sizes.heads,
        "seq-len": sizes.sequence,
        "micro-batch-size": sizes.tokens[0] // sizes.sequence, "num-microbatches": 8,
        "steps": steps,
        "dtype": sizes.dtype,
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Measured:
    ratios: list[float]
    """Step time with backup over step time without, per pair of neighbouring blocks."""
    cpu_ratio: float
    """Processor time with backup over that without, of all workers and agents in the whole run."""
    step_s: float
    """Median time of a step without backup."""
    sent: float
    """Bytes that all nodes send per step."""
    exposed_s: float
    """Time per step that a worker copies and waits; the largest of all workers."""


def run(
    backup: str, pipelines: int, script: Sequence[str], scratch: str, flags: Sequence[str] = ()
) -> tuple[Path, dict[str, Any]]:
    """Run one job; return its directory and summary. Raises RuntimeError with its output."""
    run_dir = Path(tempfile.mkdtemp(dir=scratch)) / "run"
    command = [
        sys.executable, "-m", "elastic", "run", "--standalone", "--nnodes", str(NODES),
        "--pipelines", str(pipelines), "--backup", backup, "--run-dir", str(run_dir), *flags,
        *script,
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout.decode(errors="replace"))
    return run_dir, json.loads((run_dir / "summary.json").read_text())


def measure(
    backup: str, pipelines: int, pairs: int, sizes: argparse.Namespace, flags: Sequence[str] = ()
) -> Measured:
    """Run one job with additional flags of `elastic run`, and compare its blocks."""
    script = [
        "-m", "benchmarks.backup.backup_overhead", "--worker", "--pairs", str(pairs), "--layers",
        str(sizes.layers),
        "--hidden", str(sizes.hidden), "--tokens", str(sizes.tokens[0]), "--heads",
        str(sizes.heads),
        "--sequence", str(sizes.sequence), "--dtype", sizes.dtype,
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as scratch:
        run_dir, summary = run(backup, pipelines, script, scratch, flags)
        told = [json.loads(path.read_text()) for path in run_dir.glob("node-*.json")]
    on, off = halves(summary["step_s"])
    totals = [sum(used) for used in zip(*(node["cpu_s"] for node in told), strict=True)]
    cpu_on, cpu_off = halves([b - a for a, b in pairwise([totals[0], *totals])])
    return Measured(
        ratios=[a / b for a, b in zip(on, off, strict=True)],
        cpu_ratio=sum(cpu_on) / sum(cpu_off),
        step_s=statistics.median(off),
        sent=sum(node["sent"] for node in told),
        exposed_s=max(node["exposed"] for node in told),
    )


def halves(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Return the medians of blocks with and of blocks without backup. The first pair warms up."""
    blocks = [values[at + 1 : at + BLOCK] for at in range(0, len(values), BLOCK)]
    medians = [statistics.median(block) for block in blocks][2:]
    return medians[::2], medians[1::2]


def train_alone(
    backup: str, pipelines: int, steps: int, sizes: argparse.Namespace
) -> dict[str, Any]:
    """Run the unchanged example; return its summary."""
    with tempfile.TemporaryDirectory() as scratch:
        return run(
            backup, pipelines, ["-m", "examples.train_gpt", *script_flags(steps, sizes)], scratch
        )[1]


def rows_of(name: str, where: str, found: Measured, target: float | None) -> list[Row]:
    ordered = sorted(found.ratios)
    quarter, n = len(ordered) // 4, len(ordered)
    rows = [
        Row(f"step time, {name} / off, {where}", statistics.median(ordered), "", target, "lower"),
        Row(f"quarter of {n} pairs below, {name}, {where}", ordered[quarter], "", None, "lower"),
        Row(
            f"quarter of {n} pairs above, {name}, {where}", ordered[-1 - quarter], "", None, "lower"
        ),
        Row(f"processor time, {name} / off, {where}", found.cpu_ratio, "", None, "lower"),
        Row(f"exposed in a step, {name}, {where}", found.exposed_s * 1e3, "ms", None, "lower"),
        Row(f"sent in a step, {name}, {where}", found.sent / 1e6, "MB", None, "lower"),
        Row(f"step off, beside {name}, {where}", found.step_s, "s", None, "lower"),
    ]
    for row in rows:
        print(f"{row.metric}: {row.value:.4g} {row.unit}", flush=True)
    return rows


def add_sizes(parser: argparse.ArgumentParser, **defaults: int | str) -> None:
    """Add flags for the size of the trained model."""
    for name in ("layers", "hidden", "heads", "sequence"):
        parser.add_argument(f"--{name}", type=int, default=defaults[name])
    parser.add_argument("--dtype", choices=("fp32", "bf16"), default=defaults["dtype"])
    parser.add_argument(
        "--tokens", type=int, nargs=1, default=[defaults["tokens"]], help="tokens a micro-batch"
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backup.backup_overhead")
    parser.add_argument("--pairs", type=int, default=30, help="of blocks, for auto")
    parser.add_argument(
        "--others",
        type=int,
        default=6,
        help="of blocks, for other pairs of schemes; 0: their rows stay as they are",
    )
    add_sizes(parser, layers=4, hidden=128, heads=4, sequence=128, tokens=512, dtype="fp32")
    parser.add_argument(
        "--quick", action="store_true", help="one pair of schemes, two of blocks; writes nothing"
    )
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args.pairs, args)
        return 0
    if args.quick:
        rows_of("recompute+snapshot", "quick", measure("recompute+snapshot", 1, 2, args), None)
        return 0
    found = []
    for pipelines, pairs in PAIRS.items():
        where = (
            f"{NODES} nodes, {pipelines} pipeline{'s' * (pipelines > 1)}, "
            f"{args.tokens[0]} tokens a micro-batch"
        )
        backup = train_alone("auto", pipelines, WEIGHED, args)["backup"]
        auto = f"{backup['gradients']}+{backup['state']}"
        found += rows_of(
            f"auto ({auto})", where, measure(auto, pipelines, args.pairs, args), TARGET
        )
        for pair in pairs if args.others else ():
            found += rows_of(pair, where, measure(pair, pipelines, args.others, args), None)
    if args.others:
        found.append(reduced(args))
    else:
        found += [row for row in load("backup_overhead") if "auto (" not in row.metric]
    save("backup_overhead", found)
    return 0


def reduced(args: argparse.Namespace) -> Row:
    """Return the row that compares `reduce` with `recompute`, in jobs that take turns."""
    ratios = []
    for _ in range(3):
        seconds = [
            statistics.median(train_alone(f"{gradients}+replica", 2, 20, args)["step_s"][4:])
            for gradients in ("reduce", "recompute")
        ]
        ratios.append(seconds[0] / seconds[1])
    where = f"{NODES} nodes, 2 pipelines, {args.tokens[0]} tokens a micro-batch"
    return Row(
        f"step time, reduce+replica / recompute+replica, {where}",
        statistics.median(ratios),
        "",
        None,
        "lower",
    )


if __name__ == "__main__":
    sys.exit(main())
