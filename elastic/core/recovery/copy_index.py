"""Index of the recoverable copies in the vaults of living nodes, by purpose.

A *chain* is one owner's history within one epoch: a state of version s and the updates of steps s,
s+1, ... v-1, none missing. The updates turn the state into exactly the bits that this owner had at
version v. Updates of another holder or epoch would not, because floating-point sums may differ in
the last bits. The copies of a chain may be in different vaults.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from elastic.domain.ledger import to_mask
from elastic.domain.types import LOGS, REDUCED, STATE, UPDATE, Copy, Plan, Recipe, Slot

History = tuple[str, int]
"""(owner, epoch) of the copies of a chain."""
K = TypeVar("K")


@dataclass(frozen=True, slots=True)
class CopyIndex:
    """Usable copies by purpose. The copies of one tuple are equivalent, newest epoch first.

    Not usable are copies on lost nodes; copies of layers, TP ranks or micro-batches that the plan
    does not have; empty gradients; and gradients of the last layer without all their losses.
    """

    states: dict[tuple[Slot, int], tuple[Copy, ...]] = field(default_factory=dict)
    """(slot, version): copies."""
    gradients: dict[tuple[Slot, int], dict[int, tuple[Copy, ...]]] = field(default_factory=dict)
    """((layer, TP rank), step): mask of the ledger: copies."""
    reduced: dict[tuple[Slot, int], tuple[Copy, ...]] = field(default_factory=dict)
    """((layer, TP rank), step): reduced gradients of layers that share a tensor."""
    updates: dict[Slot, dict[History, dict[int, tuple[Copy, ...]]]] = field(default_factory=dict)
    """Slot: (owner, epoch): step: copies of that step's update."""
    logs: dict[tuple[str, int, int, int], dict[int, tuple[Copy, ...]]] = field(default_factory=dict)
    """(kind, layer, step, micro-batch): TP rank: copies of one logged message."""
    divisions: dict[Slot, tuple[int, ...]] = field(default_factory=dict)
    """(layer, TP rank): all numbers of portions into which copies divide its state."""
    by_node: dict[tuple[Slot, int], dict[str, Copy]] = field(default_factory=dict)
    """(slot, version): node: its copy in `states`, preferably made by the node itself. It saves a
    search over hundreds of nodes."""

    @classmethod
    def of(cls, inventory: Iterable[Copy], plan: Plan, nodes: Iterable[str]) -> CopyIndex:
        """Index the usable copies of `inventory` that are on `nodes`."""
        living, full = frozenset(nodes), (1 << plan.n_microbatches) - 1
        states: dict[tuple[Slot, int], list[Copy]] = {}
        gradients: dict[tuple[Slot, int], dict[int, list[Copy]]] = {}
        reduced: dict[tuple[Slot, int], list[Copy]] = {}
        updates: dict[Slot, dict[History, dict[int, tuple[Copy, ...]]]] = {}
        logs: dict[tuple[str, int, int, int], dict[int, list[Copy]]] = {}
        for copy in dict.fromkeys(inventory):
            if copy.node not in living or not _fits(copy, plan):
                continue
            at = (copy.layer, copy.shard), copy.step
            if copy.kind == STATE:
                states.setdefault((copy.slot, copy.step), []).append(copy)
            elif copy.kind == REDUCED:
                reduced.setdefault(at, []).append(copy)
            elif copy.kind == UPDATE:
                steps = updates.setdefault(copy.slot, {}).setdefault((copy.owner, copy.epoch), {})
                steps[copy.step] = (*steps.get(copy.step, ()), copy)
            elif copy.kind in LOGS:
                for index in copy.microbatches:
                    ranks = logs.setdefault((copy.kind, copy.layer, copy.step, index), {})
                    ranks.setdefault(copy.shard, []).append(copy)
            elif copy.microbatches and _has_losses(copy, plan):
                mask = to_mask(copy.microbatches)
                if not mask & ~full:
                    gradients.setdefault(at, {}).setdefault(mask, []).append(copy)
        sorted_states = _newest_first(states)
        return cls(
            states=sorted_states,
            gradients={at: _newest_first(by_mask) for at, by_mask in gradients.items()},
            reduced=_newest_first(reduced),
            updates=updates,
            logs={at: _newest_first(by_rank) for at, by_rank in logs.items()},
            divisions=_divisions(states),
            by_node={at: _by_node(copies) for at, copies in sorted_states.items()},
        )

    def versions(self, slot: Slot) -> list[int]:
        """Return the versions with a state copy of `slot`, or of a portion of it, ascending."""
        return sorted({version for at, version in self.states if at[: len(slot)] == slot})

    def equals(self, copy: Copy) -> tuple[Copy, ...]:
        """Return the copies that serve the same purpose as `copy`, itself included."""
        at = (copy.layer, copy.shard), copy.step
        if copy.kind == STATE:
            return self.states[copy.slot, copy.step]
        if copy.kind == REDUCED:
            return self.reduced[at]
        if copy.kind == UPDATE:
            return self.updates[copy.slot][copy.owner, copy.epoch][copy.step]
        return self.gradients[at][to_mask(copy.microbatches)]

    def substitutes(self, recipe: Recipe, copy: Copy) -> list[Copy]:
        """Return the byte-equal copies that can replace `copy` in `recipe`, itself included.

        In a chain they also have the same owner and epoch.
        """
        chained = recipe.updates and copy.kind in (STATE, UPDATE)
        return [
            other
            for other in self.equals(copy)
            if (other.nbytes, other.checksum) == (copy.nbytes, copy.checksum)
            and not (chained and (other.owner, other.epoch) != (copy.owner, copy.epoch))
        ]

    @property
    def newest(self) -> int:
        """Highest version of a state copy or of the result of an update; -1: no copies."""
        return max(self.updated | {version for _, version in self.states}, default=-1)

    @property
    def updated(self) -> set[int]:
        """Versions that result from updates."""
        return {
            step + 1
            for histories in self.updates.values()
            for steps in histories.values()
            for step in steps
        }

    def chains(self, slot: Slot, version: int) -> Iterator[tuple[Sequence[Copy], ...]]:
        """Yield all chains to `version`: the copies of the state, then those of each update.

        Every chain has at least one update. Any of the copies of an element can be used.
        """
        for history, updates in self.updates.get(slot, {}).items():
            base = version - 1
            while base in updates:
                states = self._states_of(slot, base, history)
                if states:
                    yield states, *(updates[step] for step in range(base, version))
                base -= 1

    def missing_link(self, slot: Slot, version: int) -> str:
        """Return a text with the update that the longest chain to `version` lacks; "": no chain."""
        best = (-1, -1)
        for history, updates in self.updates.get(slot, {}).items():
            for base in self.versions(slot):
                if base < version and self._states_of(slot, base, history):
                    gap = next((s for s in range(base, version) if s not in updates), version)
                    best = max(best, (gap, base))
        gap, base = best
        if not -1 < gap < version:
            return ""
        return f"state {base} is left, but not the update of step {gap}"

    def _states_of(self, slot: Slot, version: int, history: History) -> list[Copy]:
        copies = self.states.get((slot, version), ())
        return [copy for copy in copies if (copy.owner, copy.epoch) == history]


