"""Text as one sequence of bytes: a file, or the files of a folder, memory-mapped."""

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
"""Maximum number of files that are mapped at a time."""


class ByteCorpus:
    """Bytes of a file or folder; `None` means the sources of the Python standard library.

    A folder contributes its regular files in path order, without hidden files. Links to folders are
    not followed. Raises FieldError("data", ...) if there is nothing to read.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        if path == "":
            raise FieldError("data", path, "name a file or folder of text")
        self.path = Path(path) if path is not None else Path(sysconfig.get_path("stdlib"))
        found = _standard_library(self.path) if path is None else _files(self.path)
        sized = [(file, size) for file, size in found if size]
        self._files = [file for file, _ in sized]
        self._starts = list(accumulate((size for _, size in sized), initial=0))
        if not self._files:
            remedy = "there is no text in it; name a file or folder with some"
            raise FieldError("data", str(self.path), remedy)
        self._map = lru_cache(MAPPED_FILES)(self._open)

    def __len__(self) -> int:
        return self._starts[-1]

    def read(self, start: int, count: int) -> bytes:
        """Return bytes [start, start + count). IndexError if the range is not in the corpus."""
        if not 0 <= start <= start + count <= len(self):
            raise IndexError(f"bytes {start} to {start + count} of {len(self)}")
        parts, at, end = [], start, start + count
        index = bisect.bisect_right(self._starts, start) - 1
        while at < end:
            base, stop = self._starts[index], min(end, self._starts[index + 1])
            parts.append(self._map(index)[at - base : stop - base])
            at, index = stop, index + 1
        return b"".join(parts)

    def need(self, count: int) -> None:
        """Raise FieldError unless the corpus has at least `count` bytes."""
        if len(self) < count:
            remedy = f"it has {len(self)} bytes and a sequence needs {count}; give more text"
            raise FieldError("data", str(self.path), remedy)

    def _open(self, index: int) -> mmap.mmap:
        path, size = self._files[index], self._starts[index + 1] - self._starts[index]
        try:
            with open(path, "rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise FieldError("data", path, f"cannot be read any more: {error}") from error
        if len(mapped) < size:
            remedy = f"shrank from {size} to {len(mapped)} bytes since the start"
            raise FieldError("data", path, remedy)
        return mapped


def _standard_library(root: Path) -> list[tuple[str, int]]:
    found = _walk(root, skip=("site-packages", "dist-packages"))
    return [(file, size) for file, size in found if file.endswith(".py")]


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
        remedy = f"{reason}; name a readable file or folder of text"
        raise FieldError("data", str(path), remedy) from error


def _walk(root: Path, skip: tuple[str, ...]) -> list[tuple[str, int]]:
    """Return (path, size) of the regular, visible files below `root`, sorted by path."""
    found = []
    for folder, folders, names in os.walk(root, onerror=_refuse):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in skip]
        for name in names:
            file = os.path.join(folder, name)
            if name.startswith(".") or not os.path.isfile(file):
                continue
            if not os.access(file, os.R_OK):
                raise FieldError("data", file, "is not readable; make it readable or move it away")
            found.append((file, os.path.getsize(file)))
    return sorted(found, key=lambda pair: os.fsencode(pair[0]))


def _refuse(error: OSError) -> None:
    raise error
