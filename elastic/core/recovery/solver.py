"""The choices of one recovery: the version, the copies, and the receiver of each gradient.

`elastic.core.recovery.recovery` has the rules. A slot is a (layer, TP rank), or a portion of its
state (`elastic.domain.types.Slot`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_, or_
from typing import NamedTuple

from elastic.core.recovery.copy_index import CopyIndex, copy_on
from elastic.core.recovery.set_packing import best_packing, exact_cover
from elastic.domain.types import Copy, Plan, Recipe, Slot, StepRecord
from elastic.planning.placement.balance import balance


class StateSources(NamedTuple):
    """Copies that together give one version of a (layer, TP rank)."""

    chains: tuple[tuple[Copy, ...], ...]
    """A state and the updates after it: one chain for the whole state, or one per portion."""
    gradients: tuple[Copy, ...] = ()
    """Gradients of the last step, for its update; empty if the chains give the version."""

    def fetched_bytes(self, node: str) -> int:
        """Return the bytes that `node` must fetch from other nodes."""
        copies = [*(copy for chain in self.chains for copy in chain), *self.gradients]
        return fetched_bytes(copies, node)


@dataclass(slots=True)
class Solver:
    """Makes the choices of one recovery. Of equal copies any is chosen; `balance_senders` then
    chooses the sending vault. In all methods a node "" stands for a node without copies."""

    plan: Plan
    index: CopyIndex
    records: Mapping[int, StepRecord]
    checkpoint: tuple[str, int] | None
    """(path, version) of the durable checkpoint; None: no checkpoint."""
    initial: bool
    """Whether layers may be initialised, as version 0."""
    tied: Mapping[int, frozenset[int]]
    """Layer: the other layers that share a tensor with it. An update needs all their gradients."""
    promised: int = 0
    """Mask of micro-batches that nodes outside the recovery have in their sums; copies of gradients
    that have one of them are not used."""
    apart: frozenset[int] = frozenset()
    """Pipelines whose holders keep their sums, and get no gradient."""

    @property
    def slots(self) -> list[Slot]:
        return [
            (layer, rank) for layer in range(self.plan.n_layers) for rank in range(self.plan.tp)
        ]

    @property
    def full(self) -> int:
        """Mask of all micro-batches of a step."""
        return (1 << self.plan.n_microbatches) - 1

    # ---- the target version ----

    def candidates(self) -> list[int]:
        """Return the versions to which some copy, record or checkpoint leads, highest first."""
        versions = {version for _, version in self.index.states} | self.index.updated
        versions |= {step + 1 for step in self.records if step in versions}
        if self.checkpoint:
            versions.add(self.checkpoint[1])
        if self.initial:
            versions.add(0)
        return sorted(versions, reverse=True)

    def target(self) -> int | None:
        """Return the highest version that every slot can reach, or None."""
        for version in self.candidates():
            if self.is_durable(version) or all(self.reaches(slot, version) for slot in self.slots):
                return version
        return None

    def is_durable(self, version: int) -> bool:
        """Return whether every layer can have `version` without any vault."""
        return (self.checkpoint is not None and self.checkpoint[1] == version) or (
            self.initial and version == 0
        )

    def reaches(self, slot: Slot, version: int) -> bool:
        """Return whether copies in vaults can bring `slot` to `version`."""
        return (
            self.without_gradients("", slot, version) is not None
            or self.with_gradients("", slot, version) is not None
        )

    # ---- sources of a state ----

    def state_recipe(self, node: str, slot: Slot, version: int) -> Recipe:
        """Return the recipe that gives `node` this version of `slot` with the fewest bytes."""
        layer, shard = slot
        sources = self.without_gradients(node, slot, version)
        if sources is None or sources.fetched_bytes(node):
            options = [s for s in (sources, self.with_gradients(node, slot, version)) if s]
            sources = min(options, key=lambda s: s.fetched_bytes(node), default=None)
        if sources is not None:
            return _recipe(slot, version, sources)
        path, step = self.checkpoint or ("", -1)
        return Recipe(layer, shard, version, checkpoint=path if step == version else "")

    def without_gradients(self, node: str, slot: Slot, version: int) -> StateSources | None:
        """Return the cheapest sources of the state, whole or from all its portions, or None."""
        whole = self.chain(node, slot, version)
        options = [StateSources((whole,))] if whole else []
        for number in self.index.divisions.get(slot, ()):
            chains = [self.chain(node, (*slot, i, number), version) for i in range(number)]
            found = tuple(chain for chain in chains if chain is not None)
            if len(found) == number:
                options.append(StateSources(found))
        if len(options) == 1:
            return options[0]
        return min(options, key=lambda sources: sources.fetched_bytes(node), default=None)

    def chain(self, node: str, slot: Slot, version: int) -> tuple[Copy, ...] | None:
        """Return a state of `version`, or an older state and the updates from it to `version`. The
        choice fetches the fewest bytes to `node`, then has the fewest updates. None: no copies lead
        to `version`."""
        local = self.index.by_node.get((slot, version), {}).get(node)
        if local:
            return (local,)
        states = self.index.states.get((slot, version), ())
        options: list[tuple[Copy, ...]] = [(_nearest(states, node),)] if states else []
        for links in self.index.chains(slot, version):
            options.append(tuple(_nearest(copies, node) for copies in links))
        return min(
            options, key=lambda chain: (fetched_bytes(chain, node), len(chain)), default=None
        )

    def with_gradients(self, node: str, slot: Slot, version: int) -> StateSources | None:
        """Return sources of version - 1 and of the gradients of that step, or None."""
        (layer, shard), before = slot, version - 1
        base = self.without_gradients(node, slot, before) if before in self.records else None
        if base is None:
            return None
        if layer in self.tied and (slot, before) in self.index.reduced:
            return StateSources(base.chains, (_nearest(self.index.reduced[slot, before], node),))
        copies: list[Copy] = []
        for owner in (layer, *sorted(self.tied.get(layer, ()))):
            by_mask = self.index.gradients.get(((owner, shard), before), {})
            costs = {mask: _fetch_cost(held, node) for mask, held in by_mask.items()}
            masks = exact_cover(costs, self.full)
            if masks is None:
                return None
            copies += [_nearest(by_mask[mask], node) for mask in masks]
        return StateSources(base.chains, tuple(copies))

    # ---- gradients of the step that was running ----

    def gradients(self, version: int) -> tuple[dict[tuple[str, Slot], list[Copy]], list[int]]:
        """Return the copies to sum by (node, slot), and per layer the union of their ledgers."""
        options = [self._common_ledgers(layer, version) for layer in range(self.plan.n_layers)]
        # A micro-batch must run again in any case if some layer has no gradient of it.
        useful = reduce(and_, map(union_of, options), self.full)
        sums: dict[tuple[str, Slot], list[Copy]] = {}
        covered = []
        fetched: dict[str, int] = {}
        for layer, masks in enumerate(options):
            holders = [
                unit.node
                for number, unit in enumerate(self.plan.holders(layer))
                if number not in self.apart
            ]
            costs = {
                mask: min(self._gradient_cost(node, layer, mask, version) for node in holders)
                for mask in masks
            }
            chosen = best_packing(costs, useful)
            for mask in chosen:
                node = min(
                    holders,
                    key=lambda n: (
                        self._gradient_cost(n, layer, mask, version),
                        fetched.get(n, 0),
                        holders.index(n),
                    ),
                )
                for rank in range(self.plan.tp):
                    copy = _nearest(self.index.gradients[(layer, rank), version][mask], node)
                    fetched[node] = fetched.get(node, 0) + fetched_bytes((copy,), node)
                    sums.setdefault((node, (layer, rank)), []).append(copy)
            covered.append(union_of(chosen))
        return sums, covered

    def _common_ledgers(self, layer: int, version: int) -> frozenset[int]:
        """Return the ledgers (as masks) of which every TP rank of `layer` has a gradient copy that
        a holder may add to its sum."""
        if len(self.apart) == len(self.plan.pipelines):
            return frozenset()
        ranks = range(self.plan.tp)
        found = [self.index.gradients.get(((layer, r), version), {}).keys() for r in ranks]
        common = frozenset(found[0]).intersection(*found[1:])
        return frozenset(mask for mask in common if not mask & self.promised)

    def _gradient_cost(self, node: str, layer: int, mask: int, version: int) -> int:
        """Return the bytes that `node` fetches for this ledger's gradients of all TP ranks."""
        return sum(
            _fetch_cost(self.index.gradients[(layer, rank), version][mask], node)
            for rank in range(self.plan.tp)
        )


