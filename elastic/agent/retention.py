"""Which copies of a vault newer ones supersede.

Per (kind, layer, shard, owner, epoch): the two newest steps are kept, and of a step the newest copy alone.
Of gradients the two newest: TP ranks are backed up one by one, and only a ledger that all have is of use.
Logged messages are kept for each micro-batch by itself.
"""

from __future__ import annotations

from elastic.core.types import GRADIENT, LOGS, Copy

KEPT_STEPS = 2
KEPT_GRADIENTS = 2

Group = tuple[str, int, int, str, int, frozenset[int]]


def group_of(copy: Copy) -> Group:
    """Copies that can supersede each other."""
    messages = copy.microbatches if copy.kind in LOGS else frozenset()
    return copy.kind, copy.layer, copy.shard, copy.owner, copy.epoch, messages


def superseded(copies: list[Copy]) -> list[Copy]:
    """Copies of one group that retention gives up."""
    steps = sorted({copy.step for copy in copies})[-KEPT_STEPS:]
    kept: list[Copy] = []
    for step in steps:
        mine = sorted((c for c in copies if c.step == step), key=age)
        kept += mine[-KEPT_GRADIENTS if mine[0].kind == GRADIENT else -1 :]
    return [copy for copy in copies if copy not in kept]


def age(copy: Copy) -> tuple[int, int]:
    """Of copies of one group and step the newest has the highest."""
    return len(copy.microbatches), copy.sequence
