"""The run directory of a launcher: locked while in use; results of earlier runs are kept."""

from __future__ import annotations

import contextlib
import fcntl
import math
import os
import random
import shutil
import socket
import sys
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path

from elastic.command_line import file_errors, make_folder
from elastic.config import JobConfig, is_url
from elastic.domain.errors import FieldError, UsageError
from elastic.launcher.flags.request import LOOPBACK, Request
from elastic.launcher.flags.slow_storage import HANGING_S, OBJECTS_S, ends_in_time
from elastic.launcher.flags.validators import PRIVATE_CERTS, TOKEN_VARIABLE
from elastic.rpc.security.tls import TOKEN_FILE, write_token
from elastic.store.checkpoints import probe
from elastic.store.shared_memory import remove_fallbacks

KEPT = ("checkpoints", "launcher.lock")
"""Entries that are not moved when a run directory is used again."""
LAUNCHER_EXIT = "launcher-exit.json"
"""Code and reason of a launcher that ended otherwise than exit.json tells."""
PORTS, ATTEMPTS = range(20_000, 32_000), 100
"""Ports of services without a given port, and how many of them to try."""
_RESERVED: list[socket.socket] = []
"""Sockets whose names reserve the ports that this process has chosen."""


class RunDir:
    """A run directory that its launcher uses: created, locked, with config.json."""

    def __init__(self, request: Request) -> None:
        """Create and lock the directory.

        Raises FieldError if another launcher uses it, or if a directory of the job cannot be
        written.
        """
        self.path = Path(request.config.run_dir)
        _make_folders(request.config)
        with file_errors("--run-dir", self.path):
            self._prepare(request)
        self._memory = Path(self.config.memory_dir)
        with file_errors("shared memory", self._memory.parent):
            remove_stale(self._memory.parent.glob("elastic-*/"), ".lock")
            self._memory_lock = _make_memory(self._memory)

    def _prepare(self, request: Request) -> None:
        """Lock the directory, move an earlier run aside, and write the files of this one."""
        self._lock = locked(self.path / "launcher.lock")
        if self._lock is None:
            raise FieldError("--run-dir", str(self.path), "a run is using it; give another")
        os.ftruncate(self._lock, 0)
        os.pwrite(self._lock, f"{os.getpid()}\n".encode(), 0)
        (self.path / TOKEN_FILE).unlink(missing_ok=True)  # left by a launcher that was killed
        shutil.rmtree(self.path / PRIVATE_CERTS, ignore_errors=True)
        if request.in_place:
            _move_aside(self.path)
        (self.path / "logs").mkdir(exist_ok=True)
        port = request.config.master_port or free_port("")  # for the workers' own rendezvous
        self.config = request.config.of(master_port=port)
        self.config.save()
        if request.guard.token:
            write_token(self.path / TOKEN_FILE, request.guard.token)
        self._private = request.guard.private
        if self._private:
            from elastic.launcher.flags.certs import make_private

            make_private(self.path / PRIVATE_CERTS, self.config.certs_name)
        os.environ.pop(TOKEN_VARIABLE, None)  # children must not inherit it
        _point_latest(self.path)

    def close(self) -> None:
        """Remove the memory directory, join token and private certificates; release the lock."""
        (self.path / TOKEN_FILE).unlink(missing_ok=True)
        if self._private:
            shutil.rmtree(self.path / PRIVATE_CERTS, ignore_errors=True)
        shutil.rmtree(self._memory, ignore_errors=True)
        remove_fallbacks(self._memory)
        for lock in (self._memory_lock, self._lock):
            if lock is not None:
                os.close(lock)


def launcher_of(path: Path) -> int | None:
    """Return the process id of the launcher that uses this run directory; None: none does."""
    with contextlib.suppress(FileNotFoundError):
        if (lock := locked(path / "launcher.lock", create=False)) is None:
            text = (path / "launcher.lock").read_text().strip()
            return int(text) if text.isdigit() else None
        os.close(lock)
    return None


