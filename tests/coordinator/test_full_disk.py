"""A full disk loses lines of the records, or a checkpoint, but no decision."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.config import JobConfig, WorkerCommand
from elastic.coordinator.records import run_records as records
from elastic.coordinator.records.checkpoint_commit import CheckpointCommits
from elastic.coordinator.records.run_directory import announce, initial_state, read_json, write_pid
from elastic.coordinator.records.run_records import RetryingEventLog, RunRecords
from elastic.core.job.state import (
    CheckpointCommitted,
    CheckpointFailed,
    DropCheckpoint,
    JobPhase,
    JobState,
    LogEntry,
    Policy,
)
from elastic.domain.errors import FieldError
from elastic.store import checkpoint_directory
from elastic.telemetry import read_events
from tests.disks import fill, small_disk
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S

STATE = JobState(policy=Policy())


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(records, "retry_s", lambda failures: 0.0)
    with small_disk(tmp_path / "disk", "1m"):
        yield tmp_path / "disk"


def at_once(function: Callable[[], object]) -> None:
    function()


def logged(folder: Path) -> list[tuple[str, Any]]:
    return [(event["kind"], event.get("n")) for event in read_events(folder / "events.jsonl")]


def test_events_wait_in_their_order_until_there_is_room(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = RunRecords(disk)
    made.event("x", {"n": 0})
    assert made.flush(LONG_S)
    filler = fill(disk)
    for number in range(1, 100):
        made.event("x", {"n": number, "text": "-" * 100})
    assert made.flush(LONG_S)
    before = logged(disk)
    assert before[0] == ("x", 0) and len(before) < 50, (
        "the disk is full; the written events stay readable"
    )
    filler.unlink()
    made.heartbeat((1, 0), STATE)
    assert made.flush(LONG_S)
    assert logged(disk) == [*(("x", number) for number in range(100)), ("records-late", None)]
    late = read_events(disk / "events.jsonl")[-1]
    assert late["dropped"] == 0 and late["refused_s"] >= 0
    words = [r.message for r in caplog.records if "events.jsonl" in r.message]
    assert len(words) == 2 and "No space left" in words[0] + "No space left", words
    assert "events wait" in words[0] and "is written again" in words[1]
    made.close()


@pytest.fixture
def hung(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[RunRecords, int]]:
    """Records with 1000 events on a disk that hangs, and the end of a pipe that makes it go on.

    A pipe in the place of events.jsonl takes 64 KiB, until somebody reads it.
    """
    monkeypatch.setattr(records, "CLOSE_S", 0.01)
    path = tmp_path / "events.jsonl"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    made = RunRecords(tmp_path)
    for number in range(1000):
        made.event("x", {"n": number, "text": "-" * 200})
    assert not made.flush(0.01), "the disk hangs"
    path.unlink()
    path.touch()  # the summary reads it
    os.set_blocking(reader, True)
    yield made, reader
    made.close()
    os.close(reader)


def test_nobody_waits_for_a_disk_that_hangs(hung: tuple[RunRecords, int], tmp_path: Path) -> None:
    made, reader = hung
    made.end(3, "it is over", "")
    assert not made.ended.wait(0.01) and not (tmp_path / "exit.json").exists()
    text = b""
    while b'"kind":"end"' not in text:
        text += os.read(reader, 1 << 20)
    assert made.ended.wait(LONG_S) and (tmp_path / "exit.json").exists()
    numbers = [json.loads(line).get("n") for line in text.splitlines()]
    assert numbers == [*range(1000), None]


def test_a_coordinator_that_has_ended_writes_nothing_when_the_disk_answers(
    hung: tuple[RunRecords, int], tmp_path: Path
) -> None:
    """Another coordinator may write to the same files by then."""
    made, reader = hung
    made.announce({"term": 1, "pid": 1, "address": "h:1"})
    made.end(3, "it is over", "")
    made.close()
    while b'"n":999' not in (text := os.read(reader, 1 << 20)) and text:
        pass  # until the thread has closed its end of the pipe
    assert not text, "the line whose call hung may come late, the others do not"
    made._disk._thread.join(LONG_S)
    assert not made._disk._thread.is_alive()
    assert not (tmp_path / "exit.json").exists() and not (tmp_path / "coordinator.json").exists()
    made.close()


def test_a_former_leader_does_not_replace_its_successor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk hangs while it writes its draft."""
    write, newer = Path.write_text, {"term": 2, "pid": 2, "address": "h:2"}

    def slow(path: Path, text: str) -> int:
        monkeypatch.setattr(Path, "write_text", write)
        announce(tmp_path, newer)
        return write(path, text)

    monkeypatch.setattr(Path, "write_text", slow)
    announce(tmp_path, {"term": 1, "pid": 1, "address": "h:1"})
    assert read_json(tmp_path / "coordinator.json") == newer
    assert not list(tmp_path.glob("*.tmp"))


