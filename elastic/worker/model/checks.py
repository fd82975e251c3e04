"""Checks of the objects that a training script gives. Errors name the object, never print it."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Callable

from torch import Tensor

from elastic.domain.errors import FieldError

LEAST, MOST = -(2**63), 2**64 - 1
"""Range of the whole numbers that messages can hold; seeds use all of it."""
_LONGEST_CHARS = 60
"""Longest text that describes a value."""


class Described(str):
    """Description of a value, which stands in an error without quotation marks."""

    def __repr__(self) -> str:
        return str(self)


def description(value: object) -> Described:
    """Return a short description of `value` for the text of a FieldError."""
    if value is None or isinstance(value, bool | int | float | str):
        return _cut(repr(value))
    if isinstance(value, type):
        return Described(f"the class {value.__name__}")
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return Described(f"a tensor of shape {tuple(value.shape)} and type {dtype}")
    if inspect.isroutine(value):
        return Described(f"the function {value.__name__}")
    return Described(f"an object of type {type(value).__name__}")


def whole_number(field: str, value: object, least: int = LEAST, most: int = MOST) -> int:
    """Return `value` as an int. Raises FieldError unless it is a whole number in this range."""
    first = f" from {least}" if least > LEAST else ""
    last = f" to {most}" if most < MOST else " up" if first else ""
    remedy = f"a whole number{first}{last}"
    if isinstance(value, bool):
        raise FieldError(field, value, remedy)
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise FieldError(field, description(value), remedy) from None
    if not least <= number <= most:
        large = " below 2**64" if most == MOST and number > least else ""
        raise FieldError(field, description(number), f"{remedy}{large}")
    return number


def positive(field: str, value: object) -> float:
    """Return `value` as a float. Raises FieldError unless it is a finite number above 0."""
    right = isinstance(value, int | float) and not isinstance(value, bool)
    if not right or not 0 < value < math.inf:  # type: ignore[operator]
        raise FieldError(field, description(value), "a number above 0")
    return float(value)  # type: ignore[arg-type]


def check_callable(field: str, value: object, n_arguments: int, remedy: str) -> None:
    """Raise FieldError unless `value` can be called with `n_arguments` positional arguments."""
    if not callable(value):
        raise FieldError(field, description(value), remedy)
    if not accepts(value, n_arguments):
        name = getattr(value, "__name__", type(value).__name__)
        raise FieldError(field, _cut(f"{name}{inspect.signature(value)}"), remedy)


def accepts(function: Callable[..., object], n_arguments: int) -> bool:
    """Return whether `function` takes this number of positional arguments, as far as known."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError, NameError):  # of an extension module, or with wrong annotations
        return True
    try:
        signature.bind(*range(n_arguments))
    except TypeError:
        return False
    return True


def _cut(text: str) -> Described:
    text = " ".join(text.split())
    return Described(text if len(text) <= _LONGEST_CHARS else f"{text[: _LONGEST_CHARS - 3]}...")
