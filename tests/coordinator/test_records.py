"""Records of a run: the job, the times of injected faults, and the checks of its steps."""

from __future__ import annotations

import math
import os
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.records.run_records import RunRecords
from elastic.coordinator.records.run_summary import job_entry, summarize
from elastic.core.job.goodput import evaluation_entries, nonfinite_entries, step_entry
from elastic.core.job.state import JobState, Policy
from elastic.core.protocol.messages import StepDone
from elastic.domain.types import EvaluationResult, JobSpec, LayerSpec, StepRecord
from elastic.telemetry import event_line, read_events
from tests.patience import LONG_S

SPEC = JobSpec(
    (LayerSpec(4, 8, 4, 1.0, 2.0),) * 3,
    n_microbatches=8,
    n_steps=5,
    tokens_per_microbatch=16,
    tied=((0, 2),),
)


def test_the_job_is_recorded(tmp_path: Path) -> None:
    records = RunRecords(tmp_path)
    records.event("job", job_entry(SPEC))
    records.close()
    (event,) = read_events(tmp_path / "events.jsonl")
    assert event["kind"] == "job" and (event["steps"], event["microbatches"]) == (5, 8)
    assert event["tied"] == [[0, 2]] and event["tokens_per_microbatch"] == 16


def test_faults_are_recorded_at_the_end_with_their_times(tmp_path: Path) -> None:
    (tmp_path / "faults").mkdir()
    for number, at in ((10, 50.0), (2, 70.0)):
        fired = tmp_path / "faults" / f"{number}.fired"
        fired.touch()
        os.utime(fired, (at, at))
    records = RunRecords(tmp_path)
    records.end(0, "all 0 steps done", "")
    assert records.ended.wait(LONG_S)
    first, second, last = read_events(tmp_path / "events.jsonl")
    assert [(e["kind"], e["number"], e["at"]) for e in (first, second)] == [
        ("fault", 2, 70.0),
        ("fault", 10, 50.0),
    ]
    assert last["kind"] == "end"


def test_records_are_late_while_the_disk_hangs(tmp_path: Path) -> None:
    records, hangs = RunRecords(tmp_path), threading.Event()
    assert records.flush(LONG_S)
    records._disk.post(lambda: hangs.wait(LONG_S))
    records.event("one", {})
    first_s = records.late_s
    records.event("two", {})
    assert records.unwritten == 2 and 0 < first_s < records.late_s
    hangs.set()
    assert records.flush(LONG_S)
    assert (records.unwritten, records.late_s, records.dropped) == (0, 0.0, 0)
    records.close()


