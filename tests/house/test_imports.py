"""Import contracts, and the packages that light commands load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "numpy", "megatron", "grpc", "google.protobuf")


def loaded_by(statement: str) -> set[str]:
    """Names of all modules in a fresh interpreter after `statement`."""
    code = f"{statement}\nimport sys\nprint(*sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(result.stdout.split())


@pytest.mark.parametrize(
    "module",
    [
        "elastic",
        "elastic.launcher.cli",
        "elastic.store.sqlite",
        "elastic.telemetry",
        "elastic.planning.plan.plan",
    ],
)
def test_command_line_starts_without_heavy_packages(module: str) -> None:
    assert not loaded_by(f"import {module}").intersection(HEAVY)


@pytest.mark.parametrize(
    "module", ["elastic.rpc.control.client", "elastic.rpc.control.server", "elastic.rpc.frames"]
)
def test_rpc_needs_no_torch(module: str) -> None:
    assert not loaded_by(f"import {module}").intersection({"torch", "numpy", "megatron"})


def test_public_names() -> None:
    import elastic

    assert set(elastic.__all__) >= {"Trainer", "LayerStack", "OptimizerSpec"}
    for name in elastic.__all__:
        assert getattr(elastic, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = elastic.nonsense


def test_layers() -> None:
    """The contracts of pyproject.toml hold."""
    command = "from importlinter.cli import lint_imports_command; lint_imports_command()"
    result = subprocess.run(
        [sys.executable, "-c", command, "--no-cache"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
    )
    assert result.returncode == 0, result.stdout + result.stderr
