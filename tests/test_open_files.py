"""The limit on open files is raised as far as it may be, and a limit that is too low is told."""

from __future__ import annotations

import subprocess
import sys

import pytest

from elastic.open_files import SPARE

SCRIPT = """
import logging, resource
from elastic.open_files import raise_limit
logging.basicConfig(format="%(message)s")
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 300))
print(raise_limit({connections}), *resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize("connections", [300 - SPARE, 301 - SPARE])
def test_the_soft_limit_becomes_the_hard_one(connections: int) -> None:
    text = SCRIPT.format(connections=connections)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    assert done.stdout == "300 300 300\n"
    warned = f"at most 300 files may be open, and {connections} nodes need up to 301"
    assert (warned in done.stderr) == (connections + SPARE > 300)
