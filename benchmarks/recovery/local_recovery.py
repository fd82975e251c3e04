"""What a kill costs pipelines that lost nothing, in steps of about 20 s, beside another version.

    python -m benchmarks.recovery.local_recovery [--against DIR] [--keep DIR]

Eight emulated nodes train as two and as three pipelines. One node of the second pipeline is killed
(SIGKILL) when its pipeline has done a quarter, a half and three quarters of its micro-batches. The
training script records when each layer ends the backward pass of a micro-batch. So the cost to the
other pipelines is the time that they need for their own micro-batches, less that in the steps
before. `--against` names a checkout of another version, which is measured in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.emulated import equal_layers, shaped
from benchmarks.results import Row, save
from elastic.planning.cost.profile import format_profile
from elastic.planning.plan.plan import parse_plan

ROOT = Path(__file__).parents[2]
NODES, LAYERS, MICROBATCHES = 8, 16, 32
SHAPES = ("2", "3")
LAYER_S = {"2": 0.263, "3": 0.28}
"""Seconds of a layer for steps of about 20 s."""
PARAMETERS = 1 << 18
LINK, BYTES_PER_S = "800Mbit", 100e6
VICTIM, STEP, STEPS = "node4", 3, 5
"""node4 is in the second pipeline under both shapes. The first step of a job is not compared."""
PARTS = (0.25, 0.5, 0.75)
TARGET = 2.0
"""Per cent of a step that a kill may cost an undamaged pipeline."""


@dataclass(frozen=True)
class Passes:
    """Ends of a worker's backward passes, by step and micro-batch."""

    at: dict[int, dict[int, float]] = field(default_factory=dict)

    def own(self, step: int, indices: frozenset[int]) -> list[float]:
        return sorted(t for index, t in self.at.get(step, {}).items() if index in indices)

    def span_s(self, step: int, indices: frozenset[int]) -> float:
        """Return the seconds from the first to the last end of `indices` in a step."""
        times = self.own(step, indices)
        return times[-1] - times[0]


@dataclass(frozen=True)
class Measured:
    """One run with a kill."""

    step_s: float
    """Median of the steps before the kill."""
    killed_s: float
    """The step of the kill."""
    cost_s: float
    """Largest time that an undamaged pipeline took longer for its own micro-batches."""


def read(folder: Path) -> list[Passes]:
    found = []
    for path in sorted(folder.iterdir()):
        passes = Passes()
        for line in path.read_text().splitlines():
            at, step, index = json.loads(line)
            passes.at.setdefault(step, {})[index] = at
        found.append(passes)
    return found


def train(source: Path, shape: str, faults: list[str], steps: int, folder: Path) -> None:
    """Run a job with the version in `source`. Raises RuntimeError with the run's output."""
    (folder / "passes").mkdir(parents=True)
    profile = equal_layers(LAYERS, PARAMETERS, LAYER_S[shape], BYTES_PER_S)
    (folder / "profile.json").write_text(format_profile(profile))
    words = [
        "run", "--standalone", "--schedule", "1f1b", "--emulate", str(folder / "profile.json"),
        "--device", "a", "--nnodes", str(NODES), "--pipelines", shape,
        "--run-dir", str(folder / "run"), *shaped(LINK),
        *(word for text in faults for word in ("--fault", text)),
        str(ROOT / "benchmarks" / "waiting.py"), "--num-microbatches", str(MICROBATCHES),
        "--steps", str(steps), "--moments", "--record-passes", str(folder / "passes"),
    ]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(source)}
    done = subprocess.run(
        [sys.executable, "-m", "elastic", *words],
        env=env,
        cwd=source,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stdout.decode(errors="replace"))


def events(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "run" / "events.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def shares(folder: Path) -> tuple[list[frozenset[int]], int]:
    """Return the micro-batches of each pipeline in the first plan, and the pipeline of VICTIM."""
    plan = parse_plan(next(e["text"] for e in events(folder) if e["kind"] == "plan"))
    victim = next(p for p, _, stage in plan.stages() if stage.unit.node == VICTIM)
    return [frozenset(pipeline.microbatches) for pipeline in plan.pipelines], victim


def measure(source: Path, shape: str, microbatch: int, folder: Path) -> Measured:
    """Kill the victim before its backward pass of a micro-batch, and return the figures."""
    fault = f"kill node={VICTIM.removeprefix('node')} step={STEP} microbatch={microbatch}"
    train(source, shape, [fault], STEPS, folder)
    lists, victim = shares(folder)
    done = {e["step"]: float(e["at"]) for e in events(folder) if e["kind"] == "step"}
    before = range(1, STEP)
    costs = []
    for passes in read(folder / "passes"):
        for pipeline, own in enumerate(lists):
            whole = all(len(passes.own(step, own)) == len(own) for step in (*before, STEP))
            if pipeline != victim and whole:
                usual = statistics.median(passes.span_s(step, own) for step in before)
                costs.append(passes.span_s(STEP, own) - usual)
    if len(costs) < len(lists) - 1:
        raise RuntimeError(
            f"an undamaged pipeline did not compute all of its micro-batches: {folder}"
        )
    usual_s = statistics.median(done[step] - done[step - 1] for step in before)
    return Measured(usual_s, done[STEP] - done[STEP - 1], max(costs))


def rows(shape: str, version: str, found: list[Measured]) -> list[Row]:
    name = f"{shape} pipelines, {version}"
    step_s = statistics.median(one.step_s for one in found)
    costs = [100 * one.cost_s / one.step_s for one in found]
    longer = [100 * (one.killed_s / one.step_s - 1) for one in found]
    target = TARGET if version == "this version" else None
    return [
        Row(f"{name}: step", step_s, "s", None, "lower"),
        Row(f"{name}: cost to undamaged pipelines, max", max(costs), "%", target, "lower"),
        Row(f"{name}: step of a kill is longer by, median", statistics.median(longer), "%", None,
            "lower"),
    ]  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.recovery.local_recovery")
    parser.add_argument("--against", type=Path, help="checkout of another version")
    parser.add_argument("--keep", type=Path, help="keep the run directories in this new folder")
    args = parser.parse_args()
    versions = {"this version": ROOT}
    if args.against is not None:
        if not (args.against / "elastic").is_dir():
            parser.error(f"--against: {args.against} is no checkout: it has no folder elastic")
        versions["other version"] = args.against.resolve()
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = args.keep or Path(scratch)
        for shape in SHAPES:
            train(ROOT, shape, [], 1, base / f"plan-{shape}")
            lists, victim = shares(base / f"plan-{shape}")
            own = sorted(lists[victim])
            done: dict[str, list[Measured]] = {version: [] for version in versions}
            for part in PARTS:
                for version, source in versions.items():
                    folder = base / f"{shape}-{part}-{version.split()[0]}"
                    one = measure(source, shape, own[int(part * len(own))], folder)
                    print(f"{shape} pipelines, killed at {part:.0%}, {version}: {one}", flush=True)
                    done[version].append(one)
            for version, measured in done.items():
                found += rows(shape, version, measured)
    save("local_recovery", found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
