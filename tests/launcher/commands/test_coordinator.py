"""`elastic coordinator`: no second job after the end of the first, and the name."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic.domain.errors import EXIT_JOB_FAILED, EXIT_UNRECOVERABLE
from elastic.launcher.cli import main
from elastic.launcher.commands import run
from elastic.launcher.flags.request import Request
from elastic.launcher.run.supervisor import _label

WORDS = ("coordinator", "--once", "--address", "127.0.0.1:29400", "-m", "json.tool")


@pytest.mark.parametrize(
    ("code", "shown"), [(0, 0), (EXIT_UNRECOVERABLE, EXIT_UNRECOVERABLE), (1, EXIT_JOB_FAILED)]
)
def test_the_code_of_the_job_that_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    code: int, shown: int,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run, "_launch", lambda task: 77)
    assert main([*WORDS]) == 77, "no job has run here"
    latest = tmp_path / "runs" / "latest"
    latest.mkdir(parents=True)
    assert main([*WORDS]) == 77, "the job has not ended"
    (latest / "exit.json").write_text(f'{{"code": {code}, "reason": "it is over"}}')
    assert main([*WORDS]) == shown
    assert "has ended: it is over" in capsys.readouterr().err
    assert main([word for word in WORDS if word != "--once"]) == 77


def test_a_coordinator_can_have_a_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In Kubernetes that of its pod, which tells the coordinators of a job apart."""
    monkeypatch.chdir(tmp_path)  # a job that has ended may have left its files in the present one
    tasks: list[Request] = []
    monkeypatch.setattr(run, "_launch", tasks.append)
    for words in ((), ("--name", "demo-coordinator-1")):
        assert main(["coordinator", *words, *WORDS[1:]]) == 0
    assert [task.config.coordinator_name for task in tasks] == ["", "demo-coordinator-1"]
    assert [_label(task) for task in tasks] == ["coordinator", "demo-coordinator-1"]
    assert main(["coordinator", "--name", "a b", *WORDS[1:]]) == 2
