"""`elastic status` of a run that is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic.launcher.cli import main


@pytest.mark.parametrize(
    ("summary", "told"),
    [
        (json.dumps({"loss": [4.0, 3.5], "recoveries": [{}], "steps": 2}), "epoch_changes: 1"),
        ('{"loss": [4.0', "summary.json is damaged"),
        ("", "summary.json is damaged"),
    ],
)
def test_a_damaged_summary_is_told(
    summary: str, told: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "exit.json").write_text(json.dumps({"code": 0, "reason": "all 2 steps done"}))
    (tmp_path / "summary.json").write_text(summary)
    assert main(["status", "--run-dir", str(tmp_path)]) == 0
    printed = capfd.readouterr().out
    assert told in printed and "phase: finished" in printed
    assert ("epoch_changes" in printed) == ("loss" in printed) == ("4.0, 3.5" in summary)