def test_the_end_has_the_time_of_its_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs, and takes the event later."""
    records, hangs = RunRecords(tmp_path), threading.Event()
    records._disk.post(lambda: hangs.wait(LONG_S))
    monkeypatch.setattr(time, "time", lambda: 50.0)
    records.end(0, "all 0 steps done", "")
    monkeypatch.setattr(time, "time", lambda: 80.0)
    hangs.set()
    assert records.ended.wait(LONG_S)
    (event,) = read_events(tmp_path / "events.jsonl")
    assert (event["kind"], event["at"]) == ("end", 50.0)


def step(number: int, ledgers: int = 3, norm: float = 1.0, **more: Any) -> list[dict[str, Any]]:
    """The events of a finished step."""
    record = StepRecord(number, 1.0, norm, 2.0, ledgers, () if norm == 1.0 else (1,), **more)
    entries = nonfinite_entries(record)
    return [
        {"kind": "step", **step_entry(StepDone(1, record, 0.5, 0.1))},
        *({"kind": entry.kind, **entry.data} for entry in entries),
    ]


JOB = {"kind": "job", "ledgers": 3}


def timed(number: int, seconds: float) -> list[dict[str, Any]]:
    """The events of a step that took `seconds`."""
    return [one | {"seconds": seconds} for one in step(number)]


def test_only_steps_with_all_ledgers_are_proved() -> None:
    """A step of an older worker, without the number, is not; nor is one that lacks a layer."""
    events = [JOB, *step(0), *step(1, ledgers=2), *step(2, ledgers=0), *step(3)]
    assert summarize(events)["ledger"] == {"double": 0, "missing": 0, "proved": 2}
    assert summarize(events[1:])["ledger"]["proved"] == 0


def test_the_utilisation_is_that_of_all_steps() -> None:
    job = {**JOB, "flops_per_microbatch": 1e12, "microbatches": 6}
    plan = {"kind": "plan", "text": "", "backup": {}, "peak_tflops": 12.0}
    events = [job, plan, *timed(0, 1.0), {**plan, "peak_tflops": 6.0}, *timed(1, 3.0)]
    assert summarize(events)["mfu"] == pytest.approx(12 / (12 + 18))
    assert summarize([*events, {**plan, "peak_tflops": 0.0}, *step(2)])["mfu"] == 0
    assert summarize(events[1:])["mfu"] == summarize([])["mfu"] == 0


def test_a_wrong_ledger_is_in_the_summary() -> None:
    events = [JOB, *step(0), {"kind": "ledger", "double": 1, "missing": 2}]
    assert summarize(events)["ledger"] == {"double": 1, "missing": 2, "proved": 1}


@pytest.mark.parametrize("norm", [math.nan, math.inf])
def test_steps_that_are_not_finite_are_in_the_summary_once(norm: float) -> None:
    again = step(2, norm=norm, skipped=True)
    events = [JOB, *step(0), *step(1, norm=norm), *again, *again]
    found = summarize(events)["nonfinite"]
    assert [(one["step"], one["action"], one["layers"]) for one in found] == [
        (1, "continue", [1]),
        (2, "skip", [1]),
    ]
    back = {"kind": "lost-steps", "from_step": 2}
    assert [one["step"] for one in summarize([*events, back])["nonfinite"]] == [1]


def test_an_event_that_two_coordinators_wrote_counts_once() -> None:
    """The first one was paused between a save and its records, and went on after the next steps."""
    back = {"kind": "lost-steps", "at": 5.0, "from_step": 1}
    checkpoints = [{"kind": "checkpoint", "at": at, "step": 1} for at in (2.0, 2.0, 9.0)]
    events = [JOB, *step(0), *step(1), *checkpoints, back, *step(1), *step(2), back]
    found = summarize(events)
    assert found["steps"] == 3 and found["checkpoints"] == [1, 1]


@pytest.mark.parametrize("written", [0, 1, 2])
def test_events_that_the_former_coordinator_has_not_written_come_first(
    tmp_path: Path, written: int
) -> None:
    """The last line that it wrote may be torn."""
    lines = [event_line("lost", {"node": node}, 1.0) for node in "ab"]
    older = event_line("lost", {"node": "a"}, 0.5)
    log = tmp_path / "events.jsonl"
    log.write_bytes(b"".join([older, *lines[:written], lines[0][:9]]))
    records = RunRecords(tmp_path, former=[line.decode() for line in lines])
    records.event("coordinator", {})
    records.close()
    *found, last = log.read_bytes().splitlines(keepends=True)
    assert found == [older, *lines] and b"coordinator" in last


def test_divergences_are_in_the_summary() -> None:
    entry = {"kind": "divergence", "at": 1.0, "step": 3, "reason": "because"}
    assert summarize([JOB, entry])["divergences"] == [{"step": 3, "reason": "because"}]


def test_a_step_is_recorded_once_although_two_workers_report_it(tmp_path: Path) -> None:
    """A step that is repeated in a later epoch is recorded again."""
    records, state = RunRecords(tmp_path), JobState(policy=Policy())
    for epoch, number in ((1, 0), (1, 0), (1, 1), (1, 0), (2, 1)):
        records.step(StepDone(epoch, StepRecord(number, 1.0, 1.0, 2.0), 0.5, 0.1), state)
    records.close()
    steps = [e["step"] for e in read_events(tmp_path / "events.jsonl") if e["kind"] == "step"]
    assert steps == [0, 1, 1]


def test_steps_that_a_former_coordinator_has_recorded_are_not_recorded_again(
    tmp_path: Path,
) -> None:
    """Nodes report their newest steps again to each coordinator, in windows that differ."""
    state = JobState(policy=Policy())
    done = [StepDone(1, StepRecord(n, 1.0, 1.0, 2.0), 0.5, 0.1) for n in range(9000)]
    for windows in ((range(9000),), (range(4096), range(4000, 8096), range(4096), range(9000))):
        records = RunRecords(tmp_path)
        records.event("coordinator", {})
        for number in (n for window in windows for n in window if windows[1:] or n % 2 == 0):
            records.step(done[number], state)
        records.close()
    events = read_events(tmp_path / "events.jsonl")
    steps = [event["step"] for event in events if event["kind"] == "step"]
    assert steps == [*range(0, 9000, 2), *range(1, 9000, 2)]


def test_evaluations_are_recorded_once(tmp_path: Path) -> None:
    """By one coordinator, by the next, and if the former one has written the evaluation alone."""
    found = EvaluationResult(1, 1, 0.5, 4, 0.1)
    done = StepDone(1, StepRecord(1, 1.0, 1.0, 2.0, evaluation=found), 0.5, 0.1)
    again = replace(done, epoch=2)  # a node that was cut off reports the step of its epoch
    records, state = RunRecords(tmp_path), JobState(policy=Policy())
    records.event("coordinator", {})
    records.event("evaluation", evaluation_entries(found)[0].data)
    records.close()
    for _ in range(2):
        records = RunRecords(tmp_path)
        for report in (done, done, again):
            records.step(report, state)
        records.close()
    kinds = [event["kind"] for event in read_events(tmp_path / "events.jsonl")]
    assert kinds == ["coordinator", "evaluation", "step", "step"]


def test_old_steps_are_no_progress(tmp_path: Path) -> None:
    """Nodes report them again to a new coordinator, which knows the newest one."""
    records = RunRecords(tmp_path)
    for number in (3, 4, 5, 6):
        done = StepDone(1, StepRecord(number, 1.0, 1.0, 2.0), 0.5, 0.1)
        records.step(done, JobState(policy=Policy()).of(logged_step=4))
    records.close()
    events = read_events(tmp_path / "progress.jsonl")
    assert [event["step"] for event in events] == [6, 7]
