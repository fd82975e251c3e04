"""Brings the layers of a stage to the version and ledger that an assignment asks for.

Live state is kept whenever its version fits; what is missing comes from the local vault through shared memory, from a
peer's vault, or from a checkpoint. Follows `types.Recipe` step by step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from elastic.domain.errors import VaultError
from elastic.domain.types import REDUCED, WHOLE, Assignment, Copy, Portion, Recipe, StepRecord
from elastic.planning.plan.rank_map import Member
from elastic.planning.plan.schemes import portion_of
from elastic.worker.engine.partial import needed_messages
from elastic.worker.model.layers import Tied
from elastic.worker.model.state_codec import join_portions
from elastic.worker.recovery.fetch import Fetched, Fetcher
from elastic.worker.replica.checkpoint import load_layer
from elastic.worker.replica.replica import LayerReplica

Fetches = dict[str, Future[Fetched]]


@dataclass
class Installed:
    """Layers of the stage, in order, and where each one's state came from."""

    replicas: list[LayerReplica] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    messages: dict[str, torch.Tensor] = field(default_factory=dict)
    """Logged messages that partial runs start from, by the copies' keys."""


class Installer:
    """Builds the layers of one worker's stage for an assignment.

    build(layer, empty) makes a replica; `fetcher` reads vaults; `lr` is the learning-rate schedule; `reached` is
    called after every layer (a point for injected faults); `check` raises when the epoch was left.
    """

    def __init__(
        self,
        build: Callable[[int, bool, Portion], LayerReplica],
        fetcher: Fetcher,
        lr: Callable[[int], float],
        reached: Callable[[], None],
        check: Callable[[], None],
        tied: Tied,
    ) -> None:
        self._build, self._fetcher, self._lr = build, fetcher, lr
        self._reached, self._check, self._tied = reached, check, tied

    @staticmethod
    def usable(
        assignment: Assignment, member: Member, live: dict[int, LayerReplica]
    ) -> dict[int, LayerReplica]:
        """Live replicas of layers that `member` has in the new plan, with the same portion of the state; the memory of
        others is wanted for new ones."""
        portions = _portions(assignment, member)
        return {layer: replica for layer, replica in live.items() if replica.portion == portions.get(layer)}

    def install(self, assignment: Assignment, member: Member, live: dict[int, LayerReplica]) -> Installed:
        """Return the stage's replicas at the assignment's version and ledger.

        `live`: see `usable`. Those that are not complete are made so.

        Raises VaultError when a source is gone; the caller then waits for the next epoch.
        """
        recipes = {
            recipe.layer: recipe
            for node, recipe in assignment.recipes
            if node == member.unit.node and recipe.shard == member.shard and recipe.layer in member.layers
        }
        portions = _portions(assignment, member)
        torn = {layer: replica for layer, replica in live.items() if not replica.complete}
        live = {layer: replica for layer, replica in live.items() if replica.complete}
        installed = Installed()
        with ThreadPoolExecutor(4, "elastic-fetch") as pool:
            recipes_want = {c.key: c for c in _wanted(recipes.values(), live)}
            fetches = {key: pool.submit(self._fetcher.fetch, c) for key, c in recipes_want.items()}
            messages = {c.key: pool.submit(self._fetcher.fetch, c) for c in needed_messages(assignment, member)}
            for layer in member.layers:
                self._check()
                recipe = recipes.get(layer)
                if recipe is None:
                    replica, source = self._build(layer, False, portions[layer]), "initial"
                else:
                    replica, source = self._state(
                        recipe,
                        portions[layer],
                        live.get(layer),
                        assignment.record,
                        fetches,
                        torn.pop(layer, None),
                    )
                    _gradients(recipe, replica, replica is live.get(layer), fetches)
                installed.replicas.append(replica)
                installed.sources.append(source)
                self._reached()
            installed.messages = {key: fetch.result().data for key, fetch in messages.items()}
        return installed

    def _state(
        self,
        recipe: Recipe,
        portion: Portion,
        live: LayerReplica | None,
        record: StepRecord | None,
        fetches: Fetches,
        torn: LayerReplica | None = None,
    ) -> tuple[LayerReplica, str]:
        """The replica at the recipe's version, with this portion of the state, and where it came from. `torn`: one with
        this portion to be filled."""
        if live is not None and live.version == recipe.version:
            return live, "memory"
        if recipe.checkpoint:
            replica = self._build(recipe.layer, True, portion)
            load_layer(recipe.checkpoint, replica)
            return replica, "checkpoint"
        if not recipe.states:
            return self._build(recipe.layer, False, portion), "initial"
        shared = portion != WHOLE or bool(recipe.portions)
        if shared and not recipe.replay and not recipe.updates:
            run, source = self._joined(recipe, fetches)
            replica = torn or self._build(recipe.layer, True, portion)
            replica.read_state(run)
        else:
            replica, source = self._brought(recipe, None if shared else live, fetches)
            if recipe.replay:
                self._replay(recipe, replica, record, fetches)
            if portion != WHOLE:
                whole, replica = replica, torn or self._build(recipe.layer, True, portion)
                replica.read_state(_run(whole))
        if replica.version != recipe.version:
            raise VaultError(f"layer {recipe.layer}: version {replica.version} instead of {recipe.version}")
        return replica, source

    def _joined(self, recipe: Recipe, fetches: Fetches) -> tuple[torch.Tensor, str]:
        """The run of the whole state that the recipe begins with, and where it, or most of it, came from."""
        if not recipe.portions:
            data, source = self._fetched(recipe, fetches)
            return data, source
        parts = [self._portion(part, fetches) for part in recipe.portions]
        source = max((source for _, source in parts), key=lambda source: source.startswith("peer"))
        return join_portions([run for run, _ in parts]), source

    def _brought(
        self, recipe: Recipe, live: LayerReplica | None, fetches: Fetches
    ) -> tuple[LayerReplica, str]:
        """A replica with the whole state that the recipe begins with, or with one further on its way."""
        if recipe.portions:
            run, source = self._joined(recipe, fetches)
            replica = self._build(recipe.layer, True, WHOLE)
            replica.read_state(run)
            return replica, source
        if live is not None and _leads_on(recipe, live):
            replica, source = live, "memory"
        else:
            replica = self._build(recipe.layer, True, WHOLE)
            data, source = self._fetched(recipe, fetches)
            replica.read_state(data)
        for copy in recipe.updates:
            if copy.step >= replica.version:
                self._update(replica, copy, fetches)
        return replica, source

    def _portion(self, recipe: Recipe, fetches: Fetches) -> tuple[torch.Tensor, str]:
        """One portion of a state as a run, and where it came from."""
        data, source = self._fetched(recipe, fetches)
        if not recipe.updates:
            return data, source
        replica = self._build(recipe.layer, True, recipe.updates[0].portion)
        replica.read_state(data)
        for copy in recipe.updates:
            self._update(replica, copy, fetches)
        return _run(replica), source

    def _update(self, replica: LayerReplica, copy: Copy, fetches: Fetches) -> None:
        """Make one update again from what it took."""
        if copy.step != replica.version:
            raise VaultError(f"layer {copy.layer}: update of step {copy.step} at version {replica.version}")
        replica.apply_update(fetches.pop(copy.key).result().data, self._lr(copy.step))
        replica.clear()

    def _fetched(self, recipe: Recipe, fetches: Fetches) -> Fetched:
        """The recipe's state."""
        assert recipe.state is not None
        return fetches[recipe.state.key].result()

    def _replay(
        self, recipe: Recipe, replica: LayerReplica, record: StepRecord | None, fetches: Fetches
    ) -> None:
        """Apply the update of step version-1 from the gradients of its holders, as they would have."""
        if record is None or record.step != recipe.version - 1:
            raise VaultError(f"layer {recipe.layer}: no record of step {recipe.version - 1}")
        whole = [copy for copy in recipe.replay if copy.kind == REDUCED]
        if whole:
            data = fetches[whole[0].key].result().data
            replica.update(
                data.view(replica.gradient.dtype).to(replica.device), record.clip, self._lr(record.step)
            )
            replica.clear()
            return
        owners = {recipe.layer: replica}
        replica.clear()
        for copy in recipe.replay:
            if copy.layer not in owners:
                owners[copy.layer] = self._build(copy.layer, True, WHOLE)
                owners[copy.layer].clear()
            owners[copy.layer].add_gradient(fetches[copy.key].result().data, copy.microbatches, copy.losses)
        reduced = replica.gradient.clone()
        for group in self._tied:
            if any(layer == recipe.layer for layer, _ in group):
                self._sum_tied(group, recipe.layer, owners, reduced)
        replica.update(reduced, record.clip, self._lr(record.step))
        replica.clear()

    @staticmethod
    def _sum_tied(
        group: tuple[tuple[int, str], ...], mine: int, owners: dict[int, LayerReplica], reduced: torch.Tensor
    ) -> None:
        """Give `reduced` the sum over all owners of one tied tensor, added in the group's order."""
        rows = []
        for layer, name in group:
            if layer not in owners:
                raise VaultError(f"layer {mine}: the gradient of {name} in layer {layer} is needed to replay")
            rows.append(owners[layer].gradient[owners[layer].gradient_slice(name)])
        total = rows[0].clone()
        for row in rows[1:]:
            total += row
        for layer, name in group:
            if layer == mine:
                reduced[owners[mine].gradient_slice(name)] = total


