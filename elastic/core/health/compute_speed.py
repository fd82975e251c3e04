"""Compute speed of a node, as three numbers. Variables named `pace` hold a `ComputeSpeed`.

    ratio            measured time of a micro-batch through the node's stages / expected time
    reference ratio  ratio of a node at normal speed: 1 if the user gave a profile (field `unit`)
    slow factor      ratio / reference ratio: 1 at normal speed, 2 if computing takes twice as long

Without a profile the expected times are only proportional to seconds. The reference ratio is then
the median over other nodes with the same layers, or is taken from the node's own first steps. The
former reference ratio of a node that was slow shows whether these steps are slow, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from statistics import median

SAMPLES, CHANGED = 3, 1.2
"""Number of consecutive steps that must agree on a new slow factor, and the least change: new
factor / factor in use must be at least CHANGED, or at most 1 / CHANGED."""
SAMPLES_UNPROFILED, CHANGED_UNPROFILED = 8, 1.5
"""SAMPLES and CHANGED without a profile, because a node's own first steps are a rough measure."""
SPAN_UNPROFILED_S = 10.0
"""Least time between the first and the last of these steps without a profile, because a machine
may be busy for a few steps. Of shorter steps, those in between are left out."""
_GAP_S = SPAN_UNPROFILED_S / (SAMPLES_UNPROFILED - 1)
MIN_SLOW_FACTOR = 1.1
"""Lower slow factors count as 1."""


@dataclass(frozen=True, slots=True)
class ComputeSpeed:
    """Speed measurements of one node."""

    epoch: int = -1
    """Epoch of the samples."""
    samples: tuple[tuple[int, float], ...] = ()
    """(step, ratio) of the newest steps of the epoch, at most `wanted`, without its first step."""
    times: tuple[float, ...] = ()
    """Time of each sample in seconds; 0: unknown."""
    step: int = -1
    """Newest step measured."""
    unit: float = 0.0
    """Reference ratio; 0: not known yet."""
    factor: float = 1.0
    """Slow factor that plans use for this node."""
    profiled: bool = True
    """Whether the user gave a profile; the reference ratio is then 1."""
    former: float = 0.0
    """Reference ratio when the node was last found to be slow; 0: it was not slow so far."""

    @property
    def wanted(self) -> int:
        """Number of consecutive steps that must agree on a new slow factor."""
        return SAMPLES if self.profiled else SAMPLES_UNPROFILED

    @property
    def change(self) -> float:
        """Least change of the slow factor (CHANGED or CHANGED_UNPROFILED)."""
        return CHANGED if self.profiled else CHANGED_UNPROFILED

    @property
    def ratio(self) -> float:
        """Median ratio of the newest steps; 0 while fewer than `wanted` are measured."""
        return median(r for _, r in self.samples) if len(self.samples) == self.wanted else 0.0


def observe(
    speed: ComputeSpeed, epoch: int, step: int, ratio: float, at: float = 0.0
) -> ComputeSpeed:
    """Add the ratio of one step, measured at time `at` in seconds. The first step of an epoch
    discards the samples of the epoch before."""
    if epoch != speed.epoch:
        former = speed.former or (speed.unit if speed.factor > 1.0 else 0.0)
        fresh = replace(speed, epoch=epoch, step=step, samples=(), times=())
        return replace(fresh, unit=0.0, former=former)
    if step <= speed.step:
        return speed
    if not speed.profiled and speed.times and at - speed.times[-1] < _GAP_S and speed.times[-1] > 0:
        return replace(speed, step=step)
    samples, times = (*speed.samples, (step, ratio)), (*speed.times, at)
    return replace(speed, step=step, samples=samples[-speed.wanted :], times=times[-speed.wanted :])


def calibrate(speed: ComputeSpeed, same: Sequence[ComputeSpeed]) -> ComputeSpeed:
    """Set the reference ratio (`unit`) once it can be known.

    `same`: speeds of the other nodes with the same layers in this epoch. If the first steps were
    slow and the node is faster from then on, its reference ratio is set again.
    """
    if speed.profiled:
        return replace(speed, unit=1.0)
    others = [other.ratio / other.factor for other in same if other.ratio]
    if len(others) >= 2:
        return replace(speed, unit=median(others))
    if not speed.ratio:
        return speed
    if not speed.unit:
        return replace(speed, unit=_first_reference(speed))
    faster = speed.factor == 1.0 and max(r for _, r in speed.samples) <= speed.unit / speed.change
    return replace(speed, unit=speed.ratio) if faster else speed


def _first_reference(speed: ComputeSpeed) -> float:
    """Return the reference ratio that follows from the first steps of an epoch alone."""
    if not speed.former:
        return speed.ratio / speed.factor
    # The slowdown may have ended, or begun again, together with the epoch.
    slow = sqrt(speed.factor) if speed.factor > 1.0 else speed.change
    if speed.ratio < slow * speed.former:
        return speed.ratio
    return speed.ratio / speed.factor if speed.factor > 1.0 else speed.former


def changed_factor(speed: ComputeSpeed) -> float | None:
    """Return a new slow factor if all newest steps differ enough from the factor in use, or None.

    A node above normal speed gets slow factor 1.
    """
    if not (speed.unit and speed.ratio):
        return None
    factors = [ratio / speed.unit / speed.factor for _, ratio in speed.samples]
    normal = speed.factor > 1.0 and max(factors) * speed.factor < MIN_SLOW_FACTOR
    if not (normal or min(factors) >= speed.change or max(factors) <= 1 / speed.change):
        return None
    factor = round(speed.ratio / speed.unit, 2)
    factor = factor if factor >= MIN_SLOW_FACTOR else 1.0
    return None if factor == speed.factor else factor
