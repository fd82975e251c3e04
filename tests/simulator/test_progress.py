"""Long commands show their progress on standard error, and short ones show nothing."""

from __future__ import annotations

import os
import pty
import re
import signal
import sys
import termios
import threading
import time
from pathlib import Path
from select import select
from typing import Any

import pytest
from click.testing import CliRunner
from elastic_sim.cli import progress as module
from elastic_sim.cli.cli import main
from elastic_sim.cli.progress import Progress

from tests.patience import LONG_S

SMALL = ("--mtbf", "5m", "--nodes", "4", "--duration", "30m", "--model", "gpt2")
LINE = r"elastic-sim (\w+): \d+% done after \d+ s: .+\n"


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Progress is shown often, and each command takes long enough for one line."""
    monkeypatch.setattr(module, "EVERY_S", 0.05)
    monkeypatch.setattr(module, "FIRST_S", 0.05)
    shown, line, close = threading.Event(), Progress._line, Progress.__exit__

    def noted(self: Progress) -> str:
        shown.set()
        return line(self)

    def slow(self: Progress, *error: Any) -> None:
        assert shown.wait(LONG_S)
        close(self, *error)

    monkeypatch.setattr(Progress, "_line", noted)
    monkeypatch.setattr(Progress, "__exit__", slow)


@pytest.mark.parametrize(
    "words",
    [
        ("replay", *SMALL, "--policy", "varuna"),
        ("advise", *SMALL, "--policy", "varuna", "--buy", "4", "--mixes", "1", "--seeds", "1"),
        ("sweep", "out", *SMALL, "--policy", "varuna", "--seeds", "1", "--workers", "1"),
    ],
    ids=lambda words: words[0],
)
@pytest.mark.usefixtures("often")
def test_lines_are_on_standard_error_only(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert re.fullmatch(f"({LINE})+", done.stderr) and words[0] in done.stderr
    assert "% done after" not in done.stdout and done.stdout


def test_a_short_command_shows_nothing() -> None:
    done = CliRunner().invoke(main, ["replay", *SMALL, "--policy", "varuna"])
    assert done.exit_code == 0 and done.stderr == ""


@pytest.mark.parametrize(("every_s", "is_shown"), [(0.01, True), (LONG_S, False)])
def test_a_terminal_gets_a_bar(
    every_s: float, is_shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    monkeypatch.setattr(module, "EVERY_S", every_s)
    monkeypatch.setattr(module, "FIRST_S", every_s)
    with open(theirs, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with Progress("prog") as progress:
            progress.show(0.5, "half")
            until = time.monotonic() + LONG_S
            while is_shown and time.monotonic() < until and not select([ours], [], [], 0.1)[0]:
                pass
        os.write(theirs, b"end")
    text = b""
    while not text.endswith(b"end"):
        text += os.read(ours, 4096)
    os.close(ours)
    assert (b"prog:  50%" in text and b"half" in text) is is_shown
    assert is_shown or text == b"end"


def test_the_share_of_a_replay_grows() -> None:
    from elastic_sim.replay.replay import replay
    from elastic_sim.steps.scenario import Scenario
    from elastic_sim.traces.generate import Market

    scenario = Scenario(
        market=Market(nodes=4, mtbf_s=300.0, repair_s=600.0), duration_s=1800.0, model="gpt2"
    )
    seen = list[tuple[float, str]]()
    replay(
        scenario.world(),
        scenario.trace_of,
        ("varuna",),
        range(2),
        progress=lambda share, text: seen.append((share, text)),
    )
    shares = [share for share, _ in seen]
    assert shares == sorted(shares) and shares[0] == 0.0 and 0.75 < shares[-1] <= 1.0
    runs = ("oracle, seed 0", "oracle, seed 1", "varuna, seed 0", "varuna, seed 1")
    assert list(dict.fromkeys(text for _, text in seen)) == [
        f"{run} (run {number} of 4)" for number, run in enumerate(runs, 1)
    ]


def test_ctrl_c_is_for_the_main_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    blocked, shown = list[set[int]](), threading.Event()
    monkeypatch.setattr(module, "EVERY_S", 0.01)
    monkeypatch.setattr(module, "FIRST_S", 0.01)

    def line(self: Progress) -> str:
        blocked.append(set(signal.pthread_sigmask(signal.SIG_BLOCK, ())))
        shown.set()
        return ""

    monkeypatch.setattr(Progress, "_line", line)
    with Progress("prog"):
        assert shown.wait(LONG_S)
    assert signal.SIGINT in blocked[0]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())
    assert all(thread.name != "progress" for thread in threading.enumerate())
