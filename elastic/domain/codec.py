"""Conversion between frozen dataclasses and plain JSON values, by msgspec.

The store, the event log, configuration files and local frames use this form. Network messages use
MessagePack (`elastic.rpc.control.envelope`) and the same checks. Decoding refuses unknown fields,
missing fields and wrong types with a `FieldError` that names the path of the field.

Messages and saved state may come from the next or the former version
(`elastic.core.protocol.version`). They are decoded with `newer=True`: unknown fields are ignored.
Fields that are missing have their defaults in both modes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import threading
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from elastic.domain.errors import FieldError

T = TypeVar("T")
_DESCRIBING = threading.Lock()
_NOTHING = object()
"""A value of no type that is decoded."""


def encode(value: Any) -> Any:
    """Return `value` as JSON-compatible data.

    Sets become sorted lists, so that equal values give equal texts. Dictionaries keep their order.
    Fields at their default are included. Raises TypeError for a type that has no JSON form.
    """
    if isinstance(value, Mapping):
        return {str(key): encode(inner) for key, inner in value.items()}
    kind: Any = type(value)
    names = _names_around_mappings(kind)
    if names is not None:
        return {name: encode(getattr(value, name)) for name in names}
    return msgspec.to_builtins(value, str_keys=True, order="deterministic")


def decode(kind: type[T], data: Any, path: str = "", *, newer: bool = False) -> T:
    """Convert plain `data` to type `kind`.

    Raises FieldError with the path of the first value that does not fit. `path`: name of the whole
    value in errors; "": the name of `kind`. `newer`: ignore fields that `kind` does not have.
    """
    path = path or getattr(kind, "__name__", "value")
    _describe(typing.cast(Any, kind))
    try:
        value = msgspec.convert(data, kind, str_keys=True)
        if not newer:
            _refuse_unknown_fields(kind, data, path)
    except msgspec.ValidationError as error:
        raise _field_error(kind, data, path, str(error)) from error
    except RecursionError:
        raise FieldError(path, "...", "it is nested too deeply") from None
    except UnicodeError as error:
        raise FieldError(path, "...", f"not valid text: {error}") from None
    return value


@functools.cache
def msgpack_decoder(kind: type[T]) -> msgspec.msgpack.Decoder[T]:
    """Return a decoder from MessagePack to `kind`. It ignores unknown fields."""
    _describe(typing.cast(Any, kind))
    with _DESCRIBING:
        return msgspec.msgpack.Decoder(kind)


def dumps(value: Any) -> str:
    """Return `value` as JSON text without spaces.

    Infinity and NaN are written as Python's json does.
    """
    return json.dumps(encode(value), separators=(",", ":"), allow_nan=True)


def loads(kind: type[T], text: str | bytes, *, newer: bool = False) -> T:
    """Convert a JSON text to type `kind`, as `decode` does. Raises FieldError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(kind.__name__, text[:80], f"not JSON: {json_fault(error)}") from error
    return decode(kind, data, newer=newer)


def json_fault(error: Exception) -> str:
    """Return why json.loads refused a text, with the place."""
    if isinstance(error, json.JSONDecodeError):
        if not error.doc.strip():
            return "it is empty"
        fault = error.msg[:1].lower() + error.msg[1:]
        return f"line {error.lineno}, column {error.colno}: {fault}"
    return "it is nested too deeply" if isinstance(error, RecursionError) else str(error)


@functools.cache
def _describe(kind: Any) -> None:
    """Let msgspec collect what it must know of a type, in one thread at a time.

    It does so when it meets a dataclass first, and keeps the description in the class before it is
    complete. A second thread that used it meanwhile ended the process by a segmentation fault.
    """
    with _DESCRIBING, contextlib.suppress(msgspec.ValidationError):
        msgspec.convert(_NOTHING, kind, str_keys=True)


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """Return the annotations of a dataclass by field name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _names_around_mappings(kind: Any) -> tuple[str, ...] | None:
    """Return the field names of a dataclass with a dictionary field; None for every other type.

    Such a dataclass is encoded field by field, because msgspec sorts sets only together with
    dictionaries, and the order of dictionaries must stay.
    """
    if not _is_dataclass(kind):
        return None
    hints = _hints(kind)
    has_mapping = any(typing.get_origin(hint) is dict for hint in hints.values())
    return tuple(hints) if has_mapping else None


@functools.cache
def _without_none(kind: Any) -> Any:
    """Return the type T of `T | None`; any other type unchanged."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return next(arg for arg in typing.get_args(kind) if arg is not types.NoneType)
    return kind