def balance_senders(
    recipes: Sequence[tuple[str, Recipe]], index: CopyIndex
) -> tuple[tuple[str, Recipe], ...]:
    """Choose the sending vault of every copy that crosses the network. The vault that sends most
    must send as little as possible (`elastic.planning.placement.balance`)."""
    items = [
        {c.node: float(c.nbytes) for c in index.substitutes(part, copy)}
        for node, recipe in recipes
        for part in (*recipe.portions, recipe)
        for copy in _copies_beside_portions(part)
        if copy.node != node
    ]
    senders = iter(balance(items))

    def sent(node: str, recipe: Recipe, copy: Copy) -> Copy:
        if copy.node == node:
            return copy
        sender = next(senders)
        return next(c for c in index.substitutes(recipe, copy) if c.node == sender)

    def with_senders(node: str, recipe: Recipe) -> Recipe:
        # This must call `sent` in the order of `items`.
        if all(copy.node == node for copy in copies_of(recipe)):
            return recipe
        return replace(
            recipe,
            portions=tuple(with_senders(node, portion) for portion in recipe.portions),
            state=sent(node, recipe, recipe.state) if recipe.state else None,
            updates=tuple(sent(node, recipe, copy) for copy in recipe.updates),
            replay=tuple(sent(node, recipe, copy) for copy in recipe.replay),
            gradients=tuple(sent(node, recipe, copy) for copy in recipe.gradients),
        )

    return tuple((node, with_senders(node, recipe)) for node, recipe in recipes)


