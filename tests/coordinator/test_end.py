"""A coordinator that fails ends, and keeps its error, although the disk of its output hangs."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from elastic.config import JobConfig
from elastic.domain.errors import EXIT_FAILURE, EXIT_USAGE
from elastic.telemetry import read_last_words
from tests.patience import LONG_S
from tests.pipes import full_pipe

MAIN = """
import sys
from elastic.coordinator import service
from elastic.domain.errors import UsageError

def fail(*_):
    raise {error}

service.lead = fail
sys.exit(service.main(["--run-dir", sys.argv[1]]))
"""


def main(config: JobConfig, error: str, output: int) -> int:
    """Run a coordinator that fails with `error` to its end; return its exit code."""
    config.save()
    command = [sys.executable, "-c", MAIN.format(error=error), config.run_dir]
    environ = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    started = subprocess.Popen(command, stdout=output, stderr=output, env=environ)
    try:
        return started.wait(LONG_S)
    finally:
        started.kill()
        started.wait()


ERRORS = [
    ("UsageError('no address')", EXIT_USAGE, "no address"),
    ("RuntimeError('a bug')", EXIT_FAILURE, "RuntimeError: a bug"),
]


@pytest.mark.parametrize(("error", "code", "words"), ERRORS)
def test_it_ends_while_its_output_is_not_taken(
    make_config: Callable[..., JobConfig], error: str, code: int, words: str
) -> None:
    config = make_config()
    read, write = full_pipe()
    assert main(config, error, write) == code
    assert read_last_words(config.run_dir, "coordinator") == words
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(("error", "code", "words"), ERRORS)
def test_its_output_has_the_error(
    make_config: Callable[..., JobConfig], tmp_path: Path, error: str, code: int, words: str
) -> None:
    """The launcher shows the end of this file if there are no last words."""
    with (tmp_path / "out").open("wb") as out:
        assert main(make_config(), error, out.fileno()) == code
    assert (tmp_path / "out").read_text().rstrip().endswith(words)
