"""Parsers of sizes, rates and durations as people write them: 40GiB, 25Gbit, 300GB/s, 10us, 2h."""

from __future__ import annotations

import re
from math import isfinite

from elastic.domain.errors import FieldError

_SCALE = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}
_FRACTIONS = {"ns": "e-9", "us": "e-6", "µs": "e-6", "ms": "e-3"}
_SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
MAX_BYTES = 1 << 60
"""Largest size; messages hold numbers of 64 bits."""
_NUMBER = r"(\d{1,15}(?:\.\d{1,9})?)\s*"


def size_of(field: str, value: object) -> int:
    """Return bytes, from a number or text such as 40GiB or 500MB. Raises FieldError."""
    text = _text(value)
    match = re.fullmatch(_NUMBER + r"([kmgt]i?)?b?", text.lower())
    if match is None or float(match[1]) <= 0:
        raise FieldError(field, value, "a size above 0, as 40GiB, 500MB or a number of bytes")
    unit = match[2] or ""
    size = int(float(match[1]) * (_BINARY[unit] if unit in _BINARY else _SCALE[unit]))
    if size > MAX_BYTES:
        raise FieldError(field, value, f"at most {MAX_BYTES // _BINARY['ti']}TiB")
    return size


def size_text(nbytes: float) -> str:
    """Return a size as people write it: 512 bytes, 1.5 MiB, 40.0 GiB."""
    for unit in ("ti", "gi", "mi", "ki"):
        if nbytes >= _BINARY[unit]:
            return f"{nbytes / _BINARY[unit]:.1f} {unit.capitalize()}B"
    return f"{nbytes:.0f} bytes"


def rate_of(field: str, value: object) -> float:
    """Return bytes per second, from text such as 25Gbit/s or 300GB/s. Raises FieldError."""
    text = _text(value)
    match = re.fullmatch(_NUMBER + r"([kKmMgGtT]i?)?(bit(?:/s)?|bps|B(?:/s)?)", text)
    if match is None or float(match[1]) <= 0:
        raise FieldError(field, value, "a bandwidth above 0 with its unit, as 25Gbit or 300GB/s")
    unit = (match[2] or "").lower()
    scale = _BINARY[unit] if unit in _BINARY else _SCALE[unit]
    return float(match[1]) * scale / (8 if match[3].startswith("b") else 1)


def duration_of(field: str, value: object) -> float:
    """Return seconds, from a number or text such as 10us, 2m or 1.5h. Raises FieldError."""
    match = re.fullmatch(_NUMBER + r"([a-zµ]*)", _text(value))
    if match is None or match[2] not in {**_FRACTIONS, **_SECONDS}:
        raise FieldError(field, value, "a duration from 0 up, as 10us, 30s, 2m or 1h")
    return float(match[1] + _FRACTIONS.get(match[2], "")) * _SECONDS.get(match[2], 1)


def _text(value: object) -> str:
    """Return `value` as text, numbers without exponent; "?" if it is neither number nor text."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return "?"
    if isinstance(value, str):
        return value.strip()
    return f"{value:.9f}" if isinstance(value, float) and isfinite(value) else str(value)