def copies_of(recipe: Recipe) -> Iterator[Copy]:
    """Yield every copy that a recipe reads from vaults, in order."""
    for portion in recipe.portions:
        yield from _copies_beside_portions(portion)
    yield from _copies_beside_portions(recipe)


def _copies_beside_portions(recipe: Recipe) -> Iterator[Copy]:
    if recipe.state:
        yield recipe.state
    yield from recipe.updates
    yield from recipe.replay
    yield from recipe.gradients


def _recipe(slot: Slot, version: int, sources: StateSources) -> Recipe:
    layer, shard = slot
    base = version - 1 if sources.gradients else version
    parts = [
        Recipe(layer, shard, base, state, updates=tuple(updates))
        for state, *updates in sources.chains
    ]
    if len(parts) == 1:
        return replace(parts[0], version=version, replay=sources.gradients)
    return Recipe(layer, shard, version, replay=sources.gradients, portions=tuple(parts))


def _nearest(copies: Sequence[Copy], node: str) -> Copy:
    """Return the copy on `node`; if there is none, the newest of the smallest copies."""
    return copy_on(copies, node) or min(
        copies, key=lambda c: (c.nbytes, -c.epoch, -c.sequence, c.node)
    )


def _fetch_cost(copies: Sequence[Copy], node: str) -> int:
    """Return the bytes that `node` must fetch to have one of these copies."""
    return 0 if copy_on(copies, node) else min(copy.nbytes for copy in copies)


def fetched_bytes(copies: Iterable[Copy], node: str) -> int:
    """Return the bytes that `node` must fetch to have all these copies."""
    return sum(copy.nbytes for copy in copies if copy.node != node)


def union_of(masks: Iterable[int]) -> int:
    return reduce(or_, masks, 0)
