"""Real runs against their simulation: throughput and each phase of its recoveries, measured and predicted.

The constants of the machine must come from other runs (`--calibrate` there, `--physics` here): nothing is fitted on
the runs that are compared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from elastic_sim.microbatches.calibrate import calibrate, predicted
from elastic_sim.microbatches.physics import Physics, write
from elastic_sim.microbatches.recorded import Recorded, read
from elastic_sim.microbatches.story import PHASES, Story, pairs

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
    """Recoveries that only one of them has: of the runs, of their simulation."""

    def figure(self, name: str) -> Figure:
        return next(one for one in self.figures if one.name == name)


def compare(runs: Sequence[Recorded], physics: Physics) -> Report:
    """Simulate `runs` with several seeds and compare, all runs taken together. Medians over the seeds."""
    measured = [run.story for run in runs]
    stories = [[predicted(run, physics, seed) for run in runs] for seed in range(SEEDS)]
    batches = [run.job.microbatches for run in runs]
    rate = median(_throughput(told, batches) for told in stories)
    figures = [Figure("throughput", "samples/s", _throughput(measured, batches), rate)]
    if starts := [start for story in measured for start in story.starts]:
        figures.append(Figure("start of a later node, median", "s", median(starts), physics.spawn_s))
    for what, chosen in (("losses", False), ("planned changes", True)):
        names = PHASES if not chosen else (*PHASES[1:], "pause_s")
        for name in names:
            figures += _phase(measured, stories, what, chosen, name)
    figures += [one for name in PHASES for one in _phase(measured, stories, "all", None, name)]
    both = [pair for one, other in zip(measured, stories[0], strict=True) for pair in pairs(one, other)]
    real, simulated = (sum(len(story.recoveries) for story in told) for told in (measured, stories[0]))
    return Report(tuple(figures), tuple(both), (real - len(both), simulated - len(both)))


def _throughput(stories: Sequence[Story], microbatches: Sequence[int]) -> float:
    """Samples a second of all runs, one after the other."""
    done = sum(
        (len(story.steps) - 1) * m for story, m in zip(stories, microbatches, strict=True) if story.steps
    )
    seconds = sum(story.seconds for story in stories)
    return done / seconds if seconds > 0 else 0.0


def _phase(
    measured: Sequence[Story],
    stories: Sequence[Sequence[Story]],
    what: str,
    planned: bool | None,
    name: str,
) -> list[Figure]:
    def of(told: Sequence[Story]) -> list[dict[str, Any]]:
        found = [r for story in told for r in story.recoveries]
        return [r for r in found if planned is None or bool(r["planned"]) is planned]

    def over(told: Sequence[Story], fold: Callable[[list[float]], float]) -> float:
        found = [float(recovery[name]) for recovery in of(told)]
        return fold(found) if found else 0.0

    if not of(measured):
        return []
    folds: tuple[tuple[str, Callable[[list[float]], float]], ...] = (("median", median), ("mean", fmean))
    short = name.removesuffix("_s")
    return [
        Figure(
            f"{what}: {short}, {text}",
            "s",
            over(measured, fold),
            median(over(told, fold) for told in stories),
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
        lines.append(f"without a counterpart: {real} of the runs, {simulated} of the simulation")
    return "\n".join(lines)


def as_json(report: Report) -> dict[str, Any]:
    return {
        "figures": [{**asdict(one), "ratio": one.ratio} for one in report.figures],
        "recoveries": [{"measured": one, "predicted": other} for one, other in report.recoveries],
        "unmatched": {"runs": report.unmatched[0], "simulation": report.unmatched[1]},
    }


def measure(run_dirs: Sequence[Path], out: Path) -> Physics:
    """Write what runs tell of the machine."""
    found = calibrate([read(run_dir) for run_dir in run_dirs])
    write(found, out)
    return found


def validate(run_dirs: Sequence[Path], physics: Physics) -> Report:
    return compare([read(run_dir) for run_dir in run_dirs], physics)
