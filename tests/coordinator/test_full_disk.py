"""A disk that refuses costs lines of the records and a checkpoint, no decision."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.records import run_directory as rundir
from elastic.coordinator.records import run_records as records
from elastic.coordinator.records.checkpoint_commit import Commits
from elastic.coordinator.records.run_directory import announce, note_pid, read_told
from elastic.coordinator.records.run_records import PatientLog, Records
from elastic.core.job.state import JobState, Policy
from elastic.store import checkpoint_directory
from elastic.telemetry import read_events
from tests.disks import fill, small_disk
from tests.patience import LONG_S

STATE = JobState(policy=Policy())


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(records, "retry_s", lambda failures: 0.0)
    with small_disk(tmp_path / "disk", "1m"):
        yield tmp_path / "disk"


def told(folder: Path) -> list[tuple[str, Any]]:
    return [(event["kind"], event.get("n")) for event in read_events(folder / "events.jsonl")]


def test_events_wait_in_their_order_until_there_is_room(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    made = Records(disk)
    made.event("x", {"n": 0})
    filler = fill(disk)
    for number in range(1, 100):
        made.event("x", {"n": number, "text": "-" * 100})
    before = told(disk)
    assert before[0] == ("x", 0) and len(before) < 50, "the disk is full, and what there is stays readable"
    filler.unlink()
    made.beat((1, 0), STATE)
    assert told(disk) == [*(("x", number) for number in range(100)), ("records-late", None)]
    late = read_events(disk / "events.jsonl")[-1]
    assert late["dropped"] == 0 and late["refused_s"] >= 0
    words = [r.message for r in caplog.records if "events.jsonl" in r.message]
    assert len(words) == 2 and "No space left" in words[0] + "No space left", words
    assert "events wait" in words[0] and "is written again" in words[1]
    made.close()


def test_of_too_many_the_oldest_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = PatientLog(path, kept_bytes=1000)
    for number in range(100):
        log.append("x", {"n": number}, at=1.0)
    path.unlink()
    log.retry(at_once=True)
    *kept, late = read_events(path)
    assert [event["n"] for event in kept] == list(range(100 - len(kept), 100)) and 10 < len(kept) < 50
    assert (late["kind"], late["dropped"]) == ("records-late", 100 - len(kept))
    log.close()


def test_it_is_not_tried_at_every_event(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "retry_s", lambda failures: 1000.0)
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = PatientLog(path)
    log.append("x", {})
    path.unlink()
    log.append("x", {})
    assert not path.exists()
    log.close()
    log.close()
    assert [event["kind"] for event in read_events(path)] == ["x", "x", "records-late"]


def test_the_end_of_the_job_is_told_on_a_full_disk(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Room for the verdict was taken at the start; the summary does not fit, and that is all."""
    made = Records(disk)
    fill(disk)
    made.end(3, "it is over", "")
    assert json.loads((disk / "exit.json").read_text()) == {"code": 3, "reason": "it is over"}
    assert not (disk / "summary.json").exists() and not list(disk.glob("*.tmp"))
    assert "summary.json cannot be written" in caplog.text
    made.close()
    assert "lacks its last" in caplog.text


def test_who_leads_is_told_on_a_full_disk(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = [{"term": term, "pid": 1, "address": "h:1"} for term in range(3)]
    announce(disk, told[0])
    (disk / "coordinator-0.pid").write_text("1\n")
    fill(disk)
    announce(disk, told[1])
    assert read_told(disk / "coordinator.json") == told[1], "in the room of the old one"
    note_pid(disk, 0)
    assert (disk / "coordinator-0.pid").read_text() == f"{rundir.os.getpid()}\n"
    (disk / "coordinator.json").unlink()
    fill(disk)
    announce(disk, told[2])
    assert read_told(disk / "coordinator.json") == {} and "cannot be written" in caplog.text


@pytest.mark.parametrize("where", ["parts", "lock"])
def test_a_commit_that_the_disk_refuses_is_one_that_failed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """What a part's record is read from is no file; locks are not to be had."""
    (checkpoint_directory.staging_path(tmp_path, 4) / "layer-0000-tp-0.json").mkdir(parents=True)
    if where == "lock":
        monkeypatch.setattr("fcntl.flock", no_locks)
    done = threading.Event()
    commits = Commits(tmp_path, lambda future: done.set())
    with caplog.at_level(logging.ERROR):
        commits.begin(4, None)
        assert done.wait(LONG_S)
        (future,) = commits.left()
        assert commits.take(future) is None and commits.left() == ()
    assert "checkpoint of step 4 is not whole" in caplog.text
    commits.close()


def no_locks(descriptor: int, how: int) -> None:
    raise OSError(37, "No locks available")