def test_the_oldest_events_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = RetryingEventLog(path, at_once, kept_bytes=1000)
    for number in range(100):
        log.append("x", {"n": number}, at=1.0)
    path.unlink()
    log.write()
    *kept, late = read_events(path)
    assert [event["n"] for event in kept] == list(range(100 - len(kept), 100)) and 10 < len(
        kept
    ) < 50
    assert (late["kind"], late["dropped"]) == ("records-late", 100 - len(kept))
    log.close()


def test_a_failing_file_is_not_retried_at_each_event(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(records, "retry_s", lambda failures: 1000.0)
    path = tmp_path / "events.jsonl"
    path.symlink_to("/dev/full")
    log = RetryingEventLog(path, at_once)
    log.append("x", {})
    path.unlink()
    log.append("x", {})
    assert not path.exists()
    log.close()
    log.close()
    assert [event["kind"] for event in read_events(path)] == ["x", "x", "records-late"]


def test_exit_json_is_written_on_a_full_disk(
    disk: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """exit.json uses the reserved space; only the summary is missing."""
    monkeypatch.setattr(records, "ROOM_S", 0.2)
    monkeypatch.setattr(records, "ROOM_POLL_S", 0.05)
    made = RunRecords(disk)
    assert made.flush(LONG_S)
    fill(disk)
    made.end(3, "it is over", "")
    assert made.ended.wait(LONG_S)
    assert json.loads((disk / "exit.json").read_text()) == {"code": 3, "reason": "it is over"}
    assert not (disk / "summary.json").exists() and not list(disk.glob("*.tmp"))
    assert "summary.json cannot be written" in caplog.text
    made.close()
    assert "lacks its last" in caplog.text


def test_the_end_waits_for_room(disk: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A disk that has room again soon has the last events and the summary before exit.json."""
    made = RunRecords(disk)
    assert made.flush(LONG_S)
    filler = fill(disk)
    made.end(0, "all steps done", "")
    assert wait_until(lambda: "the end waits" in caplog.text)
    assert not made.ended.is_set() and not (disk / "exit.json").exists()
    filler.unlink()
    assert made.ended.wait(LONG_S)
    assert (disk / "exit.json").exists()
    assert json.loads((disk / "summary.json").read_text())["exit_code"] == 0
    assert logged(disk)[-1][0] in ("end", "records-late")
    made.close()


def test_a_coordinator_that_ends_does_not_wait_for_room(disk: Path) -> None:
    made = RunRecords(disk)
    assert made.flush(LONG_S)
    fill(disk)
    made.end(0, "all steps done", "")
    made.close()
    assert made.ended.wait(LONG_S) and not (disk / "summary.json").exists()


def test_the_leader_is_announced_on_a_full_disk(
    disk: Path, caplog: pytest.LogCaptureFixture
) -> None:
    leaders = [{"term": term, "pid": 1, "address": "h:1"} for term in range(3)]
    announce(disk, leaders[0])
    (disk / "coordinator-0.pid").write_text("1\n")
    fill(disk)
    announce(disk, leaders[1])
    assert read_json(disk / "coordinator.json") == leaders[1], "it overwrites the old content"
    write_pid(disk, 0)
    assert (disk / "coordinator-0.pid").read_text() == f"{os.getpid()}\n"
    (disk / "coordinator.json").unlink()
    fill(disk)
    announce(disk, leaders[2])
    assert read_json(disk / "coordinator.json") == {} and "cannot be written" in caplog.text


@pytest.mark.parametrize("where", ["parts", "lock"])
def test_a_commit_fails_if_the_disk_fails(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """The record of a part cannot be read, or the file system supports no locks."""
    (checkpoint_directory.staging_path(tmp_path, 4) / "layer-0000-tp-0.json").mkdir(parents=True)
    if where == "lock":
        monkeypatch.setattr("fcntl.flock", no_locks)
    monkeypatch.setattr(checkpoint_directory, "RETRY_S", (0.001,))
    done = threading.Event()
    commits = CheckpointCommits(tmp_path, lambda future: done.set())
    with caplog.at_level(logging.ERROR):
        commits.begin(4, None)
        assert done.wait(LONG_S)
        (future,) = commits.pending()
        failed = commits.take(future)
        assert isinstance(failed, CheckpointFailed) and failed.step == 4 and failed.error
        assert commits.pending() == ()
    assert "checkpoint of step 4 is incomplete" in caplog.text
    commits.close()


def no_locks(descriptor: int, how: int) -> None:
    raise OSError(37, "No locks available")


def test_a_stopped_coordinator_does_not_block_the_commits_of_the_next(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped inside a commit. The next one says that it waits, and why it gives up."""
    monkeypatch.setattr(checkpoint_directory, "RETRY_S", (0.001,))
    monkeypatch.setattr(checkpoint_directory, "PATIENT_RETRY_S", 0.001)
    monkeypatch.setattr(checkpoint_directory, "LOCK_S", 0.001)
    done, late = threading.Event(), list[LogEntry]()
    stopped = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(stopped, fcntl.LOCK_EX)
    commits = CheckpointCommits(tmp_path, lambda future: done.set(), late.append)
    with caplog.at_level(logging.ERROR):
        commits.drop(DropCheckpoint(4, before=2, committed=True))
        commits.begin(4, None, patience_s=0.005)
        assert done.wait(LONG_S)
    os.close(stopped)
    (future,) = commits.pending()
    failed = commits.take(future)
    assert isinstance(failed, CheckpointFailed) and "holds the lock" in failed.error
    (entry,) = late
    assert "holds the lock" in entry.data["why"]
    assert "files of step 4 cannot be removed" in caplog.text
    commits.close()


def test_a_run_does_not_begin_while_another_process_holds_the_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint_directory, "RETRY_S", (0.001,))
    monkeypatch.setattr(checkpoint_directory, "PATIENT_RETRY_S", 10.0)
    monkeypatch.setattr(checkpoint_directory, "LOCK_S", 0.001)
    config = JobConfig(
        job_id="j",
        run_dir=str(tmp_path / "run"),
        memory_dir=str(tmp_path / "memory"),
        checkpoint_dir=str(tmp_path),
        command=WorkerCommand(script="x"),
    )
    stopped, pauses = os.open(tmp_path, os.O_RDONLY), list[float]()
    fcntl.flock(stopped, fcntl.LOCK_EX)
    with pytest.raises(FieldError, match="holds the lock"):
        initial_state(config, "j.1", pauses.append)
    assert len(pauses) > 1, "it tries several times"
    os.close(stopped)
    assert initial_state(config, "j.1", pauses.append)[0].phase is JobPhase.WAITING


def test_a_commit_is_repeated_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told of once, and the checkpoint is complete when there is room."""
    monkeypatch.setattr(checkpoint_directory, "RETRY_S", (0.001,))
    monkeypatch.setattr(checkpoint_directory, "PATIENT_RETRY_S", 0.001)
    room, done, late = threading.Event(), threading.Event(), list[LogEntry]()

    def commit(directory: Path, *_: Any) -> Path:
        if not room.is_set():
            raise OSError(28, "No space left on device")
        return directory

    def told(entry: LogEntry) -> None:
        late.append(entry)
        room.set()

    monkeypatch.setattr(checkpoint_directory, "commit", commit)
    commits = CheckpointCommits(tmp_path, lambda future: done.set(), told)
    commits.begin(4, None, patience_s=10.0)
    assert done.wait(LONG_S)
    (future,) = commits.pending()
    assert commits.take(future) == CheckpointCommitted(str(tmp_path), 4)
    (entry,) = late
    assert entry.kind == "checkpoint-late" and entry.data["step"] == 4
    assert "No space left on device" in entry.data["why"]
    commits.close()
