"""Recovery: make an `Assignment` for all workers from the copies that are left.

Invariants of the result:

1. **One version.** Every (layer, TP rank) enters the epoch with state version `Assignment.step`.
   Versions are never mixed.
2. **Highest version.** The target is the highest version that every (layer, TP rank) can reach.
   A survivor with a newer state loads an older copy and repeats the same update.
3. **Proof by copies.** A (layer, TP rank) reaches version v only if
   - a copy of its state of version v lies in a living vault; or
   - a copy of an older version s exists, with the inputs of the updates of steps s to v-1, all made
     by one owner in one epoch (a chain, see `elastic.core.recovery.copy_index`); or
   - it reaches version v-1 in one of these two ways, gradients of step v-1 together hold every
     micro-batch exactly once, and the record of step v-1 exists, which proves that step v-1 was
     committed; or
   - the durable checkpoint has version v; or
   - v is 0 and no step was ever trained, so that the layer is initialised.
   Otherwise `solve` raises Unrecoverable. Training never continues from a state without proof.
4. **Exactly once.** In the step that was running, the gradients that a layer keeps have pairwise
   disjoint ledgers, and each goes to exactly one holder. All TP ranks keep the same ledgers.
   Among all choices, the chosen one leaves the fewest micro-batches to run again.
5. **Nothing is missing.** A micro-batch that any layer lacks runs again, through as few layers as
   the logged messages allow (`elastic.core.recovery.partial_replay`). Layers that already have its
   gradient add nothing.

If two layers share a tensor (tied embeddings), each of their updates needs the gradients of both
layers, so the replay of each layer lists the copies of both.

A second fault during a recovery starts a new epoch with a new call of `solve`
(`elastic.core.job.epoch_change`). Old copies stay in the vaults until the new copies are protected,
so the new call finds all copies that the first call found, except those on the node just lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

from elastic.core.protocol.messages import Halted
from elastic.core.recovery import partial_replay as partial
from elastic.core.recovery.copy_index import CopyIndex
from elastic.core.recovery.solver import Solver, balance_senders, copies_of, fetched_bytes
from elastic.core.recovery.unrecoverable import describe_lost_steps, explain_unreachable
from elastic.domain.errors import Unrecoverable
from elastic.domain.ledger import format_indices, from_mask, to_mask
from elastic.domain.types import (
    WHOLE,
    Assignment,
    Copy,
    JobSpec,
    LayerSpec,
    PartialRun,
    Pipeline,
    Plan,
    Recipe,
    Slot,
    StepRecord,
)
from elastic.planning.plan.schemes import gradients_of, portion_of
from elastic.planning.schedule import microbatch_split as batches
from elastic.planning.schedule.reduction_rounds import rounds_of
from elastic.planning.schedule.schedule import Action, Kind, actions_of, units_of

__all__ = ["Assignment", "RecoverySummary", "replayed_microbatches", "solve", "summarize"]


@dataclass(frozen=True, slots=True)
class PromisedWork:
    """Work of pipelines that run the step of the recovery meanwhile (`elastic.core.job.scope`)."""

    microbatches: Mapping[int, tuple[int, ...]]
    """Pipeline -> micro-batches that its nodes have promised to finish, in all layers."""
    left: float = 1.0
    """Share of them that is not finished yet."""

    @property
    def mask(self) -> int:
        """Mask of all promised micro-batches."""
        return to_mask(index for some in self.microbatches.values() for index in some)


def solve(
    *,
    plan: Plan,
    spec: JobSpec,
    inventory: tuple[Copy, ...],
    records: tuple[StepRecord, ...],
    vaults: tuple[tuple[str, str], ...],
    checkpoint: tuple[str, int] | None,
    initial_allowed: bool,
    live: Mapping[str, int],
    fetch_s: float = 0.0,
    promised: PromisedWork | None = None,
) -> Assignment:
    """Return the assignment with which all workers enter the epoch of `plan`.

    Args:
        inventory: copies in all living vaults; `Copy.node` names the vault.
        records: records of committed steps, one per step; not of a run that was undone.
        vaults: (node, address); copies on other nodes are ignored.
        checkpoint: (path, step) of the durable checkpoint; None: no checkpoint.
        initial_allowed: whether layers may be initialised, because no update was committed. Ignored
            if a copy, a record or a worker shows a later version.
        live: version that the workers of each node hold, to count the steps that a fall-back loses.
        fetch_s: time to fetch a byte from another node, measured like `LayerSpec.forward_s`; 0: it
            is unknown. A pipeline that fetches its state gets fewer micro-batches.
        promised: pipelines that keep their layers and sums, and need no recipe. Copies of gradients
            with their micro-batches are not used. None: there are none.

    Raises:
        Unrecoverable: names the layers and the copies that they lack.
    """
    index = CopyIndex.of(inventory, plan, (node for node, _ in vaults))
    newest = max([index.newest, *live.values(), *(record.step + 1 for record in records)])
    solver = Solver(
        plan=plan,
        index=index,
        records={record.step: record for record in records},
        checkpoint=checkpoint,
        initial=initial_allowed and newest <= 0,
        tied=_tied_layers(spec.tied),
        promised=promised.mask if promised is not None else 0,
        apart=frozenset(promised.microbatches) if promised is not None else frozenset(),
    )
    version = solver.target()
    if version is None:
        why = explain_unreachable(solver, newest)
        raise Unrecoverable(f"{why}; there is no durable checkpoint to fall back to")
    sums, covered = solver.gradients(version)
    recipes = _recipes(solver, version, sums)
    begins = [0.0] * len(plan.pipelines)
    if fetch_s and not gradients_of(plan.gradients).rounds:  # sums of rounds need all pipelines
        begins = [fetch_s * nbytes for nbytes in _bytes_before_work(plan, recipes, live)]
    if promised is not None:
        covered = [mask | solver.promised for mask in covered]
        for number, some in promised.microbatches.items():
            begins[number] = (
                len(some) * promised.left * _slowest(plan.pipelines[number], spec.layers)
            )
    todo, runs = _distribute_work(solver, spec, version, covered, begins)
    if any(recipe.checkpoint for _, recipe in recipes):
        why = (
            f"fell back to the checkpoint of step {version}: "
            f"{explain_unreachable(solver, newest)}; {describe_lost_steps(version, newest)}"
        )
        plan = replace(plan, reason="; ".join(text for text in (plan.reason, why) if text))
    return Assignment(
        plan=plan,
        step=version,
        recipes=recipes,
        covered=tuple((layer, from_mask(mask)) for layer, mask in enumerate(covered)),
        todo=todo,
        record=solver.records.get(version - 1),
        vaults=vaults,
        partial=runs,
        promised=tuple(sorted(promised.microbatches.items())) if promised is not None else (),
    )


def _recipes(
    solver: Solver, version: int, sums: Mapping[tuple[str, Slot], list[Copy]]
) -> tuple[tuple[str, Recipe], ...]:
    """Return (node, recipe) for every (layer, TP rank) and holder.

    A holder that only initialises a layer, without a gradient, gets no recipe, nor does one that
    keeps its layers and sums.
    """
    recipes = []
    for number, _, stage in solver.plan.stages():
        if number in solver.apart:
            continue
        node = stage.unit.node
        for slot in ((layer, rank) for layer in stage.layers for rank in range(solver.plan.tp)):
            recipe = solver.state_recipe(node, slot, version)
            if gradients := sums.get((node, slot)):
                recipe = replace(recipe, gradients=tuple(gradients))
            if recipe.states or recipe.checkpoint or recipe.gradients:
                recipes.append((node, recipe))
    return balance_senders(recipes, solver.index)


def _tied_layers(pairs: Sequence[tuple[int, int]]) -> dict[int, frozenset[int]]:
    """Return for each tied layer all layers that it shares a tensor with, also through others."""
    groups: dict[int, frozenset[int]] = {}
    for a, b in pairs:
        group = groups.get(a, frozenset((a,))) | groups.get(b, frozenset((b,)))
        groups.update(dict.fromkeys(group, group))
    return {layer: group - {layer} for layer, group in groups.items()}


def _bytes_before_work(
    plan: Plan, recipes: Sequence[tuple[str, Recipe]], alive: Collection[str]
) -> list[float]:
    """Return for each pipeline the bytes that pass the slowest link before it can work: what a
    worker of one of its nodes fetches, or what a sender of that node sends to all nodes.

    `alive`: nodes whose workers live.
    """
    fetched: dict[str, float] = {}
    sent: dict[str, float] = {}
    senders: dict[str, set[str]] = {}
    for node, recipe in recipes:
        held = node in alive and _holds_whole(plan, node, recipe)
        for copy in copies_of(replace(recipe, portions=()) if held else recipe):
            if copy.node != node:
                nbytes = copy.nbytes / plan.tp
                fetched[node] = fetched.get(node, 0.0) + nbytes
                sent[copy.node] = sent.get(copy.node, 0.0) + nbytes
                senders.setdefault(node, set()).add(copy.node)
    slowest = {
        node: max(nbytes, *(sent[sender] for sender in senders[node]))
        for node, nbytes in fetched.items()
    }
    return [
        max(slowest.get(stage.unit.node, 0.0) for stage in pipeline.stages)
        for pipeline in plan.pipelines
    ]


def _distribute_work(
    solver: Solver,
    spec: JobSpec,
    version: int,
    covered: Sequence[int],
    begins: Sequence[float],
) -> tuple[tuple[tuple[int, ...], ...], tuple[PartialRun, ...]]:
    """Distribute the micro-batches that some layer lacks over the pipelines.

    `begins`: time at which each pipeline can begin. Returns (per pipeline the micro-batches that
    run through all layers, partial runs). Both are empty after the last step.
    """
    plan = solver.plan
    if version >= spec.n_steps:
        return tuple(() for _ in plan.pipelines), ()
    complete = reduce(and_, covered, solver.full)
    left = [index for index in range(plan.n_microbatches) if not complete >> index & 1]
    some, left = partial.split_runs(plan, solver.index, version, covered, left)
    slowest = [_slowest(pipeline, spec.layers) for pipeline in plan.pipelines]
    if max(begins) - min(begins) < min(slowest):  # less than a micro-batch
        begins = [0.0] * len(begins)
        if len(left) == plan.n_microbatches:
            return tuple(pipeline.microbatches for pipeline in plan.pipelines), ()
    runs, busy_until = partial.assign_runs(plan, solver.index, version, some, spec.layers, begins)
    costs = [
        _finish_time(pipeline, spec.layers, start)
        for pipeline, start in zip(plan.pipelines, busy_until, strict=True)
    ]
    return batches.deal(left, batches.allot(len(left), costs, least=0)), runs


def _finish_time(pipeline: Pipeline, layers: Sequence[LayerSpec], start: float) -> batches.Cost:
    """Return the finish time of a pipeline as a function of its number of micro-batches.

    The pipeline is free at time `start`. Times are measured like `LayerSpec.forward_s`.
    """
    units, slowest = units_of(pipeline), _slowest(pipeline, layers)
    fill = (len(units) - 1) * len(units) / len(pipeline.stages)
    return lambda microbatches: start + (microbatches + fill) * slowest if microbatches else start


def _slowest(pipeline: Pipeline, layers: Sequence[LayerSpec]) -> float:
    """Return the time of a micro-batch on the slowest unit; 1 if times are unknown."""
    busy = dict.fromkeys(units_of(pipeline), 0.0)
    for stage in pipeline.stages:
        busy[stage.unit] += sum(layers[i].forward_s + layers[i].backward_s for i in stage.layers)
    return max(busy.values()) or 1.0


# ---- summary of a recovery ----


@dataclass(frozen=True, slots=True)
class RecoverySummary:
    """Figures of a recovery, for the records of the run and for logs."""

    network_bytes: int
    """Bytes that vaults send to other nodes."""
    state_source: str
    """Slowest source of a layer's state. From slow to fast:
    checkpoint: a state is read from the checkpoint;
    peer: a state comes from another node, or was made by another node;
    shared memory: a state was left in its node's shared memory by workers that are gone;
    memory: every holder has its state;
    initial: all layers are initialised."""
    todo: frozenset[int]
    """Micro-batches of the step that run through all layers."""
    partial: frozenset[int]
    """Micro-batches of the step that run through some layers."""
    lost_layers: frozenset[int]
    """Layers that lost nodes held."""
    text: str


def summarize(
    assignment: Assignment, before: Plan | None = None, lost_nodes: Sequence[str] = ()
) -> RecoverySummary:
    """Return the figures of `assignment`. `before`: the plan that it replaces; None: the first
    plan. `lost_nodes`: nodes whose workers are gone."""
    plan, recipes, old = assignment.plan, assignment.recipes, before or assignment.plan
    live = [
        node not in lost_nodes and _is_live(assignment, node, recipe) for node, recipe in recipes
    ]
    network = sum(
        _network_bytes(node, recipe, live=one)
        for (node, recipe), one in zip(recipes, live, strict=True)
    )
    network += partial.fetched_bytes(plan, assignment.partial)
    moved = sum(
        not {u.node for u in plan.holders(layer)} <= {u.node for u in old.holders(layer)}
        for layer in range(plan.n_layers if before else 0)
    )
    source = _state_source(assignment, lost_nodes, live)
    longest = max((len(part.updates) for _, r in recipes for part in (r, *r.portions)), default=0)
    todo = frozenset(index for share in assignment.todo for index in share)
    stages = [stage for _, _, stage in old.stages() if stage.unit.node in lost_nodes]
    lost = frozenset(layer for stage in stages for layer in stage.layers)
    text = f"layers {format_indices(sorted(lost))} were on {' '.join(lost_nodes)}; " if lost else ""
    text += f"step {assignment.step}, state from {source}"
    text += f" and up to {longest} updates" if longest else ""
    text += (
        f", {moved} of {plan.n_layers} layers move, {network} bytes over the network, "
        f"{len(todo)} of {plan.n_microbatches} micro-batches to run"
    )
    if assignment.partial:
        text += f"; in part: {partial.describe_runs(assignment.partial)}"
    in_part = frozenset(run.microbatch for run in assignment.partial)
    return RecoverySummary(network, source, todo, in_part, lost, text)


def _state_source(assignment: Assignment, lost_nodes: Sequence[str], live: Sequence[bool]) -> str:
    """`live`: for each recipe, whether living workers on its node hold the state."""
    recipes = assignment.recipes
    if any(recipe.checkpoint for _, recipe in recipes):
        return "checkpoint"
    states = [
        (node, copy)
        for (node, recipe), one in zip(recipes, live, strict=True)
        if not one
        for copy in recipe.states
    ]
    if any(copy.node != node or copy.owner != node for node, copy in states):
        return "peer"
    if any(node in lost_nodes for node, _ in states):
        return "shared memory"
    return "memory" if any(recipe.states for _, recipe in recipes) else "initial"


def _is_live(assignment: Assignment, node: str, recipe: Recipe) -> bool:
    """Return whether living workers on `node` hold the state that the portions of `recipe` give.

    They do if they made one of these portions: they received the others after the last update,
    unless the fault came in between. But a layer that may be wrong is loaded anew.
    """
    if (node, recipe.layer, recipe.shard) in assignment.reload:
        return False
    return _holds_whole(assignment.plan, node, recipe)


def _holds_whole(plan: Plan, node: str, recipe: Recipe) -> bool:
    """Return whether `node` made one of the portions that `recipe` gives. Then its workers received
    the others after the last update."""
    own = portion_of(plan, node, recipe.layer)
    return not recipe.replay and any(
        copy.owner == copy.node == node and copy.portion == own != WHOLE for copy in recipe.states
    )


def _network_bytes(node: str, recipe: Recipe, *, live: bool) -> int:
    """Return the bytes that `node` must fetch for `recipe`. `live`: its workers hold the state."""
    return fetched_bytes(copies_of(replace(recipe, portions=()) if live else recipe), node)


# ---- work done twice ----


def replayed_microbatches(
    old_plan: Plan,
    lost_nodes: frozenset[str],
    todo: frozenset[int],
    halted: Mapping[str, Halted],
    step: int,
    orders: Sequence[Sequence[int]],
    covered: Mapping[int, frozenset[int]],
) -> frozenset[int]:
    """Return the micro-batches of `todo` that had reached a lost stage and so are computed twice.

    A lost stage cannot report, so its living neighbours in the pipeline give an estimate:

    - If a stage before it lives: the micro-batches that the nearest such stage had `sent`. This is
      exact for the first lost stage after it, and an upper bound for further ones.
    - Else, if a stage after it lives: the micro-batches that the nearest such stage had `started`.
      This is a lower bound, because the lost stage may have been ahead.
    - If the whole pipeline is lost: no micro-batch.

    If a unit has several stages, `sent` and `started` are those of its first stage, which every
    micro-batch reaches first.

    Args:
        halted: report of a halted worker per node.
        step: reports of nodes at another version are ignored.
        orders: each pipeline's micro-batches of the step, in order.
        covered: saved micro-batches per layer. They limit how far the lost stage can have come, so
            that micro-batches in its input queue do not count.
    """
    reached: frozenset[int] = frozenset()
    for p, pipeline in enumerate(old_plan.pipelines):
        units = units_of(pipeline)
        reports = [halted.get(u.node) if u.node not in lost_nodes else None for u in units]
        reports = [h if h and h.step == step else None for h in reports]
        for s in (s for s, unit in enumerate(units) if unit.node in lost_nodes):
            before = next((h for h in reversed(reports[:s]) if h), None)
            after = next((h for h in reports[s + 1 :] if h), None)
            here = before.sent if before else after.started if after else frozenset()
            saved = covered.get(pipeline.stages[s].first, frozenset()).intersection(orders[p])
            actions = actions_of(pipeline, tuple(orders[p]))[s]
            reached |= here & _begun(actions, _most_finished(old_plan, orders, p, len(saved)))
    return reached & todo


def _most_finished(plan: Plan, orders: Sequence[Sequence[int]], p: int, n_saved: int) -> int:
    """Return the most micro-batches that a stage of pipeline `p` can have finished; 0: no limit.

    `n_saved` of them were saved. Besides, at most two copies of K micro-batches each were not
    acknowledged; the stage waits before it makes a third (`elastic.worker.backup.publisher`). For
    gradient scheme `reduce` see `elastic.planning.schedule.reduction_rounds`.
    """
    gradients = gradients_of(plan.gradients)
    if gradients.rounds:
        shares = [len(order) for order in orders]
        return rounds_of(plan.pipelines, shares, gradients.rounds).most_finished(p, n_saved)
    return n_saved + 3 * gradients.every if gradients.every else 0


def _begun(actions: Sequence[Action], most_finished: int) -> frozenset[int]:
    """Return the micro-batches that a unit's first stage can have begun.

    `most_finished`: the most micro-batches that the stage can have finished; 0: no limit.
    """
    stage, finished, begun = actions[0].stage if actions else -1, 0, set[int]()
    for action in (a for a in actions if a.stage == stage):
        if action.kind is Kind.F:
            begun.add(action.microbatch)
        finished += action.kind.finishes
        if most_finished and finished == most_finished:
            break
    return frozenset(begun)
