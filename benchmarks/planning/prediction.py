"""The cost model against the real engine: 12 plans, predicted and run.

    python -m benchmarks.planning.prediction [--steps 10] [--keep DIR]

Every plan runs as `elastic run --emulate`: one process per worker, real messages, gradient sums,
backups, reduction and commit. Workers wait the times of a profile instead of computing, so that two
cores do not distort the result.

Three runs come first. They give the profile the costs of the engine on this machine, which do not
depend on the plan:

- the cost of a layer per micro-batch besides its waits (adding and copying its gradient), from one
  node with few and with many micro-batches;
- the cost of a step besides its micro-batches, from the same runs; it becomes the update's time;
- the cost of a message between two stages, from two nodes; it becomes the link's latency.

Nothing is fitted afterwards. The error is |measured - predicted| / predicted; "measured" is the
median over all steps but the first two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

from benchmarks.planning.fixed_plan import FILE
from benchmarks.results import Row, save
from elastic.domain.types import LayerSpec, NodeInfo, Pipeline, Plan, Stage, Unit
from elastic.planning.cost.predict import predict
from elastic.planning.cost.profile import Device, LayerTimes, LinkProfile, Profile, format_profile
from elastic.planning.plan.plan import format_plan

LAYERS = 12
FORWARD_S, BACKWARD_S = 0.005, 0.010
SLOW = 1.5
"""Slow factor of the second device type."""
KILOBYTE = 1 << 10
SKIP = 2
"""Number of first steps that are not counted."""

Shape = tuple[str, str, tuple[tuple[tuple[int, ...], int], ...]]
"""(schedule, device types of the nodes, pipelines as (layers of each stage, micro-batches)). The
interleaved schedule has twice as many stages as units."""
PLANS: tuple[Shape, ...] = (
    ("1f1b", "a", (((12,), 4),)),
    ("1f1b", "aaa", (((4, 4, 4), 8),)),
    ("1f1b", "aaaa", (((2, 3, 3, 4), 12),)),
    ("1f1b", "aaaaaa", (((2, 2, 2, 2, 2, 2), 16),)),
    ("1f1b", "aabb", (((4, 4, 2, 2), 8),)),
    ("1f1b", "aaaa", (((6, 6), 4), ((6, 6), 4))),
    ("1f1b", "aaabb", (((4, 4, 4), 9), ((6, 6), 4))),
    ("1f1b", "aabbaa", (((6, 6), 6), ((6, 6), 4), ((5, 7), 6))),
    ("zero-bubble", "aaa", (((4, 4, 4), 6),)),
    ("zero-bubble", "aaaa", (((3, 3, 3, 3), 12),)),
    ("interleaved", "aa", (((3, 3, 3, 3), 8),)),
    ("interleaved", "aaa", (((2, 2, 2, 2, 2, 2), 9),)),
)
FEW: Shape = ("1f1b", "a", (((12,), 2),))
MANY: Shape = ("1f1b", "a", (((12,), 10),))
PAIR: Shape = ("1f1b", "aa", (((6, 6), 8),))


@dataclass(frozen=True)
class Engine:
    """Costs of the engine on this machine, in seconds."""

    layer_s: float = 0.0
    """Cost of a layer per micro-batch, besides its wait."""
    step_s: float = 0.0
    message_s: float = 0.0


def profile(engine: Engine) -> Profile:
    """Return a profile of equal layers on two device types, with the costs of the engine."""
    layer = LayerSpec(
        param_bytes=16 * KILOBYTE,
        state_bytes=0,
        gradient_bytes=16 * KILOBYTE,
        forward_s=FORWARD_S,
        backward_s=BACKWARD_S,
        output_bytes=64 * KILOBYTE,
    )
    devices = []
    for name, factor in (("a", 1.0), ("b", SLOW)):
        forward, half, own = FORWARD_S * factor, BACKWARD_S * factor / 2, engine.layer_s
        times = LayerTimes(forward, 2 * half + own, half, half + own, engine.step_s / LAYERS)
        devices.append(Device(name, (times,) * LAYERS))
    link = LinkProfile(0.0, engine.message_s)
    return Profile(
        model="waiting", layers=(layer,) * LAYERS, devices=tuple(devices), inside=link, link=link
    )


def plan_of(shape: Shape) -> Plan:
    """Return the plan of a shape; nodes in order, one worker each."""
    schedule, _, parts = shape
    pipelines, node, given = [], 0, 0
    for sizes, microbatches in parts:
        units = len(sizes) // 2 if schedule == "interleaved" else len(sizes)
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        stages = tuple(
            Stage(Unit(f"node{node + i % units}"), end - size, end)
            for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
        )
        pipelines.append(Pipeline(stages, tuple(range(given, given + microbatches)), schedule))
        node, given = node + units, given + microbatches
    return Plan(1, LAYERS, given, 1, tuple(pipelines))


def nodes_of(shape: Shape) -> tuple[NodeInfo, ...]:
    return tuple(NodeInfo(f"node{i}", "", "", device=name) for i, name in enumerate(shape[1]))


def measure(shape: Shape, steps: int, run_dir: Path) -> float:
    """Run the plan; return the median seconds of a step. Raises RuntimeError if the run fails."""
    plan = plan_of(shape)
    run_dir.mkdir(parents=True)
    (run_dir / "given.json").write_text(format_profile(profile(Engine())))
    out = run_dir / "run"
    words = [
        "--standalone", "--nnodes", str(len(shape[1])), "--emulate", str(run_dir / "given.json"),
        "--device", ",".join(shape[1]), "--run-dir", str(out),
        "-m", "benchmarks.waiting", "--num-microbatches", str(plan.n_microbatches), "--steps",
        str(steps + SKIP),
    ]  # fmt: skip
    command = [
        sys.executable,
        "-m",
        "benchmarks.planning.prediction",
        "--run",
        format_plan(plan),
        *words,
    ]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    if done.returncode:
        raise RuntimeError(done.stdout.decode(errors="replace"))
    summary = json.loads((out / "summary.json").read_text())
    step_s: list[float] = summary["step_s"]
    return median(step_s[SKIP:])


def run(plan: str, words: list[str]) -> int:
    """Run `elastic run` with a coordinator that uses this plan; return the exit code."""
    from elastic.command_line import read_flags
    from elastic.launcher.commands.run import run as elastic_run
    from elastic.launcher.flags.request import request
    from elastic.launcher.run.supervisor import launch

    wanted = request(read_flags(elastic_run, words), os.environ)
    folder = Path(wanted.config.run_dir)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(plan)
    return launch(replace(wanted, services=("benchmarks.planning.fixed_plan", wanted.services[1])))


def predicted(shape: Shape, given: Profile) -> float:
    return predict(plan_of(shape), given, nodes_of(shape)).step_s


def calibrated(steps: int, folder: Path) -> Engine:
    """Return the engine's costs, from one node with few and many micro-batches, and two nodes."""
    few, many, pair = (
        measure(s, steps, folder / n) for s, n in ((FEW, "few"), (MANY, "many"), (PAIR, "pair"))
    )
    compute = LAYERS * (FORWARD_S + BACKWARD_S)
    slope = max((many - few) / (MANY[2][0][1] - FEW[2][0][1]), compute)
    engine = Engine((slope - compute) / LAYERS, max(few - FEW[2][0][1] * slope, 0.0))
    low, high = 0.0, 0.1
    for _ in range(40):  # the latency that makes the prediction right
        engine = replace(engine, message_s=(low + high) / 2)
        late = predicted(PAIR, profile(engine)) < pair
        low, high = (engine.message_s, high) if late else (low, engine.message_s)
    parts = (engine.layer_s, engine.step_s, engine.message_s)
    print(
        "a layer {:.2f} ms, a step {:.2f} ms, a message {:.2f} ms".format(
            *(1e3 * s for s in parts)
        ),
        flush=True,
    )
    return engine