def _parts(kind: Any, data: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (part of the path, type, value) of each value in `data`, which should be a `kind`."""
    origin, args = typing.get_origin(kind), typing.get_args(kind)
    if _is_dataclass(kind) and isinstance(data, dict):
        for name, hint in _hints(kind).items():
            if name in data:
                yield f".{name}", hint, data[name]
    elif origin is dict and isinstance(data, dict):
        for key, value in data.items():
            yield f".{key}", args[1], value
    elif origin in (tuple, list, frozenset) and isinstance(data, (list, tuple)):
        fixed = origin is tuple and args[-1] is not Ellipsis
        for index, value in enumerate(data[: len(args)] if fixed else data):
            yield f"[{index}]", args[index if fixed else 0], value


@functools.cache
def _objects_inside(kind: Any) -> bool:
    """Return whether a value of `kind` can be or contain a dataclass."""
    return _is_dataclass(kind) or any(_objects_inside(arg) for arg in typing.get_args(kind))


@functools.cache
def _nested(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Return (name, type) of a dataclass's fields that can contain other dataclasses."""
    return tuple((name, hint) for name, hint in _hints(kind).items() if _objects_inside(hint))


def _refuse_unknown_fields(kind: Any, data: Any, path: str) -> None:
    """Raise FieldError for a field that its dataclass does not have, because msgspec ignores it.

    msgspec must have accepted `data` as a `kind`.
    """
    kind = _without_none(kind)
    if data is None or not _objects_inside(kind):
        return
    if not _is_dataclass(kind):
        for step, inner, value in _parts(kind, data):
            _refuse_unknown_fields(inner, value, path + step)
    elif not _is_dataclass(data):  # a dataclass in `data` was decoded before
        if not data.keys() <= _hints(kind).keys():
            raise _unknown_field(kind, data, path)
        for name, hint in _nested(kind):
            if data.get(name):
                _refuse_unknown_fields(hint, data[name], f"{path}.{name}")


def _unknown_field(kind: Any, data: dict[Any, Any], path: str) -> FieldError:
    name = min(data.keys() - _hints(kind).keys(), key=str)
    return FieldError(f"{path}.{name}", data[name], "unknown field")


def _field_error(kind: Any, data: Any, path: str, refusal: str) -> FieldError:
    """Return an error about the innermost value that msgspec refuses. `refusal`: msgspec's text."""
    kind = _without_none(kind)
    for step, inner, value in _parts(kind, data):
        text = _refusal(inner, value)
        if text:
            return _field_error(inner, value, path + step, text)
    problem = refusal.partition(" - at ")[0]
    if problem.startswith("Object missing required field"):
        return FieldError(f"{path}.{problem.split('`')[1]}", None, "missing field")
    if problem.startswith("Invalid enum value"):
        return FieldError(path, data, f"one of {', '.join(str(m.value) for m in kind)}")
    problem = problem[:1].lower() + problem[1:]
    if _is_dataclass(kind) and isinstance(data, dict) and data.keys() - _hints(kind).keys():
        return _unknown_field(kind, data, path)  # a name that is not a text
    if typing.get_origin(kind) is dict and isinstance(data, dict):
        wrong = next(key for key, value in data.items() if _refusal(kind, {key: value}))
        return FieldError(f"{path}.{wrong}", wrong, f"{problem} as key")
    return FieldError(path, data, problem)


def _refusal(kind: Any, data: Any) -> str:
    """Return the reason why msgspec refuses `data` as a `kind`; "": msgspec accepts it."""
    try:
        msgspec.convert(data, kind, str_keys=True)
    except msgspec.ValidationError as error:
        return str(error)
    return ""
