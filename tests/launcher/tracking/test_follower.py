"""A tracker follows a growing record, goes on where it ended, and repeats what may succeed."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from elastic.domain.errors import ElasticError, FieldError
from elastic.launcher.run.rundir import locked
from elastic.launcher.tracking import follower
from elastic.launcher.tracking.callback import Callback, RunEvent, RunInfo, StepMetrics
from elastic.launcher.tracking.follower import Tracker
from elastic.launcher.tracking.targets import Target
from tests.launcher.helpers import wait_until
from tests.launcher.tracking.records import END, JOB, config, plan, recovery, step, write

TARGET = Target("callback", "mine:Notes")


class Notes(Callback):
    """Notes its calls; raises `errors` in turn, once each, before it notes a step."""

    def __init__(self, *errors: Exception) -> None:
        self.calls: list[str] = []
        self.errors = list(errors)

    def on_start(self, run: RunInfo, key: str) -> str:
        self.calls.append(f"start {key or 'first'}")
        return key or "k1"

    def on_step(self, step: StepMetrics) -> None:
        if self.errors:
            raise self.errors.pop(0)
        self.calls.append(f"step {step.step}")

    def on_recovery(self, recovery: RunEvent) -> None:
        self.calls.append(f"recovery at {recovery.step}")

    def on_end(self, end: RunEvent) -> None:
        self.calls.append(f"end {end.fields['code']}")

    def close(self) -> None:
        self.calls.append("close")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("POLL_S", "PAUSE_S", "MAX_PAUSE_S", "TOLD_S"):
        monkeypatch.setattr(follower, name, 0.01)


def tracker(
    run_dir: Path, notes: Callback, said: list[str] | None = None, *, once: bool = False
) -> Tracker:
    say = (said if said is not None else []).append
    return Tracker(config(str(run_dir)), run_dir, TARGET, notes, say, once=once)


def once(run_dir: Path, notes: Callback, said: list[str] | None = None) -> int:
    """Run a tracker over what the record has now."""
    return tracker(run_dir, notes, said, once=True).run()


def test_it_follows_a_record_that_grows(tmp_path: Path) -> None:
    notes, codes = Notes(), []
    hold(tmp_path)
    made = tracker(tmp_path, notes)  # before there is a record
    thread = threading.Thread(target=lambda: codes.append(made.run()))
    thread.start()
    write(tmp_path, JOB, plan(0), step(0))
    assert wait_until(lambda: "step 0" in notes.calls)
    line = json.dumps(step(1)) + "\n"
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(line[:30])
        file.flush()
        assert notes.calls[-1] == "step 0"
        file.write(line[30:])
    assert wait_until(lambda: "step 1" in notes.calls)
    write(tmp_path, recovery(2), END)
    thread.join()
    assert codes == [0]
    assert notes.calls == ["start first", "step 0", "step 1", "recovery at 2", "end 0", "close"]


def test_a_later_start_goes_on_with_the_same_key(tmp_path: Path) -> None:
    write(tmp_path, JOB, plan(0), step(0), step(1))
    first, second, third = Notes(), Notes(), Notes()
    assert once(tmp_path, first) == 0
    assert first.calls == ["start first", "step 0", "step 1", "close"]
    write(tmp_path, step(1, epoch=2), step(2))
    assert once(tmp_path, second) == 0
    assert second.calls == ["start k1", "step 2", "close"]
    write(tmp_path, END)
    assert once(tmp_path, third) == 0 and third.calls == ["start k1", "end 0", "close"]


def test_a_damaged_position_means_all_again(tmp_path: Path) -> None:
    write(tmp_path, JOB, step(0))
    once(tmp_path, Notes())
    (place,) = (tmp_path / "tracking").glob("*.json")
    place.write_text('{"offset": "x"')
    again = Notes()
    once(tmp_path, again)
    assert again.calls == ["start first", "step 0", "close"]


def test_a_call_is_repeated_while_the_network_is_away(tmp_path: Path) -> None:
    write(tmp_path, JOB, step(0), step(1), END)
    notes, said = Notes(OSError("no route"), ConnectionError("reset")), list[str]()
    assert tracker(tmp_path, notes, said).run() == 0
    assert notes.calls == ["start first", "step 0", "step 1", "end 0", "close"]
    assert [text.partition(";")[0].rpartition(": ")[2] for text in said[:2]] == [
        "no route",
        "reset",
    ]


def test_an_interrupted_tracker_does_not_repeat_for_ever(tmp_path: Path) -> None:
    class Away(Notes):
        def on_step(self, step: StepMetrics) -> None:
            made.stop.set()
            raise OSError("no route")

    write(tmp_path, JOB, step(0))
    made = tracker(tmp_path, Away())
    with pytest.raises(ElasticError, match=r"callback:mine:Notes: .*no route"):
        made.run()


def test_an_error_of_the_callback_skips_one_call(tmp_path: Path) -> None:
    write(tmp_path, JOB, step(0), step(1), step(2), END)
    notes, said = Notes(ValueError("a bug"), ValueError("a bug")), list[str]()
    assert tracker(tmp_path, notes, said).run() == 0
    assert notes.calls == ["start first", "step 2", "end 0", "close"]
    assert said[0] == "callback:mine:Notes: on_step failed: ValueError: a bug"


def test_three_errors_in_a_row_end_the_tracker(tmp_path: Path) -> None:
    write(tmp_path, JOB, *map(step, range(4)), END)
    notes = Notes(*(ValueError("a bug") for _ in range(3)))
    with pytest.raises(ElasticError, match="on_step failed: ValueError: a bug; the tracker ends"):
        tracker(tmp_path, notes).run()
    assert notes.calls == ["start first", "close"]


def test_a_tracker_that_cannot_begin_ends(tmp_path: Path) -> None:
    class Refused(Notes):
        def on_start(self, run: RunInfo, key: str) -> str:
            raise PermissionError("no key") if key else ValueError("no API key")

    write(tmp_path, JOB, step(0))
    said: list[str] = []
    with pytest.raises(ElasticError, match="callback:mine:Notes cannot begin"):
        tracker(tmp_path, Refused(), said).run()
    assert said == ["callback:mine:Notes: on_start failed: ValueError: no API key"]


def test_a_run_that_was_killed_has_an_end(tmp_path: Path) -> None:
    """The coordinator wrote none: the launcher's file tells."""
    write(tmp_path, JOB, step(0))
    (tmp_path / "launcher-exit.json").write_text('{"code": 143, "reason": "ended by SIGTERM"}')
    notes = Notes()
    assert tracker(tmp_path, notes).run() == 0
    assert notes.calls == ["start first", "step 0", "end 143", "close"]


