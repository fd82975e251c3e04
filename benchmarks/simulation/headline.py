"""Compare this runtime with models of its rivals under one physics.

    python -m benchmarks.simulation.headline [--data DIR] [--keep DIR] [--seeds 5] [--quick]

Each type of node has two sweeps (`elastic-sim sweep`). The first replays the recorded spot traces
of AWS p3 and g4dn. They are not scaled, and losses are spread over the minute of their record. The
second has 30 nodes for 12 hours with a loss every 10 min, 30 min, 1 h, 3 h and 6 h on average; a
lost node is replaced after 20 minutes on average. Oobleck's five models run on A40 nodes as in its
artifact; Llama-3 runs on current nodes with enough memory. A third sweep of p3 runs only our
policy, with AWS's notice of two minutes before each loss. Most models of rivals do not use notices.

The benchmark writes two files. The tables in docs/simulator/headline.md compare our policy with the
best rival of each scenario, seed by seed. benchmarks/results/headline-policies.csv has all
policies. Goodput is a fraction of the samples of a feasible oracle. `--quick` runs one model
briefly, without recorded traces, and writes nothing.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from elastic_sim.replay.replay import Mean, mean_of
from elastic_sim.reproduce.tables import data_directory
from elastic_sim.steps.policies import ORACLES, RIVALS

from benchmarks.results import Row, save

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/simulator/headline.md"
CSV = ROOT / "benchmarks/results/headline-policies.csv"
"""Goodput of every policy in every scenario."""
BEGIN, END = "<!-- tables -->", "<!-- /tables -->"
MODELS = {
    "a40": ("bert-large", "gpt2", "gpt3-medium", "gpt3-2.7b", "gpt3-6.7b"),
    "g6e.12xlarge": ("llama3-8b",),
    "p5.48xlarge": ("llama3-70b", "llama3-405b"),
}
"""Models by type of node."""
RATES = ("10m", "30m", "1h", "3h", "6h")
NAMES = tuple(kind.about.name for kind in RIVALS)
EVERY = ("ours", *NAMES, *(kind.about.name for kind in ORACLES))
WANTED_P3 = 0.95
NOTICE = "120s"
"""Time from AWS's notice to the loss of a spot node."""
OURS_ALONE = ("ours",)


@dataclass(frozen=True)
class ScenarioResult:
    """Results of one scenario: goodput of each policy, and ours compared with the best rival."""

    trace: str
    model: str
    goodput: dict[str, Mean]
    best: str
    ahead: Mean
    """Ratio of our samples to those of the best rival, seed by seed."""

    @property
    def verdict(self) -> str:
        low, high = self.ahead.value - self.ahead.margin, self.ahead.value + self.ahead.margin
        return "ahead" if low > 1 else "behind" if high < 1 else "undecided"


def sweep(out: Path, *words: str, policies: Sequence[str] = EVERY) -> dict[str, Any]:
    """Run or continue a sweep in the folder `out`. Return its sweep.json, which has the oracle."""
    subprocess.run(
        [
            sys.executable,
            "-m",
            "elastic_sim.cli.cli",
            "sweep",
            str(out),
            "--policy",
            ",".join(policies),
            *words,
        ],
        check=True,
        cwd=ROOT,
        stdout=subprocess.DEVNULL,
    )
    found: dict[str, Any] = json.loads((out / "sweep.json").read_text())
    return found


def places(found: dict[str, Any]) -> list[ScenarioResult]:
    samples: dict[tuple[str, str, int], int] = {}
    for cell in found["cells"]:
        definition = cell["cell"]
        scenario = json.dumps(definition["scenario"], sort_keys=True)
        samples[scenario, definition["policy"], definition["seed"]] = cell["result"]["samples"]
    rows = []
    for told in found["scenarios"]:
        policies = told["policies"]
        goodput = {
            name: Mean(one["goodput"], one["margins"]["goodput"] or 0.0)
            for name, one in policies.items()
        }
        best = max(NAMES, key=lambda name: goodput[name].value)
        scenario = json.dumps(told["scenario"], sort_keys=True)
        pairs = [
            (samples[scenario, "ours", s], samples[scenario, best, s])
            for s in policies["ours"]["seeds"]
        ]
        ahead = (
            mean_of([a / b for a, b in pairs]) if all(b for _, b in pairs) else Mean(float("inf"))
        )
        rows.append(ScenarioResult(told["trace"], told["model"], goodput, best, ahead))
    return rows


