"""Decides which copies a vault keeps, and which may be dropped to make room. Pure functions.

A group is all copies of one kind, layer, shard, owner and epoch; logged messages also have one
group per micro-batch. From each group the vault keeps the two newest steps:

- the newest copy of each step;
- of gradients the two newest copies of each step: TP ranks are backed up one after another, and
  only a ledger that all ranks have is of use;
- of updates instead all since the oldest kept state of the same layer, shard, owner and epoch: the
  newest version can be computed from any kept state.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from elastic.domain.types import GRADIENT, LOGS, STATE, UPDATE, Copy
from elastic.planning.plan.schemes import MOST_REPLAY

KEPT_STEPS = 2
KEPT_GRADIENTS = 2
KEPT_UPDATES = 2 * MOST_REPLAY
"""Upper limit on kept updates, for the case that no more states arrive."""

RetentionGroup = tuple[str, int, int, str, int, frozenset[int]]


def group_of(copy: Copy) -> RetentionGroup:
    """Return the group of `copy`. Newer copies of this group can supersede it."""
    messages = copy.microbatches if copy.kind in LOGS else frozenset()
    return copy.kind, copy.layer, copy.shard, copy.owner, copy.epoch, messages


def superseded(copies: Collection[Copy], states: Iterable[int] = ()) -> list[Copy]:
    """Return the copies of one group that the vault does not keep. `states`: steps of the kept
    states, needed if the copies are updates."""
    steps = sorted({copy.step for copy in copies})
    oldest = min(states, default=None)
    if oldest is None:
        steps = steps[-KEPT_STEPS:]
    else:
        steps = [step for step in steps if step >= oldest][-KEPT_UPDATES:]
    kept: list[Copy] = []
    for step in steps:
        of_step = sorted((c for c in copies if c.step == step), key=age)
        kept += of_step[-KEPT_GRADIENTS if of_step[0].kind == GRADIENT else -1 :]
    return [copy for copy in copies if copy not in kept]


def dispensable(copies: Iterable[Copy], arriving: Copy) -> list[Copy]:
    """Return the copies that may be dropped to make room for `arriving`.

    All of them have the layer, shard and owner of `arriving`. The newest copy of its kind stays,
    whatever its epoch. Of states and updates, the newest state and the later updates stay: every
    newer version can be computed from them.
    """
    kinds = (STATE, UPDATE) if arriving.kind in (STATE, UPDATE) else (arriving.kind,)
    place = (arriving.layer, arriving.shard, arriving.owner)
    related = [c for c in copies if c.kind in kinds and (c.layer, c.shard, c.owner) == place]
    states = [copy for copy in related if copy.kind == STATE]
    if len(states) in (0, len(related)):
        return _older(related)
    last = max(states, key=lambda c: (c.epoch, c.step, c.sequence))
    needed = [c for c in related if c.kind == UPDATE and c.epoch == last.epoch]
    needed = [last, *(update for update in needed if update.step >= last.step)]
    return [copy for copy in related if copy not in needed]


def age(copy: Copy) -> tuple[int, int]:
    """Return a sort key for copies of one group and step; the newest copy has the highest key."""
    return len(copy.microbatches), copy.sequence


def _older(copies: Sequence[Copy]) -> list[Copy]:
    """Return all copies but the newest. Except for gradients, a copy of a later epoch is newer even
    at an earlier step, because training went back."""
    return sorted(copies, key=lambda c: (c.epoch if c.kind != GRADIENT else 0, c.step, *age(c)))[
        :-1
    ]


def abandoned(copies: Iterable[Copy], epoch: int, step: int) -> list[Copy]:
    """Return the copies of older epochs that are later than `step`, at which `epoch` begins."""
    return [copy for copy in copies if copy.undone_by(epoch, step)]
