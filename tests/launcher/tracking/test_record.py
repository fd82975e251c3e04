"""From the lines of a record to what a tracker is told."""

from __future__ import annotations

from typing import Any

import pytest

from elastic.launcher.tracking.callback import (
    EvaluationMetrics,
    RunEvent,
    RunInfo,
    StepMetrics,
)
from elastic.launcher.tracking.record import Call, Record, StepSet
from tests.launcher.tracking.records import JOB, config, plan, recovery, step


def told(*events: dict[str, Any]) -> list[Call]:
    record = Record(config())
    return [call for event in events for call in record.observe(event)]


def steps(calls: list[Call]) -> list[int]:
    return [c.argument.step for c in calls if isinstance(c.argument, StepMetrics)]


def test_what_a_tracker_is_told_first() -> None:
    (call,) = told(JOB, JOB)  # a new coordinator writes it again
    info = call.argument
    assert call.method == "on_start" and isinstance(info, RunInfo)
    assert (info.name, info.steps) == ("mine", 8)
    assert info.settings["script"] == "-m train --lr 0.1"
    assert (info.settings["microbatches"], info.settings["accumulate"]) == (6, "exact")


def test_a_step_has_its_numbers() -> None:
    calls = told(JOB, plan(0, "a[0:2] b[2:4]"), step(0, at=14.0, seconds=1.0))
    metrics = calls[-1].argument
    assert isinstance(metrics, StepMetrics)
    assert metrics.scalars() == {
        "loss": 5.0, "grad_norm": 0.5, "clip": 1.0, "lr": 0.01, "step_s": 1.0, "nodes": 2.0,
        "goodput": pytest.approx(0.25), "tokens_per_s": 192.0,
    }  # fmt: skip
    assert (metrics.step, metrics.at, metrics.epoch) == (0, 14.0, 1)


def test_utilisation_needs_operations_and_peak() -> None:
    """6 micro-batches of 10^12 operations in 2 s, on devices that compute 12 x 10^12 per second."""
    job, known = {**JOB, "flops_per_microbatch": 1e12}, {**plan(0), "peak_tflops": 12.0}

    def found(*events: dict[str, Any]) -> dict[str, float]:
        metrics = told(*events, step(0, seconds=2.0))[-1].argument
        assert isinstance(metrics, StepMetrics)
        return metrics.scalars()

    assert found(job, known)["mfu"] == pytest.approx(0.25)
    assert found(job, known, {**plan(0), "peak_tflops": 6.0})["mfu"] == pytest.approx(0.5)
    assert all("mfu" not in found(*events) for events in ((JOB, known), (job, plan(0))))


def test_a_model_without_tokens_has_no_rate() -> None:
    (_, call) = told(JOB, step(0, tokens=0))
    assert isinstance(call.argument, StepMetrics)
    assert "tokens_per_s" not in call.argument.scalars()


def test_a_repeated_step_comes_once_and_counts_once() -> None:
    """After a fall-back to the checkpoint of step 1, steps 1 and 2 run again."""
    first = [step(i, at=11.0 + i) for i in range(3)]
    again = [step(i, at=21.0 + i, epoch=2) for i in range(1, 4)]
    calls = told(JOB, plan(0), *first, plan(1, epoch=2), recovery(1), *again)
    assert steps(calls) == [0, 1, 2, 3]
    last = calls[-1].argument
    assert isinstance(last, StepMetrics) and last.goodput == pytest.approx(4 / 14)
    (found,) = [c.argument for c in calls if c.method == "on_recovery"]
    assert isinstance(found, RunEvent) and (found.step, found.fields["cause"]) == (1, "node1 lost")


def test_a_step_that_is_reported_late_comes_too() -> None:
    calls = told(JOB, plan(0), *(step(i) for i in (0, 2, 1, 2, 3)))
    assert steps(calls) == [0, 2, 1, 3]


def test_a_resumed_run_begins_with_its_first_step() -> None:
    record = Record(config())
    events = (JOB, plan(5), step(5), step(6))
    calls = [call for event in events for call in record.observe(event)]
    assert steps(calls) == [5, 6] and record.next_step == 7


def test_each_evaluation_comes_once() -> None:
    """After a fall-back to the checkpoint of step 1, the evaluation after step 2 comes again."""
    one = {
        "at": 13.0, "kind": "evaluation", "epoch": 1, "step": 2, "loss": 4.0,
        "figures": {"accuracy": 0.5}, "microbatches": 8, "seconds": 1.5,
    }  # fmt: skip
    first = (step(0), step(1), one, step(2))
    calls = told(JOB, plan(0), *first, plan(1, epoch=2), step(1), {**one, "epoch": 2})
    (call,) = [call for call in calls if call.method == "on_evaluation"]
    found = call.argument
    assert isinstance(found, EvaluationMetrics) and (found.step, found.at) == (2, 13.0)
    assert found.scalars() == {
        "evaluation/loss": 4.0,
        "evaluation/accuracy": 0.5,
        "evaluation/seconds": 1.5,
    }


def test_plans_checkpoints_and_the_end() -> None:
    done = {"at": 20.0, "kind": "end", "code": 0, "reason": "all 8 steps done"}
    kept = {"at": 19.0, "kind": "checkpoint", "step": 1, "path": "/c/step-1"}
    other = {"at": 19.0, "kind": "decision", "phase": "running"}
    calls = told(JOB, plan(0), step(0), kept, other, done)
    methods = [call.method for call in calls]
    assert methods == ["on_start", "on_plan", "on_step", "on_checkpoint", "on_end"]
    end = calls[-1].argument
    assert isinstance(end, RunEvent) and dict(end.fields) == {"code": 0, "reason": done["reason"]}


@pytest.mark.parametrize("line", [{}, {"kind": "step", "at": 1.0}, {"kind": "job", "at": "x"}, []])
def test_a_line_without_its_fields_is_an_error(line: Any) -> None:
    with pytest.raises((KeyError, TypeError, ValueError)):
        told(line)


def test_a_set_of_steps_stays_small() -> None:
    found = StepSet()
    assert all(found.add(i) for i in (0, 1, 4, 3))
    assert not any(found.add(i) for i in (0, 1, 3, 4))
    assert found.below == 2 and found.add(2) and found.below == 5


def test_a_record_without_the_job_begins_with_its_plan() -> None:
    """That of a coordinator that took over on another machine."""
    calls = told(plan(3), step(3), JOB, step(4))
    assert [call.method for call in calls] == ["on_start", "on_plan", "on_step", "on_step"]
    info = calls[0].argument
    assert isinstance(info, RunInfo) and info.steps == 0 and steps(calls) == [3, 4]
