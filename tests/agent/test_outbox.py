"""The messages that an agent resends after a reconnect."""

from __future__ import annotations

from dataclasses import replace

from elastic.agent.outbox import MAX_CHECKPOINTS, MAX_NOTES, Outbox
from elastic.core.protocol import messages as m
from elastic.domain.types import Assignment, Pipeline, Plan, Stage, StepRecord, Unit

PLAN = Plan(2, 1, 1, 1, (Pipeline((Stage(Unit("a"), 0, 1),), (0,)),))


def finished(step: int, epoch: int) -> m.StepDone:
    return m.StepDone(epoch, StepRecord(step, 1.0, 1.0, 1.0), 0.1, 0.01, 16)


def test_steps_come_before_a_report_that_may_end_the_job_and_parts_after_them() -> None:
    outbox, part, note = (
        Outbox(),
        m.CheckpointPart(2, ((0, 0),)),
        m.BackupNote("backup-short", "a", "b", "full"),
    )
    for message in (part, finished(1, 1), note, finished(2, 1)):
        outbox.add(message)
    assert list(outbox) == [finished(1, 1), finished(2, 1), part, note]


def test_undone_steps_are_not_resent() -> None:
    outbox, note = Outbox(), m.BackupNote("backup-short", "a", "b", "full")
    for step in range(6):
        outbox.add(finished(step, 1))
    for step in (2, 4):
        outbox.add(m.CheckpointPart(step, ((0, 0),), 1))
    outbox.add(note)
    outbox.enter(m.Install(2, Assignment(PLAN, 2)))
    outbox.add(finished(2, 2))
    outbox.enter(m.Install(2, Assignment(PLAN, 2)))
    kept = [finished(0, 1), finished(1, 1), finished(2, 2), m.CheckpointPart(2, ((0, 0),), 1)]
    assert outbox.parts == (m.CheckpointPart(2, ((0, 0),), 1),)
    assert list(outbox) == kept, "the same order again removes nothing"


def test_steps_that_others_have_repeated_meanwhile_are_not_resent() -> None:
    """A node finished steps 2 and 3 in epoch 1. Epoch 2 began at step 3, and epoch 4 at step 5."""
    outbox = Outbox()
    for step in range(4):
        outbox.add(finished(step, 1))
    outbox.enter(m.Install(4, Assignment(replace(PLAN, epoch=4), 5, starts=((2, 3), (4, 5)))))
    assert list(outbox) == [finished(step, 1) for step in range(3)]


def test_a_note_about_backups_is_resent_in_its_epoch_only() -> None:
    """Later its keeper may be another incarnation, which is well."""
    outbox, note = Outbox(), m.BackupNote("keeper-failed", "a", "b", "no slot", "b:1")
    outbox.add(note)
    assert list(outbox) == [note]
    outbox.enter(m.Install(2, Assignment(PLAN, 2)))
    assert not list(outbox)


def test_all_parts_of_the_newest_checkpoints_are_kept() -> None:
    """A node with many workers reports many parts while no coordinator can be reached."""
    outbox = Outbox()
    for step in range(1, 41):
        outbox.add(m.BackupNote("backup-short", "a", "b", f"full {step}"))
        for layer in range(8):
            outbox.add(m.CheckpointPart(step, ((layer, 0),), 1))
    kept = [part.step for part in outbox.parts]
    assert kept == [step for step in range(41 - MAX_CHECKPOINTS, 41) for _ in range(8)]
    notes = [one.detail for one in outbox if isinstance(one, m.BackupNote)]
    assert notes == [f"full {step}" for step in range(1, 41)]
    for step in range(41, 41 + MAX_NOTES):
        outbox.add(m.BackupNote("backup-short", "a", "b", f"full {step}"))
    notes = [one.detail for one in outbox if isinstance(one, m.BackupNote)]
    assert notes == [f"full {step}" for step in range(41, 41 + MAX_NOTES)]
