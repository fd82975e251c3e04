"""Recovery: from the copies that are left to an `Assignment` for every worker.

Invariants of the result:

1. **One version.** Every (layer, TP rank) enters the epoch with state version `Assignment.step`.
   Versions are never mixed.
2. **Highest version.** The target is the highest version that all of them can reach. Survivors
   that are ahead go back to an older copy and make the same update again.
3. **Proof by copies.** A (layer, TP rank) reaches version v only if
   - a copy of its state of version v lies in a living vault; or
   - a copy of an older version s exists, with the inputs of the updates of steps s to v-1, all made
     by one owner in one epoch (a chain, see `elastic.core.recovery.copy_index`); or
   - it reaches version v-1 in one of these two ways, gradients of step v-1 together hold every
     micro-batch exactly once, and the record of step v-1 exists. The record exists only if step
     v-1 was committed; or
   - the durable checkpoint is of version v; or
   - v is 0 and nothing was ever trained, so that it is initialised.
   Otherwise `solve` raises Unrecoverable. Training never goes on from a state without proof.
4. **Exactly once.** In the step that was running, the gradients that a layer keeps have pairwise
   disjoint ledgers, and each goes to exactly one holder. All TP ranks keep the same ledgers.
   Among all choices, the chosen one leaves the fewest micro-batches to run again.
5. **Nothing is missing.** A micro-batch that any layer lacks runs again. Layers that have it add
   nothing. Between logged messages only the layers that lack it run
   (`elastic.core.recovery.partial_replay`).

A layer that shares a tensor with another one (tied embeddings) needs the other's gradient for its
update too, so its replay lists the copies of both layers.

A second fault during a recovery starts a new epoch with a new call of `solve`
(`elastic.core.coordinator.transitions`). Old copies stay in the vaults until the new ones are
protected, so the call finds at least as much as the one before, except on the node just lost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from operator import and_

from elastic.core.protocol.messages import Halted
from elastic.core.recovery import partial_replay as partial
from elastic.core.recovery.copy_index import CopyIndex
from elastic.core.recovery.solver import Solver, balance_senders, copies_of, fetched_bytes
from elastic.core.recovery.unrecoverable import describe_lost_steps, explain_unreachable
from elastic.domain.errors import Unrecoverable
from elastic.domain.ledger import format_indices, from_mask
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
) -> Assignment:
    """Return the work of every holder in `plan` to enter its epoch.

    Args:
        inventory: copies in all living vaults; `Copy.node` names the vault.
        records: records of committed steps, one per step.
        vaults: (node, address); copies on other nodes are ignored.
        checkpoint: (path, step) of the durable checkpoint.
        initial_allowed: no update was ever committed, so layers may be initialised. Ignored if a
            copy of a later version exists.
        live: node: version that its workers hold. It shows the steps that a fall-back loses.

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
    )
    version = solver.target()
    if version is None:
        why = explain_unreachable(solver, newest)
        raise Unrecoverable(f"{why}; there is no durable checkpoint to fall back to")
    sums, covered = solver.gradients(version)
    todo, runs = _distribute_work(solver, spec, version, covered)
    recipes = _recipes(solver, version, sums)
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
    )


def _recipes(
    solver: Solver, version: int, sums: Mapping[tuple[str, Slot], list[Copy]]
) -> tuple[tuple[str, Recipe], ...]:
    """One recipe per holder of every (layer, TP rank).

    A holder that only initialises a layer and gets no gradient has none.
    """
    recipes = []
    for _, _, stage in solver.plan.stages():
        node = stage.unit.node
        for slot in ((layer, rank) for layer in stage.layers for rank in range(solver.plan.tp)):
            recipe = solver.state_recipe(node, slot, version)
            recipe = replace(recipe, gradients=tuple(sums.get((node, slot), ())))
            if recipe.states or recipe.checkpoint or recipe.gradients:
                recipes.append((node, recipe))
    return balance_senders(recipes, solver.index)


def _tied_layers(pairs: Sequence[tuple[int, int]]) -> dict[int, frozenset[int]]:
    """Layer: all others that it is tied to, directly or through a third."""
    groups: dict[int, frozenset[int]] = {}
    for a, b in pairs:
        group = groups.get(a, frozenset((a,))) | groups.get(b, frozenset((b,)))
        groups.update(dict.fromkeys(group, group))
    return {layer: group - {layer} for layer, group in groups.items()}


def _distribute_work(
    solver: Solver, spec: JobSpec, version: int, covered: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[PartialRun, ...]]:
    """Distribute the micro-batches that some layer lacks.

    Returns, per pipeline, those that run through all layers, and the partial runs. Both are empty
    after the last step.
    """
    plan = solver.plan
    if version >= spec.n_steps:
        return tuple(() for _ in plan.pipelines), ()
    complete = reduce(and_, covered, solver.full)
    left = [index for index in range(plan.n_microbatches) if not complete >> index & 1]
    some, left = partial.split_runs(plan, solver.index, version, covered, left)
    if len(left) == plan.n_microbatches:
        return tuple(pipeline.microbatches for pipeline in plan.pipelines), ()
    runs, busy_until = partial.assign_runs(plan, solver.index, version, some, spec.layers)
    costs = [
        _finish_time(pipeline, spec.layers, start)
        for pipeline, start in zip(plan.pipelines, busy_until, strict=True)
    ]
    return batches.deal(left, batches.allot(len(left), costs, least=0)), runs


