"""How fast a node computes compared with its profile.

The *ratio* of a node is the measured time of one micro-batch through its stages, divided by the
expected time. With a profile, a node at its proper speed has ratio 1. Without one the expected
times are only proportional figures. Then the ratio of a node at proper speed (`unit`) is learned
from the median of other nodes with the same layers, or from the node's own first steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

SAMPLES, CHANGED = 3, 1.2
"""Consecutive steps that must agree, and the change that they must show: a factor above this one,
or below its inverse, compared with the factor that plans use."""
SAMPLES_UNPROFILED, CHANGED_UNPROFILED = 8, 1.5
"""The same without a profile, because a node's own first steps are a rough measure."""
SPAN_UNPROFILED_S = 10.0
"""Without a profile the samples must also span this time: a machine may be busy for a few steps."""
MIN_SLOW_FACTOR = 1.1
"""Factors below this one count as 1."""


@dataclass(frozen=True, slots=True)
class ComputeSpeed:
    """Speed measurements of one node."""

    epoch: int = -1
    """Epoch of the samples."""
    samples: tuple[tuple[int, float], ...] = ()
    """(step, ratio) of the newest steps of this epoch, at most `wanted`, without its first one."""
    times: tuple[float, ...] = ()
    """Time of each sample in seconds; 0: unknown."""
    step: int = -1
    """Newest step measured."""
    unit: float = 0.0
    """Ratio at proper speed; 0: not known yet."""
    factor: float = 1.0
    """Slowdown that plans assume for this node."""
    profiled: bool = True
    """Whether the ratio at proper speed is 1."""

    @property
    def wanted(self) -> int:
        """Number of steps that must agree."""
        return SAMPLES if self.profiled else SAMPLES_UNPROFILED

    @property
    def change(self) -> float:
        """Change that they must show."""
        return CHANGED if self.profiled else CHANGED_UNPROFILED

    @property
    def ratio(self) -> float:
        """Median ratio of the newest steps; 0 until there are enough."""
        return median(r for _, r in self.samples) if len(self.samples) == self.wanted else 0.0


def observe(
    speed: ComputeSpeed, epoch: int, step: int, ratio: float, at: float = 0.0
) -> ComputeSpeed:
    """Add the sample of one step, measured at time `at` in seconds."""
    if epoch != speed.epoch:
        return replace(speed, epoch=epoch, step=step, samples=(), times=(), unit=0.0)
    if step <= speed.step:
        return speed
    samples, times = (*speed.samples, (step, ratio)), (*speed.times, at)
    return replace(speed, step=step, samples=samples[-speed.wanted :], times=times[-speed.wanted :])


def calibrate(speed: ComputeSpeed, same: Sequence[ComputeSpeed]) -> ComputeSpeed:
    """Set `unit` once it can be known.

    `same` are the other nodes with the same layers in this epoch. A node that was calibrated in a
    slow moment and is faster from then on is calibrated again.
    """
    if speed.profiled:
        return replace(speed, unit=1.0)
    others = [other.ratio / other.factor for other in same if other.ratio]
    if len(others) >= 2:
        return replace(speed, unit=median(others))
    if not speed.ratio:
        return speed
    faster = speed.factor == 1.0 and max(r for _, r in speed.samples) <= speed.unit / speed.change
    return replace(speed, unit=speed.ratio / speed.factor) if faster or not speed.unit else speed


def changed_factor(speed: ComputeSpeed) -> float | None:
    """The factor that all newest steps show, if plans assume another one; else None.

    A node that is faster than its proper speed counts as one at proper speed.
    """
    if not (speed.unit and speed.ratio):
        return None
    times = speed.times
    brief = bool(times) and times[0] > 0 and times[-1] - times[0] < SPAN_UNPROFILED_S
    if brief and not speed.profiled:
        return None
    factors = [ratio / speed.unit / speed.factor for _, ratio in speed.samples]
    if not (min(factors) >= speed.change or max(factors) <= 1 / speed.change):
        return None
    factor = round(speed.ratio / speed.unit, 2)
    factor = factor if factor >= MIN_SLOW_FACTOR else 1.0
    return None if factor == speed.factor else factor
