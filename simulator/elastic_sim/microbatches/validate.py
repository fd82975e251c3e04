"""DOC"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from pathlib import Path
from statistics import fmean, median
from typing import Any

from elastic_sim.microbatches.physics import Physics, write
from elastic_sim.microbatches.recorded_run import PHASES, Recorded, Story, pairs, read, tell
from elastic_sim.microbatches.world import simulate

ROUNDS = 2
PROBE_S = 0.002
"""Added to every message between stages, to see what that does to a step."""
RecoveryFigure = Callable[[dict[str, Any]], float]


def predicted(run: Recorded, physics: Physics, seed: int = 0) -> Story:
    """What the simulator says of a run."""
    outcome = simulate(run.trace, run.profile, run.job, run.physics(physics), seed, run.anchored)
    return tell(outcome.events)


def calibrate(runs: Sequence[Recorded]) -> Physics:
    """Measure `runs`, taken together. What does not occur in them keeps its default."""
    physics = Physics(hop_s=0.0, step_s=0.0, resume_s=0.0)
    measured = [run.story for run in runs]
    if took := _all(measured, lambda story: story.planning_s(joins=False)):
        physics = replace(physics, plan_s=max(0.0, median(took)))
    if took := _all(measured, lambda story: story.planning_s(joins=True)):
        physics = replace(physics, replan_s=max(0.0, median(took)))
    if took := _all(measured, lambda story: story.starts):
        physics = replace(physics, spawn_s=median(took))
    for _ in range(ROUNDS):
        physics = _steps(runs, physics)
        simulated = [predicted(run, physics) for run in runs]
        physics = _recoveries(measured, simulated, physics)
    return physics


def _all(stories: Iterable[Story], figures: Callable[[Story], Sequence[float]]) -> list[float]:
    return [figure for story in stories for figure in figures(story)]


def _steps(runs: Sequence[Recorded], physics: Physics) -> Physics:
    """What a step, and a message, take besides: least squares over undisturbed steps, neither below zero."""
    from scipy.optimize import nnls

    bare = replace(physics, hop_s=0.0, step_s=0.0)
    rows, gaps = list[tuple[float, float]](), list[float]()
    for run in runs:
        base = dict(predicted(run, bare).undisturbed())
        probed = dict(predicted(run, replace(bare, hop_s=PROBE_S)).undisturbed())
        for step, seconds in run.story.undisturbed():
            if step in base and step in probed:
                rows.append((1.0, max(0.0, probed[step] - base[step]) / PROBE_S))
                gaps.append(seconds - base[step])
    if not rows:
        return physics
    kept = _without_outliers(rows, gaps)
    (step_s, hop_s), _ = nnls([row for row, _ in kept], [gap for _, gap in kept])
    return replace(physics, step_s=float(step_s), hop_s=float(hop_s))


def _without_outliers(
    rows: Sequence[tuple[float, float]], gaps: Sequence[float]
) -> list[tuple[tuple[float, float], float]]:
    """Without those further from the median than three times the median distance."""
    middle = median(gaps)
    spread = median(abs(gap - middle) for gap in gaps)
    found = zip(rows, gaps, strict=True)
    return [(row, gap) for row, gap in found if abs(gap - middle) <= 3 * spread + 1e-9]


def _recoveries(measured: Sequence[Story], simulated: Sequence[Story], physics: Physics) -> Physics:
    both = [
        pair for one, other in zip(measured, simulated, strict=True) for pair in pairs(one, other)
    ]
    lost = [pair for pair in both if not pair[0]["planned"]]
    planned = [pair for pair in both if pair[0]["planned"]]
    apart, together = lost or planned, planned or lost
    late = _gap(apart, lambda r: r["rebuild_s"])
    found = {
        "closed_s": _gap(lost, lambda r: r["detect_s"]),
        "leave_s": _gap(lost, lambda r: r["halt_s"]),
        "stop_s": _gap(planned, lambda r: r["halt_s"] + r["pause_s"] - r["total_s"]),
        "install_s": _gap(both, lambda r: r["transfer_s"]),
        "group_s": late,
        "pair_s": _pair_s(together, late),
        "resume_s": _gap(both, _rest),
        "prefetch_s": _middle(_all(measured, lambda story: story.prefetches))
        - _middle(_all(simulated, lambda story: story.prefetches)),
    }
    changed = {name: max(0.0, getattr(physics, name) + gap) for name, gap in found.items()}
    return replace(physics, **changed)


def _pair_s(together: Sequence[tuple[dict[str, Any], dict[str, Any]]], late_s: float) -> float:
    """What the rebuild phases of nodes that all meet at one moment lack besides `late_s`, for each two of them."""
    took = [
        (one["rebuild_s"] - other["rebuild_s"] - late_s) / comb(one["nodes_after"], 2)
        for one, other in together
        if one["nodes_after"] > 1
    ]
    return median(took) if took else 0.0


def _rest(recovery: dict[str, Any]) -> float:
    """Of the total, what is in no phase."""
    phases = ("detect_s", "decide_s", "transfer_s", "rebuild_s")
    return float(recovery["total_s"]) - sum(float(recovery[phase]) for phase in phases)


def _gap(both: Sequence[tuple[dict[str, Any], dict[str, Any]]], figure: RecoveryFigure) -> float:
    return median(figure(one) - figure(other) for one, other in both) if both else 0.0


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0


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
        figures.append(
            Figure("start of a later node, median", "s", median(starts), physics.spawn_s)
        )
    for what, chosen in (("losses", False), ("planned changes", True)):
        names = PHASES if not chosen else (*PHASES[1:], "pause_s")
        for name in names:
            figures += _phase(measured, stories, what, chosen, name)
    figures += [one for name in PHASES for one in _phase(measured, stories, "all", None, name)]
    both = [
        pair for one, other in zip(measured, stories[0], strict=True) for pair in pairs(one, other)
    ]
    real, simulated = (
        sum(len(story.recoveries) for story in told) for told in (measured, stories[0])
    )
    return Report(tuple(figures), tuple(both), (real - len(both), simulated - len(both)))


def _throughput(stories: Sequence[Story], microbatches: Sequence[int]) -> float:
    """Samples a second of all runs, one after the other."""
    done = sum(
        (len(story.steps) - 1) * m
        for story, m in zip(stories, microbatches, strict=True)
        if story.steps
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
    folds: tuple[tuple[str, Callable[[list[float]], float]], ...] = (
        ("median", median),
        ("mean", fmean),
    )
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
