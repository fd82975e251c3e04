"""All copies that living vaults hold, arranged by what they are good for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from elastic.core.ledger import to_mask
from elastic.core.types import LOGS, REDUCED, STATE, Copy, Plan

Slot = tuple[int, int]
"""(layer, TP rank)."""


@dataclass(frozen=True, slots=True)
class Shelf:
    """Usable copies. Unusable, and left out: those on nodes without a vault, of other layers, TP ranks or
    micro-batches than the plan's, empty gradients, and gradients of the last layer that lack a loss."""

    states: dict[tuple[Slot, int], tuple[Copy, ...]] = field(default_factory=dict)
    """((layer, TP rank), version): copies, newest epoch first."""
    gradients: dict[tuple[Slot, int], dict[int, tuple[Copy, ...]]] = field(default_factory=dict)
    """((layer, TP rank), step): ledger mask: copies, newest epoch first. Copies with the same ledger are
    equal."""

    reduced: dict[tuple[Slot, int], tuple[Copy, ...]] = field(default_factory=dict)
    """((layer, TP rank), step): gradients of layers with shared tensors as their update takes them."""

    logs: dict[tuple[str, int, int, int], dict[int, tuple[Copy, ...]]] = field(default_factory=dict)
    """(kind, layer, step, micro-batch): TP rank: copies of one message, newest epoch first."""

    @classmethod
    def of(cls, inventory: Iterable[Copy], plan: Plan, nodes: Iterable[str]) -> Shelf:
        living, full = frozenset(nodes), (1 << plan.n_microbatches) - 1
        states: dict[tuple[Slot, int], list[Copy]] = {}
        gradients: dict[tuple[Slot, int], dict[int, list[Copy]]] = {}
        reduced: dict[tuple[Slot, int], list[Copy]] = {}
        logs: dict[tuple[str, int, int, int], dict[int, list[Copy]]] = {}
        for copy in dict.fromkeys(inventory):
            if copy.node not in living or not (0 <= copy.layer < plan.n_layers and 0 <= copy.shard < plan.tp):
                continue
            at = (copy.layer, copy.shard), copy.step
            if copy.kind == STATE:
                states.setdefault(at, []).append(copy)
            elif copy.kind == REDUCED:
                reduced.setdefault(at, []).append(copy)
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
        return cls(
            {at: _newest_first(copies) for at, copies in states.items()},
            {at: {m: _newest_first(c) for m, c in by.items()} for at, by in gradients.items()},
            {at: _newest_first(copies) for at, copies in reduced.items()},
            {at: {s: _newest_first(c) for s, c in by.items()} for at, by in logs.items()},
        )

    def versions(self, slot: Slot) -> list[int]:
        """Versions of which a state copy of `slot` exists, ascending."""
        return sorted(version for at, version in self.states if at == slot)

    def equals(self, copy: Copy) -> tuple[Copy, ...]:
        """Copies of the same content, `copy` included."""
        at = (copy.layer, copy.shard), copy.step
        if copy.kind == STATE:
            return self.states[at]
        if copy.kind == REDUCED:
            return self.reduced[at]
        return self.gradients[at][to_mask(copy.microbatches)]

    @property
    def newest(self) -> int:
        """The highest state version of which any copy exists, or -1."""
        return max((version for _, version in self.states), default=-1)


def on_node(copies: Sequence[Copy], node: str) -> Copy | None:
    """Return the copy that lies on `node`, made there if possible, or None."""
    local = [copy for copy in copies if copy.node == node]
    return next((copy for copy in local if copy.owner == node), local[0] if local else None)


def _has_losses(copy: Copy, plan: Plan) -> bool:
    return copy.layer != plan.n_layers - 1 or copy.microbatches <= {index for index, _ in copy.losses}


def _newest_first(copies: list[Copy]) -> tuple[Copy, ...]:
    return tuple(sorted(copies, key=lambda c: (-c.epoch, -c.sequence, c.node, c.owner)))
