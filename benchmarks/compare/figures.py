"""The figures of one run, from the records of its workers.

A micro-batch is *useful* if no later computation of the same micro-batch of the same step replaces
it: work that is computed again was lost. A run counts from the first step with the whole batch, for
some systems begin before all nodes are there, to the last step.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from benchmarks.compare.cluster import Record
from benchmarks.compare.job import MICROBATCHES

WARM_UP = 3
"""Steps at the beginning that do not count for the usual step."""


@dataclass(frozen=True)
class Figures:
    """What a run did and how long it took."""

    seconds: float
    """From the first step with the whole batch to the last step."""
    step_s: float
    """Median time between two steps."""
    idle_s: tuple[float, ...]
    """Per kill: time from it to the next useful micro-batch."""
    pause_s: tuple[float, ...]
    """Per kill: time from it to the next step that was not committed before."""
    lost: int
    """Computed micro-batches that are in no committed step."""
    small_steps: int
    """Steps with fewer micro-batches than the global batch."""
    loss: float
    """Loss of the final parameters on the evaluation micro-batch."""


def figures(records: Sequence[Record], steps: Sequence[Record], kills: Sequence[float]) -> Figures:
    """Return the figures. `steps`: records of committed steps and of the end."""
    commits = sorted((one for one in steps if one["kind"] == "step"), key=lambda one: one["at"])
    whole = next(one for one in commits if one["microbatches"] == MICROBATCHES)
    begin = whole["at"]
    last = max(one["step"] for one in commits)
    end = next(one["at"] for one in commits if one["step"] == last)
    computed = [one for one in records if one["kind"] == "microbatch" and begin <= one["at"] <= end]
    useful: dict[tuple[int, int], float] = {}
    for one in computed:
        at = one["step"], one["index"]
        useful[at] = max(useful.get(at, 0.0), one["at"])
    first: dict[int, float] = {}
    sizes: dict[int, int] = {}
    for one in commits:
        inside = begin < one["at"] <= end and one["step"] != whole["step"]
        if inside and one["step"] not in first:
            first[one["step"]] = one["at"]
            sizes[one["step"]] = one["microbatches"]
    ends = [begin, *(first[step] for step in sorted(first))]
    between = [after - before for before, after in pairwise(ends)]
    losses = [one["loss"] for one in steps if one["kind"] == "end"]
    return Figures(
        seconds=end - begin,
        step_s=statistics.median(between[WARM_UP:]),
        idle_s=tuple(min(at for at in useful.values() if at > kill) - kill for kill in kills),
        pause_s=tuple(min(at for at in ends if at > kill) - kill for kill in kills),
        lost=len(computed) - sum(sizes.values()),
        small_steps=sum(size < MICROBATCHES for size in sizes.values()),
        loss=losses[0],
    )
