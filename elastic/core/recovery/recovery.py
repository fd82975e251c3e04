"""How every layer comes to one and the same version, from whatever copies are left: the proof behind each
recovery.

A (layer, TP rank) can be brought to version v if

- a copy of its state of version v exists in a living vault; or
- a copy of an older version s and what the updates of steps s to v-1 took, all made by one owner in one epoch
  (`elastic.core.recovery.replay_chains`); or
- version v-1, had in one of these ways, gradients of step v-1 that together hold every micro-batch exactly
  once, and the record of step v-1 (which exists only if the commit of step v-1 happened); or
- the durable checkpoint is of version v; or
- v is 0 and nothing was ever trained: it is initialised.

The target is the highest version that all of them can be brought to; versions are never mixed. Survivors
that are ahead of it go back to an older copy, and make the same update again. The update of a layer that
shares a tensor with another (tied embeddings) needs the other's gradient too: its replay lists both layers'
copies.

For the step that was running, each layer keeps the finished micro-batches that some living vault holds: of
all pairwise disjoint choices the one that leaves the fewest micro-batches to run again, and each chosen
gradient goes to exactly one holder. All TP ranks choose the same ledgers. Micro-batches missing in any
layer are run again by whichever pipeline; layers that have them already add nothing. Between logged messages only the
layers that lack a micro-batch run it (`elastic.core.recovery.partial_replay`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from elastic.core.protocol.messages import Halted
from elastic.core.recovery import partial_replay as partial
from elastic.core.recovery.copy_index import CopyIndex
from elastic.core.recovery.solver import Solver, copies_of, fetched, spread
from elastic.core.recovery.unrecoverable import explain_unreachable, describe_lost_steps
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

__all__ = ["Assignment", "Outcome", "explain", "replayed", "solve"]


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
    """Return what every holder in `plan` has to do, or raise Unrecoverable naming layers and what they lack.

    `inventory` is that of all living vaults (each `Copy.node` says where); copies on nodes that are not in
    `vaults` are ignored. `checkpoint` is (path, step). `initial_allowed`: no update was ever committed, so
    layers may be initialised; refused all the same when a copy of a later version is seen. `live` (node:
    version that its workers hold) tells up to where training had come, so that a fall-back can say what it
    loses.
    """
    shelf = CopyIndex.of(inventory, plan, (node for node, _ in vaults))
    newest = max([shelf.newest, *live.values(), *(record.step + 1 for record in records)])
    solver = Solver(
        plan=plan,
        shelf=shelf,
        records=_one_each(records),
        checkpoint=checkpoint,
        initial=initial_allowed and newest <= 0,
        tied=_partners(spec.tied),
    )
    version = solver.target()
    if version is None:
        raise Unrecoverable(f"{lacking(solver, newest)}; there is no durable checkpoint to fall back to")
    sums, covered = solver.gradients(version)
    todo, runs = _todo(solver, spec, version, covered)
    recipes = _recipes(solver, version, sums)
    if any(recipe.checkpoint for _, recipe in recipes):
        short, gone = explain_unreachable(solver, newest), describe_lost_steps(version, newest)
        why = f"fell back to the checkpoint of step {version}: {short}; {gone}"
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


@dataclass(frozen=True, slots=True)
class RecoverySummary:
    """What a recovery does, for summaries and logs."""

    network_bytes: int
    """Bytes that vaults send to other nodes."""
    state_source: str
    """memory: every holder has its state on its own node | shared memory: so it is, and some of it was left by workers
    that are gone | peer: some state is a copy that a peer kept | checkpoint: some state is read from the checkpoint |
    initial: layers are initialised."""
    todo: frozenset[int]
    """Micro-batches of the step that have to run through all layers."""
    partial: frozenset[int]
    """Those that some layers run alone."""
    text: str


def summarize(assignment: Assignment, before: Plan | None = None, lost_nodes: Sequence[str] = ()) -> RecoverySummary:
    """Count what `assignment` moves; `before` is the plan that it replaces, `lost_nodes` those whose
    workers are gone."""
    plan, recipes = assignment.plan, assignment.recipes
    network = sum(_bytes_read(plan, node, recipe, lost_nodes) for node, recipe in recipes)
    network += partial.fetched_bytes(plan, assignment.partial)
    moved = sum(
        1
        for layer in range(plan.n_layers if before else 0)
        if {u.node for u in plan.holders(layer)} - {u.node for u in (before or plan).holders(layer)}
    )
    source = _state_source(assignment, lost_nodes)
    longest = max((len(part.updates) for _, r in recipes for part in (r, *r.portions)), default=0)
    made = f" and up to {longest} updates" if longest else ""
    todo = frozenset(index for share in assignment.todo for index in share)
    gone = sorted(
        {layer for _, _, st in (before or plan).stages() if st.unit.node in lost_nodes for layer in st.layers}
    )
    text = (
        f"{f'layers {format_indices(gone)} were on {chr(32).join(lost_nodes)}; ' if gone else ''}"
        f"step {assignment.step}, state from {source}{made}, {moved} of {plan.n_layers} layers move, "
        f"{network} bytes over the network, {len(todo)} of {plan.n_microbatches} micro-batches to run"
        f"{f'; in part: {partial.describe(assignment.partial)}' if assignment.partial else ''}"
    )
    in_part = frozenset(run.microbatch for run in assignment.partial)
    return RecoverySummary(network, source, todo, in_part, text)


def replayed_microbatches(
    old_plan: Plan,
    lost_nodes: frozenset[str],
    todo: frozenset[int],
    halted: Mapping[str, Halted],
    step: int | None = None,
    *,
    orders: Sequence[Sequence[int]] = (),
    covered: Mapping[int, frozenset[int]] | None = None,
) -> frozenset[int]:
    """Return those of `todo` that had reached a lost stage: work that is really done twice.

    The lost stage cannot be asked, so its neighbours in its pipeline are. For stage s of a pipeline:

    - s > 0: what the nearest living stage before it had `sent`. With one lost node that is exactly what had
      been handed to the lost stage; with several lost in a row it is an upper bound for the later ones.
    - no living stage before it (s = 0, or all before it lost too): what the nearest living stage after it
      had `started`; a lower bound, since the lost stage may have been ahead.
    - the whole pipeline lost: nothing is known, and nothing is counted.

    With `step`, evidence of nodes that hold another version (already a step further, or behind) is left out.

    With `orders` (each pipeline's micro-batches of the step, whole or in part, in order) and `covered` (layer:
    micro-batches that were saved), what lay in the lost stage's input queue is left out too: its list says how
    far it can have come (`_begun`).

    Where units have several stages, `sent` and `started` tell of each unit's first one, which every micro-batch reaches
    before the others.
    """
    reached: frozenset[int] = frozenset()
    for p, pipeline in enumerate(old_plan.pipelines):
        units = units_of(pipeline)
        told = [halted.get(unit.node) if unit.node not in lost_nodes else None for unit in units]
        told = [h if h and (step is None or h.step == step) else None for h in told]
        for s in (s for s, unit in enumerate(units) if unit.node in lost_nodes):
            before = next((h for h in reversed(told[:s]) if h), None)
            after = next((h for h in told[s + 1 :] if h), None)
            here = before.sent if before else after.started if after else frozenset()
            if orders and covered is not None:
                saved = covered.get(pipeline.stages[s].first, frozenset()).intersection(orders[p])
                actions = actions_of(pipeline, tuple(orders[p]))[s]
                here &= _begun(actions, _most_finished(old_plan, orders, p, len(saved)))
            reached |= here
    return reached & todo


def _most_finished(plan: Plan, orders: Sequence[Sequence[int]], p: int, n_saved: int) -> int:
    """How many micro-batches a stage of pipeline `p` can have finished, if `n_saved` of them were saved; 0: any number.

    At most two copies, of K micro-batches each, were made and not yet acknowledged (`elastic.worker.backup.publisher`); it waits
    when the third is to be made. Of sums over the holders: `elastic.planning.schedule.reduction_rounds`. Without either nothing bounds it.
    """
    gradients = gradients_of(plan.gradients)
    if gradients.rounds:
        shares = [len(order) for order in orders]
        return rounds_of(plan.pipelines, shares, gradients.rounds).most_finished(p, n_saved)
    return n_saved + 3 * gradients.every if gradients.every else 0


def _begun(actions: Sequence[Action], most_finished: int) -> frozenset[int]:
    """Micro-batches that a unit's first stage can have begun, if it finished no more than `most_finished` (0: any)."""
    stage, finished, begun = actions[0].stage if actions else -1, 0, set[int]()
    for action in (a for a in actions if a.stage == stage):
        if action.kind is Kind.F:
            begun.add(action.microbatch)
        finished += action.kind.finishes
        if most_finished and finished == most_finished:
            break
    return frozenset(begun)


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
    """Whether workers on `node`, if they live, have what the portions bring: theirs is among them, and the rest they
    got after the last update (unless the fault came just then)."""
    mine = portion_of(plan, node, recipe.layer)
    return not recipe.replay and any(
        copy.owner == copy.node == node and copy.portion == mine != WHOLE for copy in recipe.states
    )


