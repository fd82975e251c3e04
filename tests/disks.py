"""Disks that are really full."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[None]:
    """A file system of that size at `path`; needs to be allowed to mount."""
    path.mkdir()
    if os.geteuid() != 0 or shutil.which("mount") is None:
        pytest.skip(
            "only root may mount a small disk; tests/vault has the same with a limit on files"
        )
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", path], check=False
    )
    if made.returncode:
        pytest.skip("mounting is not allowed here; tests/vault has the same with a limit on files")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", path], check=True)


def fill(folder: Path) -> Path:
    """Take all room there is; return the file that takes it."""
    filler = folder / "filler"
    with filler.open("wb", buffering=0) as file:
        for size in (1 << 16, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                pass
    return filler
