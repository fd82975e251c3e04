"""Rounds of gradient sums with the other holders, under the gradient scheme `reduce`.

The micro-batches of a step form rounds; every worker has the same number of them. A worker joins
round r with its accumulated gradients when its slowest stage has finished `due(pipeline, r)`
micro-batches. The worker waits if too many of its earlier rounds are unfinished. So pipelines stay
within a few rounds of each other, which bounds the unsaved work of a lost pipeline.

Waiting inside a schedule could deadlock: the awaited stage may itself wait for a message from the
waiting stage. Under 1F1B and zero-bubble this cannot happen: a stage that catches up never needs an
action that comes later in the other stage's list. Under the interleaved schedule a stage may lag by
`n_units - 2` micro-batches, so a worker leaves that distance between the awaited round and the
started one (`tests/planning/schedule/test_reduction_rounds.py` tries all lists).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.domain.types import Pipeline
from elastic.planning.schedule.schedule import INTERLEAVED, units_of


@dataclass(frozen=True, slots=True)
class Rounds:
    """Number of rounds in one step, and the micro-batches that each round needs."""

    number: int
    shares: tuple[int, ...]
    """Number of micro-batches of each pipeline in this step."""
    windows: tuple[int, ...]
    """Per pipeline: maximum rounds that a worker may have joined before they are finished."""

    def due(self, pipeline: int, index: int) -> int:
        """Return how many micro-batches all stages of a worker finish before round `index`."""
        return (min(index, self.number - 1) + 1) * self.shares[pipeline] // self.number

    def most_finished(self, pipeline: int, n_saved: int) -> int:
        """Return the maximum number of micro-batches that a lost stage can have finished.

        The other holders have the sums of `n_saved` micro-batches: all rounds up to some r. They
        have joined at most one window of rounds after r. So the lost stage saw no later round end.
        It joined at most its own window after those rounds, and stopped where the next round is
        due.
        """
        saved = sum(self.due(pipeline, index) <= n_saved for index in range(self.number))
        others = [window for p, window in enumerate(self.windows) if p != pipeline]
        return self.due(pipeline, saved + max(others, default=0) + self.windows[pipeline])


def rounds_of(pipelines: Sequence[Pipeline], shares: Sequence[int], every: int) -> Rounds:
    """Return the rounds of a step in which pipeline p runs `shares[p]` micro-batches.

    There is one round per `every` micro-batches of the largest share, but no more rounds than the
    smallest share above 0 has micro-batches.
    """
    least = min((share for share in shares if share), default=1)
    number = max(1, min(-(-max(shares) // every), least))
    windows = tuple(
        _window(pipeline, share // number)
        for pipeline, share in zip(pipelines, shares, strict=True)
    )
    return Rounds(number, tuple(shares), windows)


def lag(pipeline: Pipeline) -> int:
    """Return the number of micro-batches by which a stage may lag behind a waiting stage."""
    return max(0, len(units_of(pipeline)) - 2) if pipeline.schedule == INTERLEAVED else 0


def _window(pipeline: Pipeline, part: int) -> int:
    """Return the `windows` entry of a pipeline with at least `part` micro-batches per round."""
    return max(1, -(-lag(pipeline) // part)) if part else 1