def named(shape: Shape) -> str:
    """Return a name such as `1f1b 4-4-4 x8 on aaa`."""
    schedule, devices, parts = shape
    text = ", ".join(
        f"{'-'.join(map(str, sizes))} x{microbatches}" for sizes, microbatches in parts
    )
    return f"{schedule} {text} on {devices}"


def compare(steps: int, folder: Path) -> list[Row]:
    engine, errors, rows = calibrated(steps, folder), [], []
    given = profile(engine)
    for number, shape in enumerate(PLANS):
        seconds, expected = measure(shape, steps, folder / str(number)), predicted(shape, given)
        errors.append(abs(seconds - expected) / expected * 100)
        rows.append(Row(f"error of {named(shape)}", errors[-1], "%", None, "lower"))
        print(
            f"{named(shape):<46} {expected:7.4f} s predicted, {seconds:7.4f} s measured", flush=True
        )
    head = [
        Row("median error of 12 plans", median(errors), "%", 3.0, "lower"),
        Row("worst error", max(errors), "%", 8.0, "lower"),
        Row("engine: a message between stages", engine.message_s * 1e3, "ms", None, "lower"),
        Row("engine: a layer, each micro-batch", engine.layer_s * 1e3, "ms", None, "lower"),
        Row("engine: a step", engine.step_s * 1e3, "ms", None, "lower"),
    ]
    return head + rows


def main() -> int:
    if sys.argv[1:2] == ["--run"]:
        return run(sys.argv[2], sys.argv[3:])
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--steps", type=int, default=10, help="of each plan, besides two that warm up"
    )
    parser.add_argument(
        "--keep", default=None, help="directory for the runs (default: a temporary one)"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        rows = compare(args.steps, Path(args.keep or scratch))
    print(f"written to {save('prediction', rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
