"""Reads the free space of the disks of a node. A disk that hangs delays nobody for long."""

from __future__ import annotations

import logging
import re
import shutil
import socket
from collections.abc import Sequence
from pathlib import Path

import psutil

from elastic.background import BackgroundReading
from elastic.core.protocol.health_report import MAX_TEXT_LENGTH, DiskSpace

log = logging.getLogger(__name__)
NETWORK_FILE_SYSTEM = re.compile(r"nfs|cifs|smb3|lustre|ceph|gpfs|beegfs|glusterfs|9p|afs|fuse\.")
"""Beginnings of the types of file systems that several machines share."""


class Disks:
    """Reads the space of directories on a thread of its own. A directory that cannot be read keeps
    its newest known value; the others are not affected by an error, but by a hang."""

    def __init__(self, directories: Sequence[tuple[str, Path]]) -> None:
        """`directories`: (role, path) of each directory."""
        self._directories = directories
        self._known: dict[str, DiskSpace] = {}
        self._problems: dict[str, str] = {}
        self._reading = BackgroundReading("disks", self._read, None)

    def read(self) -> tuple[DiskSpace, ...]:
        """Return the newest known space of each directory that was ever read."""
        self._reading.read()
        known = dict(self._known)
        return tuple(known[role] for role, _ in self._directories if role in known)

    def _read(self) -> None:
        for role, path in self._directories:
            problem = ""
            try:
                self._known[role] = disk_of(role, path)
            except Exception as error:  # noqa: BLE001 - the other directories are read anyway
                problem = f"{path}: {error!r}"
            if problem and problem != self._problems.get(role):
                log.warning("the space of a disk cannot be read: %s", problem)
            self._problems[role] = problem


def nearest_parent(path: Path) -> Path:
    """Return `path` if it exists, else its nearest parent that exists."""
    return next((one for one in (path, *path.parents) if one.exists()), path)


def disk_of(role: str, path: Path) -> DiskSpace:
    """Return the space of the file system of `path`, which need not exist yet. Raises OSError."""
    existing = nearest_parent(path)
    usage = shutil.disk_usage(existing)
    return DiskSpace(role, str(path)[:MAX_TEXT_LENGTH], usage.free, usage.total, volume(existing))


def volume(path: Path) -> str:
    """Return a text that identifies the file system of `path`, equal on all machines that share it:
    the mounted source, or host name and device number if the file system is local."""
    mounts = [
        p for p in psutil.disk_partitions(all=True) if path.resolve().is_relative_to(p.mountpoint)
    ]
    mount = max(mounts, key=lambda p: len(p.mountpoint), default=None)
    if mount is not None and NETWORK_FILE_SYSTEM.match(mount.fstype):
        return mount.device[:MAX_TEXT_LENGTH]
    return f"{socket.gethostname()}:{path.stat().st_dev}"
