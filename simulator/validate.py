"""A real run against its simulation: throughput and each phase of its recoveries, measured and predicted.

The constants of the machine must come from another run (`--calibrate` there, `--physics` here): nothing is fitted on
the run that is compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from simulator.detail.calibrate import calibrate, predicted
from simulator.detail.physics import Physics, write
from simulator.detail.recorded import Recorded, read
from simulator.detail.story import PHASES, Story, pairs

SEEDS = 5
"""Simulations whose middle is the prediction."""
NAMES = {"total_s": "total", "pause_s": "pause"}


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of both."""

    name: str
    unit: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured; 1 where both are 0."""
        if self.measured:
            return self.predicted / self.measured
        return 1.0 if not self.predicted else float("inf")


@dataclass(frozen=True, slots=True)
class Report:
    figures: tuple[Figure, ...]
    recoveries: tuple[tuple[dict[str, Any], dict[str, Any]], ...]
    """(measured, predicted) of each recovery that both have."""
    unmatched: tuple[int, int]
    """Recoveries that only one of them has: of the run, of its simulation."""

    def figure(self, name: str) -> Figure:
        return next(one for one in self.figures if one.name == name)


def compare(run: Recorded, physics: Physics) -> Report:
    """Simulate `run` with several seeds and compare. Medians over the seeds."""
    stories = [predicted(run, physics, seed) for seed in range(SEEDS)]
    rate = Figure(
        "throughput",
        "samples/s",
        run.story.steps_per_s * run.job.microbatches,
        median(story.steps_per_s for story in stories) * run.job.microbatches,
    )
    figures = [rate]
    if run.story.starts:
        figures.append(
            Figure("start of a later node, median", "s", median(run.story.starts), physics.spawn_s)
        )
    for what, chosen in (("losses", False), ("planned changes", True)):
        names = PHASES if not chosen else (*PHASES[1:], "pause_s")
        for name in names:
            figures += _phase(run.story, stories, what, chosen, name)
    figures += [one for name in PHASES for one in _phase(run.story, stories, "all", None, name)]
    both = pairs(run.story, stories[0])
    left = len(run.story.recoveries) - len(both), len(stories[0].recoveries) - len(both)
    return Report(tuple(figures), tuple(both), left)


def _phase(
    measured: Story, stories: Sequence[Story], what: str, planned: bool | None, name: str
) -> list[Figure]:
    def over(story: Story, fold: Callable[[list[float]], float]) -> float:
        found = [float(r[name]) for r in story.recoveries if planned is None or bool(r["planned"]) is planned]
        return fold(found) if found else 0.0

    if not any(planned is None or bool(r["planned"]) is planned for r in measured.recoveries):
        return []
    folds: tuple[tuple[str, Callable[[list[float]], float]], ...] = (("median", median), ("sum", sum))
    short = name.removesuffix("_s")
    return [
        Figure(
            f"{what}: {short}, {text}",
            "s",
            over(measured, fold),
            median(over(story, fold) for story in stories),
        )
        for text, fold in folds
    ]


def told(report: Report) -> str:
    """The report as text."""
    width = max(len(one.name) for one in report.figures)
    lines = [f"{'':<{width}}  {'measured':>10} {'predicted':>10}  ratio"]
    lines += [
        f"{f.name:<{width}}  {f.measured:>10.4g} {f.predicted:>10.4g}  {f.ratio:.3f}  {f.unit}"
        for f in report.figures
    ]
    lines += ["", "each recovery (measured / predicted, seconds)"]
    for one, other in report.recoveries:
        phases = "  ".join(
            f"{n.removesuffix('_s')} {one[n]:.3f}/{other[n]:.3f}" for n in (*PHASES, "pause_s")
        )
        lost = f"micro-batches lost {one['microbatches_lost']}/{other['microbatches_lost']}"
        lines.append(f"step {one['step']}: {one['cause']}: {phases}  {lost}")
    if any(report.unmatched):
        real, simulated = report.unmatched
        lines.append(f"without a counterpart: {real} of the run, {simulated} of the simulation")
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    return {
        "figures": [{**asdict(one), "ratio": one.ratio} for one in report.figures],
        "recoveries": [{"measured": one, "predicted": other} for one, other in report.recoveries],
        "unmatched": {"run": report.unmatched[0], "simulation": report.unmatched[1]},
    }


def measure(run_dir: Path, out: Path) -> Physics:
    """Write what `run_dir` tells of the machine."""
    found = calibrate(read(run_dir))
    write(found, out)
    return found


def validate(run_dir: Path, physics: Physics) -> Report:
    return compare(read(run_dir), physics)
