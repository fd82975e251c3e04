"""Compression benchmark on small data: codecs are lossless, and the chosen one shrinks copies."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.backup.compression import CHOSEN, shuffled, unshuffled

ROOT = Path(__file__).resolve().parents[2]


def test_a_small_part_of_everything() -> None:
    """In a process of its own: megatron's groups are a whole process's."""
    command = [sys.executable, "-m", "benchmarks.backup.compression", "--quick"]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=True
    )
    values = {
        name: float(text.split()[0]) for name, _, text in map(_split, done.stdout.splitlines())
    }
    assert all(value >= 0 for value in values.values())
    for copy in ("gradient, exact", "gradient, fast"):
        assert values[f"{copy}: {CHOSEN}, ratio"] > 1.5
    assert any(name.startswith("state, bf16, XOR") for name in values)


def _split(line: str) -> tuple[str, str, str]:
    return line.rpartition(": ")


@pytest.mark.parametrize("nbytes", [0, 7, 8, 4096, 4099])
def test_shuffling_is_undone(nbytes: int) -> None:
    data = bytes(i % 251 for i in range(nbytes))
    assert unshuffled(shuffled(memoryview(data))) == data
