"""Text logs and JSON lines: format, rotation, limits, and disks that do not answer."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import stat
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic import logs
from elastic.logs import LogSource, RotatingFile, configure_logging
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S


def text_with(path: Path, part: str) -> str:
    """Wait until the file has `part`, which another thread writes; return the file's text."""
    wait_until(lambda: path.exists() and part in path.read_text(), LONG_S)
    return path.read_text()


class Broken:
    """An object whose end fails. Nobody gets the error; Python prints it to standard error, which
    may be a console that nobody reads."""

    def __del__(self) -> None:
        raise ValueError("broken")


def test_text_log(tmp_path: Path) -> None:
    handlers, level = list(logging.root.handlers), logging.root.level
    hooks = threading.excepthook, sys.unraisablehook
    try:
        configure_logging(tmp_path / "logs" / "agent.log")
        log = logging.getLogger("elastic.agent")
        log.info("node %d", 3)
        logging.getLogger("elsewhere").debug("not shown")
        warnings.warn("from a library", stacklevel=1)
        log.info("%d", "no number")
        Broken()
        first = text_with(tmp_path / "logs" / "agent.log", "ValueError: broken")
        configure_logging(tmp_path / "other.log")
        log.warning("moved")
        assert text_with(tmp_path / "other.log", "WARNING elastic.agent: moved")
    finally:
        threading.excepthook, sys.unraisablehook = hooks
        logging.captureWarnings(False)
        logging.root.handlers[:] = handlers
        logging.root.setLevel(level)
    assert "INFO elastic.agent: node 3" in first
    assert "from a library" in first and "not shown" not in first
    assert "cannot be logged: TypeError" in first
    assert (tmp_path / "logs" / "agent.log").read_text() == first


SLOW_LOG = """
import logging, os, sys, threading
from pathlib import Path
from elastic.logs import configure_logging

path = Path(sys.argv[1])
os.mkfifo(path)  # a disk that does not answer: opening works, writing waits for a reader
reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
configure_logging(path)
def fail():
    raise KeyError("node7")
for number in range(2000):
    logging.getLogger("elastic").info("%d %s", number, "x" * 200)
thread = threading.Thread(target=fail, name="replicator")
thread.start()
thread.join()
print("all logged", flush=True)
os.set_blocking(reader, True)
with open(reader) as file:
    found = [line for line in (file.readline() for _ in range(2002)) if "has ended" in line]
print(found[0].partition("ERROR")[2], flush=True)
file = None
os._exit(0)
"""


def test_nobody_waits_for_the_disk_of_the_log(tmp_path: Path) -> None:
    """The log holds more than a pipe. A thread that ends by an exception is named in it."""
    command = [sys.executable, "-c", SLOW_LOG, str(tmp_path / "log")]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, cwd=root, capture_output=True, text=True, check=False, timeout=LONG_S
    )
    assert "all logged" in done.stdout, done.stderr
    assert "the thread replicator has ended by an error" in done.stdout


@pytest.fixture
def own_logging() -> Iterator[None]:
    """Loggers and hooks are as before afterwards."""
    handlers, level = list(logging.root.handlers), logging.root.level
    hooks = threading.excepthook, sys.unraisablehook
    yield
    threading.excepthook, sys.unraisablehook = hooks
    logging.captureWarnings(False)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def test_json_lines(tmp_path: Path, own_logging: None) -> None:
    """The epoch is that of the moment, and an error has its text. The text log has the same."""
    source, lines, epoch = LogSource("demo", "node0"), list[bytes](), 3
    source.epoch = lambda: epoch
    found = configure_logging(tmp_path / "log", source, lines.append)
    log = logging.getLogger("elastic.agent")
    log.info("node %d\nsays \u00e4", 3)
    epoch = 4
    try:
        raise KeyError("node7")
    except KeyError:
        log.exception("it failed")
    log.warning("%d", "no number")
    found.end_json()
    found.end()
    first, second, third = (json.loads(line) for line in lines)
    assert all(line.count(b"\n") == 1 for line in lines)
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "job": "demo",
        "node": "node0",
        "epoch": 3,
        "logger": "elastic.agent",
        "message": "node 3\nsays \u00e4",
    }
    assert (second["level"], second["epoch"], second["message"]) == ("error", 4, "it failed")
    assert second["error"] == "KeyError: 'node7'" and "raise KeyError" in second["traceback"]
    assert third["level"] == "error" and "cannot be logged: TypeError" in third["message"]
    text = (tmp_path / "log").read_text()
    assert "ERROR elastic.agent: it failed\nTraceback" in text and "KeyError: 'node7'" in text


