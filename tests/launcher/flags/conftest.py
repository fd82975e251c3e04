"""Where the tests of flags run."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an empty script.py, without PET_ variables."""
    (tmp_path / "script.py").write_text("")
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("PET_")]:
        monkeypatch.delenv(name)
    return tmp_path