def test_a_run_without_training_is_not_begun(tmp_path: Path) -> None:
    write(tmp_path, END)
    notes = Notes()
    assert tracker(tmp_path, notes).run() == 0 and notes.calls == ["close"]


def test_a_line_that_cannot_be_read_is_told_once(tmp_path: Path) -> None:
    bad: dict[str, Any] = {"kind": "step"}
    write(tmp_path, JOB, bad, bad, step(0), END)
    notes, said = Notes(), list[str]()
    assert tracker(tmp_path, notes, said).run() == 0
    assert notes.calls == ["start first", "step 0", "end 0", "close"]
    assert len([text for text in said if "cannot be read" in text]) == 1


def test_three_errors_end_it_also_if_each_comes_alone(tmp_path: Path) -> None:
    write(tmp_path, JOB)
    notes = Notes(*(ValueError("a bug") for _ in range(3)))
    made, ended = tracker(tmp_path, notes), list[str]()

    def follow() -> None:
        with pytest.raises(ElasticError, match="the tracker ends after three failures"):
            made.run()
        ended.append("yes")

    hold(tmp_path)
    thread = threading.Thread(target=follow)
    thread.start()
    for number in range(3):
        write(tmp_path, step(number))
        assert wait_until(lambda left=2 - number: len(notes.errors) == left)  # type: ignore[misc]
    thread.join()
    assert ended


