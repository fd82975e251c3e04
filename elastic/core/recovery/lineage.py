"""Lineage: proves that a copy or a record belongs to the history that training continues.

A node that was cut off keeps its copies. Meanwhile training may have gone back behind some of them
and computed these versions again. So the coordinator keeps the first step of each epoch: a copy is
of the present history if no later epoch began before it. Its checksum proves its bytes, and its
ledger the micro-batches of a gradient. In the same way the record of a step proves only the commit
of the run that made it: if the step runs again, it is committed again.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from elastic.core.protocol.messages import CheckpointPart, Halted
from elastic.domain.types import LOGS, Assignment, Copy, StepRecord

Starts = tuple[tuple[int, int], ...]
"""(epoch, first step), both ascending. An epoch that began at the same step as a later one, or
after it, is left out: the later one undoes all copies that it undoes."""
MAX_STARTS = 256
FORGOTTEN = -1
"""First step in place of those that are no longer kept: it refuses all older copies."""


def with_start(starts: Starts, epoch: int, step: int) -> Starts:
    """Add an epoch that begins at `step`."""
    kept = (*(start for start in starts if start[1] < step), (epoch, step))
    if len(kept) <= MAX_STARTS:
        return kept
    return ((kept[-MAX_STARTS][0], FORGOTTEN), *kept[-MAX_STARTS + 1 :])


def starts_of(assignment: Assignment) -> Starts:
    """Return the starts by which parts of checkpoints are undone in the assignment's epoch."""
    return assignment.starts or ((assignment.plan.epoch, assignment.step),)


def is_undone(item: Copy | CheckpointPart, starts: Starts) -> bool:
    """Return whether an epoch after that of `item` began before it."""
    return any(item.undone_by(epoch, step) for epoch, step in starts)


def committed(halted: Iterable[Halted], starts: Starts) -> tuple[StepRecord, ...]:
    """Return the records in the reports of halted workers, except those of undone steps.

    A worker that missed an installation repeats its older report. A record is older than the epoch
    for which the worker halted.
    """
    return tuple(
        one.record
        for one in halted
        if one.record is not None
        and not any(epoch >= one.epoch and step <= one.record.step for epoch, step in starts)
    )


def proven(
    inventory: Iterable[Copy], starts: Starts, *, newest_epoch: int, trimmed: int
) -> tuple[Copy, ...]:
    """Return the copies that belong to the history of training.

    `newest_epoch`: present epoch; copies of later ones are of a coordinator whose state was lost.
    `trimmed`: epoch whose copies are whole at their peers. Older copies are of no use, except
    logged messages.
    """
    bounds: dict[int, tuple[int, float]] = {}
    found = []
    for copy in inventory:
        if copy.epoch not in bounds:
            later = (start for start in starts if start[0] > copy.epoch)
            bounds[copy.epoch] = min(later, key=lambda start: start[1], default=(0, inf))
        epoch, step = bounds[copy.epoch]
        old = copy.epoch < trimmed and copy.kind not in LOGS
        undone = step < inf and copy.undone_by(epoch, int(step))
        if copy.epoch <= newest_epoch and not old and not undone:
            found.append(copy)
    return tuple(found)
