"""Shared by the launcher's tests: small configurations and a clean environment."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic.config import Command, JobConfig


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[..., JobConfig]:
    """Build a JobConfig whose workers run the given Python source."""

    def make(source: str = "", args: tuple[str, ...] = (), **changes: Any) -> JobConfig:
        script = tmp_path / "script.py"
        script.write_text(source)
        run_dir = tmp_path / "run"
        run_dir.mkdir(exist_ok=True)
        values: dict[str, Any] = {
            "job_id": "test",
            "run_dir": str(run_dir),
            "memory_dir": str(tmp_path / "memory"),
            "checkpoint_dir": str(run_dir / "checkpoints"),
            "command": Command(script=str(script), args=args),
        }
        return JobConfig(**{**values, **changes})

    return make


@pytest.fixture
def environment() -> dict[str, str]:
    """This environment without PET_* defaults, with the package importable."""
    root = str(Path(__file__).resolve().parents[2])
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PET_")}
    return {**kept, "PYTHONPATH": root}
