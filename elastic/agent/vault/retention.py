"""Which copies a vault keeps. Pure.

Per (kind, layer, shard, owner, epoch): the two newest steps, and of a step the newest copy alone. Of gradients the two
newest: TP ranks are backed up one by one, and only a ledger that all have is of use. Of updates all since the older of
the states that are kept of the same layer, shard, owner and epoch: each of those leads to the newest version. Updates
without any state lead nowhere and are kept as others are. Logged messages are kept for each micro-batch by itself.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from elastic.domain.types import GRADIENT, LOGS, STATE, UPDATE, Copy
from elastic.planning.plan.schemes import MOST_REPLAY

KEPT_STEPS = 2
KEPT_GRADIENTS = 2
KEPT_UPDATES = 2 * MOST_REPLAY
"""At most, should states no longer come."""

Group = tuple[str, int, int, str, int, frozenset[int]]


def group_of(copy: Copy) -> Group:
    """Copies that can supersede each other."""
    messages = copy.microbatches if copy.kind in LOGS else frozenset()
    return copy.kind, copy.layer, copy.shard, copy.owner, copy.epoch, messages


def superseded(copies: Collection[Copy], states: Iterable[int] = ()) -> list[Copy]:
    """Copies of one group that retention gives up. `states`: versions kept beside, for updates."""
    steps = sorted({copy.step for copy in copies})
    oldest = min(states, default=None)
    if oldest is None:
        steps = steps[-KEPT_STEPS:]
    else:
        steps = [step for step in steps if step >= oldest][-KEPT_UPDATES:]
    kept: list[Copy] = []
    for step in steps:
        mine = sorted((c for c in copies if c.step == step), key=age)
        kept += mine[-KEPT_GRADIENTS if mine[0].kind == GRADIENT else -1 :]
    return [copy for copy in copies if copy not in kept]


def spare(copies: Iterable[Copy], arriving: Copy) -> list[Copy]:
    """Copies that make room for one that arrives, most dispensable ones included.

    Of what there is of its kind, layer, shard and owner, of whatever epoch, the newest is left. Of states and updates,
    the newest state and the updates that lead on from it: all that can be reached is reached from there.
    """
    kin = [
        c for c in copies if (c.layer, c.shard, c.owner) == (arriving.layer, arriving.shard, arriving.owner)
    ]
    same = [copy for copy in kin if copy.kind == arriving.kind]
    if arriving.kind not in (STATE, UPDATE):
        return _older(same)
    updates = [copy for copy in kin if copy.kind == UPDATE]
    states = [copy for copy in kin if copy.kind == STATE]
    if not updates:
        return _older(states)
    if not states:
        return _older(updates)
    last = max(states, key=lambda c: (c.epoch, c.step, c.sequence))
    return [
        *(copy for copy in states if copy != last),
        *(copy for copy in updates if copy.epoch != last.epoch or copy.step < last.step),
    ]


def age(copy: Copy) -> tuple[int, int]:
    """Of copies of one group and step the newest has the highest."""
    return len(copy.microbatches), copy.sequence


def _older(copies: Sequence[Copy]) -> list[Copy]:
    """All but the newest. Of an epoch that came later what is older in steps is newer: training went back."""
    return sorted(copies, key=lambda c: (c.epoch if c.kind != GRADIENT else 0, c.step, *age(c)))[:-1]


def abandoned(copies: Iterable[Copy], epoch: int, step: int) -> list[Copy]:
    """Copies of older epochs beyond the version in which `epoch` begins: training went back behind them, and comes
    there again, in floating point with other last bits."""
    return [
        copy
        for copy in copies
        if copy.epoch < epoch and copy.step > (step - 1 if copy.kind == UPDATE else step)
    ]
