"""Durable checkpoints of a job: their parts, their commit, and the older ones to fall back to.

A checkpoint of step s is written in parts by several nodes (`elastic.agent.vault.checkpoints`). It
is committed when all parts are on disk. Several checkpoints may be incomplete at the same time,
because nodes write at different speeds.

If an epoch begins at an earlier step than a checkpoint that is being written, training repeats this
checkpoint's steps. The parts written before are then dropped, here and by the agents, and all
holders write it again.

A job that ends with an error waits for the newest checkpoint that is due, because the user resumes
from it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic.core.job import scope
from elastic.core.job.state import (
    Cause,
    CauseKind,
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    DropCheckpoint,
    JobAction,
    JobState,
    JobTransition,
    LogEntry,
    Member,
)
from elastic.core.protocol import messages as m
from elastic.core.recovery import lineage
from elastic.domain.errors import FieldError
from elastic.domain.types import (
    STATE,
    Assignment,
    Copy,
    JobSpec,
    Plan,
    SavedModel,
    Slot,
    whole_slots,
)
from elastic.planning.plan.schemes import NONE, state_of

MAX_PENDING = 8
"""Maximum number of checkpoints that are being written at the same time."""
MAX_OLDER = 8
"""Maximum number of older checkpoints that are remembered."""
MAX_LOST = 256
"""Maximum number of lost checkpoints that are remembered: a node whose disk is far behind may still
report parts of them."""


def part_reported(state: JobState, part: m.CheckpointPart, now: float) -> JobTransition:
    """Record a part that is on disk, or that could not be written. The last part of a step starts
    the commit."""
    present = state.assignment
    if state.spec is None or lineage.is_undone(part, (*state.starts, *state.rewritten)):
        return state, (), ""
    pending = dict(state.checkpoint_parts)
    if part.step not in pending and _is_settled(state, part.step):
        # A node with a slow disk writes files of a lost checkpoint after the others were removed.
        stays = part.step in state.lost_checkpoints and not part.error
        return state, (_removal(state, part.step),) if stays else (), ""
    if part.error:
        old = present is not None and part.epoch < present.plan.epoch
        if old and not scope.is_awaited(state, part.node):  # its states are written again
            return state, (), ""
        failed = ((part.step, _writer(part.node, slot)) for slot in part.layers)
        state = state.of(failed_writers=tuple(dict.fromkeys((*state.failed_writers, *failed))))
        if _is_written_by_others(state, part):
            return state, (), ""
        return _part_failed(state, part)
    before = frozenset(pending.get(part.step, ()))
    slots = before | set(part.layers)
    pending[part.step] = tuple(sorted(slots))
    writers = dict(state.checkpoint_writers)
    writers[part.step] = tuple(sorted({*writers.get(part.step, ()), part.node}))
    state = state.of(
        checkpoint_parts=tuple(sorted(pending.items())),
        checkpoint_writers=tuple(sorted(writers.items()))[-2 * MAX_PENDING :],
    )
    # Nodes report a part again after a reconnect. The commit must begin only once.
    if is_complete(state, before):
        return state, (), ""
    # The assignment may be older than the part, if the store has lost it.
    kept = {*pending, *durable_steps(state)}
    epochs = {step: known for step, known in state.checkpoint_epochs if step in kept}
    epochs[part.step] = max(part.epoch, epochs.get(part.step, 0))
    whole = is_complete(state, slots)
    if whole:
        # A change under way may begin earlier, but its assignment will have this checkpoint whole.
        epoch = present.plan.epoch if present is not None else state.epoch
        epochs[part.step] = max(epoch, epochs[part.step])
    state = state.of(checkpoint_epochs=tuple(sorted(epochs.items())))
    if not whole:
        return state, (), ""
    return state, (CommitCheckpoint(part.step),), ""


def is_decided(state: JobState, step: int) -> bool:
    """Return whether the checkpoint of `step` is known to be durable, or was given up."""
    return step in (*durable_steps(state), *state.lost_checkpoints)


def _is_settled(state: JobState, step: int) -> bool:
    """Return whether the checkpoint of `step` is decided, or is older than all that are remembered.
    A newer checkpoint may become durable first."""
    return is_decided(state, step) or _is_forgotten(state, step)


def _is_forgotten(state: JobState, step: int) -> bool:
    """Return whether the step is older than all durable checkpoints that are remembered."""
    return len(state.older_checkpoints) >= MAX_OLDER and step < min(durable_steps(state))


def durable_steps(state: JobState) -> tuple[int, ...]:
    """Return the steps of the durable checkpoints that are remembered, newest first."""
    newest = (state.checkpoint,) if state.checkpoint else ()
    return tuple(step for _, step in (*newest, *state.older_checkpoints))


def rewritten_steps(state: JobState) -> frozenset[int]:
    """Return the steps of the checkpoints that a divergence has undone (`distrust_parts`)."""
    return frozenset(start + 1 for _, start in state.rewritten)


def due_steps(state: JobState) -> tuple[int, ...]:
    """Return the steps of all checkpoints that were due in a job that has finished."""
    spec = state.spec
    if spec is None or not spec.checkpoint_every:
        return ()
    first = max(0, state.starts[0][1]) if state.starts else 0
    every, last = spec.checkpoint_every, spec.n_steps
    published = state.plan is not None and state_of(state.plan.state).name != NONE
    between = range(first // every * every + every, last, every) if published else ()
    return (*between, last)


def being_written(state: JobState, now: float) -> tuple[int, ...]:
    """Return the steps of the newest due checkpoints that lack files, while a node says that it
    still writes, or has not finished the last step. A disconnected node has time to return."""
    if state.plan is None:
        return ()
    parts, nodes = dict(state.checkpoint_parts), state.plan.nodes()
    late = [
        step
        for step in due_steps(state)[-MAX_PENDING - MAX_OLDER :]
        if not _is_settled(state, step) and not is_complete(state, parts.get(step, ()))
    ]
    writing = any(
        _may_write(state, member, now)
        and (member.report.writing or (node in nodes and member.report.finished is None))
        for node, member in state.members.items()
    )
    return tuple(late) if writing else ()


def _may_write(state: JobState, member: Member, now: float) -> bool:
    """Return whether the member is connected, or may reconnect."""
    silent = member.silence_s(now) > state.limits.lease_s
    return member.connected or not (silent or member.refused)


def late_entry(step: int, patience_s: float) -> LogEntry:
    """Return the warning that the end of the job waits for the checkpoint of `step`."""
    why = "a disk is behind"
    return LogEntry("checkpoint-late", {"step": step, "why": why, "patience_s": patience_s})


def may_be_writing(state: JobState) -> bool:
    """Return whether a checkpoint from before the present epoch is unfinished. A node that holds no
    layers any more may still be writing its part."""
    present = state.assignment
    if present is None:
        return False
    due = due_at(state, present.step)
    waiting = {step for step, _ in state.checkpoint_parts if step <= present.step}
    return bool(waiting) or (due > 0 and not _is_settled(state, due))


def is_complete(state: JobState, slots: Collection[Slot]) -> bool:
    """Return whether `slots` cover every (layer, TP rank) of the model."""
    spec = state.spec
    return spec is not None and len(whole_slots(slots)) == spec.n_layers * spec.tp


def newest_written(state: JobState) -> int:
    """Return the newest step whose checkpoint has all its files; -1: none."""
    whole = [step for step, slots in state.checkpoint_parts if is_complete(state, slots)]
    return max([newest_step(state), *whole])


def is_of_other_history(state: JobState) -> bool:
    """Return whether training went back behind the newest durable checkpoint after its files were
    complete. The version was then computed again, with other last bits in floating point."""
    if state.checkpoint is None:
        return False
    step = newest_step(state)
    complete_in = dict(state.checkpoint_epochs).get(step, 0)
    return any(epoch > complete_in and start < step for epoch, start in state.starts)


def adopted_history(state: JobState, epoch: int) -> JobState:
    """Return the state after `epoch` has begun with nothing but the newest durable checkpoint, so
    that this version is of the history that training continues."""
    epochs = {**dict(state.checkpoint_epochs), newest_step(state): epoch}
    return state.of(checkpoint_epochs=tuple(sorted(epochs.items())))


def commits_to_repeat(state: JobState) -> tuple[CommitCheckpoint, ...]:
    """Return the commits that may not have been finished: by a former coordinator, or because the
    disk failed before this epoch."""
    parts = state.checkpoint_parts
    return tuple(CommitCheckpoint(step) for step, slots in parts if is_complete(state, slots))


def starts_of_files(state: JobState, step: int) -> lineage.Starts:
    """Return the starts by which the files of a checkpoint are undone.

    If it is complete, later epochs undo nothing: they may begin at an earlier step, but nobody
    writes the checkpoint again while its commit is under way.
    """
    starts, whole_in = (*state.starts, *state.rewritten), _whole_in(state, step)
    return tuple(start for start in starts if not whole_in or start[0] <= whole_in)


def file_counts(state: JobState, step: int, epoch: int) -> bool:
    """Return whether a file of the checkpoint of `step` that belongs to `epoch` is of the history
    in which the checkpoint became complete. Later epochs may have written it again, after the
    commit of another coordinator failed."""
    whole_in = _whole_in(state, step)
    if whole_in and epoch > whole_in:
        return False
    known = epoch or -1  # agents of the former version write no epoch
    return not lineage.is_undone(m.CheckpointPart(step, (), known), starts_of_files(state, step))


def _whole_in(state: JobState, step: int) -> int:
    """Return the epoch in which the checkpoint became complete; 0: it is not complete."""
    if not is_complete(state, dict(state.checkpoint_parts).get(step, ())):
        return 0
    return dict(state.checkpoint_epochs).get(step, state.epoch)


def committed(state: JobState, event: CheckpointCommitted) -> JobTransition:
    """Record a durable checkpoint. The one before stays as an older checkpoint."""
    known = (*((state.checkpoint,) if state.checkpoint else ()), *state.older_checkpoints)
    if (event.path, event.step) in known or _is_distrusted(state, event.step):
        return state, (), ""
    others = [one for one in known if one[1] != event.step]
    ordered = sorted([(event.path, event.step), *others], key=lambda one: -one[1])
    parts = tuple(part for part in state.checkpoint_parts if part[0] != event.step)
    state = state.of(
        checkpoint=ordered[0],
        older_checkpoints=tuple(ordered[1 : 1 + MAX_OLDER]),
        checkpoint_parts=parts,
        checkpoint_writers=tuple(w for w in state.checkpoint_writers if w[0] >= ordered[0][1]),
    )
    entry = LogEntry("checkpoint", {"step": event.step, "path": event.path})
    return state, (entry,), f"checkpoint of step {event.step}"


def commit_failed(state: JobState, event: CheckpointFailed) -> JobTransition:
    """Record that a checkpoint could not be committed.

    Agents do not write a checkpoint that was whole when the epoch began. If training repeats its
    steps, a new epoch lets them write it again (`cause_to_write_again`).
    """
    present, step = state.assignment, event.step
    if _is_distrusted(state, step):
        return state, (), ""
    if present is not None and present.checkpointed >= step > state.newest_step:
        parts = tuple(part for part in state.checkpoint_parts if part[0] != step)
        return state.of(checkpoint_parts=parts), (), event.error
    part = m.CheckpointPart(event.step, (), error=event.error)
    return _part_failed(state, part)


def starts_with(state: JobState, step: int, *, alone: bool = False) -> lineage.Starts:
    """Return `Assignment.starts` of the present epoch, which begins at `step`; `alone`: with a
    checkpoint of another history, as if training had gone back behind this step."""
    first = step - 1 if alone else step
    return (*lineage.with_start(state.starts, state.epoch, first), *state.rewritten)


def began_epoch(state: JobState, assignment: Assignment) -> JobState:
    """Return the state after the epoch of `assignment` has begun: parts of later steps are undone.
    Call this before the plan is replaced.

    All parts of a checkpoint that is being committed stay, so that the commit is repeated if the
    coordinator fails. Nobody writes this checkpoint again (`newest_written`).
    """
    step = assignment.step
    parts = tuple(
        part for part in state.checkpoint_parts if part[0] <= step or is_complete(state, part[1])
    )
    lost = tuple(other for other in state.lost_checkpoints if other <= step)
    return state.of(
        checkpoint_parts=parts,
        lost_checkpoints=lost,
        checkpoint_errors=(),
        failed_writers=(),
        queued_writers=_queued_writers(state, assignment),
    )


def cause_to_write_again(state: JobState) -> Cause | None:
    """Return the cause for a new epoch if agents leave out a checkpoint that was whole when this
    epoch began, but could not be committed. None: there is no such checkpoint."""
    step = state.assignment.checkpointed if state.assignment is not None else -1
    if step <= newest_written(state) or step in state.lost_checkpoints:
        return None
    return Cause(CauseKind.OTHER, f"the checkpoint of step {step} could not be committed")


def distrust_parts(
    state: JobState, step: int, nodes: Collection[str], why: str
) -> tuple[JobState, tuple[JobAction, ...]]:
    """Let the present epoch write the checkpoint of `step` again after a divergence at this step,
    because `nodes` may have written wrong states."""
    state = state.of(rewritten=lineage.with_start(state.rewritten, state.epoch, step - 1))
    whole = newest_written(state) >= step
    if whole and not set(nodes) & set(dict(state.checkpoint_writers).get(step, ())):
        return state, ()
    actions: list[JobAction] = [DropCheckpoint(step, before=state.epoch, committed=True)]
    if state.checkpoint is not None and state.checkpoint[1] == step:
        state, entry = without_newest(state, why)
        actions.append(entry)
    return state.of(
        checkpoint_parts=tuple(part for part in state.checkpoint_parts if part[0] != step),
        checkpoint_writers=tuple(one for one in state.checkpoint_writers if one[0] != step),
    ), tuple(actions)


def removals_to_repeat(state: JobState) -> tuple[DropCheckpoint, ...]:
    """Return the removals after losses (`_give_up`) and divergences (`distrust_parts`) that a
    former coordinator may not have carried out. After a divergence, checkpoints that stayed, or
    were written again since, are left out."""
    parts, durable = dict(state.checkpoint_parts), durable_steps(state)
    diverged = tuple(
        DropCheckpoint(step, before=epoch, committed=True)
        for epoch, step in ((epoch, start + 1) for epoch, start in state.rewritten)
        if step not in durable
        and not _is_forgotten(state, step)
        and not is_complete(state, parts.get(step, ()))
    )
    return (*diverged, *(_removal(state, step) for step in state.lost_checkpoints))


def _is_distrusted(state: JobState, step: int) -> bool:
    """Return whether a divergence has undone the parts of `step` that were being committed."""
    again = any(start == step - 1 for _, start in state.rewritten)
    return again and not is_complete(state, dict(state.checkpoint_parts).get(step, ()))


def mismatch(saved: SavedModel | None, spec: JobSpec) -> str:
    """Return the reason why a job cannot continue from a checkpoint; "": it can, or the checkpoint
    does not describe its model."""
    if saved is None:
        return ""
    problem = ""
    if saved.n_layers != spec.n_layers:
        problem = f"it has {saved.n_layers} layers, and this job has {spec.n_layers}"
    elif saved.optimizer and spec.optimizer and saved.optimizer != spec.optimizer:
        problem = f"its optimizer is {saved.optimizer}, and this job has {spec.optimizer}"
    for layer, (there, here) in enumerate(zip(saved.contents, spec.contents, strict=False)):
        if there != here and not problem:
            problem = f"its layer {layer} has {there}, and this job has {here}"
    if not problem:
        return ""
    remedy = f"the checkpoint is of another model: {problem}"
    return str(FieldError("--resume", saved.path, remedy))


def unreadable(state: JobState) -> tuple[str, m.CheckpointUnreadable] | None:
    """Return (node, its report) if the present checkpoint cannot be read, or None."""
    for node, report in ((node, member.report) for node, member in state.members.items()):
        found = report.unreadable if report.epoch == state.epoch else None
        if found and state.checkpoint is not None and found.path == state.checkpoint[0]:
            return node, found
    return None


def without_newest(state: JobState, why: str) -> tuple[JobState, LogEntry]:
    """Replace the newest checkpoint, which cannot be read, by the one before it, if any."""
    assert state.checkpoint is not None
    path, step = state.checkpoint
    older = state.older_checkpoints
    newest = older[0] if older else None
    state = state.of(checkpoint=newest, older_checkpoints=older[1:], checkpoint_blind=())
    return state, LogEntry("checkpoint-unusable", {"path": path, "step": step, "why": why})


def copies_to_rescue(
    state: JobState, plan: Plan, step: int, inventory: Iterable[Copy]
) -> tuple[Copy, ...]:
    """Return those copies of `inventory` that make the newest checkpoint that is due before `step`
    complete. The epoch of `plan` begins at `step`.

    The node that was to write a state writes it, if it is in `plan`: it has this state in its queue
    already. In place of any other node two nodes write the state, because one may have dropped its
    copy meanwhile. The nodes of `plan` come first: all others may enter the epoch after its trim.
    """
    spec = state.spec
    if spec is None or not spec.checkpoint_every:
        return ()
    due = (step - 1) // spec.checkpoint_every * spec.checkpoint_every
    if due <= max(0, newest_written(state)) or due in state.lost_checkpoints:
        return ()
    starts, nodes = starts_with(state, step), plan.nodes()
    copies: dict[Slot, dict[str, Copy]] = {}
    for copy in inventory:
        if copy.kind == STATE and copy.step == due and not lineage.is_undone(copy, starts):
            copies.setdefault(copy.slot, {}).setdefault(copy.node, copy)
    written = frozenset(dict(state.checkpoint_parts).get(due, ()))
    chosen: list[Copy] = []
    for slot in _missing_slots(state, written, copies):
        writer = _writer_of(state, slot, copies[slot].values())
        ranked = sorted(
            copies[slot].values(), key=lambda c: (c.node not in nodes, c.node != writer)
        )
        queued = ranked[0].node == writer and writer in nodes
        chosen += ranked[: 1 if queued else 2]
    return tuple(chosen)


def _missing_slots(
    state: JobState, written: frozenset[Slot], copies: Collection[Slot]
) -> list[Slot]:
    """Return those slots of `copies` that complete what is `written`: for each layer and TP rank
    the division into portions of which the fewest are missing."""
    assert state.spec is not None
    whole, found = whole_slots(written), [*written, *copies]
    missing: list[Slot] = []
    for place in ((n, rank) for n in range(state.spec.n_layers) for rank in range(state.spec.tp)):
        numbers = {slot[3] for slot in found if slot[:2] == place and len(slot) > 2}
        divisions: list[list[Slot]] = [[place]]
        divisions += [[(*place, i, n) for i in range(n)] for n in sorted(numbers)]
        absent: list[list[Slot]] = [
            [slot for slot in division if slot not in written] for division in divisions
        ]
        possible = [slots for slots in absent if all(slot in copies for slot in slots)]
        if place not in whole and possible:
            fewest = min(possible, key=len)
            missing += fewest
    return missing


def _queued_writers(state: JobState, assignment: Assignment) -> tuple[tuple[int, Slot, str], ...]:
    """Return `JobState.queued_writers` for the next epoch.

    A member that its plan leaves out may still write, and a second change does not end what the
    plan before the first one began. A node that joined again before this epoch counts, too. Its
    part does not come, so the checkpoint is given up later.
    """
    rescued = {(copy.step, copy.slot): copy for copy in assignment.rescued}
    found = [(*part, _writer_of(state, part[1], [copy])) for part, copy in rescued.items()]
    found += [one for one in _queued(state) if one[:2] in rescued]
    return tuple(
        (step, slot, state.members[node].report.info.incarnation)
        for step, slot, node in dict.fromkeys(found)
        if node in state.members and (step, _writer(node, slot)) not in state.failed_writers
    )


def _queued(state: JobState) -> list[tuple[int, Slot, str]]:
    """Return (step, layer or portion, member) of `JobState.queued_writers`. An agent that was
    restarted has lost its queue."""
    nodes = {member.report.info.incarnation: node for node, member in state.members.items()}
    return [(step, slot, nodes[one]) for step, slot, one in state.queued_writers if one in nodes]


def _writer_of(state: JobState, slot: Slot, copies: Iterable[Copy]) -> str:
    """Return the node that was to write the state of `slot`: its first holder in the old plan; of a
    portion its owner."""
    if len(slot) > 2:
        return next(iter(copies)).owner
    holders = state.plan.holders(slot[0]) if state.plan is not None else ()
    return holders[0].node if holders else ""


def _is_written_by_others(state: JobState, failed: m.CheckpointPart) -> bool:
    """Return whether each state that could not be written is on disk, or another node may write it.

    A node that had rescued a copy may have dropped it meanwhile. The node that was to write it may
    have it in its queue (`copies_to_rescue`).
    """
    written = dict(state.checkpoint_parts).get(failed.step, ())
    if is_complete(state, written):
        return True
    rescued = state.assignment.rescued if state.assignment is not None else ()
    writers = [(copy.step, copy.slot, copy.node) for copy in rescued] + _queued(state)
    working = {
        slot
        for step, slot, node in writers
        if step == failed.step
        and node in state.members
        and (step, _writer(node, slot)) not in state.failed_writers
    }
    on_disk = {*written, *whole_slots(written)}
    safe = working | on_disk
    return bool(failed.layers) and all(s in safe or s[:2] in on_disk for s in failed.layers)


def _writer(node: str, slot: Slot) -> str:
    """Return the second half of an entry of `JobState.failed_writers`."""
    return " ".join(map(str, (node, *slot)))


def is_final_missing(state: JobState) -> bool:
    """Return whether the checkpoint of the last step is due and not durable yet."""
    spec = state.spec
    return spec is not None and spec.checkpoint_every > 0 and newest_step(state) < spec.n_steps


def due_at(state: JobState, version: int) -> int:
    """Return the step of the newest checkpoint that is due when states have `version`; 0: none."""
    spec, plan = state.spec, state.plan
    if spec is None or plan is None or not spec.checkpoint_every or version <= 0:
        return 0
    if version >= spec.n_steps:
        return spec.n_steps
    if state_of(plan.state).name == NONE:
        return 0  # states are published after the last step only
    return version // spec.checkpoint_every * spec.checkpoint_every


def is_awaited(state: JobState, step: int) -> bool:
    """Return whether the checkpoint of `step` is due, not durable, and can still become so."""
    spec, plan = state.spec, state.plan
    if not step or spec is None or plan is None or step <= newest_step(state):
        return False
    if step in state.lost_checkpoints or (step == spec.n_steps and state.checkpoint_errors):
        return False
    written = whole_slots(dict(state.checkpoint_parts).get(step, ()))
    missing = {
        layer
        for layer in range(spec.n_layers)
        for shard in range(spec.tp)
        if (layer, shard) not in written
    }
    return all(_has_writer(state, plan, layer) for layer in missing)


def _has_writer(state: JobState, plan: Plan, layer: int) -> bool:
    """Return whether the agent of a node that writes the layer may live."""
    members = [state.members.get(node) for node in writers_of(plan, layer)]
    return any(member is not None and not member.refused for member in members)


def writers_of(plan: Plan, layer: int) -> tuple[str, ...]:
    """Return the nodes that write the state of the layer, or portions of it, under the plan."""
    nodes = tuple(unit.node for unit in plan.holders(layer))
    return nodes if state_of(plan.state).sharded else nodes[:1]


def due_at_failure(state: JobState) -> int:
    """Return the step of the newest checkpoint that all workers can have if the job ends because of
    an error; 0: none. A worker that has a version proves that all others have it, or get it without
    this worker."""
    if state.failure is None:
        return 0
    version = state.failure.failed.version
    return due_at(state, version if version >= 0 else state.newest_step + 1)


def unfinished(state: JobState) -> tuple[CommitCheckpoint, ...]:
    """Return a last try for each checkpoint that lacks reports at the end of the job. A node may
    have been lost after it wrote its files, but before its report was read. After an error this
    includes the checkpoint that is due, also if no part of it was reported."""
    steps = {step for step, slots in state.checkpoint_parts if not is_complete(state, slots)}
    due = due_at_failure(state)
    if due and due > newest_written(state) and due not in state.lost_checkpoints:
        steps.add(due)
    return tuple(CommitCheckpoint(step) for step in sorted(steps))


def newest_step(state: JobState) -> int:
    return state.checkpoint[1] if state.checkpoint is not None else -1


def _part_failed(state: JobState, part: m.CheckpointPart) -> JobTransition:
    """Give up the checkpoint of a step. The error of the last step is kept instead, because the job
    needs this checkpoint."""
    if state.spec is not None and part.step == state.spec.n_steps:
        errors = dict.fromkeys((*state.checkpoint_errors, (part.node, part.error)))
        return state.of(checkpoint_errors=tuple(errors)), (), part.error
    state, actions = _give_up(state, [part.step], part.node, part.error)
    return state, actions, f"no checkpoint of step {part.step}"


def without_stragglers(state: JobState) -> tuple[JobState, tuple[JobAction, ...]]:
    """Give up the oldest incomplete checkpoints if there are too many. Call it when the reports of
    all nodes are recorded: after a delay, those of one node come before those of another."""
    waiting = [step for step, slots in state.checkpoint_parts if not is_complete(state, slots)]
    old = waiting[: max(0, len(waiting) - MAX_PENDING)]
    return _give_up(state, old, "", f"{MAX_PENDING} newer checkpoints are being written")


def _give_up(
    state: JobState, steps: Collection[int], node: str, why: str
) -> tuple[JobState, tuple[JobAction, ...]]:
    """Forget the parts of these checkpoints; log the loss, and order to remove the files."""
    actions: list[JobAction] = []
    for step in steps:
        entry = LogEntry("checkpoint-lost", {"step": step, "node": node, "why": why})
        actions += [entry, _removal(state, step)]
    parts = tuple(part for part in state.checkpoint_parts if part[0] not in steps)
    lost = (*state.lost_checkpoints, *steps)[-MAX_LOST:]
    return state.of(checkpoint_parts=parts, lost_checkpoints=lost), tuple(actions)


def _removal(state: JobState, step: int) -> DropCheckpoint:
    """Return the order to remove the files of a lost checkpoint. It spares those of the next epoch,
    which may write the checkpoint again; after the end of the job there is none."""
    epoch = state.assignment.plan.epoch if state.assignment is not None else state.epoch
    return DropCheckpoint(step, before=0 if state.ending is not None else epoch + 1)
