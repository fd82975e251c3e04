"""Directories of a run: claimed, never overwritten, and the shared memory cleaned up behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
from pathlib import Path

from elastic.config import JobConfig
from elastic.errors import FieldError
from elastic.launcher.guarding import TOKEN_VARIABLE
from elastic.launcher.options import LOOPBACK, Request
from elastic.rpc.security import TOKEN_FILE, write_token
from elastic.store.slots import remove_fallbacks

KEPT = ("checkpoints", "launcher.lock")
"""What stays in place when a run directory is used again."""


class RunDir:
    """A run directory while its launcher lives: created, locked, configured. `close` removes the memory
    directory."""

    def __init__(self, request: Request) -> None:
        """Raises FieldError when another launcher uses the directory."""
        self.path = Path(request.config.run_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = _lock(self.path / "launcher.lock")
        if self._lock is None:
            raise FieldError("--run-dir", str(self.path), "a run is going on in it; give another")
        (self.path / TOKEN_FILE).unlink(missing_ok=True)  # of a launcher that was killed
        if request.in_place:
            _move_aside(self.path)
        (self.path / "logs").mkdir(exist_ok=True)
        self.config = _with_port(request)
        self.config.save()
        if request.guard.token:
            write_token(self.path / TOKEN_FILE, request.guard.token)
        os.environ.pop(TOKEN_VARIABLE, None)  # not for the children's environment
        self._memory = Path(self.config.memory_dir)
        _sweep(self._memory.parent)
        self._memory_lock = _make_memory(self._memory)
        _point_latest(self.path)

    def close(self) -> None:
        """Remove what lies in memory, and the join token, and let go of the directory."""
        (self.path / TOKEN_FILE).unlink(missing_ok=True)
        shutil.rmtree(self._memory, ignore_errors=True)
        remove_fallbacks(self._memory)
        for lock in (self._memory_lock, self._lock):
            if lock is not None:
                os.close(lock)


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port that nobody uses now."""
    with socket.socket() as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def _with_port(request: Request) -> JobConfig:
    """The configuration with a MASTER_PORT for the workers' own rendezvous."""
    config = request.config
    return config if config.master_port else config.of(master_port=free_port(""))


def _lock(path: Path) -> int | None:
    """An exclusive lock that the kernel lets go when this process ends; None if somebody has it."""
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        return None
    return descriptor


def _move_aside(path: Path) -> None:
    """Put what an earlier run left into attempt-N, so that nothing is overwritten."""
    earlier = [
        entry for entry in path.iterdir() if entry.name not in KEPT and not entry.name.startswith("attempt-")
    ]
    number = 1
    while (path / f"attempt-{number}").exists():
        number += 1
    (path / f"attempt-{number}").mkdir()
    for entry in earlier:
        entry.rename(path / f"attempt-{number}" / entry.name)


def _make_memory(path: Path) -> int | None:
    """Create the memory directory under its name once it is locked, so that nobody sweeps it; return the
    lock."""
    draft = path.with_name(f".{path.name}")
    draft.mkdir(mode=0o700)
    lock = _lock(draft / ".lock")
    draft.rename(path)
    return lock


def _sweep(root: Path) -> None:
    """Remove memory directories whose launcher was killed: nobody holds their lock any more."""
    for folder in root.glob("elastic-*/"):
        with contextlib.suppress(OSError):  # somebody else's, or being removed right now
            if (folder / ".lock").exists() and (lock := _lock(folder / ".lock")) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(lock)


def _point_latest(path: Path) -> None:
    """Make `latest`, next to the run directory, a link to it; a real file of that name is left alone."""
    link = path.parent / "latest"
    if path.parent.name != "runs" or (link.exists() and not link.is_symlink()):
        return
    draft = path.parent / f".latest-{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(path.name)
    os.replace(draft, link)
