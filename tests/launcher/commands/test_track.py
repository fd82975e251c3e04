"""`elastic track`: wrong input is one line; Ctrl-C keeps the position."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from elastic.launcher.cli import main
from tests.launcher.helpers import wait_until
from tests.launcher.tracking.records import END, JOB, config, plan, step, write

HOOKS = """
from elastic import Callback
class Lines(Callback):
    def on_step(self, step): open("told", "a").write(f"{step.step}\\n")
"""


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    made = tmp_path / "run"
    made.mkdir()
    config(str(made)).save()
    write(made, JOB, plan(0), step(0))
    return made


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ([], "--to"),
        (["--to", "board"], "give tensorboard:FOLDER"),
        (["--to", "callback:no_such:Hook"], "No module named 'no_such'"),
        (["--to", "callback:my_hooks:Lines", "--run-dir", "elsewhere"], "it has no config.json"),
    ],
)
def test_wrong_input_is_one_line(
    words: list[str], text: str, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["track", *words]) == 2
    out, err = capsys.readouterr()
    assert out == "" and len(err.splitlines()) == 1 and text in err


def test_an_interrupted_command_goes_on_later(run_dir: Path, tmp_path: Path) -> None:
    words = ["track", "--run-dir", str(run_dir), "--to", "callback:my_hooks:Lines"]
    command = [sys.executable, "-m", "elastic", *words]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    told = tmp_path / "told"
    first = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
    assert wait_until(lambda: told.exists() and told.read_text() == "0\n")
    first.send_signal(signal.SIGINT)
    out, _ = first.communicate()
    assert first.returncode == 130 and out.splitlines()[-1].endswith("1 steps written")
    write(run_dir, step(1), END)
    second = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert second.returncode == 0, second.stderr
    assert (
        second.stdout
        == "elastic track: callback:my_hooks:Lines: 1 steps written; the job has ended\n"
    )
    assert told.read_text() == "0\n1\n"