def _bytes_read(plan: Plan, node: str, recipe: Recipe, lost_nodes: Sequence[str]) -> int:
    """Bytes over the network that `recipe` costs `node`."""
    live = node not in lost_nodes and _is_live(plan, node, recipe)
    return fetched(list(copies_of(replace(recipe, portions=()) if live else recipe)), node)


def _recipes(
    solver: Solver, version: int, sums: Mapping[tuple[str, Slot], list[Copy]]
) -> tuple[tuple[str, Recipe], ...]:
    """One recipe for every holder of every (layer, TP rank); none where it only initialises and has no
    gradient."""
    recipes = []
    for _, _, stage in solver.plan.stages():
        node = stage.unit.node
        for slot in ((layer, shard) for layer in stage.layers for shard in range(solver.plan.tp)):
            recipe = solver.state_recipe(node, slot, version)
            recipe = replace(recipe, gradients=tuple(sums.get((node, slot), ())))
            if recipe.states or recipe.checkpoint or recipe.gradients:
                recipes.append((node, recipe))
    return spread(recipes, solver.shelf)


def _partners(pairs: Sequence[tuple[int, int]]) -> dict[int, frozenset[int]]:
    """Layer: all others that it is tied to, directly or through a third."""
    groups: dict[int, frozenset[int]] = {}
    for a, b in pairs:
        group = groups.get(a, frozenset((a,))) | groups.get(b, frozenset((b,)))
        groups.update(dict.fromkeys(group, group))
    return {layer: group - {layer} for layer, group in groups.items()}


