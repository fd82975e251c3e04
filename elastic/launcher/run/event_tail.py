"""Following the files that the coordinator writes: whole JSON lines, as they come."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Follower:
    """Reads a growing JSON-lines file from its beginning. A torn last line is read once it is whole."""

    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._rest = path, 0, b""

    def read(self) -> list[dict[str, Any]]:
        """Objects that were completed since the last call; lines that are not JSON objects are passed
        over."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        self._offset += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [value for line in lines if isinstance(value := _value(line), dict)]


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in `path`, or None while there is none."""
    try:
        value = _value(path.read_bytes())
    except OSError:
        return None
    return value if isinstance(value, dict) else None


def _value(text: bytes) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
