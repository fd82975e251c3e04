"""Brings the layers of a stage to the version and ledger that an assignment asks for.

A live layer is kept if its version fits. Missing data comes from the local vault through shared
memory, from a peer's vault, or from a checkpoint. Each layer follows its `types.Recipe`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field

from torch import Tensor

from elastic.domain.errors import VaultError
from elastic.domain.types import REDUCED, WHOLE, Assignment, Copy, Portion, Recipe, StepRecord
from elastic.planning.plan.rank_map import RankMember
from elastic.planning.plan.schemes import portion_of
from elastic.worker.engine.partial import needed_messages
from elastic.worker.model.layers import Tied
from elastic.worker.model.state_codec import join_portions
from elastic.worker.recovery.fetch import FetchedCopy, Fetcher
from elastic.worker.replica.checkpoint import load_layer
from elastic.worker.replica.replica import LayerReplica


@dataclass
class LoadedStage:
    """Loaded layers of a worker, in order, with the source of each layer's state."""

    replicas: list[LayerReplica] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    """Per layer: memory | initial | checkpoint | shared-memory | peer:NODE."""
    messages: dict[str, Tensor] = field(default_factory=dict)
    """Logged messages for partial replays, by the keys of their copies."""


class StateLoader:
    """Loads the layers of one worker's stage for one assignment."""

    def __init__(
        self,
        build: Callable[[int, bool, Portion], LayerReplica],
        fetcher: Fetcher,
        lr: Callable[[int], float],
        after_layer: Callable[[], None],
        tied: Tied,
    ) -> None:
        """`build(layer, empty, portion)` returns a new replica, `lr(step)` the learning rate.

        `after_layer()` is called after each layer and may raise EpochAbandoned.
        """
        self._build, self._fetcher, self._lr = build, fetcher, lr
        self._after_layer, self._tied = after_layer, tied
        self._fetches: dict[str, Future[FetchedCopy]] = {}

    @staticmethod
    def usable(
        assignment: Assignment, member: RankMember, live: dict[int, LayerReplica]
    ) -> dict[int, LayerReplica]:
        """Return the live replicas that `member` keeps: with the same portion, and not diverged.

        The caller frees the others before `install`, which needs their memory.
        """
        portions, node = _portions(assignment, member), member.unit.node
        diverged = {layer for where, layer, _ in assignment.reload if where == node}
        return {
            layer: replica
            for layer, replica in live.items()
            if replica.portion == portions.get(layer) and layer not in diverged
        }

    def install(
        self, assignment: Assignment, member: RankMember, live: dict[int, LayerReplica]
    ) -> LoadedStage:
        """Return the stage's replicas at the assignment's version and ledger.

        `live` is the result of `usable`; incomplete replicas in it are loaded anew. Raises
        VaultError if a source is gone, without waiting for other transfers.
        """
        pool = ThreadPoolExecutor(4, "elastic-fetch")
        try:
            loaded = self._load_stage(pool, assignment, member, live)
        except BaseException:
            self._fetcher.close()
            pool.shutdown(wait=False, cancel_futures=True)
            raise
        pool.shutdown()
        return loaded

    def _load_stage(
        self,
        pool: ThreadPoolExecutor,
        assignment: Assignment,
        member: RankMember,
        live: dict[int, LayerReplica],
    ) -> LoadedStage:
        recipes = {
            recipe.layer: recipe
            for node, recipe in assignment.recipes
            if node == member.unit.node
            and recipe.shard == member.shard
            and recipe.layer in member.layers
        }
        portions = _portions(assignment, member)
        complete = {layer: replica for layer, replica in live.items() if replica.complete}
        loaded = LoadedStage()
        copies = {c.key: c for c in _copies_to_fetch(recipes.values(), complete)}
        self._fetches = {key: pool.submit(self._fetcher.fetch, c) for key, c in copies.items()}
        messages = {
            c.key: pool.submit(self._fetcher.fetch, c) for c in needed_messages(assignment, member)
        }
        for layer in member.layers:
            recipe, portion = recipes.get(layer), portions[layer]
            if recipe is None:
                replica, source = self._build(layer, False, portion), "initial"
            else:
                old = live.get(layer)
                replica, source = self._load(recipe, portion, old, assignment.record)
                kept = replica is complete.get(layer)
                self._load_gradients(recipe, replica, kept=kept)
            replica.fill_frozen()
            loaded.replicas.append(replica)
            loaded.sources.append(source)
            self._after_layer()
        loaded.messages = {key: fetch.result().data for key, fetch in messages.items()}
        return loaded

    def _load(
        self, recipe: Recipe, portion: Portion, old: LayerReplica | None, record: StepRecord | None
    ) -> tuple[LayerReplica, str]:
        """Return a replica with this portion of the state at the recipe's version, and its source.

        `old`: a live replica with this portion. If `old` is incomplete, only its memory is used.
        """
        live = old if old is not None and old.complete else None
        memory = old if old is not None and not old.complete else None
        if live is not None and live.version == recipe.version:
            return live, "memory"
        if recipe.checkpoint:
            replica = self._build(recipe.layer, True, portion)
            load_layer(recipe.checkpoint, replica)
            return replica, "checkpoint"
        if not recipe.states:
            return self._build(recipe.layer, False, portion), "initial"
        sharded = portion != WHOLE or bool(recipe.portions)
        if sharded and not recipe.replay and not recipe.updates:
            run, source = self._whole_run(recipe)
            replica = memory or self._build(recipe.layer, True, portion)
            replica.read_state(run)
        else:
            replica, source = self._load_whole(recipe, None if sharded else live)
            if recipe.replay:
                self._replay(recipe, replica, record)
            if portion != WHOLE:
                run = replica.state_run()
                replica = memory or self._build(recipe.layer, True, portion)
                replica.read_state(run)
        if replica.version != recipe.version:
            versions = f"version {replica.version} instead of {recipe.version}"
            raise VaultError(f"layer {recipe.layer}: {versions}")
        return replica, source

    def _whole_run(self, recipe: Recipe) -> tuple[Tensor, str]:
        """Return the run of the recipe's first whole state, and its source (a peer's, if any)."""
        if not recipe.portions:
            return self._fetched_state(recipe)
        parts = [self._portion_run(part) for part in recipe.portions]
        source = max((source for _, source in parts), key=lambda source: source.startswith("peer"))
        return join_portions([run for run, _ in parts]), source

    def _portion_run(self, recipe: Recipe) -> tuple[Tensor, str]:
        """Return the run of one portion after the recipe's updates, and its source."""
        data, source = self._fetched_state(recipe)
        if not recipe.updates:
            return data, source
        replica = self._build(recipe.layer, True, recipe.updates[0].portion)
        replica.read_state(data)
        for copy in recipe.updates:
            self._update(replica, copy)
        return replica.state_run(), source

    def _load_whole(self, recipe: Recipe, live: LayerReplica | None) -> tuple[LayerReplica, str]:
        """Return a replica with the whole state after the recipe's updates, and its source."""
        if live is not None and _continues(recipe, live):
            replica, source = live, "memory"
        else:
            replica = self._build(recipe.layer, True, WHOLE)
            run, source = self._whole_run(recipe)
            replica.read_state(run)
        for copy in recipe.updates if not recipe.portions else ():
            if copy.step >= replica.version:
                self._update(replica, copy)
        return replica, source

    def _update(self, replica: LayerReplica, copy: Copy) -> None:
        """Repeat one update from the copy of its input."""
        if copy.step != replica.version:
            text = f"update of step {copy.step} at version {replica.version}"
            raise VaultError(f"layer {copy.layer}: {text}")
        replica.apply_update(self._fetches.pop(copy.key).result().data, self._lr(copy.step))
        replica.clear()

    def _fetched(self, copy: Copy) -> Tensor:
        return self._fetches[copy.key].result().data

    def _fetched_state(self, recipe: Recipe) -> FetchedCopy:
        assert recipe.state is not None
        return self._fetches[recipe.state.key].result()

    def _replay(self, recipe: Recipe, replica: LayerReplica, record: StepRecord | None) -> None:
        """Repeat the update of step `recipe.version - 1` from gradients, with the same bits."""
        if record is None or record.step != recipe.version - 1:
            raise VaultError(f"layer {recipe.layer}: no record of step {recipe.version - 1}")
        replica.clear()
        if record.skipped:
            replica.skip_update()
            return
        whole = next((copy for copy in recipe.replay if copy.kind == REDUCED), None)
        if whole is not None:
            reduced = self._fetched(whole).view(replica.gradient.dtype).to(replica.device)
        else:
            reduced = self._reduced(recipe, replica)
        replica.update(reduced, record.clip, self._lr(record.step))
        replica.clear()

    def _reduced(self, recipe: Recipe, replica: LayerReplica) -> Tensor:
        """Return the layer's reduced gradient from `recipe.replay`, with tied tensors summed."""
        owners = {recipe.layer: replica}
        for copy in recipe.replay:
            if copy.layer not in owners:
                owners[copy.layer] = self._build(copy.layer, True, WHOLE)
                owners[copy.layer].clear()
            owners[copy.layer].add_gradient(self._fetched(copy), copy.microbatches, copy.losses)
        reduced = replica.gradient.clone()
        for group in self._tied:
            if any(layer == recipe.layer for layer, _ in group):
                _sum_tied(group, recipe.layer, owners, reduced)
        return reduced

    def _load_gradients(self, recipe: Recipe, replica: LayerReplica, *, kept: bool) -> None:
        """Make the gradient the sum of the recipe's copies.

        If the live replica was `kept`, its own sums replace equal copies.
        """
        live = [copy for copy in recipe.gradients if kept and _is_live(replica, copy)]
        replica.keep([copy.microbatches for copy in live])
        for copy in recipe.gradients:
            if copy not in live:
                replica.add_gradient(self._fetched(copy), copy.microbatches, copy.losses)


