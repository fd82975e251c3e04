"""Carries out an assignment on the real contents of the vaults and checks its promises."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

from elastic.domain.types import (
    ACTIVATION,
    COTANGENT,
    GRADIENT,
    LOGS,
    STATE,
    UPDATE,
    Assignment,
    Copy,
    JobSpec,
    PartialRun,
    Recipe,
)

Vaults = dict[str, "Vault"]


@dataclass
class Vault:
    """Copies with their real contents: a version, or a multiset of micro-batches."""

    node: str
    held: dict[str, tuple[Copy, Any]] = field(default_factory=dict)

    def add(self, copy: Copy, content: Any) -> None:
        """Add a copy and drop old ones of the same (kind, layer, shard, owner, epoch).

        Two steps stay, with the newest copy of each. Updates stay from the older state on, and
        logged messages for each micro-batch.
        """
        copy = replace(copy, node=self.node)
        group = [c for c, _ in self.held.values() if _group(c) == _group(copy)]
        if any(c.step == copy.step and c.sequence > copy.sequence for c in group):
            return
        self.held[copy.key] = copy, content
        for old in [c for c in group if c.step == copy.step]:
            self.held.pop(old.key, None)
        steps = sorted({copy.step, *(c.step for c in group)})[:-2]
        for old in [c for c in group if c.step in steps and copy.kind != UPDATE]:
            self.held.pop(old.key, None)
        line = (copy.layer, copy.shard, copy.owner, copy.epoch)
        kin = [c for c, _ in self.held.values() if (c.layer, c.shard, c.owner, c.epoch) == line]
        oldest = min((c.step for c in kin if c.kind == STATE), default=0)
        for old in [c for c in kin if c.kind == UPDATE and c.step < oldest]:
            self.held.pop(old.key)

    def forget(self, epoch: int, kinds: tuple[str, ...] = ()) -> None:
        """Drop copies of epochs below `epoch`: all, or only those of `kinds`."""
        self.held = {
            key: (copy, inside)
            for key, (copy, inside) in self.held.items()
            if copy.epoch >= epoch or (kinds and copy.kind not in kinds)
        }


def _group(c: Copy) -> tuple[Any, ...]:
    return c.kind, c.layer, c.shard, c.owner, c.epoch, c.microbatches if c.kind in LOGS else ()


def check_assignment(assignment: Assignment, spec: JobSpec, vaults: Vaults) -> None:
    """Assert that the assignment gives one version, doubles nothing, and keeps its promises."""
    plan, version = assignment.plan, assignment.step
    recipes = {(node, r.layer, r.shard): r for node, r in assignment.recipes}
    assert len(recipes) == len(assignment.recipes), "two recipes for one holder"
    sums: dict[tuple[int, int], Counter[int]] = {}
    for _, _, stage in plan.stages():
        for layer in stage.layers:
            ledgers = set()
            for shard in range(plan.tp):
                recipe = recipes.pop((stage.unit.node, layer, shard), None)
                if recipe is None:
                    assert version == 0, "only initial layers need no recipe"
                    recipe = Recipe(layer, shard, 0)
                assert (recipe.layer, recipe.shard, recipe.version) == (layer, shard, version)
                _check_state(recipe, assignment, spec, vaults)
                total = _gradient(recipe, vaults)
                ledgers.add(frozenset(total))
                sums[layer, shard] = sums.get((layer, shard), Counter()) + total
            assert len(ledgers) == 1, "TP ranks disagree"
    assert not recipes, "recipes without a holder"
    covered = dict(assignment.covered)
    for (layer, _), total in sums.items():
        assert total == Counter(covered[layer]), (
            "covered differs from the sums, or a micro-batch is doubled"
        )
    _check_todo(assignment, spec)
    for run in assignment.partial:
        _check_messages(run, assignment, vaults)


def content(copy: Copy, vaults: Vaults) -> Any:
    """Real content of this copy in its vault; raises KeyError if it is not there."""
    held, inside = vaults[copy.node].held[copy.key]
    assert held == copy
    return inside


def _check_state(recipe: Recipe, assignment: Assignment, spec: JobSpec, vaults: Vaults) -> None:
    version = recipe.version
    if recipe.state is None:
        assert not recipe.replay and not recipe.updates
        assert recipe.checkpoint or version == 0, "nothing to start from"
        return
    assert not recipe.checkpoint
    base = version - 1 if recipe.replay else version
    state = recipe.state
    assert (state.kind, state.layer, state.shard) == (STATE, recipe.layer, recipe.shard)
    assert content(state, vaults) == state.step
    assert [copy.step for copy in recipe.updates] == list(range(state.step, base)), (
        "an update is missing"
    )
    for copy in recipe.updates:
        assert (copy.kind, copy.layer, copy.shard) == (UPDATE, recipe.layer, recipe.shard)
        assert (copy.owner, copy.epoch) == (state.owner, state.epoch), "two histories mixed"
        assert content(copy, vaults) == copy.step
    if recipe.replay:
        assert assignment.record is not None and assignment.record.step == base
        sums: dict[int, Counter[int]] = {}
        for copy in recipe.replay:
            assert (copy.kind, copy.shard, copy.step) == (GRADIENT, recipe.shard, base)
            sums[copy.layer] = sums.get(copy.layer, Counter()) + content(copy, vaults)
        tied = {b if a == recipe.layer else a for a, b in spec.tied if recipe.layer in (a, b)}
        everything = Counter(range(spec.n_microbatches))
        assert sums == dict.fromkeys({recipe.layer, *tied}, everything), (
            "replay is not exactly once"
        )


def _gradient(recipe: Recipe, vaults: Vaults) -> Counter[int]:
    total: Counter[int] = Counter()
    for copy in recipe.gradients:
        found = (copy.kind, copy.layer, copy.shard, copy.step)
        assert found == (GRADIENT, recipe.layer, recipe.shard, recipe.version)
        total += content(copy, vaults)
    return total


def _check_todo(assignment: Assignment, spec: JobSpec) -> None:
    """Every layer runs each micro-batch that it lacks once; no other micro-batch runs."""
    todo = Counter(index for share in assignment.todo for index in share)
    assert len(assignment.todo) == len(assignment.plan.pipelines)
    if assignment.step >= spec.n_steps:
        assert not todo and not assignment.partial
        return
    complete = frozenset.intersection(*(held for _, held in assignment.covered))
    in_part = {run.microbatch for run in assignment.partial}
    assert not in_part & set(todo)
    assert todo + Counter(in_part) == Counter(range(spec.n_microbatches)) - Counter(complete)
    for layer, held in assignment.covered:
        ran = todo + Counter(r.microbatch for r in assignment.partial if r.first <= layer < r.last)
        assert max(ran.values(), default=0) <= 1
        assert ran.keys() | held == set(range(spec.n_microbatches))


def _check_messages(run: PartialRun, assignment: Assignment, vaults: Vaults) -> None:
    for kind, copies, boundary in (
        (ACTIVATION, run.inputs, run.first),
        (COTANGENT, run.gradients, run.last),
    ):
        inside = 0 < boundary < assignment.plan.n_layers
        assert len(copies) == (assignment.plan.tp if inside else 0)
        for shard, copy in enumerate(copies):
            assert copy.shard == shard
            assert content(copy, vaults) == (kind, boundary, assignment.step, run.microbatch)
