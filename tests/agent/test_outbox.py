"""What an agent says again after a break: all that may not have been heard, and nothing that was undone."""

from __future__ import annotations

from elastic.agent.outbox import News
from elastic.core.protocol import messages as m
from elastic.domain.types import Assignment, Pipeline, Plan, Stage, StepRecord, Unit

PLAN = Plan(3, 1, 1, 1, (Pipeline((Stage(Unit("a"), 0, 1),), (0,)),))


def done(step: int, epoch: int) -> m.StepDone:
    return m.StepDone(epoch, StepRecord(step, 1.0, 1.0, 1.0), 0.1, 0.01, 16)


def test_steps_come_before_a_report_that_may_end_the_job_and_parts_after_them() -> None:
    news, part, note = News(), m.CheckpointPart(2, ((0, 0),)), m.BackupNote("backup-short", "a", "b", "full")
    for message in (part, done(1, 1), note, done(2, 1)):
        news.add(message)
    assert list(news) == [done(1, 1), done(2, 1), part, note]


def test_what_an_older_checkpoint_undid_is_not_said_again() -> None:
    news, note = News(), m.BackupNote("backup-short", "a", "b", "full")
    for step in range(6):
        news.add(done(step, 1))
    for step in (2, 4):
        news.add(m.CheckpointPart(step, ((0, 0),)))
    news.add(note)
    news.enter(m.Install(2, Assignment(PLAN, 2)))
    news.add(done(2, 2))
    news.enter(m.Install(2, Assignment(PLAN, 2)))
    kept = [done(0, 1), done(1, 1), done(2, 2), m.CheckpointPart(2, ((0, 0),)), note]
    assert list(news) == kept, "an order that comes again undoes nothing"
