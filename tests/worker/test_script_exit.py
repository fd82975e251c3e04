"""The end of a script that never trains."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize(
    ("statement", "warnings"),
    [("os.fork() and os.wait()", 1), ("raise ValueError", 0)],
)
def test_the_script_alone_warns_that_it_has_not_trained(statement: str, warnings: int) -> None:
    """Its forks do not train; an error that ends the script says more than the warning."""
    code = f"import os; from elastic import Trainer; {statement}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "ELASTIC_AGENT": "socket", "RANK": "0"},
        capture_output=True,
        check=False,
    )
    assert done.stdout.count(b"ended without training") == warnings


@pytest.mark.parametrize("imports", ["OptimizerSpec", "OptimizerSpec, Trainer"])
def test_a_wrong_argument_is_one_line_with_its_place(imports: str, tmp_path: Path) -> None:
    """The line is that of the script, and not of the method that makes the object."""
    script = tmp_path / "mine.py"
    script.write_text(f"from elastic import {imports}\n\nOptimizerSpec(factory=print, lr=0.003)\n")
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert done.stderr.startswith("elastic: mine.py:3: OptimizerSpec.lr: 0.003 is not usable")
    assert done.stderr.count("\n") == 1
