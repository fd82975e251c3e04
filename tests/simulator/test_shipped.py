"""The traces that are shipped are what their README says they are."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from simulator.cli import main
from simulator.trace import read

TRACES = Path(__file__).parents[2] / "traces"
COMMANDS = re.findall(r"^    elastic-sim (traces generate .*)$", (TRACES / "README.md").read_text(), re.M)


def test_every_trace_is_named_labelled_and_usable() -> None:
    files = sorted(TRACES.glob("*.csv"))
    assert {f"traces/{file.name}" for file in files} == {shlex.split(command)[2] for command in COMMANDS}
    for file in files:
        found, repairs = read(file)
        assert found.events and not repairs
        assert found.origin.startswith("generated, not recorded")


@pytest.mark.parametrize("command", [c for c in COMMANDS if "--like" not in c])
def test_the_same_command_gives_the_same_bytes(command: str, tmp_path: Path) -> None:
    words = shlex.split(command)
    shipped = TRACES / Path(words[2]).name
    words[2] = str(tmp_path / "again.csv")
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 0, found.output
    assert (tmp_path / "again.csv").read_bytes() == shipped.read_bytes()
