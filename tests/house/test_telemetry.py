"""The event log, also after crashes of its writer."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest

from elastic.domain.errors import FieldError
from elastic.domain.types import Unit
from elastic.telemetry import EventLog, event_line, read_events


def test_events_come_back_in_order(tmp_path: Path) -> None:
    before = time.time()
    with closing(EventLog(tmp_path / "run" / "events.jsonl")) as log:
        log.write(
            event_line("halt", {"epoch": 1, "unit": Unit("node0"), "lost": frozenset({2, 1})})
        )
        log.write(event_line("plan", {"text": "a\nb", "at_step": 3}, at=5.0))
    first, second = read_events(log.path)
    assert before <= first.pop("at") <= time.time()
    assert first == {
        "kind": "halt",
        "epoch": 1,
        "unit": {"node": "node0", "group": 0},
        "lost": [1, 2],
    }
    assert second == {"at": 5.0, "kind": "plan", "text": "a\nb", "at_step": 3}


def test_empty(tmp_path: Path) -> None:
    EventLog(tmp_path / "events.jsonl").close()
    assert read_events(tmp_path / "events.jsonl") == []


def test_torn_last_line_is_ignored_and_removed_at_reopening(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with closing(EventLog(path)) as log:
        log.write(event_line("one", {}))
    whole = path.read_bytes()
    for torn in (b'{"at":1', b"x" * 200_000):
        path.write_bytes(whole + torn)
        assert [event["kind"] for event in read_events(path)] == ["one"]
        EventLog(path).close()
        assert path.read_bytes() == whole
    path.write_bytes(b'{"at"')
    with closing(EventLog(path)) as log:
        log.write(event_line("fresh", {}))
    assert [event["kind"] for event in read_events(path)] == ["fresh"]


def test_damage_in_the_middle_is_named(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text('{"at":1,"kind":"a"}\nrubbish\n{"at":2,"kind":"b"}\n')
    with pytest.raises(FieldError, match=r"events\.jsonl:2"):
        read_events(path)
    path.write_text("[1]\n")
    with pytest.raises(FieldError, match=r"events\.jsonl:1"):
        read_events(path)
    with pytest.raises(FieldError, match="readable file"):
        read_events(tmp_path / "none")


def test_lines_of_several_writers_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"

    def write(writer: int, log: EventLog) -> None:
        with closing(log):
            for i in range(50):
                log.write(event_line("w", {"writer": writer, "i": i, "text": "x" * 5000}))

    # All logs open first, because opening removes a last line that is still being written.
    logs = [EventLog(path) for _ in range(4)]
    threads = [threading.Thread(target=write, args=pair) for pair in enumerate(logs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    events = read_events(path)
    for writer in range(4):
        assert [e["i"] for e in events if e["writer"] == writer] == list(range(50))


def test_each_event_is_on_disk_when_append_returns(tmp_path: Path) -> None:
    """The writer dies without closing the log."""
    path = tmp_path / "events.jsonl"
    code = (
        "import os, sys; from elastic.telemetry import EventLog, event_line\n"
        "log = EventLog(sys.argv[1]); log.write(event_line('last', {'n': 1}))\n"
        "os.kill(os.getpid(), 9)"
    )
    root = Path(__file__).parents[2]
    assert (
        subprocess.run([sys.executable, "-c", code, str(path)], cwd=root, check=False).returncode
        == -9
    )
    assert json.loads(path.read_text())["kind"] == "last"
