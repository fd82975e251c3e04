"""The physics of a machine, measured in some runs, for the prediction of others.

What events tell by themselves is taken as it is (planning, starting). For the rest the runs are simulated, and each
constant changed by the median difference between what was measured and what came out; twice, since they act on each
other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from math import comb
from statistics import median
from typing import Any

from elastic_sim.microbatches.physics import Physics
from elastic_sim.microbatches.recorded import Recorded
from elastic_sim.microbatches.story import Story, pairs, tell
from elastic_sim.microbatches.world import simulate

ROUNDS = 2
PROBE_S = 0.002
"""Added to every message between stages, to see what that does to a step."""
Figure = Callable[[dict[str, Any]], float]


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
    both = [pair for one, other in zip(measured, simulated, strict=True) for pair in pairs(one, other)]
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


def _gap(both: Sequence[tuple[dict[str, Any], dict[str, Any]]], figure: Figure) -> float:
    return median(figure(one) - figure(other) for one, other in both) if both else 0.0


def _middle(values: Sequence[float]) -> float:
    return median(values) if values else 0.0
