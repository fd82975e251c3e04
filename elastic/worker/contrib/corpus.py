"""Text as one long run of bytes: a file, or a folder's files end to end, mapped and never copied whole."""

from __future__ import annotations

import bisect
import mmap
import os
import stat
import sysconfig
from functools import lru_cache
from itertools import accumulate
from pathlib import Path

from elastic.domain.errors import FieldError

MAPPED_FILES = 128
"""Files that stay mapped at a time."""


class ByteCorpus:
    """Bytes of a file or folder; `None` stands for the Python standard library's own sources.

    A folder's regular files count, in the order of their paths below it; hidden ones do not, and links to
    folders are not followed. Raises FieldError("data", ...) if there is nothing to read.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path == "":
            raise FieldError("data", path, "name a file or folder of text")
        self.path = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
        found = list(_sources(self.path)) if path is None else list(_files(self.path))
        sized = [(file, size) for file, size in found if size]
        self._files = [file for file, _ in sized]
        self._ends = list(accumulate(size for _, size in sized))
        if not self._files:
            raise FieldError(
                "data", str(self.path), "there is no text in it; name a file or folder with some"
            )
        self._map = lru_cache(MAPPED_FILES)(self._open)

    def __len__(self) -> int:
        return self._ends[-1]

    def read(self, start: int, count: int) -> bytes:
        """Return bytes [start, start + count); the range must lie inside the corpus."""
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"bytes {start} to {start + count} of {len(self)}")
        parts, at, end = [], start, start + count
        index = bisect.bisect_right(self._ends, start)
        while at < end:
            base = self._ends[index - 1] if index else 0
            stop = min(end, self._ends[index])
            parts.append(self._map(index)[at - base : stop - base])
            at, index = stop, index + 1
        return b"".join(parts)

    def need(self, count: int) -> None:
        """Raise FieldError unless the corpus has at least `count` bytes."""
        if len(self) < count:
            raise FieldError(
                "data",
                str(self.path),
                f"it has {len(self)} bytes and a sequence needs {count}; give more text",
            )

    def _open(self, index: int) -> mmap.mmap:
        path = self._files[index]
        size = self._ends[index] - (self._ends[index - 1] if index else 0)
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise FieldError("data", path, f"cannot be read any more: {error}") from error
        if len(mapped) < size:
            raise FieldError("data", path, f"shrank from {size} to {len(mapped)} bytes since the start")
        return mapped


def _sources(root: Path) -> list[tuple[str, int]]:
    return [(f, n) for f, n in _walk(root, skip=("site-packages", "dist-packages")) if f.endswith(".py")]


def _files(path: Path) -> list[tuple[str, int]]:
    try:
        info = path.stat()
        if stat.S_ISREG(info.st_mode):
            with open(path, "rb"):
                return [(str(path), info.st_size)]
        if not stat.S_ISDIR(info.st_mode):
            raise FieldError("data", str(path), "neither a file nor a folder")
        return _walk(path, skip=())
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise FieldError("data", str(path), f"{reason}; name a readable file or folder of text") from error


def _walk(root: Path, skip: tuple[str, ...]) -> list[tuple[str, int]]:
    """Regular, readable, not hidden files below `root`, with sizes, by path."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        for name in names:
            file = os.path.join(folder, name)
            if name.startswith(".") or not os.path.isfile(file):
                continue
            if not os.access(file, os.R_OK):
                raise FieldError("data", file, "may not be read; make it readable or move it away")
            found.append((file, os.path.getsize(file)))
    return sorted(found, key=lambda pair: os.fsencode(pair[0]))


def _refuse(error: OSError) -> None:
    raise error
