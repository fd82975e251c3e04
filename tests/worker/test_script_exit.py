"""The end of a script that never trains."""

from __future__ import annotations

import os
import subprocess
import sys

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
