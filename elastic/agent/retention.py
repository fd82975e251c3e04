"""Which copies of one epoch a vault keeps.

Per (kind, layer, shard, owner, epoch): the two newest steps, and of a step the newest copy alone. Of gradients the two
newest: TP ranks are backed up one by one, and only a ledger that all have is of use.
"""

from __future__ import annotations

from elastic.core.types import GRADIENT, Copy

KEPT_STEPS = 2
KEPT_GRADIENTS = 2

Group = tuple[str, int, int, str, int]


def group_of(copy: Copy) -> Group:
    return copy.kind, copy.layer, copy.shard, copy.owner, copy.epoch


def superseded(copies: list[Copy]) -> list[Copy]:
    """Copies of one group that retention gives up."""
    steps = sorted({copy.step for copy in copies})[-KEPT_STEPS:]
    kept: list[Copy] = []
    for step in steps:
        mine = sorted((c for c in copies if c.step == step), key=age)
        kept += mine[-KEPT_GRADIENTS if mine[0].kind == GRADIENT else -1 :]
    return [copy for copy in copies if copy not in kept]


def age(copy: Copy) -> tuple[int, int]:
    return len(copy.microbatches), copy.sequence