def copy_on(copies: Sequence[Copy], node: str) -> Copy | None:
    """Return the copy on `node`, preferably one that the node made itself, or None."""
    local = [copy for copy in copies if copy.node == node]
    return next((copy for copy in local if copy.owner == node), local[0] if local else None)


def _by_node(copies: Sequence[Copy]) -> dict[str, Copy]:
    found: dict[str, Copy] = {}
    for copy in copies:
        known = found.get(copy.node)
        if known is None or (copy.owner == copy.node and known.owner != copy.node):
            found[copy.node] = copy
    return found


def _divisions(states: Iterable[tuple[Slot, int]]) -> dict[Slot, tuple[int, ...]]:
    found: dict[Slot, set[int]] = {}
    for slot, _ in states:
        if len(slot) > 2:
            found.setdefault(slot[:2], set()).add(slot[3])
    return {slot: tuple(sorted(numbers)) for slot, numbers in found.items()}


def _fits(copy: Copy, plan: Plan) -> bool:
    """Return whether the plan has this layer and TP rank, and the portion is valid."""
    index, number = copy.portion
    return 0 <= copy.layer < plan.n_layers and 0 <= copy.shard < plan.tp and 0 <= index < number


def _has_losses(copy: Copy, plan: Plan) -> bool:
    return copy.layer != plan.n_layers - 1 or copy.microbatches <= {i for i, _ in copy.losses}


def _newest_first(groups: dict[K, list[Copy]]) -> dict[K, tuple[Copy, ...]]:
    return {
        key: tuple(sorted(copies, key=lambda c: (-c.epoch, -c.sequence, c.node, c.owner)))
        for key, copies in groups.items()
    }
