"""Directories of a run: claimed, never overwritten, and the shared memory cleaned up behind it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import shutil
import socket
from pathlib import Path

from elastic.config import JobConfig
from elastic.domain.errors import FieldError, UsageError
from elastic.launcher.flags.certs import make_private
from elastic.launcher.flags.guarding import PRIVATE, TOKEN_VARIABLE
from elastic.launcher.flags.request import LOOPBACK, Request
from elastic.rpc.security.tls import TOKEN_FILE, write_token
from elastic.store.shared_memory import remove_fallbacks

KEPT = ("checkpoints", "launcher.lock")
"""What stays in place when a run directory is used again."""
PORTS, ATTEMPTS = range(20_000, 32_000), 100
"""Where services of ours listen that were given no port; how many of them are tried."""


class RunDir:
    """A run directory while its launcher lives: created, locked, configured. `close` removes the memory
    directory."""

    def __init__(self, request: Request) -> None:
        """Raises FieldError when another launcher uses the directory."""
        self.path = Path(request.config.run_dir)
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = locked(self.path / "launcher.lock")
        if self._lock is None:
            raise FieldError("--run-dir", str(self.path), "a run is going on in it; give another")
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        (self.path / TOKEN_FILE).unlink(missing_ok=True)  # of a launcher that was killed
        shutil.rmtree(self.path / PRIVATE, ignore_errors=True)
        if request.in_place:
            _move_aside(self.path)
        (self.path / "logs").mkdir(exist_ok=True)
        self.config = _with_port(request)
        self.config.save()
        if request.guard.token:
            write_token(self.path / TOKEN_FILE, request.guard.token)
        self.private = request.guard.private
        if self.private:
            make_private(self.path / PRIVATE, self.config.certs_name)
        os.environ.pop(TOKEN_VARIABLE, None)  # not for the children's environment
        self._memory = Path(self.config.memory_dir)
        _sweep(self._memory.parent)
        self._memory_lock = _make_memory(self._memory)
        _point_latest(self.path)

    def close(self) -> None:
        """Remove what lies in memory, the join token and certificates of the job's own, and let go of the directory."""
        (self.path / TOKEN_FILE).unlink(missing_ok=True)
        if self.private:
            shutil.rmtree(self.path / PRIVATE, ignore_errors=True)
        shutil.rmtree(self._memory, ignore_errors=True)
        remove_fallbacks(self._memory)
        for lock in (self._memory_lock, self._lock):
            if lock is not None:
                os.close(lock)


def launcher_of(path: Path) -> int | None:
    """Process id of the launcher that uses this run directory; None: nobody does."""
    try:
        descriptor = os.open(path / "launcher.lock", os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = os.pread(descriptor, 32, 0).strip()
        return int(text) if text.isdigit() else None
    finally:
        os.close(descriptor)
    return None


def free_port(host: str = LOOPBACK) -> int:
    """A TCP port that nobody uses now, and that no outgoing connection takes while its service is down.

    Systems give outgoing connections ports from 32768 up (Linux) or 49152 (IANA). Raises UsageError.
    """
    for port in random.sample(PORTS, ATTEMPTS):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((host, port))
            return port
    raise UsageError(
        f"no free TCP port was found from {PORTS.start} to {PORTS.stop - 1} on {host or 'this machine'}"
    )


def _with_port(request: Request) -> JobConfig:
    """The configuration with a MASTER_PORT for the workers' own rendezvous."""
    config = request.config
    return config if config.master_port else config.of(master_port=free_port(""))


def locked(path: Path, *, make: bool = True) -> int | None:
    """An exclusive lock that the kernel lets go when this process ends; None if somebody has it. Who only cleans up
    must not `make` the file: its owner may be removing the directory just now. Raises OSError."""
    descriptor = os.open(path, os.O_CREAT * make | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if make or os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)  # somebody has it, or another file has its name now
    return None


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
    lock = locked(draft / ".lock")
    draft.rename(path)
    return lock


def _sweep(root: Path) -> None:
    """Remove memory directories whose launcher was killed: nobody holds their lock any more."""
    for folder in root.glob("elastic-*/"):
        with contextlib.suppress(OSError):  # somebody else's, or being removed right now
            if (lock := locked(folder / ".lock", make=False)) is not None:
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
