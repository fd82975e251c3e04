"""When a worker sums its gradients with the other holders, under the gradient scheme `reduce`. Pure.

The micro-batches of a step fall into rounds, as many for every worker. A worker joins round r when the slowest of its
stages has finished `due(pipeline, r)` micro-batches, with all that its layers hold by then; it waits there if too many
rounds before are not over yet. Pipelines so stay within a few rounds of each other, which bounds what a lost one has
run that nobody else has.

Waiting inside a schedule could hang: the stage that is waited for may itself wait for a message from one that waits.
Under 1F1B and zero-bubble it cannot, by any number of micro-batches: what a stage must do to finish as many as another
has finished never needs anything that comes later in the other's list. Under the interleaved schedule it may lag by
`n_units - 2`, so that many are left between a round that is waited for and the one that is begun
(`tests/planning/schedule/test_reduction_rounds.py` tries all lists).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastic.domain.types import Pipeline
from elastic.planning.schedule.schedule import INTERLEAVED, units_of


@dataclass(frozen=True, slots=True)
class Rounds:
    """The rounds of one step."""

    number: int
    shares: tuple[int, ...]
    """Micro-batches of each pipeline in this step."""
    windows: tuple[int, ...]
    """Rounds that a worker of each pipeline may have under way."""

    def due(self, pipeline: int, index: int) -> int:
        """Micro-batches that all stages of a worker have finished when it joins round `index`."""
        return (min(index, self.number - 1) + 1) * self.shares[pipeline] // self.number

    def most_finished(self, pipeline: int, n_saved: int) -> int:
        """How many micro-batches a lost stage can have finished, if the others have `n_saved` of them.

        They have all rounds up to some r. They have joined at most a window's more, hence the lost one has seen no
        later one end, has joined at most its own window's beyond, and stopped where the next is due.
        """
        saved = sum(self.due(pipeline, index) <= n_saved for index in range(self.number))
        others = [window for p, window in enumerate(self.windows) if p != pipeline]
        return self.due(pipeline, saved + max(others, default=0) + self.windows[pipeline])


def rounds_of(pipelines: Sequence[Pipeline], shares: Sequence[int], every: int) -> Rounds:
    """The rounds of a step in which each pipeline runs `shares` micro-batches: one for every `every` of the longest
    share, but none in which a pipeline that runs any has none to bring."""
    least = min((share for share in shares if share), default=1)
    number = max(1, min(-(-max(shares) // every), least))
    windows = tuple(
        _window(pipeline, share // number)
        for pipeline, share in zip(pipelines, shares, strict=True)
    )
    return Rounds(number, tuple(shares), windows)


def lag(pipeline: Pipeline) -> int:
    """Micro-batches by which a stage may stay behind another that waits."""
    return max(0, len(units_of(pipeline)) - 2) if pipeline.schedule == INTERLEAVED else 0


def _window(pipeline: Pipeline, part: int) -> int:
    """`part`: micro-batches of a round, at least."""
    return max(1, -(-lag(pipeline) // part)) if part else 1
