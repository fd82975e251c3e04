"""Freezes a sample of each message and of the saved state, as this version writes them.

    python -m tests.rpc.frozen.make

Run this after a new kind of message. Samples that are frozen already stay as they are, because
versions are in use that write them. `PROTOCOL` grows by one with a change of a release; then the
script begins a new file. A sample has every field, and no field has its default.
"""

from __future__ import annotations

import dataclasses
import json
import types
import typing
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

from elastic.core.job.state import JobState
from elastic.core.protocol.version import PROTOCOL
from elastic.domain import codec
from elastic.rpc.bulk.transfer import REQUESTS, Reply
from elastic.rpc.control.envelope import KINDS
from elastic.store.checkpoint_format import CheckpointFile, Manifest

FOLDER = Path(__file__).parent


def sample(kind: Any, path: tuple[Any, ...] = ()) -> Any:
    """Return plain data of this type with all fields. `path`: the dataclasses around it."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return sample(args[0], path)
    if origin in (types.UnionType, typing.Union):
        return sample(next(arg for arg in args if arg is not types.NoneType), path)
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        inside = (*path, kind)
        return {f.name: _field(hints[f.name], inside) for f in dataclasses.fields(kind)}
    if origin is dict:
        return {str(sample(args[0], path)): sample(args[1], path)}
    if origin is tuple and args[-1] is not Ellipsis:
        return [sample(arg, path) for arg in args]
    if origin in (tuple, list, frozenset):
        return [sample(args[0], path)]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return list(kind)[-1].value
    plain = {bool: True, int: 3, float: 0.5, str: "text", Any: {"text": [3]}}
    return plain[kind]


def _field(kind: Any, path: tuple[Any, ...]) -> Any:
    """Return the sample of a field; "nothing" where a dataclass contains itself."""
    for arg in typing.get_args(kind):
        if arg in path:
            return [] if typing.get_origin(kind) is tuple else None
    return sample(kind, path)


def kinds() -> dict[str, Any]:
    """Return all kinds of messages, requests to a vault, and what is saved, by name."""
    saved = {kind.__name__: kind for kind in (JobState, Manifest, CheckpointFile)}
    return {**KINDS, **REQUESTS, "Reply": Reply, **saved}


def enumerations(kind: Any, found: dict[str, list[str]], seen: set[Any]) -> dict[str, list[str]]:
    """Add the values of all enumerations inside `kind` to `found`, by name."""
    if kind in seen:
        return found
    seen.add(kind)
    if isinstance(kind, type) and issubclass(kind, Enum):
        found[kind.__name__] = [str(member.value) for member in kind]
    if dataclasses.is_dataclass(kind):
        for hint in typing.get_type_hints(kind).values():
            enumerations(hint, found, seen)
    for arg in typing.get_args(kind):
        enumerations(arg, found, seen)
    return found


def frozen(number: int) -> dict[str, Any]:
    """Return the file of this protocol: samples by kind, values of enumerations by name."""
    path = FOLDER / f"protocol-{number}.json"
    empty: dict[str, Any] = {"samples": {}, "enumerations": {}}
    return dict(json.loads(path.read_text())) if path.exists() else empty


def freeze(number: int, out: Callable[[str], object]) -> None:
    """Add what the file of this protocol lacks."""
    file = frozen(number)
    for name, kind in sorted(kinds().items()):
        if name not in file["samples"]:
            value = codec.decode(kind, sample(kind))
            file["samples"][name] = codec.encode(value)
            out(f"{name} is frozen")
        enumerations(kind, file["enumerations"], set())
    text = json.dumps(file, indent=1, sort_keys=True) + "\n"
    (FOLDER / f"protocol-{number}.json").write_text(text)


if __name__ == "__main__":
    freeze(PROTOCOL, print)
