"""Compare the backup schemes that `--backup auto` chooses with every other pair.

    python -m benchmarks.planning.backup_choice [--steps 6] [--cells 100Mbit/1/short ...] [--quick]

Four nodes run one or two pipelines on links of 100 Mbit/s to 100 Gbit/s (`--link`). A micro-batch
takes 15 ms or 150 ms per stage: workers wait these times instead of computing (`--emulate`), but
they copy, send and reduce real tensors.

The measured value of a pair is its median step time. The expected step time includes losses:
measured seconds * (1 + losses per second * seconds per loss). The cost model gives the seconds per
loss under the pair. The loss rate is that of AWS P3 spot instances (0.61 losses per node-hour). The
result is the expected step time of the pair that `auto` takes over that of the best pair.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from tqdm import tqdm

from benchmarks.emulated import equal_layers, run, shaped
from benchmarks.results import DIRECTORY, Row, load, save
from elastic.domain.types import JobSpec, NodeInfo, Plan
from elastic.planning.backup.backup_cost import Estimate, Weighing, choose_pair, estimates
from elastic.planning.cost.profile import Profile
from elastic.planning.search.search import PlanRequest, make_plan

NODES, LAYERS, MICROBATCHES = 4, 8, 8
PARAMETERS = 100_000
"""Parameters per layer. Each has 4 bytes, 4 of gradient and 8 of optimizer state."""
LINKS = {"100Mbit": 12.5e6, "1Gbit": 125e6, "10Gbit": 1.25e9, "100Gbit": 12.5e9}
STAGE_S = {"short": 0.015, "long": 0.150}
"""Seconds per micro-batch of a stage of two layers, forward and backward."""
HAZARD_PER_S = 0.61 / 3600
"""Losses per node-second on AWS P3 spot instances (trace of Bamboo, Thorpe et al., NSDI 2023)."""
SKIP = 2
TARGET = 3.0
TABLE = DIRECTORY / "backup-choice.csv"


@dataclass(frozen=True)
class Cell:
    """A cell of the table: one link, number of pipelines and length of micro-batches."""

    link: str
    pipelines: int
    length: str

    def __str__(self) -> str:
        return f"{self.link}/{self.pipelines}/{self.length}"

    def profile(self) -> Profile:
        """Return the planner's input: the emulated times and the shaped link."""
        return equal_layers(
            LAYERS, PARAMETERS, STAGE_S[self.length] / (LAYERS // NODES), LINKS[self.link]
        )

    def by(self) -> Weighing:
        return Weighing(profile=self.profile(), hazard_per_s=HAZARD_PER_S)

    def plan(self) -> Plan:
        """Return the plan that `auto` chooses."""
        profile = self.profile()
        request = PlanRequest(
            spec=JobSpec(profile.layers, MICROBATCHES, 1),
            nodes=nodes(),
            epoch=1,
            shape=str(self.pipelines),
            schedule="1f1b",
            profile=profile,
            weighing=self.by(),
        )
        return make_plan(request)


CELLS = [Cell(link, k, length) for link in LINKS for k in (1, 2) for length in STAGE_S]


def nodes() -> tuple[NodeInfo, ...]:
    return tuple(NodeInfo(f"node{i}", f"i{i}", "", device="a") for i in range(NODES))


def measure(cell: Cell, pair: str, steps: int, folder: Path) -> float:
    """Return the median seconds of a step under a pair of schemes."""
    flags = [
        "--nnodes",
        str(NODES),
        "--pipelines",
        str(cell.pipelines),
        "--backup",
        pair,
        *shaped(cell.link),
    ]
    summary = run(cell.profile(), flags, MICROBATCHES, steps + SKIP, folder)
    step_s: list[float] = summary["step_s"]
    return median(step_s[SKIP:])


@dataclass(frozen=True)
class Outcome:
    """Results of one pair of schemes in one cell."""

    estimate: Estimate
    step_s: float

    @property
    def expected_s(self) -> float:
        """Return the measured step time plus the expected time of losses according to the model."""
        e, hazard = self.estimate, HAZARD_PER_S * NODES
        return self.step_s * (
            1 + hazard * (Weighing(profile=CELLS[0].profile()).pause_s + e.lost_s)
        )


def compare(cell: Cell, steps: int, folder: Path, bar: tqdm[Any]) -> tuple[float, list[str]]:
    """Return (expected slowdown of auto's pair against the best in percent, lines of the table)."""
    plan = cell.plan()
    options = estimates(plan, cell.by(), nodes())
    chosen, _ = choose_pair(options)
    found = []
    for option in options:
        bar.set_description(f"{cell} {option.pair}")
        found.append(
            Outcome(
                option, measure(cell, option.pair, steps, folder / option.pair.replace(":", "-"))
            )
        )
        bar.update()
    best = min(found, key=lambda o: o.expected_s)
    mine = next(o for o in found if o.estimate.pair == chosen.pair)
    lines = [
        f"{cell.link},{cell.pipelines},{cell.length},{o.estimate.pair},{o.step_s:.5f},{o.estimate.exposed_s:.5f},"
        f"{o.estimate.sent_bytes:.0f},{o.estimate.lost_s:.4f},{o.expected_s:.5f},"
        f"{'auto' if o is mine else ''}{' best' if o is best else ''}"
        for o in found
    ]
    return (mine.expected_s / best.expected_s - 1) * 100, lines


def merged(lines: Sequence[str], rows: Sequence[Row]) -> tuple[list[str], list[Row]]:
    """Return the new rows together with earlier rows of cells that were not measured again."""
    again = {row.metric for row in rows}
    old = [
        row
        for row in load("backup_choice")
        if "worst of" not in row.metric and row.metric not in again
    ]
    measured = {tuple(line.split(",")[:3]) for line in lines[1:]}
    kept = [
        line
        for line in TABLE.read_text().splitlines()[1:]
        if tuple(line.split(",")[:3]) not in measured
    ]
    return [*lines, *kept], [*rows, *old]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.planning.backup_choice")
    parser.add_argument(
        "--steps", type=int, default=6, help="of each run, besides two that warm up"
    )
    parser.add_argument(
        "--cells",
        nargs="+",
        choices=[str(cell) for cell in CELLS],
        default=None,
        help="others stay as they are",
    )
    parser.add_argument("--quick", action="store_true", help="one cell, two steps; writes nothing")
    args = parser.parse_args()
    wanted = [cell for cell in CELLS if args.cells is None or str(cell) in args.cells]
    if args.quick:
        wanted, args.steps = wanted[:1], 2
    lines = [
        "link,pipelines,micro-batches,pair,step_s,predicted_exposed_s,sent_bytes,lost_s,expected_s,"
    ]
    rows = []
    total = sum(len(estimates(cell.plan(), cell.by(), nodes())) for cell in wanted)
    with tempfile.TemporaryDirectory() as scratch, tqdm(total=total, disable=None) as bar:
        for cell in wanted:
            over, table = compare(cell, args.steps, Path(scratch) / str(cell), bar)
            lines += table
            print("\n".join(table), flush=True)
            rows.append(Row(f"auto over the best pair, {cell}", over, "%", TARGET, "lower"))
    if args.quick:
        return 0
    if args.cells:
        lines, rows = merged(lines, rows)
    worst = max(row.value for row in rows)
    rows.insert(
        0, Row(f"auto over the best pair, worst of {len(rows)}", worst, "%", TARGET, "lower")
    )
    TABLE.write_text("\n".join(lines) + "\n")
    print(f"written to {save('backup_choice', rows)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