def table(rows: Sequence[ScenarioResult]) -> str:
    """Return a Markdown table: goodput of ours and of the best rival in percent; their ratio."""
    lines = [
        "| model | trace | ours | best rival | ours / rival |",
        "| --- | --- | --- | --- | --- |",
    ]
    for row in rows:
        ours, rival = (_cell(row.goodput[name]) for name in ("ours", row.best))
        ratio = f"{row.ahead.value:.3f} ± {row.ahead.margin:.3f}, {row.verdict}"
        lines.append(f"| {row.model} | {row.trace} | {ours} | **{row.best}** {rival} | {ratio} |")
    return "\n".join(lines)


def all_goodputs(rows: Sequence[ScenarioResult]) -> str:
    """Return CSV: goodput of each scenario and policy as a fraction, half of its 95 % interval."""
    lines = ["model,trace,policy,goodput,margin"]
    for row in rows:
        for name in ("ours", *NAMES):
            mean = row.goodput[name]
            lines.append(f"{row.model},{row.trace},{name},{mean.value:.3f},{mean.margin:.3f}")
    return "\n".join(lines) + "\n"


def _cell(mean: Mean) -> str:
    """Format a mean in percent, with half of its 95 % interval unless that rounds to 0."""
    margin = f" ± {100 * mean.margin:.1f}" if mean.margin >= 0.0005 else ""
    return f"{100 * mean.value:.1f}{margin}"


def noticed(found: dict[str, Any]) -> dict[str, Mean]:
    """Return our goodput by model from a sweep with notices."""
    ours = {told["model"]: told["policies"]["ours"] for told in found["scenarios"]}
    return {
        model: Mean(one["goodput"], one["margins"]["goodput"] or 0.0) for model, one in ours.items()
    }


def notice_table(found: Sequence[ScenarioResult], told: Mapping[str, Mean]) -> str:
    """Return a Markdown table: ours on p3 without and with notices, in percent of the oracle."""
    lines = ["| model | no notice | two minutes' notice |", "| --- | --- | --- |"]
    for one in found:
        if one.trace.startswith("p3"):
            cells = (one.model, _cell(one.goodput["ours"]), _cell(told[one.model]))
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def rows_of(found: Sequence[ScenarioResult], told: Mapping[str, Mean]) -> list[Row]:
    rows = []
    for one in found:
        target = WANTED_P3 if one.trace.startswith("p3") else None
        where = f"{one.model}, {one.trace}"
        rows.append(
            Row(f"{where}: ours over the oracle", one.goodput["ours"].value, "", target, "higher")
        )
        rows.append(Row(f"{where}: ours over {one.best}", one.ahead.value, "x", 1.0, "higher"))
    for model, mean in told.items():
        what = f"{model}, p3-trace.csv with two minutes' notice: ours over the oracle"
        rows.append(Row(what, mean.value, "", None, "higher"))
    verdicts = [one.verdict for one in found]
    rows += [
        Row(
            f"scenarios in which ours is {word}",
            verdicts.count(word),
            f"of {len(found)}",
            None,
            "higher",
        )
        for word in ("ahead", "undecided", "behind")
    ]
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.headline")
    parser.add_argument(
        "--data", type=Path, help="recorded traces (default: ELASTIC_DATA, or ../shared/data)"
    )
    parser.add_argument(
        "--keep", type=Path, help="folder of the sweeps; existing ones are continued"
    )
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if args.quick:
            options = (
                "--mtbf 10m --nodes 6 --duration 1h --seeds 2 --model bert-large --microbatches 16 "
                "--workers 1"
            )
            found = places(sweep(folder / "rates", *options.split()))
            print(table(found))
            return 0
        traces = data_directory(args.data) / "traces/bamboo"
        markets = ("p3-trace.csv", "g4dn-trace.csv")
        recorded = [word for name in markets for word in ("--trace", str(traces / name))]
        made = {
            "recorded": [*recorded, "--physics", "spread_s=60"],
            "rates": ["--mtbf", ",".join(RATES), "--nodes", "30"],
        }
        notices = [
            "--trace",
            str(traces / markets[0]),
            "--physics",
            "spread_s=60",
            "--notice",
            NOTICE,
        ]
        found, told = list[ScenarioResult](), dict[str, Mean]()
        for kind, models in MODELS.items():
            common = ("--nodes-of", kind, "--model", ",".join(models), "--seeds", str(args.seeds))
            for name, words in made.items():
                found += places(sweep(folder / f"{name}-{kind}", *words, *common))
            told |= noticed(
                sweep(folder / f"noticed-{kind}", *notices, *common, policies=OURS_ALONE)
            )
    before, _, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(
        f"{before}{BEGIN}\n{table(found)}\n\n{notice_table(found, told)}\n{END}"
        f"{rest.partition(END)[2]}"
    )
    CSV.write_text(all_goodputs(found))
    save("headline", rows_of(found, told))
    return 0


if __name__ == "__main__":
    sys.exit(main())