def _finish_time(pipeline: Pipeline, layers: Sequence[LayerSpec], start: float) -> batches.Cost:
    """Finish time of a pipeline as a function of its number of micro-batches.

    Times are in the unit of the layers' figures; the pipeline is free at `start`.
    """
    units = units_of(pipeline)
    busy = dict.fromkeys(units, 0.0)
    for stage in pipeline.stages:
        busy[stage.unit] += sum(layers[i].forward_s + layers[i].backward_s for i in stage.layers)
    slowest = max(busy.values()) or 1.0
    fill = (len(units) - 1) * len(units) / len(pipeline.stages)
    return lambda microbatches: start + (microbatches + fill) * slowest if microbatches else start


# ---- summary of a recovery ----


@dataclass(frozen=True, slots=True)
class RecoverySummary:
    """The work of a recovery, for summaries and logs."""

    network_bytes: int
    """Bytes that vaults send to other nodes."""
    state_source: str
    """The slowest source used, one of these, slowest first:
    checkpoint: some state is read from the checkpoint;
    peer: some state is a copy that a peer kept;
    shared memory: every holder has its state on its node, some of it left by lost workers;
    memory: every holder has its state on its node;
    initial: layers are initialised."""
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
    """Count the bytes and micro-batches of `assignment`.

    `before` is the plan that it replaces; the workers of `lost_nodes` are gone.
    """
    plan, recipes, old = assignment.plan, assignment.recipes, before or assignment.plan
    network = sum(_network_bytes(plan, node, recipe, lost_nodes) for node, recipe in recipes)
    network += partial.fetched_bytes(plan, assignment.partial)
    moved = sum(
        not {u.node for u in plan.holders(layer)} <= {u.node for u in old.holders(layer)}
        for layer in range(plan.n_layers if before else 0)
    )
    source = _state_source(assignment, lost_nodes)
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


def _state_source(assignment: Assignment, lost_nodes: Sequence[str]) -> str:
    recipes = assignment.recipes
    if any(recipe.checkpoint for _, recipe in recipes):
        return "checkpoint"
    states = [
        (node, copy)
        for node, recipe in recipes
        for copy in recipe.states
        if node in lost_nodes or not _is_live(assignment.plan, node, recipe)
    ]
    if any(copy.node != node or copy.owner != node for node, copy in states):
        return "peer"
    if any(node in lost_nodes for node, _ in states):
        return "shared memory"
    return "memory" if any(recipe.states for _, recipe in recipes) else "initial"


def _is_live(plan: Plan, node: str, recipe: Recipe) -> bool:
    """Whether living workers on `node` hold the state that the portions of `recipe` give.

    Their own portion is among these, and they got the others after the last update (unless the
    fault came just then).
    """
    own = portion_of(plan, node, recipe.layer)
    return not recipe.replay and any(
        copy.owner == copy.node == node and copy.portion == own != WHOLE for copy in recipe.states
    )


def _network_bytes(plan: Plan, node: str, recipe: Recipe, lost_nodes: Sequence[str]) -> int:
    """Bytes over the network that `recipe` costs `node`."""
    live = node not in lost_nodes and _is_live(plan, node, recipe)
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
    """Return those of `todo` that had reached a lost stage, so that their work is done twice.

    The lost stage cannot answer, so the estimate uses its neighbours in the pipeline. For stage s:

    - A living stage before it: the micro-batches that the nearest one had `sent`. After one lost
      node this is exact; after several lost in a row it is an upper bound for the later ones.
    - No living stage before it: the micro-batches that the nearest living stage after it had
      `started`. This is a lower bound, since the lost stage may have been ahead.
    - The whole pipeline is lost: none.

    Where units have several stages, `sent` and `started` concern each unit's first stage, which
    every micro-batch reaches before the others.

    Args:
        halted: node: the report of its halted worker.
        step: reports of nodes at another version are ignored.
        orders: each pipeline's micro-batches of the step, in order.
        covered: layer: micro-batches that were saved. It shows how far the lost stage can have
            come, so that micro-batches in its input queue do not count.
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
    """The most micro-batches that a stage of pipeline `p` can have finished; 0: no bound.

    `n_saved` of them were saved. At most two copies, of K micro-batches each, are unacknowledged;
    the stage waits before it makes a third (`elastic.worker.backup.publisher`). For sums over the
    holders see `elastic.planning.schedule.reduction_rounds`.
    """
    gradients = gradients_of(plan.gradients)
    if gradients.rounds:
        shares = [len(order) for order in orders]
        return rounds_of(plan.pipelines, shares, gradients.rounds).most_finished(p, n_saved)
    return n_saved + 3 * gradients.every if gradients.every else 0


def _begun(actions: Sequence[Action], most_finished: int) -> frozenset[int]:
    """Micro-batches that a unit's first stage can have begun.

    It finished at most `most_finished`; 0: no bound.
    """
    stage, finished, begun = actions[0].stage if actions else -1, 0, set[int]()
    for action in (a for a in actions if a.stage == stage):
        if action.kind is Kind.F:
            begun.add(action.microbatch)
        finished += action.kind.finishes
        if most_finished and finished == most_finished:
            break
    return frozenset(begun)
