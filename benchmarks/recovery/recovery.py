"""Time that a kill stops training: 20 kills on 4 local nodes, varying node and micro-batch.

    python -m benchmarks.recovery.recovery [--kills 20] [--keep DIR]

Every kill has its own run of the default example on one pipeline of four nodes. SIGKILL hits the
whole node before a backward pass of step 2, and the run ends soon after the recovery. total_s goes
from the kill to the first micro-batch computed afterwards. The run may replay no more micro-batches
than the lost stage had in flight, plus the one whose backup was not yet acknowledged.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.results import Row, save
from elastic.planning.plan.plan import parse_plan

NODES, MICROBATCHES, STEP = 4, 8, 2
PHASES = ("detect_s", "decide_s", "halt_s", "transfer_s", "rebuild_s", "total_s")


@dataclass(frozen=True)
class Kill:
    """Place of one kill, and the figures of its recovery."""

    node: int
    microbatch: int
    recovery: dict[str, Any]
    in_flight: int
    """Most micro-batches that the lost stage has between their forward and backward passes."""

    @property
    def within_bound(self) -> bool:
        return bool(self.recovery["microbatches_replayed"] <= self.in_flight + 1)


def kill(node: int, microbatch: int, run_dir: Path) -> Kill:
    """Run the example with this kill. Raises RuntimeError if it did not recover and finish."""
    command = [
        sys.executable, "-m", "elastic", "run", "--standalone", "--nnodes", str(NODES),
        "--pipelines", "1",
        "--run-dir", str(run_dir), "--fault",
        f"kill node={node} step={STEP} microbatch={microbatch}",
        "-m", "examples.train_gpt", "--num-microbatches", str(MICROBATCHES), "--steps",
        str(STEP + 3),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout.decode(errors="replace"))
    summary = json.loads((run_dir / "summary.json").read_text())
    (recovery,) = summary["recoveries"]
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    plan = parse_plan(next(e["text"] for e in events if e["kind"] == "plan"))
    stage = next(s for _, s, held in plan.stages() if held.unit.node == f"node{node}")
    return Kill(node, microbatch, recovery, min(NODES - stage, MICROBATCHES))


def show(number: int, done: Kill) -> None:
    times = "  ".join(f"{done.recovery[phase]:8.3f}" for phase in PHASES)
    replayed = f"{done.recovery['microbatches_replayed']} of at most {done.in_flight + 1}"
    print(f"{number:>4}  node{done.node}  {done.microbatch:>10}  {times}  {replayed}", flush=True)


def rows(kills: list[Kill]) -> list[Row]:
    found: list[Row] = []
    for phase in PHASES:
        values = sorted(k.recovery[phase] for k in kills)
        name = phase.removesuffix("_s")
        target = 0.5 if phase == "total_s" else None
        p90 = values[min(len(values) - 1, int(0.9 * len(values)))]
        found.append(Row(f"{name}, median", statistics.median(values), "s", target, "lower"))
        found.append(Row(f"{name}, p90", p90, "s", None, "lower"))
        found.append(Row(f"{name}, max", values[-1], "s", None, "lower"))
    over = sum(not k.within_bound for k in kills)
    found.append(Row("kills that replayed more than allowed", over, "", 0, "lower"))
    most = max(k.recovery["microbatches_replayed"] for k in kills)
    found.append(Row("micro-batches replayed, max", most, "", None, "lower"))
    found.append(Row("kills", len(kills), "", None, "higher"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery.recovery")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="keep the run directories here")
    args = parser.parse_args()
    if args.kills < 1:
        parser.error("--kills: a whole number from 1 up")
    heads = "  ".join(f"{phase.removesuffix('_s'):>8}" for phase in PHASES)
    print(f"kill  node   micro-batch  {heads}  replayed")
    with tempfile.TemporaryDirectory() as scratch:
        base = args.keep or Path(scratch)
        kills = []
        for i in range(args.kills):
            kills.append(kill(i % NODES, (3 * i + i // NODES) % MICROBATCHES, base / f"kill-{i}"))
            show(i, kills[-1])
    save("recovery", rows(kills))
    return 0


if __name__ == "__main__":
    sys.exit(main())