def free_port(host: str = LOOPBACK) -> int:
    """Return a free TCP port below the range from which systems take ports of outgoing connections.

    That range begins at 32768 (Linux) or 49152 (IANA), so no connection takes the port while its
    service starts or restarts. No other launcher on this machine takes it either until this process
    ends. Raises UsageError if no port is found.
    """
    for port in random.sample(PORTS, min(ATTEMPTS, len(PORTS))):
        with socket.socket() as sock, contextlib.suppress(OSError):
            sock.bind((host, port))
            _reserve(port)
            return port
    ports = f"from {PORTS.start} to {PORTS.stop - 1}"
    raise UsageError(f"no free TCP port was found {ports} on {host or 'this machine'}")


def _reserve(port: int) -> None:
    """Reserve a port among launchers of this machine, by a name that the system frees when this
    process ends. Raises OSError if another one has reserved it."""
    if sys.platform == "linux":  # other systems have no such names
        sock = socket.socket(socket.AF_UNIX)
        try:
            sock.bind(f"\0elastic-port-{port}")
        except OSError:
            sock.close()
            raise
        _RESERVED.append(sock)


def locked(path: Path, *, create: bool = True) -> int | None:
    """Lock a file until this process ends; return its descriptor, or None if another has the lock.

    With `create` False, the file must exist, and its path must still lead to it: who cleans up may
    find a directory that its owner is removing. Raises OSError.
    """
    descriptor = os.open(path, os.O_CREAT * create | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if create or os.path.samestat(os.fstat(descriptor), os.stat(path)):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    os.close(descriptor)  # another process has the lock, or the path is another file now
    return None


def _make_folders(config: JobConfig) -> None:
    """Create the directories of the job that its user named, the run directory last.

    A full disk of checkpoints is no error: training goes on without new ones, with a warning.
    Storage that hangs is left to the pre-flight.
    """
    run_dir, checkpoints = Path(config.run_dir), config.checkpoint_dir
    if is_url(checkpoints):
        check = partial(check_objects, "--checkpoint-dir", checkpoints)
        ends_in_time(check, OBJECTS_S, checkpoints)
    elif not Path(checkpoints).is_relative_to(run_dir):
        make = partial(make_folder, "--checkpoint-dir", Path(checkpoints), may_be_full=True)
        ends_in_time(make, HANGING_S, checkpoints)
    if not Path(config.log_dir).is_relative_to(run_dir):
        make_folder("--log-dir", Path(config.log_dir))
    make_folder("--run-dir", run_dir)


def check_objects(flag: str, url: str) -> None:
    """Raises FieldError if nothing can be written to an object store."""
    try:
        probe(url)
    except OSError as error:
        text = f"it cannot be written: {error}; check bucket, credentials and endpoint"
        raise FieldError(flag, url, text) from error


def _move_aside(path: Path) -> None:
    """Move the files of an earlier run into attempt-N."""
    earlier = [
        entry
        for entry in path.iterdir()
        if entry.name not in KEPT and not entry.name.startswith("attempt-")
    ]
    number = 1
    while (path / f"attempt-{number}").exists():
        number += 1
    (path / f"attempt-{number}").mkdir()
    for entry in earlier:
        entry.rename(path / f"attempt-{number}" / entry.name)


def _make_memory(path: Path) -> int | None:
    """Create the memory directory, which gets its name once it is locked. Return the lock."""
    draft = path.with_name(f".{path.name}")
    draft.mkdir(mode=0o700)
    lock = locked(draft / ".lock")
    draft.rename(path)
    return lock


def remove_stale(folders: Iterable[Path], lock_name: str, min_age_s: float = -math.inf) -> None:
    """Remove directories that no launcher has locked: their launchers were killed.

    Directories with a lock file younger than `min_age_s` stay: a launcher may be about to lock
    them.
    """
    for folder in folders:
        with contextlib.suppress(OSError):  # another user's, or being removed
            lock = folder / lock_name
            old = time.time() - lock.stat().st_mtime >= min_age_s
            if old and (held := locked(lock, create=False)) is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(held)


def _point_latest(path: Path) -> None:
    """Make runs/latest a link to the run directory, unless a real file has that name."""
    link = path.parent / "latest"
    if path.parent.name != "runs" or (link.exists() and not link.is_symlink()):
        return
    draft = path.parent / f".latest-{os.getpid()}"
    draft.unlink(missing_ok=True)
    draft.symlink_to(path.name)
    os.replace(draft, link)
