"""Readers of the files that the coordinator writes: growing JSON lines, and objects."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Follower:
    """Reader of a growing file of JSON lines. An incomplete last line is kept until it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def read(self) -> list[dict[str, Any]]:
        """Return the objects of lines that ended since the last call. Other lines are skipped.

        A file that cannot be read now is read on by a later call.
        """
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except OSError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [value for line in lines if (value := _object(line)) is not None]


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in the file `path`; None if it has none or cannot be read."""
    try:
        return _object(path.read_bytes())
    except OSError:
        return None


def _object(text: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
