"""Sets of micro-batches: which ones a gradient holds, and what two gradients hold together.

A ledger is a `frozenset[int]` wherever it is kept or sent; where many are compared it is a bit mask
(bit i set: micro-batch i is in it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from elastic.domain.errors import FieldError

EMPTY = "-"
"""How an empty set of indices prints."""


def format_indices(indices: Iterable[int]) -> str:
    """Print indices in the order given, with runs of consecutive ones as FIRST-LAST: (0, 1, 2, 5) is
    0-2,5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or EMPTY


def parse_indices(text: str, field: str = "indices") -> tuple[int, ...]:
    """Read what `format_indices` prints. Raises FieldError naming `field`."""
    if text == EMPTY:
        return ()
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if last < first or last - first >= 1 << 20:
            raise FieldError(field, text, "write indices as 0-3,5 with each range ascending, or - for none")
        indices.extend(range(first, last + 1))
    return tuple(indices)


def format_microbatches(microbatches: Iterable[int]) -> str:
    """Print a set as 0-3,5; the empty set as -."""
    return format_indices(sorted(microbatches))


def missing(covered: frozenset[int], n_microbatches: int) -> frozenset[int]:
    """Return those of 0..n_microbatches-1 that are not covered."""
    return frozenset(range(n_microbatches)) - covered


def to_mask(microbatches: Iterable[int]) -> int:
    mask = 0
    for index in microbatches:
        mask |= 1 << index
    return mask


def from_mask(mask: int) -> frozenset[int]:
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)
