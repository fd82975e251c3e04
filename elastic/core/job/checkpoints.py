"""Durable checkpoints of a job: their parts, their commit, and the older ones to fall back to.

A checkpoint of step s is written in parts by several nodes (`elastic.agent.vault.checkpoints`). It
is committed when all parts are on disk. Several checkpoints may be incomplete at the same time,
because nodes write at different speeds.

If an epoch begins at an earlier step than a checkpoint that is being written, training repeats this
checkpoint's steps. The parts written before are then dropped, here and by the agents, and all
holders write it again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from elastic.core.job.state import (
    CheckpointCommitted,
    CheckpointFailed,
    CommitCheckpoint,
    DropCheckpoint,
    JobAction,
    JobState,
    JobTransition,
    LogEntry,
)
from elastic.core.protocol import messages as m
from elastic.domain.errors import FieldError
from elastic.domain.types import STATE, WHOLE, Copy, JobSpec, SavedModel, Slot, whole_slots

MAX_PENDING = 8
"""Maximum number of checkpoints that are being written at the same time."""
MAX_OLDER = 8
"""Maximum number of older checkpoints that are remembered."""


def part_reported(state: JobState, part: m.CheckpointPart, now: float) -> JobTransition:
    """Record a part that is on disk, or that could not be written. The last part of a step starts
    the commit."""
    spec, present = state.spec, state.assignment
    if spec is None or (present and part.undone_by(present.plan.epoch, present.step)):
        return state, (), ""
    pending = dict(state.checkpoint_parts)
    known = part.step in pending or part.step > _newest_step(state)
    if not known or part.step in state.lost_checkpoints:
        return state, (), ""  # it was committed or given up before
    if part.error:
        stale = present is not None and part.epoch < present.plan.epoch
        return (state, (), "") if stale else _part_failed(state, part)
    before = frozenset(pending.get(part.step, ()))
    slots = before | set(part.layers)
    pending[part.step] = tuple(sorted(slots))
    state = state.of(checkpoint_parts=tuple(sorted(pending.items())))
    # Nodes report a part again after a reconnect. The commit must begin only once.
    begun = is_complete(state, slots) and not is_complete(state, before)
    state, dropped = _without_stragglers(state)
    return state, (*((CommitCheckpoint(part.step),) if begun else ()), *dropped), ""


def is_complete(state: JobState, slots: Collection[Slot]) -> bool:
    """Return whether `slots` cover every (layer, TP rank) of the model."""
    spec = state.spec
    return spec is not None and len(whole_slots(slots)) == spec.n_layers * spec.tp


def newest_written(state: JobState) -> int:
    """Return the newest step whose checkpoint has all its files; -1: none."""
    whole = [step for step, slots in state.checkpoint_parts if is_complete(state, slots)]
    return max([_newest_step(state), *whole])


def commits_to_repeat(state: JobState) -> tuple[CommitCheckpoint, ...]:
    """Return the commits that a former coordinator may not have finished."""
    parts = state.checkpoint_parts
    return tuple(CommitCheckpoint(step) for step, slots in parts if is_complete(state, slots))


def committed(state: JobState, event: CheckpointCommitted) -> JobTransition:
    """Record a durable checkpoint. The one before stays as an older checkpoint."""
    known = (*((state.checkpoint,) if state.checkpoint else ()), *state.older_checkpoints)
    if (event.path, event.step) in known:
        return state, (), ""
    others = [one for one in known if one[1] != event.step]
    ordered = sorted([(event.path, event.step), *others], key=lambda one: -one[1])
    parts = tuple(part for part in state.checkpoint_parts if part[0] != event.step)
    state = state.of(
        checkpoint=ordered[0],
        older_checkpoints=tuple(ordered[1 : 1 + MAX_OLDER]),
        checkpoint_parts=parts,
    )
    entry = LogEntry("checkpoint", {"step": event.step, "path": event.path})
    return state, (entry,), f"checkpoint of step {event.step}"


def commit_failed(state: JobState, event: CheckpointFailed) -> JobTransition:
    """Record that a checkpoint could not be committed."""
    part = m.CheckpointPart(event.step, (), error=event.error)
    return _part_failed(state, part)


def began_epoch(state: JobState, step: int) -> JobState:
    """Return the state after an epoch has begun at `step`: parts of later steps are undone."""
    parts = tuple(part for part in state.checkpoint_parts if part[0] <= step)
    lost = tuple(other for other in state.lost_checkpoints if other <= step)
    return state.of(checkpoint_parts=parts, lost_checkpoints=lost, checkpoint_errors=())


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


def unreadable(state: JobState) -> m.CheckpointUnreadable | None:
    """Return the report that the present checkpoint cannot be read, or None."""
    reports = (member.report for member in state.members.values())
    for found in (r.unreadable for r in reports if r.unreadable and r.epoch == state.epoch):
        if state.checkpoint is not None and found.path == state.checkpoint[0]:
            return found
    return None


def without_newest(state: JobState, why: str) -> tuple[JobState, LogEntry]:
    """Replace the newest checkpoint, which cannot be read, by the one before it, if any."""
    assert state.checkpoint is not None
    path, step = state.checkpoint
    older = state.older_checkpoints
    state = state.of(checkpoint=older[0] if older else None, older_checkpoints=older[1:])
    return state, LogEntry("checkpoint-unusable", {"path": path, "step": step, "why": why})


def copies_to_rescue(state: JobState, step: int, inventory: Iterable[Copy]) -> tuple[Copy, ...]:
    """Return those copies of `inventory` that lost nodes may not have written for the newest
    checkpoint that is due before `step`, at which the next epoch begins."""
    spec, plan = state.spec, state.plan
    if spec is None or plan is None or not spec.checkpoint_every:
        return ()
    due = (step - 1) // spec.checkpoint_every * spec.checkpoint_every
    if due <= newest_written(state) or due in state.lost_checkpoints:
        return ()
    written = whole_slots(dict(state.checkpoint_parts).get(due, ()))
    copies: dict[Slot, Copy] = {}
    for copy in inventory:
        if (copy.kind, copy.step, copy.portion) == (STATE, due, WHOLE):
            copies.setdefault(copy.slot, copy)
    return tuple(
        copy
        for slot, copy in sorted(copies.items())
        if slot not in written and plan.holders(copy.layer)[0].node not in state.members
    )


def is_final_missing(state: JobState) -> bool:
    """Return whether the checkpoint of the last step is due and not durable yet."""
    spec = state.spec
    return spec is not None and spec.checkpoint_every > 0 and _newest_step(state) < spec.n_steps


def unfinished(state: JobState) -> tuple[JobAction, ...]:
    """Return the entries and orders about the checkpoints that are incomplete at the end."""
    parts = [step for step, slots in state.checkpoint_parts if not is_complete(state, slots)]
    return _give_up(state, parts, "", "the job ended before all its files were written")[1]


def _newest_step(state: JobState) -> int:
    return state.checkpoint[1] if state.checkpoint is not None else -1


def _part_failed(state: JobState, part: m.CheckpointPart) -> JobTransition:
    """Give up the checkpoint of a step. The error of the last step is kept instead, because the job
    needs this checkpoint."""
    if state.spec is not None and part.step == state.spec.n_steps:
        errors = dict.fromkeys((*state.checkpoint_errors, (part.node, part.error)))
        return state.of(checkpoint_errors=tuple(errors)), (), part.error
    state, actions = _give_up(state, [part.step], part.node, part.error)
    return state, actions, f"no checkpoint of step {part.step}"


def _without_stragglers(state: JobState) -> tuple[JobState, tuple[JobAction, ...]]:
    """Give up the oldest incomplete checkpoints if there are too many."""
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
        actions += [entry, DropCheckpoint(step)]
    parts = tuple(part for part in state.checkpoint_parts if part[0] not in steps)
    lost = (*state.lost_checkpoints, *steps)[-MAX_OLDER:]
    return state.of(checkpoint_parts=parts, lost_checkpoints=lost), tuple(actions)
