"""Comparison of real runs with their simulation, and calibration of a machine's delays.

`validate` compares throughput and the phases of recoveries. Its physics must come from other runs
(`--calibrate` there, `--physics` here), so that nothing is fitted on the compared runs.

`calibrate` takes some delays directly from events (planning, starting). For the rest it simulates
the runs and changes each constant by the median difference between measured and simulated times;
twice, because the constants affect each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from math import comb
from pathlib import Path
from statistics import fmean, median
from typing import Any

from elastic_sim.microbatches.physics import MicrobatchPhysics
from elastic_sim.microbatches.recorded_run import (
    PHASES,
    LogEvent,
    RecordedRun,
    RunHistory,
    history_of,
    matched_recoveries,
    read,
)
from elastic_sim.microbatches.world import simulate

ROUNDS = 2
PROBE_S = 0.002
"""Delay added to each message between stages, to measure its effect on a step."""
SEEDS = 5
"""Simulations per prediction, which is their median."""
RecoveryPairs = Sequence[tuple[LogEvent, LogEvent]]
"""(measured, simulated) recoveries."""


def simulated(run: RecordedRun, physics: MicrobatchPhysics, seed: int = 0) -> RunHistory:
    """Return the history of the simulated run. Workers of `--emulate` are on CPUs."""
    given = run.physics(physics)
    found = simulate(run.trace, run.spec, run.policy, given, seed, run.anchored, accelerated=False)
    return history_of(found.events)


def calibrate(run_dirs: Sequence[Path]) -> MicrobatchPhysics:
    """Return the delays of the machine of these runs. Delays that do not occur keep their defaults.

    Raises FieldError.
    """
    runs = [read(run_dir) for run_dir in run_dirs]
    physics = MicrobatchPhysics(hop_s=0.0, step_s=0.0, resume_s=0.0)
    measured = [run.history for run in runs]
    if took := _all(measured, lambda history: history.planning_s(joins=False)):
        physics = replace(physics, plan_s=max(0.0, median(took)))
    if took := _all(measured, lambda history: history.planning_s(joins=True)):
        physics = replace(physics, replan_s=max(0.0, median(took)))
    if took := _all(measured, lambda history: history.startups):
        physics = replace(physics, spawn_s=median(took))
    for _ in range(ROUNDS):
        physics = _fit_steps(runs, physics)
        physics = _fit_recoveries(measured, [simulated(run, physics) for run in runs], physics)
    return physics


def _all(
    histories: Iterable[RunHistory], values: Callable[[RunHistory], Sequence[float]]
) -> list[float]:
    return [value for history in histories for value in values(history)]


def _fit_steps(runs: Sequence[RecordedRun], physics: MicrobatchPhysics) -> MicrobatchPhysics:
    """Fit `step_s` and `hop_s` by non-negative least squares over undisturbed steps."""
    from scipy.optimize import nnls

    bare = replace(physics, hop_s=0.0, step_s=0.0)
    rows, gaps = list[tuple[float, float]](), list[float]()
    for run in runs:
        base = dict(simulated(run, bare).undisturbed())
        probed = dict(simulated(run, replace(bare, hop_s=PROBE_S)).undisturbed())
        for step, seconds in run.history.undisturbed():
            if step in base and step in probed:
                rows.append((1.0, max(0.0, probed[step] - base[step]) / PROBE_S))
                gaps.append(seconds - base[step])
    if not rows:
        return physics
    middle = median(gaps)
    limit = 3 * median(abs(gap - middle) for gap in gaps) + 1e-9
    both = zip(rows, gaps, strict=True)
    kept = [(row, gap) for row, gap in both if abs(gap - middle) <= limit]
    (step_s, hop_s), _ = nnls([row for row, _ in kept], [gap for _, gap in kept])
    return replace(physics, step_s=float(step_s), hop_s=float(hop_s))


def _fit_recoveries(
    measured: Sequence[RunHistory], simulations: Sequence[RunHistory], physics: MicrobatchPhysics
) -> MicrobatchPhysics:
    """Change each delay of a recovery by its median error."""
    both = _pairs(measured, simulations)
    lost = [pair for pair in both if not pair[0]["planned"]]
    planned = [pair for pair in both if pair[0]["planned"]]
    group_s = _median_gap(lost or planned, lambda r: r["rebuild_s"])
    measured_prefetch_s, simulated_prefetch_s = (
        _median(_all(side, lambda history: history.prefetches)) for side in (measured, simulations)
    )
    gaps = {
        "closed_s": _median_gap(lost, lambda r: r["detect_s"]),
        "leave_s": _median_gap(lost, lambda r: r["halt_s"]),
        "stop_s": _median_gap(planned, lambda r: r["halt_s"] + r["pause_s"] - r["total_s"]),
        "install_s": _median_gap(both, lambda r: r["transfer_s"]),
        "group_s": group_s,
        "pair_s": _pair_gap(planned or lost, group_s),
        "resume_s": _median_gap(both, _outside_phases_s),
        "prefetch_s": measured_prefetch_s - simulated_prefetch_s,
    }
    changed = {name: max(0.0, getattr(physics, name) + gap) for name, gap in gaps.items()}
    return replace(physics, **changed)


def _pairs(
    measured: Sequence[RunHistory], simulations: Sequence[RunHistory]
) -> list[tuple[LogEvent, LogEvent]]:
    both = zip(measured, simulations, strict=True)
    return [pair for one, other in both for pair in matched_recoveries(one, other)]


def _pair_gap(pairs: RecoveryPairs, group_s: float) -> float:
    """Return the median error of rebuild phases beyond `group_s`, per pair of workers."""
    return _median(
        (one["rebuild_s"] - other["rebuild_s"] - group_s) / comb(one["nodes_after"], 2)
        for one, other in pairs
        if one["nodes_after"] > 1
    )


def _outside_phases_s(recovery: LogEvent) -> float:
    """Return the part of the total that belongs to no phase."""
    return float(recovery["total_s"]) - sum(float(recovery[phase]) for phase in PHASES[:-1])


def _median_gap(pairs: RecoveryPairs, value: Callable[[LogEvent], float]) -> float:
    return _median(value(one) - value(other) for one, other in pairs)


def _median(values: Iterable[float]) -> float:
    found = list(values)
    return median(found) if found else 0.0


@dataclass(frozen=True, slots=True)
class ComparedFigure:
    """A measured figure and its prediction."""

    name: str
    unit: str
    measured: float
    predicted: float

    @property
    def ratio(self) -> float:
        """Predicted over measured; 1 if both are 0."""
        if self.measured:
            return self.predicted / self.measured
        return 1.0 if not self.predicted else float("inf")


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """Figures of real runs and of their simulation."""

    figures: tuple[ComparedFigure, ...]
    recoveries: tuple[tuple[LogEvent, LogEvent], ...]
    """(measured, predicted) of each matched recovery."""
    unmatched: tuple[int, int]
    """Number of recoveries without a counterpart: of the runs, of their simulation."""

    def figure(self, name: str) -> ComparedFigure:
        """Return the figure of this name."""
        return next(one for one in self.figures if one.name == name)


def compare(runs: Sequence[RecordedRun], physics: MicrobatchPhysics) -> ValidationReport:
    """Compare all runs together with simulations of several seeds."""
    measured = [run.history for run in runs]
    simulations = [[simulated(run, physics, seed) for run in runs] for seed in range(SEEDS)]
    batches = [run.spec.n_microbatches for run in runs]
    rate = median(_throughput(histories, batches) for histories in simulations)
    figures = [ComparedFigure("throughput", "samples/s", _throughput(measured, batches), rate)]
    if starts := _all(measured, lambda history: history.startups):
        name = "start of a later node, median"
        figures.append(ComparedFigure(name, "s", median(starts), physics.spawn_s))
    planned_phases = (*PHASES[1:], "pause_s")
    for group, planned, phases in (
        ("losses", False, PHASES),
        ("planned changes", True, planned_phases),
        ("all", None, PHASES),
    ):
        for phase in phases:
            figures += _phase_figures(measured, simulations, group, planned, phase)
    pairs = _pairs(measured, simulations[0])
    real, predicted = (sum(len(h.recoveries) for h in side) for side in (measured, simulations[0]))
    unmatched = real - len(pairs), predicted - len(pairs)
    return ValidationReport(tuple(figures), tuple(pairs), unmatched)


def _throughput(histories: Sequence[RunHistory], microbatches: Sequence[int]) -> float:
    """Return the samples per second of all runs, one after the other."""
    both = zip(histories, microbatches, strict=True)
    done = sum((len(history.steps) - 1) * m for history, m in both if history.steps)
    seconds = sum(history.seconds for history in histories)
    return done / seconds if seconds > 0 else 0.0


def _phase_figures(
    measured: Sequence[RunHistory],
    simulations: Sequence[Sequence[RunHistory]],
    group: str,
    planned: bool | None,
    phase: str,
) -> list[ComparedFigure]:
    """Return the median and the mean of a phase; none without measured recoveries."""

    def values(histories: Sequence[RunHistory]) -> list[float]:
        found = (r for history in histories for r in history.recoveries)
        return [float(r[phase]) for r in found if planned is None or bool(r["planned"]) is planned]

    real, predicted = values(measured), [values(histories) for histories in simulations]
    if not real:
        return []

    def figure(name: str, fold: Callable[[list[float]], float]) -> ComparedFigure:
        simulated_s = median(fold(found) if found else 0.0 for found in predicted)
        label = f"{group}: {phase.removesuffix('_s')}, {name}"
        return ComparedFigure(label, "s", fold(real), simulated_s)

    return [figure("median", median), figure("mean", fmean)]


def format_report(report: ValidationReport) -> str:
    """Return the report as text."""
    width = max(len(one.name) for one in report.figures)
    lines = [f"{'':<{width}}  {'measured':>10} {'predicted':>10}  ratio"]
    lines += [
        f"{f.name:<{width}}  {f.measured:>10.4g} {f.predicted:>10.4g}  {f.ratio:.3f}  {f.unit}"
        for f in report.figures
    ]
    lines += ["", "each recovery (measured / predicted, seconds)"]
    for one, other in report.recoveries:
        phases = "  ".join(
            f"{name.removesuffix('_s')} {one[name]:.3f}/{other[name]:.3f}"
            for name in (*PHASES, "pause_s")
        )
        lost = f"micro-batches lost {one['microbatches_lost']}/{other['microbatches_lost']}"
        lines.append(f"step {one['step']}: {one['cause']}: {phases}  {lost}")
    if any(report.unmatched):
        real, predicted = report.unmatched
        lines.append(f"without a counterpart: {real} of the runs, {predicted} of the simulation")
    return "\n".join(lines)


def report_json(report: ValidationReport) -> dict[str, Any]:
    """Return the report as JSON values."""
    return {
        "figures": [{**asdict(one), "ratio": one.ratio} for one in report.figures],
        "recoveries": [{"measured": a, "predicted": b} for a, b in report.recoveries],
        "unmatched": {"runs": report.unmatched[0], "simulation": report.unmatched[1]},
    }


def validate(run_dirs: Sequence[Path], physics: MicrobatchPhysics) -> ValidationReport:
    """Compare run directories with their simulation. Raises FieldError."""
    return compare([read(run_dir) for run_dir in run_dirs], physics)
