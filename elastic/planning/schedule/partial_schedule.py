"""Action lists of micro-batches that run through only some layers of a pipeline.

Each group of micro-batches with the same layers runs as a small 1F1B over the stages that hold
these layers. All units run the groups in the same order, so they cannot deadlock. If a unit has
several of these stages (interleaved), the micro-batches run one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby

from elastic.domain.types import PartialRun, Pipeline
from elastic.planning.schedule.schedule import ONE_F_ONE_B, Action, Kind, Lists, lists, units_of

FORWARD = (Kind.RECV_F, Kind.F, Kind.SEND_F)


def groups(
    runs: Sequence[PartialRun], pipeline: int
) -> list[tuple[tuple[int, int], tuple[PartialRun, ...]]]:
    """Return ((first, last), runs) of one pipeline for each series of runs with equal layers."""
    mine = [run for run in runs if run.pipeline == pipeline]
    return [
        (span, tuple(found)) for span, found in groupby(mine, lambda run: (run.first, run.last))
    ]


def excerpt(pipeline: Pipeline, first: int, last: int, microbatches: tuple[int, ...]) -> Lists:
    """Return each unit's actions that run `microbatches` through layers [first, last).

    Units are in the order of `units_of`. The caller provides the inputs of the first stage and the
    output gradients of the last one, so the actions do not receive these.
    """
    units = units_of(pipeline)
    inside = [
        s for s, stage in enumerate(pipeline.stages) if stage.first < last and stage.last > first
    ]
    places = [units.index(pipeline.stages[s].unit) for s in inside]
    if len(set(places)) == len(places):
        rows = lists(ONE_F_ONE_B, len(inside), len(inside), microbatches)
    else:
        ones = [lists(ONE_F_ONE_B, len(inside), len(inside), (m,)) for m in microbatches]
        rows = tuple(tuple(action for one in ones for action in one[i]) for i in range(len(inside)))
    several = len(pipeline.stages) > len(units)
    named = [
        [replace(action, stage=s) if several else action for action in row]
        for s, row in zip(inside, rows, strict=True)
    ]
    return tuple(
        _one_after_another([row for place, row in zip(places, named, strict=True) if place == u])
        for u in range(len(units))
    )


def _one_after_another(rows: Sequence[Sequence[Action]]) -> tuple[Action, ...]:
    """Return the stages of one unit as one list: per micro-batch all forward, then all backward."""
    if len(rows) < 2:
        return tuple(action for row in rows for action in row)
    order = dict.fromkeys(action.microbatch for action in rows[0])
    done: list[Action] = []
    for m in order:
        done += [a for row in rows for a in row if a.microbatch == m and a.kind in FORWARD]
        done += [
            a for row in reversed(rows) for a in row if a.microbatch == m and a.kind not in FORWARD
        ]
    return tuple(done)
