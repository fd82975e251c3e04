"""Type, message and place of the error that ended a worker, from what the worker left behind."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.agent.workers.last_error import MAX_LINES_BELOW, printed_error, recorded_error
from elastic.domain.errors import MAX_DESCRIPTION_CHARS

RECORDED = """
from torch.distributed.elastic.multiprocessing.errors import record
@record
def main():
    raise KeyError("tokens")
main()
"""


def stderr_of(folder: Path, source: str, **variables: str) -> bytes:
    """Return what a script prints to standard error; the script is folder/train.py."""
    (folder / "train.py").write_text(source)
    argv = [sys.executable, str(folder / "train.py")]
    return subprocess.run(argv, stderr=subprocess.PIPE, env=variables or None, check=False).stderr


@pytest.mark.parametrize(
    ("source", "error", "place"),
    [
        ("raise ValueError('no file')", "ValueError: no file", ":1 in <module>"),
        (
            "def load():\n  raise RuntimeError('first line\\nsecond line')\nload()",
            "RuntimeError: first line second line",
            ":2 in load",
        ),
        ("import json\njson.loads('{')", "json.decoder.JSONDecodeError: ", ":2 in <module>"),
        ("def f(:\n  pass", "SyntaxError: invalid syntax", ":1"),
        (
            "try:\n  1 / 0\nexcept ZeroDivisionError as e:\n  raise OSError('lost') from e",
            "OSError: lost",
            ":4 in <module>",
        ),
    ],
)
def test_the_traceback_of_an_error_that_nobody_caught(
    tmp_path: Path, source: str, error: str, place: str
) -> None:
    """The place is in the user's code, although a library raised the error."""
    text = printed_error(stderr_of(tmp_path, source))
    assert text.startswith(error) and text.endswith(f"({tmp_path / 'train.py'}{place})")


def test_a_traceback_of_torch_with_the_rank_in_each_line(tmp_path: Path) -> None:
    plain = stderr_of(tmp_path, "raise ValueError('no file')").decode().splitlines()
    below = "[W926 ProcessGroupNCCL.cpp:1] Warning: destroy_process_group() was not called"
    text = "\n".join([*(f"[rank0]: {line}" for line in plain), below, ""])
    place = f"{tmp_path / 'train.py'}:1 in <module>"
    assert printed_error(text.encode()) == f"ValueError: no file ({place})"


def test_a_traceback_in_color() -> None:
    place = '  File \x1b[35m"train.py"\x1b[0m, line \x1b[35m7\x1b[0m, in \x1b[35mload\x1b[0m'
    error = "\x1b[1;35mValueError\x1b[0m: \x1b[35mno file\x1b[0m"
    text = f"Traceback (most recent call last):\n{place}\n{error}\n"
    assert printed_error(text.encode()) == "ValueError: no file (train.py:7 in load)"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("usage: train.py [-h]\ntrain.py: error: --data is required\n\n", "--data is required"),
        ("", ""),
        ("\xff\xfe broken", "broken"),
        ('  File "a.py", line 1, in f\n', 'File "a.py", line 1, in f'),
    ],
)
def test_the_last_line_without_a_traceback(text: str, error: str) -> None:
    assert printed_error(text.encode("latin-1")).endswith(error)


def test_an_error_that_was_caught_long_before_the_end(tmp_path: Path) -> None:
    caught = stderr_of(tmp_path, "raise ValueError('no file')")
    text = caught + b"a line\n" * MAX_LINES_BELOW + b"no data: the end\n"
    assert printed_error(text) == "no data: the end"


def test_the_error_file_of_torchruns_record(tmp_path: Path) -> None:
    path = tmp_path / "error.json"
    stderr_of(tmp_path, RECORDED, TORCHELASTIC_ERROR_FILE=str(path))
    place = f"{tmp_path / 'train.py'}:5 in main"
    assert recorded_error(path.read_bytes()) == f"KeyError: 'tokens' ({place})"


@pytest.mark.parametrize("text", ["", "{", "[1]", "{}", '{"message": null}'])
def test_an_error_file_that_cannot_be_used(text: str) -> None:
    assert recorded_error(text.encode()) == ""


def test_a_short_error_file() -> None:
    """Programs that are not written in Python may write only a text."""
    assert recorded_error(json.dumps({"message": "no\n device"}).encode()) == "no device"


def test_a_long_message_does_not_cost_the_place(tmp_path: Path) -> None:
    text = printed_error(stderr_of(tmp_path, "raise ValueError('x' * 5000)"))
    assert text.endswith("train.py:1 in <module>)") and len(text) == MAX_DESCRIPTION_CHARS
