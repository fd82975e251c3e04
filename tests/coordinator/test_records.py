"""Records that the simulator replays: the job, and the times of injected faults."""

from __future__ import annotations

import os
from pathlib import Path

from elastic.coordinator.records.run_records import RunRecords
from elastic.domain.types import JobSpec, LayerSpec
from elastic.telemetry import read_events

SPEC = JobSpec(
    (LayerSpec(4, 8, 4, 1.0, 2.0),) * 3,
    n_microbatches=8,
    n_steps=5,
    tokens_per_microbatch=16,
    tied=((0, 2),),
)


def test_the_job_is_recorded(tmp_path: Path) -> None:
    RunRecords(tmp_path).job(SPEC)
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
    first, second, last = read_events(tmp_path / "events.jsonl")
    assert [(e["kind"], e["number"], e["at"]) for e in (first, second)] == [
        ("fault", 2, 70.0),
        ("fault", 10, 50.0),
    ]
    assert last["kind"] == "end"
