"""All copies that living vaults hold, arranged by what they are good for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic.domain.ledger import to_mask
from elastic.domain.types import LOGS, REDUCED, STATE, UPDATE, Copy, Plan, Slot

Line = tuple[str, int]
"""(owner, epoch) of copies."""


@dataclass(frozen=True, slots=True)
class CopyIndex:
    """Usable copies. Unusable, and left out: those on nodes without a vault, of other layers, TP ranks or
    micro-batches than the plan's, empty gradients, and gradients of the last layer that lack a loss."""

    states: dict[tuple[Slot, int], tuple[Copy, ...]] = field(default_factory=dict)
    """(slot, version): copies, newest epoch first."""
    gradients: dict[tuple[Slot, int], dict[int, tuple[Copy, ...]]] = field(default_factory=dict)
    """((layer, TP rank), step): ledger mask: copies, newest epoch first. Copies with the same ledger are
    equal."""

    reduced: dict[tuple[Slot, int], tuple[Copy, ...]] = field(default_factory=dict)
    """((layer, TP rank), step): gradients of layers with shared tensors as their update takes them."""

    updates: dict[Slot, dict[Line, dict[int, tuple[Copy, ...]]]] = field(default_factory=dict)
    """Slot: (owner, epoch): step: what that update took."""
    logs: dict[tuple[str, int, int, int], dict[int, tuple[Copy, ...]]] = field(default_factory=dict)
    """(kind, layer, step, micro-batch): TP rank: copies of one message, newest epoch first."""
    divisions: dict[Slot, tuple[int, ...]] = field(default_factory=dict)
    """(layer, TP rank): into how many portions its states were divided, where they were."""
    homes: dict[tuple[Slot, int], dict[str, Copy]] = field(default_factory=dict)
    """(slot, version): node: what `on_node` finds of `states`, each of which may lie on hundreds of nodes."""

    @classmethod
    def of(cls, inventory: Iterable[Copy], plan: Plan, nodes: Iterable[str]) -> CopyIndex:
        living, full = frozenset(nodes), (1 << plan.n_microbatches) - 1
        states: dict[tuple[Slot, int], list[Copy]] = {}
        gradients: dict[tuple[Slot, int], dict[int, list[Copy]]] = {}
        reduced: dict[tuple[Slot, int], list[Copy]] = {}
        updates: dict[Slot, dict[Line, dict[int, tuple[Copy, ...]]]] = {}
        logs: dict[tuple[str, int, int, int], dict[int, list[Copy]]] = {}
        for copy in dict.fromkeys(inventory):
            if copy.node not in living or not (0 <= copy.layer < plan.n_layers and 0 <= copy.shard < plan.tp):
                continue
            if not 0 <= copy.portion[0] < copy.portion[1]:
                continue
            at = (copy.layer, copy.shard), copy.step
            if copy.kind == STATE:
                states.setdefault((copy.slot, copy.step), []).append(copy)
            elif copy.kind == REDUCED:
                reduced.setdefault(at, []).append(copy)
            elif copy.kind == UPDATE:
                line = updates.setdefault(copy.slot, {}).setdefault((copy.owner, copy.epoch), {})
                line[copy.step] = (*line.get(copy.step, ()), copy)
            elif copy.kind in LOGS:
                for index in copy.microbatches:
                    of = logs.setdefault((copy.kind, copy.layer, copy.step, index), {})
                    of.setdefault(copy.shard, []).append(copy)
            elif (
                copy.microbatches
                and not (mask := to_mask(copy.microbatches)) & ~full
                and _has_losses(copy, plan)
            ):
                gradients.setdefault(at, {}).setdefault(mask, []).append(copy)
        sorted_states = {at: _newest_first(copies) for at, copies in states.items()}
        return cls(
            sorted_states,
            {at: {m: _newest_first(c) for m, c in by.items()} for at, by in gradients.items()},
            {at: _newest_first(copies) for at, copies in reduced.items()},
            updates,
            {at: {s: _newest_first(c) for s, c in by.items()} for at, by in logs.items()},
            _divisions(states),
            {at: _homes(copies) for at, copies in sorted_states.items()},
        )

    def versions(self, slot: Slot) -> list[int]:
        """Versions of which a state copy of `slot`, or of a portion of it, exists, ascending."""
        return sorted({version for at, version in self.states if at[: len(slot)] == slot})

    def equals(self, copy: Copy) -> tuple[Copy, ...]:
        """Copies of the same content, `copy` included."""
        at = (copy.layer, copy.shard), copy.step
        if copy.kind == STATE:
            return self.states[copy.slot, copy.step]
        if copy.kind == REDUCED:
            return self.reduced[at]
        if copy.kind == UPDATE:
            return self.updates[copy.slot][copy.owner, copy.epoch][copy.step]
        return self.gradients[at][to_mask(copy.microbatches)]

    @property
    def newest(self) -> int:
        """The highest state version of which any copy exists, or that an update was made to; or -1."""
        return max(self.updated | {version for _, version in self.states}, default=-1)

    @property
    def updated(self) -> set[int]:
        """Versions that updates lead to."""
        return {step + 1 for lines in self.updates.values() for steps in lines.values() for step in steps}


def on_node(copies: Sequence[Copy], node: str) -> Copy | None:
    """Return the copy that lies on `node`, made there if possible, or None."""
    local = [copy for copy in copies if copy.node == node]
    return next((copy for copy in local if copy.owner == node), local[0] if local else None)


def _homes(copies: Sequence[Copy]) -> dict[str, Copy]:
    found: dict[str, Copy] = {}
    for copy in copies:
        held = found.get(copy.node)
        if held is None or (copy.owner == copy.node and held.owner != copy.node):
            found[copy.node] = copy
    return found


def _divisions(states: Iterable[tuple[Slot, int]]) -> dict[Slot, tuple[int, ...]]:
    found: dict[Slot, set[int]] = {}
    for slot, _ in states:
        if len(slot) > 2:
            found.setdefault(slot[:2], set()).add(slot[3])
    return {slot: tuple(sorted(numbers)) for slot, numbers in found.items()}


def _has_losses(copy: Copy, plan: Plan) -> bool:
    return copy.layer != plan.n_layers - 1 or copy.microbatches <= {index for index, _ in copy.losses}


def _newest_first(copies: list[Copy]) -> tuple[Copy, ...]:
    return tuple(sorted(copies, key=lambda c: (-c.epoch, -c.sequence, c.node, c.owner)))
