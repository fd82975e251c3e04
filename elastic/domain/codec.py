"""Conversion between frozen dataclasses and plain JSON values, by msgspec.

The store, the event log, configuration files and local frames use this form. Network messages use
MessagePack (`elastic.rpc.control.envelope`) and the same checks. Decoding is strict: it refuses
unknown fields, missing fields and wrong types with a `FieldError` that names the path of the field,
so that no message is half read.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec

from elastic.domain.errors import FieldError

T = TypeVar("T")
_WHERE = re.compile(r"^(?P<problem>.*?)(?: - at (?P<key>`key` in )?`\$(?P<path>.*)`)?$", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_MISSING = re.compile(r"^Object missing required field `(.+)`$")


def encode(value: Any) -> Any:
    """Return `value` as JSON-compatible data.

    Sets become sorted lists, so that equal values give equal text. Dictionaries keep their order.
    Fields at their default are kept. Raises TypeError for a type that has no JSON form.
    """
    if isinstance(value, Mapping):
        return {str(key): encode(inner) for key, inner in value.items()}
    kind: Any = type(value)
    names = _names_around_mappings(kind)
    if names is not None:
        return {name: encode(getattr(value, name)) for name in names}
    return msgspec.to_builtins(value, str_keys=True, order="deterministic")


def decode(kind: type[T], data: Any, path: str = "") -> T:
    """Return plain `data` as a `kind`. Raises FieldError naming the path of the first value that
    does not fit.

    `path` names the value in errors; the default is the name of `kind`.
    """
    path = path or getattr(kind, "__name__", "value")
    try:
        value = msgspec.convert(data, kind, str_keys=True)
        _refuse_unknown_fields(kind, data, path)
    except msgspec.ValidationError as error:
        raise _field_error(kind, data, path, str(error)) from error
    except RecursionError:
        raise FieldError(path, "...", "it is nested too deeply") from None
    return value


def dumps(value: Any) -> str:
    """Return `value` as JSON text without spaces.

    Infinity and NaN are written as Python's json does.
    """
    return json.dumps(encode(value), separators=(",", ":"), allow_nan=True)


def loads(kind: type[T], text: str | bytes) -> T:
    """Return the `kind` that a JSON text holds. Raises FieldError."""
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FieldError(kind.__name__, text[:80], f"not JSON: {error}") from error
    return decode(kind, data)


def _is_dataclass(kind: Any) -> bool:
    return dataclasses.is_dataclass(kind)


@functools.cache
def _hints(kind: Any) -> Mapping[str, Any]:
    """Annotations of a dataclass by field name."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind)}


@functools.cache
def _names_around_mappings(kind: Any) -> tuple[str, ...] | None:
    """Fields of a dataclass that has a dictionary among them; None for every other type.

    msgspec sorts sets only together with dictionaries, and the order of a dictionary has a meaning
    here.
    """
    if not _is_dataclass(kind):
        return None
    hints = _hints(kind)
    has_mapping = any(typing.get_origin(hint) is dict for hint in hints.values())
    return tuple(hints) if has_mapping else None


@functools.cache
def _without_none(kind: Any) -> Any:
    """The type inside an optional; any other type as it is."""
    if isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union:
        return next(arg for arg in typing.get_args(kind) if arg is not types.NoneType)
    return kind


def _inner(kind: Any, step: str | int) -> Any:
    """Type of the value at `step` inside `kind`: a field's name, an index or a key."""
    kind = _without_none(kind)
    if _is_dataclass(kind):
        return _hints(kind)[str(step)]
    args = typing.get_args(kind)
    if typing.get_origin(kind) is tuple and args[-1] is not Ellipsis:
        return args[int(step)]
    return args[1] if typing.get_origin(kind) is dict else args[0]


@functools.cache
def _objects_inside(kind: Any) -> bool:
    """Whether a value of `kind` can hold a dataclass."""
    return _is_dataclass(kind) or any(_objects_inside(arg) for arg in typing.get_args(kind))


@functools.cache
def _nested(kind: Any) -> tuple[tuple[str, Any], ...]:
    """Fields of a dataclass that can hold other dataclasses."""
    return tuple((name, hint) for name, hint in _hints(kind).items() if _objects_inside(hint))


def _refuse_unknown_fields(kind: Any, data: Any, path: str) -> None:
    """Raise FieldError for a field that its dataclass does not have: msgspec ignores those.

    Everything else about `data` was found to fit `kind`.
    """
    kind = _without_none(kind)
    if data is None or not _objects_inside(kind):
        return
    if _is_dataclass(kind):
        if _is_dataclass(data):  # decoded before
            return
        if not data.keys() <= _hints(kind).keys():
            unknown = min(data.keys() - _hints(kind).keys(), key=str)
            raise FieldError(f"{path}.{unknown}", data[unknown], "unknown field")
        for name, hint in _nested(kind):
            if data.get(name):
                _refuse_unknown_fields(hint, data[name], f"{path}.{name}")
    elif isinstance(data, dict):
        for key, value in data.items():
            _refuse_unknown_fields(_inner(kind, key), value, f"{path}.{key}")
    else:
        for index, value in enumerate(data):
            _refuse_unknown_fields(_inner(kind, index), value, f"{path}[{index}]")


def _field_error(kind: Any, data: Any, path: str, text: str) -> FieldError:
    """Translate the text of a msgspec.ValidationError, which ends with the path of the value."""
    found = _WHERE.match(text)
    assert found is not None
    problem = found["problem"]
    for step in _steps(found["path"] or ""):
        if step == "...":
            step = next(key for key, value in data.items() if not _fits(_inner(kind, key), value))
        kind, data = _inner(kind, step), data[step]
        path += f"[{step}]" if isinstance(step, int) else f".{step}"
    if found["key"]:
        key_kind = (*typing.get_args(_without_none(kind)), str)[0]  # of a dataclass: names
        wrong = next(key for key in data if not _fits(key_kind, key, strict=False))
        return FieldError(f"{path}.{wrong}", wrong, f"{problem[:1].lower()}{problem[1:]} as key")
    missing = _MISSING.match(problem)
    if missing is not None:
        return FieldError(f"{path}.{missing[1]}", None, "missing field")
    if problem.startswith("Invalid enum value"):
        return FieldError(
            path, data, f"one of {', '.join(str(m.value) for m in _without_none(kind))}"
        )
    return FieldError(path, data, problem[:1].lower() + problem[1:])


def _steps(path: str) -> Iterator[str | int]:
    """Split a path such as `.many[1].number`; `...` stands for a key of a dictionary, which msgspec
    hides.
    """
    for name, index in _STEP.findall(path):
        yield name or (index if index == "..." else int(index))


def _fits(kind: Any, data: Any, strict: bool = True) -> bool:
    """Whether msgspec takes `data` as a `kind`. Not `strict`: an integer may be text, as in a
    key."""
    try:
        msgspec.convert(data, kind, str_keys=True, strict=strict)
    except msgspec.ValidationError:
        return False
    return True