def _sum_tied(
    group: tuple[tuple[int, str], ...], mine: int, owners: dict[int, LayerReplica], reduced: Tensor
) -> None:
    """Write the sum over all owners of a tied tensor, in the group's order, into `reduced`."""
    rows = []
    for layer, name in group:
        if layer not in owners:
            needed = f"the gradient of {name} in layer {layer}"
            raise VaultError(f"layer {mine}: {needed} is needed to replay")
        rows.append(owners[layer].gradient[owners[layer].gradient_slice(name)])
    total = rows[0].clone()
    for row in rows[1:]:
        total += row
    for layer, name in group:
        if layer == mine:
            reduced[owners[mine].gradient_slice(name)] = total


def _portions(assignment: Assignment, member: RankMember) -> dict[int, Portion]:
    """Return layer -> portion of its state that `member` holds."""
    return {layer: portion_of(assignment.plan, member.unit.node, layer) for layer in member.layers}


def _copies_to_fetch(recipes: Iterable[Recipe], live: dict[int, LayerReplica]) -> Iterator[Copy]:
    """Yield the copies that the recipes need and no live replica replaces, states first."""
    later: list[Copy] = []
    for recipe in recipes:
        replica = live.get(recipe.layer)
        version = replica.version if replica is not None else -1
        kept = version == recipe.version
        if not kept:
            continues = (
                replica is not None and replica.portion == WHOLE and _continues(recipe, replica)
            )
            for part in recipe.portions:
                yield from part.states
                later += part.updates
            if recipe.state is not None and not continues:
                yield recipe.state
            later += [c for c in recipe.updates if not (continues and c.step < version)]
            later += recipe.replay
        later += [c for c in recipe.gradients if not (kept and _is_live(replica, c))]
    yield from later


def _continues(recipe: Recipe, live: LayerReplica) -> bool:
    """Return whether the live state is the recipe's first one, or a later one of its owner."""
    if recipe.state is None:
        return False
    further = len(recipe.updates) if recipe.state.owner == live.owner else 0
    return recipe.state.step <= live.version <= recipe.state.step + further


def _is_live(replica: LayerReplica | None, copy: Copy) -> bool:
    """Return whether a sum of the live replica equals `copy`."""
    return (
        replica is not None
        and replica.version == copy.step
        and copy.owner == copy.node == replica.owner
        and any(part.ledger == copy.microbatches for part in replica.parts)
    )
