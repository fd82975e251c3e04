"""Versions that are made from an older state and what the updates since then took.

A chain is one owner's own history of one epoch: its state of version s, and its updates of steps s, s+1, ... v-1, none
missing. It ends in the very bits that this owner had at version v, also where gradients are summed in floating point
and two holders, or two epochs, could differ in the last bits. The copies may lie in whichever vaults; those of one
owner, epoch and step are equal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from elastic.core.recovery.copy_index import CopyIndex
from elastic.domain.types import STATE, UPDATE, Copy, Recipe, Slot

Link = Sequence[Copy]
"""Equal copies, any of which will do."""


def chains(shelf: CopyIndex, slot: Slot, version: int) -> Iterator[tuple[Link, ...]]:
    """All chains that lead to `version`: the state and then the updates in order, at least one."""
    for line, updates in shelf.updates.get(slot, {}).items():
        base = version - 1
        while base in updates:
            states = [c for c in shelf.states.get((slot, base), ()) if (c.owner, c.epoch) == line]
            if states:
                yield states, *(updates[step] for step in range(base, version))
            base -= 1


def recipe_of(slot: Slot, version: int, copies: Sequence[Copy]) -> Recipe:
    """The recipe that takes these: a state, and updates."""
    layer, shard, *_ = slot
    state, *updates = copies
    return Recipe(layer, shard, version, state, updates=tuple(updates))


def alike(shelf: CopyIndex, recipe: Recipe, copy: Copy) -> list[Copy]:
    """Copies that can take the place of `copy` in `recipe`, `copy` included: in floating point two attempts at a step
    differ in the last bits."""
    chained = recipe.updates and copy.kind in (STATE, UPDATE)
    return [
        other
        for other in shelf.equals(copy)
        if (other.nbytes, other.checksum) == (copy.nbytes, copy.checksum)
        and not (chained and (other.owner, other.epoch) != (copy.owner, copy.epoch))
    ]


def gap(shelf: CopyIndex, slot: Slot, version: int) -> str:
    """What the longest chain towards `version` lacks, in words; "" if there is none to speak of."""
    best = (-1, -1)
    for (owner, epoch), updates in shelf.updates.get(slot, {}).items():
        for (at, base), states in shelf.states.items():
            if at != slot or base >= version or not any((c.owner, c.epoch) == (owner, epoch) for c in states):
                continue
            missing = next((step for step in range(base, version) if step not in updates), version)
            best = max(best, (missing, base))
    missing, base = best
    return f"state {base} is left, but not the update of step {missing}" if -1 < missing < version else ""