def _portions(assignment: Assignment, member: Member) -> dict[int, Portion]:
    """What `member` has of the state of each of its layers."""
    return {layer: portion_of(assignment.plan, member.unit.node, layer) for layer in member.layers}


def _wanted(recipes: Iterable[Recipe], live: dict[int, LayerReplica]) -> Iterator[Copy]:
    """Copies to fetch, states first."""
    gradients: dict[str, Copy] = {}
    for recipe in recipes:
        replica = live.get(recipe.layer)
        have = replica.version if replica is not None else -1
        if have != recipe.version:
            leads = replica is not None and replica.portion == WHOLE and _leads_on(recipe, replica)
            for part in recipe.portions:
                yield from part.states
                gradients.update((c.key, c) for c in part.updates)
            if recipe.state is not None and not leads:
                yield recipe.state
            gradients.update((c.key, c) for c in recipe.updates if not (leads and c.step < have))
            gradients.update((c.key, c) for c in recipe.replay)
        kept = have == recipe.version
        gradients.update((c.key, c) for c in recipe.gradients if not (kept and _is_live(replica, c)))
    yield from gradients.values()


def _run(replica: LayerReplica) -> torch.Tensor:
    """Its state as bytes."""
    run = torch.empty(replica.state_nbytes(), dtype=torch.uint8)
    replica.write_state(run)
    return run


def _leads_on(recipe: Recipe, live: LayerReplica) -> bool:
    """Whether the live state is the one that the recipe begins with, or one further on its owner's own way."""
    if recipe.state is None:
        return False
    further = len(recipe.updates) if recipe.state.owner == live.owner else 0
    return recipe.state.step <= live.version <= recipe.state.step + further


def _gradients(recipe: Recipe, replica: LayerReplica, kept: bool, fetches: Fetches) -> None:
    """Make the accumulator the sum of the recipe's gradients, beginning with what is live."""
    mine = [c for c in recipe.gradients if kept and _is_live(replica, c)]
    replica.keep([c.microbatches for c in mine])
    for copy in recipe.gradients:
        if copy not in mine:
            replica.add_gradient(fetches[copy.key].result().data, copy.microbatches, copy.losses)


def _is_live(replica: LayerReplica | None, copy: Copy) -> bool:
    """Whether this copy is what a live accumulator holds, so that nothing has to be read."""
    return (
        replica is not None
        and replica.version == copy.step
        and copy.owner == copy.node == replica.owner
        and any(part.ledger == copy.microbatches for part in replica.parts)
    )
