"""Evaluations in the coordinator: they come with the record of a step, or with the last report."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.coordinator.transitions import transition
from elastic.core.job.goodput import evaluation_entries
from elastic.core.job.state import JobPhase, JobState, LogEntry
from elastic.core.protocol import messages as m
from elastic.domain.types import EvaluationResult, Figure, StepRecord
from tests.core.coordinator.test_divergence import running
from tests.core.coordinator.test_transitions import send_report

RESULT = EvaluationResult(9, 3, 0.25, 4, 1.5, (Figure("accuracy", 0.5),))


def logged(actions: object) -> list[dict[str, object]]:
    assert isinstance(actions, tuple)
    return [one.data for one in actions if isinstance(one, LogEntry) and one.kind == "evaluation"]


def stepped(state: JobState, evaluation: EvaluationResult | None) -> JobState:
    record = StepRecord(state.newest_step + 1, 1.0, 2.0, 1.0, evaluation=evaluation)
    done = m.StepDone(state.epoch, record, 0.1, 0.1)
    return transition(state, done, state.updated_at + 0.1)[0]


def test_the_newest_evaluation_is_known() -> None:
    state = stepped(running(), RESULT)
    assert state.evaluation == RESULT
    assert stepped(state, None).evaluation == RESULT
    newer = replace(RESULT, step=12)
    assert stepped(state, newer).evaluation == newer


def test_the_entry_has_its_numbers() -> None:
    (entry,) = evaluation_entries(RESULT)
    assert entry.data == {
        "epoch": 3, "step": 9, "loss": 0.25, "figures": {"accuracy": 0.5}, "microbatches": 4,
        "seconds": 1.5,
    }  # fmt: skip
    assert evaluation_entries(None) == ()


@pytest.mark.parametrize("evaluation", [replace(RESULT, step=400), None])
def test_the_last_report_has_the_evaluation_of_the_end(
    evaluation: EvaluationResult | None,
) -> None:
    done = m.Finished(400, "sha", evaluation)
    state, actions, _ = send_report(running(), "node0", finished=done)
    assert state.phase is JobPhase.FINISHED
    assert logged(actions) == [one.data for one in evaluation_entries(evaluation)]
    assert state.evaluation == evaluation


def test_a_step_that_is_not_finite_keeps_its_evaluation() -> None:
    """The job ends because of the step, and the evaluation before it may show why."""
    record = StepRecord(9, 1.0, float("nan"), 1.0, nonfinite=(0,), evaluation=RESULT)
    _, actions, _ = send_report(running(), "node0", failed=m.Failed("nan", 1, record=record))
    assert logged(actions) == [one.data for one in evaluation_entries(RESULT)]