def _todo(
    solver: Solver, spec: JobSpec, version: int, covered: Sequence[int]
) -> tuple[tuple[tuple[int, ...], ...], tuple[PartialRun, ...]]:
    """Share out the micro-batches that some layer lacks: those for all layers, by pipeline, and those for some; nothing
    after the last step."""
    plan = solver.plan
    if version >= spec.n_steps:
        return tuple(() for _ in plan.pipelines), ()
    complete = solver.full
    for mask in covered:
        complete &= mask
    left = [index for index in range(plan.n_microbatches) if not complete >> index & 1]
    some, left = partial.split_runs(plan, solver.shelf, version, covered, left)
    if len(left) == plan.n_microbatches:
        return tuple(pipeline.microbatches for pipeline in plan.pipelines), ()
    runs, before = partial.assign_runs(plan, solver.shelf, version, some, spec.layers)
    costs = [
        _finish(pipeline, spec.layers, began) for pipeline, began in zip(plan.pipelines, before, strict=True)
    ]
    return batches.deal(left, batches.allot(len(left), costs, least=0)), runs


def _finish(pipeline: Pipeline, layers: Sequence[LayerSpec], began: float = 0.0) -> batches.Cost:
    """Finishing time of a pipeline as a function of its micro-batches, in the unit of the layers' figures; `began`:
    when it is free."""

    units = units_of(pipeline)
    busy = dict.fromkeys(units, 0.0)
    for stage in pipeline.stages:
        busy[stage.unit] += sum(layers[i].forward_s + layers[i].backward_s for i in stage.layers)
    slowest = max(busy.values()) or 1.0
    fill = (len(units) - 1) * len(units) / len(pipeline.stages)
    return lambda microbatches: began + (microbatches + fill) * slowest if microbatches else began


def _one_each(records: Sequence[StepRecord]) -> dict[int, StepRecord]:
    """One record a step. Several differ only if a commit was made twice in fast mode: take the one most
    often given."""
    counts: dict[StepRecord, int] = {}
    for record in records:
        counts[record] = counts.get(record, 0) + 1
    return {record.step: record for record, _ in sorted(counts.items(), key=lambda item: item[1])}
