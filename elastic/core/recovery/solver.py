"""The choices behind a recovery: which version, which copies, who takes which gradient. See
`elastic.core.recovery.recovery`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from elastic.core.recovery.copy_index import CopyIndex, on_node
from elastic.core.recovery.replay_chains import alike, chains, recipe_of
from elastic.core.recovery.set_packing import best_packing, exact_cover
from elastic.domain.types import Copy, Plan, Recipe, Slot, StepRecord
from elastic.planning.placement.balance import balance


class Way(NamedTuple):
    """What a version of a (layer, TP rank) can be made of."""

    lines: tuple[tuple[Copy, ...], ...]
    """Of the whole state, or of each portion: a state, and updates that lead on from it."""
    gradients: tuple[Copy, ...] = ()
    """Of the last step, for its update."""


@dataclass(slots=True)
class Solver:
    """One recovery. Of equal copies it names any: which vault sends is settled at the end (`spread`)."""

    plan: Plan
    shelf: CopyIndex
    records: Mapping[int, StepRecord]
    checkpoint: tuple[str, int] | None
    initial: bool
    tied: Mapping[int, frozenset[int]]
    """Layer: the others that it shares tensors with, whose gradients its update needs too."""

    @property
    def slots(self) -> list[Slot]:
        return [(layer, shard) for layer in range(self.plan.n_layers) for shard in range(self.plan.tp)]

    @property
    def full(self) -> int:
        return (1 << self.plan.n_microbatches) - 1

    # ---- which version ----

    def candidates(self) -> list[int]:
        """Versions that anything leads to, highest first."""
        versions = {version for _, version in self.shelf.states} | self.shelf.updated
        versions |= {step + 1 for step in self.records if step in versions}
        if self.checkpoint:
            versions.add(self.checkpoint[1])
        if self.initial:
            versions.add(0)
        return sorted(versions, reverse=True)

    def has(self, slot: Slot, version: int) -> bool:
        """Whether `version` of `slot` can be had without gradients."""
        return self.base("", slot, version) is not None or self.durable(version)

    def durable(self, version: int) -> bool:
        """Whether `version` can be had of every layer without any vault."""
        return (self.checkpoint is not None and self.checkpoint[1] == version) or (
            self.initial and version == 0
        )

    def replayable(self, slot: Slot, version: int) -> bool:
        """Whether `slot` can be brought from version-1 to `version`."""
        return self.replay("", slot, version) is not None

    def reachable(self, slot: Slot, version: int) -> bool:
        return self.has(slot, version) or self.replayable(slot, version)

    def target(self) -> int | None:
        for version in self.candidates():
            if all(self.reachable(slot, version) for slot in self.slots):
                return version
        return None

    # ---- state ----

    def state_recipe(self, node: str, slot: Slot, version: int) -> Recipe:
        """The cheapest way, in bytes over the network, for `slot` on `node` to get `version`."""
        layer, shard = slot
        base = self.base(node, slot, version)
        if base is not None and not self.nbytes(base, node):
            return self.recipe(slot, version, base)
        options = [way for way in (base, self.replay(node, slot, version)) if way is not None]
        if options:
            best = min(options, key=lambda way: self.nbytes(way, node))
            return self.recipe(slot, version, best)
        durable = self.checkpoint is not None and self.checkpoint[1] == version
        return Recipe(
            layer, shard, version, checkpoint=self.checkpoint[0] if durable and self.checkpoint else ""
        )

    def base(self, node: str, slot: Slot, version: int) -> Way | None:
        """How `node` has the state of `version` without gradients, whole or all portions of it, over the network with
        the fewest bytes; None if there is no way."""
        whole = self.line(node, slot, version)
        options = [Way((whole,))] if whole else []
        for number in self.shelf.divisions.get(slot, ()):
            lines = [self.line(node, (*slot, index, number), version) for index in range(number)]
            found = [line for line in lines if line is not None]
            if len(found) == number:
                options.append(Way(tuple(found)))
        return min(options, key=lambda way: self.nbytes(way, node), default=None)

    def line(self, node: str, slot: Slot, version: int) -> tuple[Copy, ...] | None:
        """Return the state of `version`, or an older one and the updates that make `version` of it: what takes the
        fewest bytes to `node`, and of these the fewest updates. None if there is neither."""
        whole = self.shelf.states.get((slot, version), ())
        local = self.shelf.homes.get((slot, version), {}).get(node)
        if local:
            return (local,)
        options: list[tuple[Copy, ...]] = [(self.nearest(whole, node),)] if whole else []
        for links in chains(self.shelf, slot, version):
            options.append(tuple(self.nearest(link, node) for link in links))
        return min(options, key=lambda line: (self.nbytes(Way((line,)), node), len(line)), default=None)

    def replay(self, node: str, slot: Slot, version: int) -> Way | None:
        """Return what makes version-1 and the gradients that make `version` of it, or None if that cannot be."""
        (layer, shard), before = slot, version - 1
        base = self.base(node, slot, before) if before in self.records else None
        if base is None:
            return None
        if layer in self.tied and (slot, before) in self.shelf.reduced:
            return Way(base.lines, (self.nearest(self.shelf.reduced[slot, before], node),))
        copies: list[Copy] = []
        for owner in (layer, *sorted(self.tied.get(layer, ()))):
            by_mask = self.shelf.gradients.get(((owner, shard), before), {})
            masks = exact_cover({mask: cost_of(held, node) for mask, held in by_mask.items()}, self.full)
            if masks is None:
                return None
            copies += [self.nearest(by_mask[mask], node) for mask in masks]
        return Way(base.lines, tuple(copies))

    def nbytes(self, way: Way, node: str) -> int:
        """Bytes over the network for `node` to have all that."""
        return fetched([*(copy for line in way.lines for copy in line), *way.gradients], node)

    def recipe(self, slot: Slot, version: int, way: Way) -> Recipe:
        """The recipe that takes these."""
        layer, shard, *_ = slot
        base = version - 1 if way.gradients else version
        lines = [recipe_of(slot, base, line) for line in way.lines]
        if len(lines) == 1:
            return replace(lines[0], version=version, replay=way.gradients)
        return Recipe(layer, shard, version, replay=way.gradients, portions=tuple(lines))

    # ---- gradients of the running step ----

    def families(self, version: int) -> list[frozenset[int]]:
        """For each layer the ledgers that every TP rank has a copy of."""
        result = []
        for layer in range(self.plan.n_layers):
            ranks = [self.shelf.gradients.get(((layer, r), version), {}).keys() for r in range(self.plan.tp)]
            result.append(frozenset(ranks[0]).intersection(*ranks[1:]))
        return result

    def gradients(self, version: int) -> tuple[dict[tuple[str, Slot], list[Copy]], list[int]]:
        """Return (copies to sum, by (node, slot)) and the mask covered in each layer."""
        families = self.families(version)
        useful = self.full
        for family in families:
            useful &= union_of(family)
        sums: dict[tuple[str, Slot], list[Copy]] = {}
        covered = []
        share: dict[str, int] = {}
        for layer, family in enumerate(families):
            holders = [unit.node for unit in self.plan.holders(layer)]
            costs = {
                mask: min(self.cost_at(node, layer, mask, version) for node in holders) for mask in family
            }
            chosen = best_packing(costs, useful)
            for mask in chosen:
                self.hand_out(sums, share, holders, layer, mask, version)
            covered.append(union_of(chosen))
        return sums, covered

    def cost_at(self, node: str, layer: int, mask: int, version: int) -> int:
        """Bytes over the network if `node` takes the gradients with this ledger, all TP ranks together."""
        ranks = range(self.plan.tp)
        return sum(cost_of(self.shelf.gradients[(layer, rank), version][mask], node) for rank in ranks)

    def hand_out(
        self,
        sums: dict[tuple[str, Slot], list[Copy]],
        share: dict[str, int],
        holders: Sequence[str],
        layer: int,
        mask: int,
        version: int,
    ) -> None:
        """Give the gradients with ledger `mask` to one holder: where they lie, else to the one that fetches
        least."""
        node = min(
            holders, key=lambda n: (self.cost_at(n, layer, mask, version), share.get(n, 0), holders.index(n))
        )
        for rank in range(self.plan.tp):
            copy = self.nearest(self.shelf.gradients[(layer, rank), version][mask], node)
            share[node] = share.get(node, 0) + (copy.nbytes if copy.node != node else 0)
            sums.setdefault((node, (layer, rank)), []).append(copy)

    # ---- sources ----

    def nearest(self, copies: Sequence[Copy], node: str) -> Copy:
        return on_node(copies, node) or self.lightest(copies)

    def lightest(self, copies: Sequence[Copy]) -> Copy:
        """The smallest copy, of these the newest."""
        return min(copies, key=lambda c: (c.nbytes, -c.epoch, -c.sequence, c.node))


def spread(recipes: Sequence[tuple[str, Recipe]], shelf: CopyIndex) -> tuple[tuple[str, Recipe], ...]:
    """Let every copy that goes over the network be sent by one of the vaults that have its equal, so that the vault
    which sends most sends as little as possible (`elastic.planning.placement.balance`)."""
    items = [
        {c.node: float(c.nbytes) for c in alike(shelf, part, copy)}
        for node, recipe in recipes
        for part in (*recipe.portions, recipe)
        for copy in _read(part)
        if copy.node != node
    ]
    senders = iter(balance(items))

    def sent(node: str, recipe: Recipe, copy: Copy) -> Copy:
        if copy.node == node:
            return copy
        sender = next(senders)
        return next(c for c in alike(shelf, recipe, copy) if c.node == sender)

    def sources(node: str, recipe: Recipe) -> Recipe:
        portions = tuple(sources(node, portion) for portion in recipe.portions)
        state = sent(node, recipe, recipe.state) if recipe.state else None
        updates, replay, gradients = (
            tuple(sent(node, recipe, copy) for copy in copies)
            for copies in (recipe.updates, recipe.replay, recipe.gradients)
        )
        return replace(
            recipe, state=state, updates=updates, replay=replay, gradients=gradients, portions=portions
        )

    return tuple((node, sources(node, recipe)) for node, recipe in recipes)


def copies_of(recipe: Recipe) -> Iterator[Copy]:
    """Everything that a recipe reads from vaults, in order."""
    for portion in recipe.portions:
        yield from _read(portion)
    yield from _read(recipe)


def _read(recipe: Recipe) -> Iterator[Copy]:
    """What it reads beside its portions."""
    if recipe.state:
        yield recipe.state
    yield from recipe.updates
    yield from recipe.replay
    yield from recipe.gradients


def cost_of(copies: Sequence[Copy], node: str) -> int:
    """Bytes over the network for `node` to have one of these."""
    return 0 if on_node(copies, node) else min(copy.nbytes for copy in copies)


def fetched(copies: Sequence[Copy], node: str) -> int:
    return sum(copy.nbytes for copy in copies if copy.node != node)


def union_of(masks: Sequence[int] | frozenset[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union
