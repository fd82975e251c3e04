"""Dataclasses to plain JSON values and back, checked against their annotations.

One codec serves the wire, the store and the event log. Decoding refuses unknown and missing fields and wrong
types with a `FieldError` that names the path, so that a malformed message is a clear error, never half a value.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import types
import typing
from enum import Enum
from typing import Any, TypeVar

from elastic.domain.errors import FieldError

T = TypeVar("T")
_newest: dict[Any, tuple[Any, Any]] = {}
"""Of kinds that say `everywhere_the_same`, which come from thousands of nodes: the newest, raw and decoded."""
_PLAIN = frozenset({str, int, float, bool, type(None)})


def encode(value: Any) -> Any:
    """Return `value` as JSON-compatible data. Sets become sorted lists; fields at their default are kept."""
    kind: type = type(value)
    if kind in _PLAIN:
        return value
    names = _names(kind)
    if names is not None:
        return {n: v if type(v) in _PLAIN else encode(v) for n in names for v in (getattr(value, n),)}
    if isinstance(value, (frozenset, set)):
        return [encode(v) for v in sorted(value)]
    if isinstance(value, (tuple, list)):
        return [encode(v) for v in value]
    if isinstance(value, dict):
        return {str(k): encode(v) for k, v in value.items()}
    if isinstance(value, Enum):
        return value.value
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise TypeError(f"cannot encode {type(value).__name__}")


def decode(kind: type[T], data: Any, path: str = "") -> T:
    """Return `data` as a `kind`. Raises FieldError naming the path of the first value that does not fit."""
    path = path or getattr(kind, "__name__", "value")
    try:
        return typing.cast(T, _decode(kind, data, path))
    except RecursionError:
        raise FieldError(path, "...", "it is nested too deeply") from None


def dumps(value: Any) -> str:
    return json.dumps(encode(value), separators=(",", ":"), allow_nan=True)


def loads(kind: type[T], text: str | bytes) -> T:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(kind.__name__, text[:80], f"not JSON: {error}") from error
    return decode(kind, data)


@functools.cache
def _names(kind: type) -> tuple[str, ...] | None:
    """Fields of a dataclass; None: it is none."""
    return tuple(f.name for f in dataclasses.fields(kind)) if dataclasses.is_dataclass(kind) else None


@functools.cache
def _known(kind: type) -> frozenset[str]:
    return frozenset(_names(kind) or ())


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, Any, bool], ...]:
    hints = typing.get_type_hints(kind)
    return tuple(
        (
            f.name,
            hints[f.name],
            f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING,
        )
        for f in dataclasses.fields(kind)
    )


def _decode(kind: Any, data: Any, path: str) -> Any:
    if kind is Any or (type(data) is kind and kind in _PLAIN):
        return data
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        return _union(typing.get_args(kind), data, path)
    if origin is not None:
        return _container(origin, typing.get_args(kind), data, path)
    if dataclasses.is_dataclass(kind):
        return _dataclass(typing.cast(type, kind), data, path)
    if isinstance(kind, type) and issubclass(kind, Enum):
        try:
            return kind(data)
        except ValueError as error:
            raise FieldError(path, data, f"one of {', '.join(str(m.value) for m in kind)}") from error
    return _scalar(kind, data, path)


def _dataclass(kind: type, data: Any, path: str) -> Any:
    if not isinstance(data, dict):
        raise FieldError(path, data, "an object is needed")
    newest = _newest.get(kind)
    if newest is not None and newest[0] == data:
        return newest[1]
    if not _known(kind).issuperset(data):
        unknown = min(set(data) - _known(kind))
        raise FieldError(f"{path}.{unknown}", data[unknown], "unknown field")
    values = {}
    for name, hint, required in _fields(kind):
        if name in data:
            value = data[name]
            plain = type(value) is hint and hint in _PLAIN
            values[name] = value if plain else _decode(hint, value, f"{path}.{name}")
        elif required:
            raise FieldError(f"{path}.{name}", None, "missing field")
    value = kind(**values)
    if getattr(kind, "everywhere_the_same", False):
        _newest[kind] = (data, value)
    return value


def _union(options: tuple[Any, ...], data: Any, path: str) -> Any:
    if data is None and type(None) in options:
        return None
    rest = [option for option in options if option is not type(None)]
    if len(rest) != 1:
        raise TypeError(f"{path}: only optional unions can be decoded")
    return _decode(rest[0], data, path)


def _container(origin: Any, args: tuple[Any, ...], data: Any, path: str) -> Any:
    if origin is dict:
        if not isinstance(data, dict):
            raise FieldError(path, data, "an object is needed")
        return {_key(args[0], k, path): _decode(args[1], v, f"{path}.{k}") for k, v in data.items()}
    if not isinstance(data, list):
        raise FieldError(path, data, "a list is needed")
    if origin is tuple and not (len(args) == 2 and args[1] is Ellipsis):
        if len(args) != len(data):
            raise FieldError(path, data, f"a list of {len(args)} is needed")
        return tuple(_decode(a, v, f"{path}[{i}]") for i, (a, v) in enumerate(zip(args, data, strict=True)))
    items = (_decode(args[0], v, f"{path}[{i}]") for i, v in enumerate(data))
    if origin in (tuple, frozenset, list):
        return origin(items)
    raise TypeError(f"{path}: cannot decode {origin}")


def _key(kind: Any, text: str, path: str) -> Any:
    """A key of a JSON object as the integer or text that it stands for."""
    if kind is not int:
        return text
    try:
        return int(text)
    except ValueError as error:
        raise FieldError(f"{path}.{text}", text, "an integer key is needed") from error


def _scalar(kind: Any, data: Any, path: str) -> Any:
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        try:
            return float(data)
        except OverflowError as error:
            raise FieldError(path, data, "a number that a float can hold is needed") from error
    if kind is int and isinstance(data, bool):
        raise FieldError(path, data, "an integer is needed")
    if isinstance(data, kind):
        return data
    if kind is float and data is None:
        return math.nan
    raise FieldError(path, data, f"{getattr(kind, '__name__', kind)} is needed")