def hold(run_dir: Path) -> None:
    """Let the run have a living launcher: this process, until it ends."""
    lock = locked(run_dir / "launcher.lock")
    assert lock is not None
    os.write(lock, str(os.getpid()).encode())


def test_a_run_without_a_launcher_is_over(tmp_path: Path) -> None:
    """The launcher was killed, and nobody wrote an end."""
    write(tmp_path, JOB, step(0))
    notes, said = Notes(), list[str]()
    assert tracker(tmp_path, notes, said).run() == 0
    assert notes.calls == ["start first", "step 0", "close"]
    assert "does not run any more" in said[-1]


def test_a_directory_that_another_run_uses_is_left(tmp_path: Path) -> None:
    write(tmp_path, JOB, step(0))
    hold(tmp_path)
    made, notes = tracker(tmp_path, seen := Notes()), list[str]()

    def follow() -> None:
        with pytest.raises(ElasticError, match="the run directory is used by another run now"):
            made.run()
        notes.append("left")

    thread = threading.Thread(target=follow)
    thread.start()
    assert wait_until(lambda: "step 0" in seen.calls)
    (tmp_path / "attempt-1").mkdir()
    for name in ("events.jsonl", "tracking"):
        (tmp_path / name).rename(tmp_path / "attempt-1" / name)
    write(tmp_path, JOB, step(0), step(1))
    thread.join()
    assert notes == ["left"] and seen.calls == ["start first", "step 0", "close"]
    assert not (tmp_path / "tracking").exists()


def test_the_end_is_told_once(tmp_path: Path) -> None:
    write(tmp_path, JOB, step(0), END)
    (tmp_path / "exit.json").write_text('{"code": 0, "reason": "done"}')
    first, second = Notes(), Notes()
    assert tracker(tmp_path, first).run() == tracker(tmp_path, second).run() == 0
    assert first.calls[-2:] == ["end 0", "close"] and second.calls == ["start k1", "close"]


def test_the_end_of_a_killed_run_is_told_once(tmp_path: Path) -> None:
    write(tmp_path, JOB, step(0))
    (tmp_path / "launcher-exit.json").write_text('{"code": 143, "reason": "ended by SIGTERM"}')
    first, second = Notes(), Notes()
    assert tracker(tmp_path, first).run() == tracker(tmp_path, second).run() == 0
    assert first.calls[-2:] == ["end 143", "close"] and second.calls == ["start k1", "close"]


def test_a_line_that_is_repeated_counts_once(tmp_path: Path) -> None:
    write(tmp_path, JOB, plan(0), step(0), recovery(1), recovery(1), plan(0), step(1), END)
    notes = Notes()
    tracker(tmp_path, notes).run()
    assert [call for call in notes.calls if call.startswith("recovery")] == ["recovery at 1"]


def test_a_flush_that_fails_keeps_no_position(tmp_path: Path) -> None:
    class Unwritten(Notes):
        def flush(self) -> None:
            raise ValueError("a bug")

    write(tmp_path, JOB, step(0))
    with pytest.raises(ElasticError, match="flush failed: ValueError: a bug"):
        once(tmp_path, Unwritten())
    again = Notes()
    once(tmp_path, again)
    assert again.calls == ["start k1", "step 0", "close"]


def test_two_trackers_of_a_run_have_two_targets(tmp_path: Path) -> None:
    write(tmp_path, JOB)
    first = tracker(tmp_path, notes := Notes())
    thread = threading.Thread(target=first.run)
    thread.start()
    assert wait_until(lambda: bool(notes.calls))
    with pytest.raises(FieldError, match="a tracker of this run writes there already"):
        once(tmp_path, Notes())
    first.stop.set()
    thread.join()
