"""Speed of the simulator, and its growth with nodes and events.

    python -m benchmarks.simulation.simulator [--quick]

Two cases are measured: 11 hours of 32 nodes with every policy (losses as on AWS p3: 0.6 per
node-hour), and a month of 1,000 nodes with our policy (traces/month-1000.csv: 7 losses per 1,000
node-days, about the rate of Meta's RSC-1). Tables of plans are cached, so the table shows the first
run in a process and the next seed. Both are given in CPU seconds and in wall-clock seconds, which
differ on a busy machine.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from elastic_sim.replay.replay import run_one
from elastic_sim.steps.policies import policy_classes
from elastic_sim.steps.scenario import Scenario
from elastic_sim.traces.generate import Market

from benchmarks.results import Row, save
from elastic.planning.search.search import clear_caches

HOURS, NODES = 11, 32
DAY_S = 86400.0
ROOT = Path(__file__).parents[2]
EVERY = tuple(name for name in policy_classes() if not name.startswith("ours:"))


@dataclass(frozen=True)
class Took:
    wall_s: float
    cpu_s: float


def timed(work: Callable[[], object]) -> Took:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    return Took(time.perf_counter() - wall, time.process_time() - cpu)


def like_p3(nodes: int, hours: float, model: str, often: float = 1.0) -> Scenario:
    """Return a scenario with AWS p3's losses (0.61 per node-hour, 2.1 at once) times `often`."""
    sizes = ((1, 5.0), (2, 2.0), (3, 2.0), (6, 1.0))
    market = Market(
        nodes=nodes,
        mtbf_s=3600 * 2.1 / (0.61 * nodes * often),
        bulk=tuple((size, weight) for size, weight in sizes if size <= nodes),
        repair_s=1800.0,
    )
    return Scenario(market=market, duration_s=hours * 3600, model=model)


def every_policy(model: str, hours: float) -> list[Row]:
    scenario = like_p3(NODES, hours, model)
    world = scenario.world()
    rows = []
    for seed, when in ((0, "first"), (1, "next seed")):
        trace = scenario.trace_of(seed)
        parts = {name: timed(partial(run_one, world, trace, name, seed)) for name in EVERY}
        what = f"{hours:g} h x {NODES} nodes, {len(EVERY)} policies, {model}, {when}"
        rows.append(Row(what, sum(p.wall_s for p in parts.values()), "s", 2.0, "lower"))
        rows.append(
            Row(f"{what}: processor", sum(p.cpu_s for p in parts.values()), "s", None, "lower")
        )
        rows.append(Row(f"{what}: ours, processor", parts["ours"].cpu_s, "s", None, "lower"))
    return rows


def month(days: float) -> list[Row]:
    scenario = Scenario(
        trace=str(ROOT / "traces/month-1000.csv"), last_s=days * DAY_S, model="gpt3-6.7b"
    )
    world, trace = scenario.world(), scenario.trace_of(0)
    took = timed(partial(run_one, world, trace, "ours", 0))
    what = f"{days:g} days x 1,000 nodes, {len(trace.events) - 1000} events, ours"
    return [
        Row(what, took.wall_s, "s", 60.0, "lower"),
        Row(f"{what}: processor", took.cpu_s, "s", None, "lower"),
    ]


def growth(sizes: tuple[int, ...], hours: float) -> list[Row]:
    """Return the time per event: more nodes at equal losses, and up to 16 times the losses."""
    by_nodes = [
        an_event(like_p3(nodes, hours * NODES / nodes, "gpt3-6.7b"), nodes) for nodes in sizes
    ]
    by_events = [
        an_event(like_p3(NODES, hours, "gpt3-6.7b", often), NODES) for often in (0.25, 4.0)
    ]
    return [*by_nodes, *by_events]


def an_event(scenario: Scenario, nodes: int) -> Row:
    """Return milliseconds of processor time per event with our policy, without cached plans."""
    clear_caches()
    world, trace = scenario.world(), scenario.trace_of(0)
    took = timed(partial(run_one, world, trace, "ours", 0))
    events = max(1, len(trace.events) - nodes)
    what = f"ours, {nodes} nodes, {events} events: time per event"
    return Row(what, 1000 * took.cpu_s / events, "ms", None, "lower")


def imports(times: int) -> list[Row]:
    """Return the time to import the simulator and its command line; neither may load torch."""
    code = "import sys, elastic_sim.cli.cli; sys.exit('torch' in sys.modules)"
    found = []
    for _ in range(times):
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
        found.append(time.perf_counter() - began)
    return [
        Row(
            "import elastic_sim.cli.cli, without torch",
            statistics.median(found),
            "s",
            None,
            "lower",
        )
    ]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.simulator")
    parser.add_argument("--quick", action="store_true", help="an hour, a day; writes nothing")
    args = parser.parse_args()
    rows = [
        *every_policy("bert-large", 1.0 if args.quick else HOURS),
        *([] if args.quick else every_policy("gpt3-6.7b", HOURS)),
        *month(1.0 if args.quick else 30.0),
        *growth((32, 128) if args.quick else (32, 128, 512), 1.0 if args.quick else 6.0),
        *imports(1 if args.quick else 5),
    ]
    for row in rows:
        print(f"{row.metric}: {row.value:.4g} {row.unit}")
    if not args.quick:
        save("simulator", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