def test_files_are_rotated_and_private(tmp_path: Path) -> None:
    path = tmp_path / "a.log"
    path.write_text("from before\n")
    path.chmod(0o644)
    file = RotatingFile(path, max_bytes=100, files=3)
    for number in range(40):
        line = f"line {number:3d}\n".encode()
        assert file.write(line) == len(line)
    file.close()
    names = sorted(found.name for found in tmp_path.iterdir())
    assert names == ["a.log", "a.log.1", "a.log.2"]
    for name in names:
        found = (tmp_path / name).stat()
        assert found.st_size <= 100 and stat.S_IMODE(found.st_mode) == 0o600
    kept = "".join((tmp_path / name).read_text() for name in reversed(names)).split("\n")[:-1]
    assert kept == [f"line {number:3d}" for number in range(40 - len(kept), 40)]


def test_a_log_that_cannot_be_opened_anew_loses_no_older_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process has no free descriptors for a while."""

    def refuse(*_: object) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    path = tmp_path / "a.log"
    file = RotatingFile(path, max_bytes=20, files=3)
    for number in range(6):
        file.write(f"line {number:3d}\n".encode())
    with monkeypatch.context() as full:
        full.setattr(os, "open", refuse)
        for number in range(6, 12):
            file.write(f"line {number:3d}\n".encode())
    assert (tmp_path / "a.log.2").read_text() == "line   0\nline   1\n"
    assert (tmp_path / "a.log.1").read_text() == "line   2\nline   3\n"
    assert len(path.read_text().splitlines()) == 8
    file.write(b"line  12\n")
    file.close()
    assert path.read_text() == "line  12\n"
    assert [found.name for found in sorted(tmp_path.iterdir())] == [
        "a.log",
        "a.log.1",
        "a.log.2",
    ]


def test_the_text_log_is_private(tmp_path: Path, own_logging: None) -> None:
    configure_logging(tmp_path / "log").end()
    assert stat.S_IMODE((tmp_path / "log").stat().st_mode) == 0o600


def test_a_log_says_how_many_lines_it_lacks(
    tmp_path: Path, own_logging: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk takes nothing while more lines are logged than may wait."""
    monkeypatch.setattr(logs, "MAX_LINES", 20)
    path = tmp_path / "log"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    found = configure_logging(path)
    log = logging.getLogger("elastic")
    for number in range(3000):  # more than the pipe and the queue take
        log.info("%d %s", number, "x" * 200)
    text = list[str]()

    def read() -> None:
        with open(reader) as file:
            text.extend(file)

    os.set_blocking(reader, True)
    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    queued = found._text._records
    assert wait_until(lambda: queued.qsize() == 0)
    log.info("the disk answers again")
    found.end()
    os.close(found_descriptor(found))
    thread.join(LONG_S)
    expected = 0
    for line in text[:-1]:
        if gap := re.search(r"WARNING elastic.logs: (\d+) lines are missing here", line):
            expected += int(gap[1])
        else:
            assert f" INFO elastic: {expected} x" in line, "the note stands where they are missing"
            expected += 1
    assert expected == 3000 and "lines are missing here" in "".join(text)
    assert "the disk answers again" in text[-1]


def found_descriptor(found: Any) -> int:
    """The descriptor of the file of a text log."""
    return int(found._file.fileno())
