"""The trackers of `elastic run --track`: real processes over a record that is there."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import pytest

from elastic.domain.errors import UsageError
from elastic.launcher.run.trackers import Trackers, check_targets
from elastic.launcher.tracking.targets import Target
from tests.launcher.helpers import wait_until
from tests.launcher.tracking.records import END, JOB, config, plan, step, write

HOOKS = """
from elastic import Callback
class Good(Callback):
    def on_step(self, step): open("told", "a").write(f"{step.step}\\n")
class Bad(Good):
    def on_start(self, run, key): raise ValueError("no key")
class NeedsValues(Callback):
    def __init__(self, path): pass
def nothing(): return 3
"""


@pytest.fixture(autouse=True)
def hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_hooks.py").write_text(HOOKS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]))


@pytest.fixture
def lifeline() -> Iterator[int]:
    read, write_end = os.pipe()
    yield read
    os.close(read)
    os.close(write_end)


def target(name: str) -> Target:
    return Target("callback", f"my_hooks:{name}")


def ended(trackers: Trackers) -> bool:
    trackers.check()
    return not trackers.children


def test_one_ends_well_and_one_cannot_begin(tmp_path: Path, lifeline: int) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config(str(run_dir)).save()
    write(run_dir, JOB, plan(0), step(0), step(1), END)
    notes: list[str] = []
    trackers = Trackers(
        run_dir, (target("Good"), target("Bad")), lifeline, notes.append,
        lambda name: nullcontext(None),
    )  # fmt: skip
    trackers.check()
    assert wait_until(lambda: ended(trackers))
    assert (tmp_path / "told").read_text() == "0\n1\n"
    assert notes == ["warning: the tracker callback:my_hooks:Bad ended (exit code 1)"]
    assert trackers.unfinished() == ["callback:my_hooks:Bad"]


def test_a_tracker_that_was_killed_tells_the_rest_at_the_end(tmp_path: Path, lifeline: int) -> None:
    """It does not wait for its pause."""
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    config(str(run_dir)).save()
    write(run_dir, JOB, plan(0), step(0))
    told, notes = tmp_path / "told", list[str]()
    trackers = Trackers(
        run_dir, (target("Good"),), lifeline, notes.append, lambda name: nullcontext(None)
    )
    trackers.check()
    assert wait_until(told.exists)
    (child,) = trackers.children
    os.kill(child.pid, signal.SIGKILL)
    assert wait_until(child.ended)
    write(run_dir, step(1), END)
    trackers.start_waiting()
    assert wait_until(lambda: all(child.ended() for child in trackers.children))
    trackers.check(ending=True)
    assert trackers.unfinished() == [] and told.read_text().splitlines()[-1] == "1"
    assert len(notes) == 1 and "ended (SIGKILL); it is started again" in notes[0]


def test_nothing_is_started_at_the_end(tmp_path: Path, lifeline: int) -> None:
    trackers = Trackers(
        tmp_path, (target("Good"),), lifeline, print, lambda name: nullcontext(None)
    )
    trackers.check(ending=True)
    assert not trackers.children and trackers.unfinished() == ["callback:my_hooks:Good"]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("Missing", "AttributeError"),
        ("NeedsValues", "missing 1 required positional argument"),
        ("nothing", "it makes a int: derive the class from elastic.Callback"),
    ],
)
def test_a_callback_that_cannot_be_made_is_refused(name: str, text: str) -> None:
    with pytest.raises(UsageError, match=f"--track: .callback:my_hooks:{name}. .*{text}"):
        check_targets([target(name)])


def test_a_good_callback_is_accepted() -> None:
    check_targets([target("Good")])
