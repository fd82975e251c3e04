"""What the backup of every micro-batch costs: step time with stream+snapshot over step time without.

    python -m benchmarks.backup_overhead [--nodes 2 4] [--pairs 12]

One job trains throughout; its backup is switched on and off in blocks of steps, so that both sides share
processes, memory and whatever else the machine does. The first step of a block is not counted: it still
carries the last one's transfers, or does not carry its own yet. The figure is the median over pairs of
neighbouring blocks.
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

import psutil

from benchmarks.results import Row, save

BLOCK = 4
"""Steps of a block; the first is not counted."""
SEQUENCE = 128
TARGET = 1.05


def switched_on(step: int) -> bool:
    """On in every second block, and one block longer at the start, to warm up."""
    return step < BLOCK or (step // BLOCK) % 2 == 0


def train(pairs: int, sizes: argparse.Namespace) -> None:
    """What every worker runs: the example's model, with the backup switched on and off."""
    from elastic.worker import runtime
    from elastic.worker.protection import Protection
    from examples import train_gpt

    class Switched(Protection):
        """Publishes in the blocks that are on. Nothing would be recoverable: this is a measurement."""

        on, sent = True, 0

        def after_microbatch(self, step: int) -> None:
            self.on = switched_on(step)
            if self.on:
                self.sent += sum(r.gradient_nbytes for r in self._replicas)
                super().after_microbatch(step)
            else:
                self.enter()

        def after_update(self) -> None:
            if self.on:
                self.sent += sum(r.state_nbytes() for r in self._replicas)
                super().after_update()
            used.append(cpu_s())

        def finish(self) -> None:
            steps = sum(switched_on(step) for step in range(n_steps(pairs)))
            path = Path(os.environ["ELASTIC_RUN_DIR"]) / f"node-{os.environ['ELASTIC_NODE']}.json"
            path.write_text(json.dumps({"sent": self.sent / steps, "cpu_s": used}))
            super().after_update()
            super().finish()

    used: list[float] = []
    setattr(runtime, "Protection", Switched)  # noqa: B010
    train_gpt.main(script_flags(pairs, sizes))


def cpu_s() -> float:
    """Processor time that this worker and its agent have used."""
    agent = psutil.Process(os.getppid()).cpu_times()
    return time.process_time() + float(agent.user + agent.system)


def n_steps(pairs: int) -> int:
    return 2 * BLOCK * (pairs + 1)


def script_flags(pairs: int, sizes: argparse.Namespace) -> list[str]:
    flags = {
        "layers": sizes.layers, "hidden": sizes.hidden, "heads": 4, "seq-len": SEQUENCE,
        "micro-batch-size": sizes.tokens[0] // SEQUENCE, "num-microbatches": 8, "steps": n_steps(pairs),
    }  # fmt: skip
    return [word for name, value in flags.items() for word in (f"--{name}", str(value))]


@dataclass(frozen=True)
class Measured:
    ratios: list[float]
    """Step time, on / off, of every pair of neighbouring blocks."""
    cpu_ratio: float
    """Processor time of all workers and agents, on / off, over the whole run."""
    step_s: float
    """Median step without backup."""
    sent: float
    """Bytes that all nodes send in a step."""


def measure(nodes: int, tokens: int, pairs: int, sizes: argparse.Namespace) -> Measured:
    """Run one job and compare its blocks. Raises RuntimeError with its output if it fails."""
    with tempfile.TemporaryDirectory() as scratch:
        run_dir = Path(scratch) / "run"
        command = [
            sys.executable, "-m", "elastic", "run", "--standalone", "--nnodes", str(nodes),
            "--pipelines", "1", "--backup", "stream+snapshot", "--run-dir", str(run_dir),
            "-m", "benchmarks.backup_overhead", "--worker",
            "--pairs", str(pairs), "--layers", str(sizes.layers), "--hidden", str(sizes.hidden),
            "--tokens", str(tokens),
        ]  # fmt: skip
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False)
        if done.returncode:
            raise RuntimeError(done.stdout.decode(errors="replace"))
        seconds = json.loads((run_dir / "summary.json").read_text())["step_s"]
        told = [json.loads(path.read_text()) for path in run_dir.glob("node-*.json")]
    on, off = halves(seconds)
    totals = [sum(used) for used in zip(*(node["cpu_s"] for node in told), strict=True)]
    cpu_on, cpu_off = halves([b - a for a, b in pairwise([totals[0], *totals])])
    return Measured(
        ratios=[a / b for a, b in zip(on, off, strict=True)],
        cpu_ratio=sum(cpu_on) / sum(cpu_off),
        step_s=statistics.median(off),
        sent=sum(node["sent"] for node in told),
    )


def halves(values: Sequence[float]) -> tuple[list[float], list[float]]:
    """Medians of the blocks that were on and of those that were off; the first pair warms up."""
    blocks = [values[at + 1 : at + BLOCK] for at in range(0, len(values), BLOCK)]
    medians = [statistics.median(block) for block in blocks][2:]
    return medians[::2], medians[1::2]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.backup_overhead")
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--pairs", type=int, default=12, help="pairs of blocks, on and off")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=128)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048], help="tokens a micro-batch")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args.pairs, args)
        return 0
    found = []
    for tokens, nodes in ((tokens, nodes) for tokens in args.tokens for nodes in args.nodes):
        measured = measure(nodes, tokens, args.pairs, args)
        ordered = sorted(measured.ratios)
        quarter, n = len(ordered) // 4, len(ordered)
        where = f"{nodes} nodes, {tokens} tokens a micro-batch"
        found += [
            Row(f"step time, backup on / off, {where}", statistics.median(ordered), "", TARGET, "lower"),
            Row(f"lower quartile of {n} pairs, {where}", ordered[quarter], "", None, "lower"),
            Row(f"upper quartile of {n} pairs, {where}", ordered[-1 - quarter], "", None, "lower"),
            Row(f"processor time, on / off, {where}", measured.cpu_ratio, "", None, "lower"),
            Row(f"step off, {where}", measured.step_s, "s", None, "lower"),
            Row(f"sent in a step, {where}", measured.sent / 1e6, "MB", None, "lower"),
        ]
    save("backup_overhead", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
