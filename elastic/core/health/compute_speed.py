"""How fast a node computes against what its profile says: what measurements show, and what plans count with.

A *ratio* is measured over expected seconds of one micro-batch through the node's stages. With a profile a
node at its proper speed has ratio 1. Without one the expected seconds are only proportional figures, so the
ratio of a proper node (`unit`) is learned: from the median of the others that hold the same layers, or else from
the node's own first steps under a plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

SAMPLES, CHANGED = 3, 1.2
"""Steps in a row that must agree before anything is believed, and the change that they must agree on: a factor above
the one that plans count with, or below its inverse."""
SAMPLES_UNPROFILED, CHANGED_UNPROFILED = 8, 1.5
"""The same without a profile: a node's own first steps are a rougher measure."""
SPAN_UNPROFILED_S = 10.0
"""They must also lie so far apart: a machine may be busy for as long as a few short steps."""
MIN_SLOW_FACTOR = 1.1
"""Factors below this count as 1."""


@dataclass(frozen=True, slots=True)
class ComputeSpeed:
    """What is known of one node's speed."""

    epoch: int = -1
    """Epoch of the samples."""
    samples: tuple[tuple[int, float], ...] = ()
    """(step, ratio) of the newest steps of this epoch, `wanted` at most; the first step seen is left out."""
    times: tuple[float, ...] = ()
    """When they were seen; 0: unknown."""
    step: int = -1
    """Newest step seen."""
    unit: float = 0.0
    """Ratio at the proper speed; 0: not known yet."""
    factor: float = 1.0
    """How much slower than it should be the plans take this node."""
    profiled: bool = True
    """The ratio at the proper speed is 1."""

    @property
    def wanted(self) -> int:
        """Steps that must agree."""
        return SAMPLES if self.profiled else SAMPLES_UNPROFILED

    @property
    def change(self) -> float:
        """What they must agree on."""
        return CHANGED if self.profiled else CHANGED_UNPROFILED

    @property
    def ratio(self) -> float:
        """Median ratio of the newest steps; 0 until there are enough."""
        return median(r for _, r in self.samples) if len(self.samples) == self.wanted else 0.0


def record_step(pace: ComputeSpeed, epoch: int, step: int, ratio: float, at: float = 0.0) -> ComputeSpeed:
    """Take note of one step; `at`: when it was seen."""
    if epoch != pace.epoch:
        return replace(pace, epoch=epoch, step=step, samples=(), times=(), unit=0.0)
    if step <= pace.step:
        return pace
    samples, times = (*pace.samples, (step, ratio)), (*pace.times, at)
    return replace(pace, step=step, samples=samples[-pace.wanted :], times=times[-pace.wanted :])


def calibrate(pace: ComputeSpeed, same: Sequence[ComputeSpeed]) -> ComputeSpeed:
    """Set `unit` once it can be known; `same`: the others that hold the same layers in this epoch.

    A node that was measured in a bad moment, and is quicker from then on, is measured anew.
    """
    if pace.profiled:
        return replace(pace, unit=1.0)
    others = [other.ratio / other.factor for other in same if other.ratio]
    if len(others) >= 2:
        return replace(pace, unit=median(others))
    if not pace.ratio:
        return pace
    quicker = pace.factor == 1.0 and max(r for _, r in pace.samples) <= pace.unit / pace.change
    return replace(pace, unit=pace.ratio / pace.factor) if quicker or not pace.unit else pace


def changed_factor(pace: ComputeSpeed) -> float | None:
    """The factor that the newest steps show, if all of them tell another one than plans count with.

    Nodes that are quicker than they should be count as they should be.
    """
    if not (pace.unit and pace.ratio):
        return None
    brief = bool(pace.times) and pace.times[0] > 0 and pace.times[-1] - pace.times[0] < SPAN_UNPROFILED_S
    if brief and not pace.profiled:
        return None
    factors = [ratio / pace.unit / pace.factor for _, ratio in pace.samples]
    if not (min(factors) >= pace.change or max(factors) <= 1 / pace.change):
        return None
    factor = round(pace.ratio / pace.unit, 2)
    factor = factor if factor >= MIN_SLOW_FACTOR else 1.0
    return None if factor == pace.factor else factor
