"""Output that nobody reads, and log files on a disk that hangs, delay neither workers nor agent."""

from __future__ import annotations

import contextlib
import os
import queue
import re
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from elastic import console as console_module
from elastic.agent.workers.processes import WorkerExit, WorkerGroup
from elastic.config import STDERR, STDOUT, JobConfig
from elastic.console import BoundedWriter, Console
from elastic.core.protocol.messages import Launch
from elastic.domain.types import NodeInfo
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S

MakeConfig = Callable[..., JobConfig]
LAUNCH, PLACE = Launch(0, 1, 0, 1, "127.0.0.1", 1, 0), NodeInfo("node0", "", "")
LINES = 4000
CHATTY = f"for i in range({LINES}): print('line', i, 'x' * 80)"
"""Prints more than a pipe holds."""


class Pipe:
    """A console whose output is read only by `read`."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe()
        self.text = b""

    def read(self, until: bytes) -> str:
        """Read until the text ends with `until`; return the whole text."""
        while not self.text.endswith(until):
            self.text += os.read(self.read_end, 1 << 16)
        return self.text.decode()


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    made = Pipe()
    yield made
    os.close(made.read_end)  # a thread that still writes gets an error


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "MAX_WAITING_BYTES", 64 << 10)
    monkeypatch.setattr(console_module, "ROOM_BYTES", 16 << 10)


def exit_of(config: JobConfig, console: Console) -> WorkerExit:
    """Run a group of one worker to its end."""
    exits: queue.Queue[WorkerExit] = queue.Queue()
    group = WorkerGroup(config, LAUNCH, PLACE, exits.put, console)
    group.start()
    try:
        return exits.get(timeout=LONG_S)
    finally:
        group.kill()


def hanging(config: JobConfig, name: str) -> int:
    """Put a named pipe that nobody reads in the place of a log file; return its descriptor."""
    folder = config.log_path("node0", 0, 0)
    folder.mkdir(parents=True)
    os.mkfifo(folder / name)
    return os.open(folder / name, os.O_RDWR)


@pytest.mark.parametrize("changes", [{}, {"tee": (3,)}])
def test_a_console_that_nobody_reads_stops_no_worker(
    make_config: MakeConfig, pipe: Pipe, changes: dict[str, object]
) -> None:
    """As with `elastic run | less`, Ctrl-S, or a stopped launcher."""
    config = make_config(CHATTY, **changes)
    assert exit_of(config, Console((pipe.write_end, pipe.write_end))).returncode == 0
    log = config.log_path("node0", 0, 0) / "stdout.log"
    assert wait_until(lambda: log.read_text().count("\n") == LINES)
    assert pipe.read(f"line {LINES - 1} {'x' * 80}\n".encode()).count("\n") == LINES


@pytest.mark.usefixtures("small")
def test_the_size_of_output_that_nobody_read_is_printed(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "ROOM_S", 0.01)
    console, pieces = Console((pipe.write_end, -1)), [b"%04d" % i * 256 for i in range(1000)]
    for piece in pieces:
        console.put(STDOUT, piece)
    assert not console.flush(0.01)
    reader = threading.Thread(target=pipe.read, args=(b"the end\n",), daemon=True)
    reader.start()
    assert console.flush(LONG_S)
    console.put(STDOUT, b"the end\n")
    reader.join(LONG_S)
    found = re.fullmatch(
        rb"([0-9]*)\nelastic agent: (\d+) bytes of output are missing here, "
        rb"because nobody read them\nthe end\n",
        pipe.text,
    )
    assert found is not None
    shown, lost = found[1], int(found[2])
    assert b"".join(pieces).startswith(shown) and len(shown) + lost == 1000 * 1024


@pytest.mark.usefixtures("small")
def test_a_slow_reader_loses_nothing(pipe: Pipe, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(console_module, "ROOM_S", LONG_S)
    console, data = Console((pipe.write_end, -1)), b"x" * 1023 + b"\n"
    reader = threading.Thread(target=pipe.read, args=(b"the end\n",), daemon=True)
    reader.start()
    for _ in range(1000):
        console.put(STDOUT, data)
    console.put(STDOUT, b"the end\n")
    reader.join(LONG_S)
    assert pipe.text == data * 1000 + b"the end\n"


def test_errors_are_shown_while_nobody_reads_the_output(pipe: Pipe) -> None:
    """A pager reads the one, a terminal shows the other."""
    with_pager, terminal = Pipe(), pipe
    console = Console((with_pager.write_end, terminal.write_end))
    console.put(STDOUT, b"x" * (1 << 20))
    console.say("a line")
    assert terminal.read(b"\n") == "elastic agent: a line\n"
    os.close(with_pager.read_end)


def test_a_stream_that_another_process_has_made_non_blocking(pipe: Pipe) -> None:
    """A terminal is shared; its flags are, too."""
    os.set_blocking(pipe.write_end, False)
    console, data = Console((pipe.write_end, -1)), b"x" * 200_000 + b"the end\n"
    console.put(STDOUT, data)
    assert not console.flush(0.01)
    assert pipe.read(b"the end\n").encode() == data


def test_a_closed_stream_is_not_taken_for_the_next_file(tmp_path: Path) -> None:
    """As with `elastic run 2>&-`: the next file that is opened gets its number."""
    code = """
        import os
        from elastic.console import Console
        assert os.open("file", os.O_CREAT | os.O_WRONLY) == 2
        console = Console()
        console.say("a line")
        assert console.flush(10)
    """
    command = ["sh", "-c", 'exec "$0" -c "$1" 2>&-', sys.executable, textwrap.dedent(code)]
    root = Path(__file__).resolve().parents[3]
    subprocess.run(command, check=True, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(root)})
    assert (tmp_path / "file").read_text() == ""


def test_lines_of_both_streams_stay_whole_on_one_pipe(pipe: Pipe) -> None:
    """As with `elastic run 2>&1 | tee`."""
    console = Console((pipe.write_end, os.dup(pipe.write_end)))
    lines = {stream: b"%d" % stream * 20_000 + b"\n" for stream in (STDOUT, STDERR)}
    for _ in range(50):
        for stream, line in lines.items():
            console.put(stream, line)
    size = sum(map(len, lines.values())) * 50
    while len(pipe.text) < size:
        pipe.text += os.read(pipe.read_end, 4096)
    assert set(pipe.text.splitlines(keepends=True)) == set(lines.values())


def test_a_log_disk_that_hangs_stops_no_worker(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The console shows all of the output."""
    config = make_config(CHATTY)
    descriptor = hanging(config, "stdout.log")
    out = os.open(tmp_path / "out", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    assert exit_of(config, Console((out, out))).returncode == 0
    assert (tmp_path / "out").read_text().count("\n") == LINES
    os.close(descriptor)


def test_the_error_of_a_worker_is_known_while_the_log_disk_hangs(make_config: MakeConfig) -> None:
    config = make_config("import sys; sys.stderr.write('x' * 200_000 + '\\n'); sys.exit('boom')")
    descriptor = hanging(config, "stderr.log")
    ended = exit_of(config, Console((-1, -1)))
    assert (ended.returncode, ended.error) == (1, "boom")
    os.close(descriptor)


@pytest.mark.usefixtures("small")
def test_the_log_names_the_file_whose_disk_takes_nothing(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console_module, "ROOM_S", 0.01)
    config = make_config(CHATTY)
    descriptor = hanging(config, "stdout.log")
    assert exit_of(config, Console((-1, -1))).returncode == 0
    assert (
        "output is lost: the disk of " in caplog.text and "stdout.log takes nothing" in caplog.text
    )
    os.set_blocking(descriptor, False)
    assert wait_until(lambda: emptied(descriptor) and "lacks its last" in caplog.text)
    os.close(descriptor)


def emptied(descriptor: int) -> bool:
    """Read all that waits in a pipe."""
    with contextlib.suppress(BlockingIOError):
        while os.read(descriptor, 1 << 16):
            pass
    return True


def ended_group(config: JobConfig) -> WorkerGroup:
    """Workers that have ended, whose output goes to log files alone."""
    group = WorkerGroup(config, LAUNCH, PLACE, lambda ended: None, Console((-1, -1)))
    group.start()
    assert group.wait(LONG_S)
    group.kill()
    return group


def test_a_slow_log_disk_gets_the_last_lines_of_a_worker(make_config: MakeConfig) -> None:
    """They are written after the group has ended."""
    config = make_config(CHATTY)
    descriptor = hanging(config, "stdout.log")
    group = ended_group(config)
    lines = "".join(f"line {i} {'x' * 80}\n" for i in range(LINES)).encode()
    got = bytearray()
    reader = threading.Thread(target=read_slowly, args=(descriptor, got, len(lines)), daemon=True)
    reader.start()
    group.save_output(LONG_S)
    reader.join(LONG_S)
    assert got == lines
    os.close(descriptor)


def test_the_end_names_the_log_file_that_lacks_lines(
    make_config: MakeConfig, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(CHATTY)
    descriptor = hanging(config, "stdout.log")
    group = ended_group(config)
    group.save_output(LONG_S)
    assert re.search(r"stdout\.log lacks its last \d{6} bytes", caplog.text)
    os.close(descriptor)


def test_a_slow_reader_gets_the_last_lines(pipe: Pipe) -> None:
    """It needs longer for all of them than a reader that does not read is waited for."""
    console, got = Console((pipe.write_end, -1)), bytearray()
    data = b"x" * (1 << 16)
    for _ in range(40):
        console.put(STDOUT, data)
    args = (pipe.read_end, got, 40 * len(data), 0.05)
    reader = threading.Thread(target=read_slowly, args=args, daemon=True)
    reader.start()
    console.finish(LONG_S)
    reader.join(LONG_S)
    assert got == data * 40


def test_the_end_drops_what_a_slow_reader_did_not_get(
    pipe: Pipe, caplog: pytest.LogCaptureFixture
) -> None:
    console, data = Console((pipe.write_end, -1)), b"x" * (1 << 16)
    for _ in range(100):
        console.put(STDOUT, data)
    ending = threading.Thread(target=console.finish, args=(0.0,), daemon=True)
    ending.start()
    wait_until(lambda: "the console lacks its last" in caplog.text)
    pipe.read(b"read them\n")
    ending.join(LONG_S)
    found = re.fullmatch(rb"(x*)\nelastic agent: (\d+) bytes of output are missing.*\n", pipe.text)
    assert found is not None
    assert len(found[1]) + int(found[2]) == 100 * len(data)


def read_slowly(descriptor: int, got: bytearray, nbytes: int, pause_s: float = 0.1) -> None:
    while len(got) < nbytes:
        got += os.read(descriptor, 1 << 16)
        time.sleep(pause_s)


def test_a_writer_survives_an_error() -> None:
    writer, written = BoundedWriter("test"), list[int]()
    writer.start()
    assert writer.post(lambda: 1 / 0, 1) and writer.post(lambda: written.append(1), 1)
    assert writer.flush(LONG_S) and written == [1]
    writer.end()


def test_a_console_that_is_gone_is_no_error() -> None:
    read, write = os.pipe()
    os.close(read)
    console = Console((-1, write))
    console.put(STDERR, b"x")
    console.say("a line")
    assert console.flush(LONG_S)
