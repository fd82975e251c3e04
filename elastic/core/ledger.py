"""Sets of micro-batches: which ones a gradient holds, and what two gradients hold together.

A ledger is a `frozenset[int]` wherever it is kept or sent; where many are compared it is a bit mask
(bit i set: micro-batch i is in it).
"""

from __future__ import annotations

from collections.abc import Iterable

from elastic.errors import FieldError, LedgerError
from elastic.planning.plan import format_indices, parse_indices


def format_microbatches(microbatches: Iterable[int]) -> str:
    """Print a set as 0-3,5; the empty set as -."""
    return format_indices(sorted(microbatches))


def parse_microbatches(text: str) -> frozenset[int]:
    """Read what `format_microbatches` prints. Raises FieldError, also for a micro-batch named twice."""
    indices = parse_indices(text, "microbatches")
    if len(set(indices)) != len(indices):
        raise FieldError("microbatches", text, "name each micro-batch once")
    return frozenset(indices)


def disjoint_union(ledgers: Iterable[frozenset[int]], what: str = "gradient") -> frozenset[int]:
    """Return the union. Raises LedgerError naming the micro-batches that `what` would hold twice."""
    union: frozenset[int] = frozenset()
    doubled: frozenset[int] = frozenset()
    for ledger in ledgers:
        doubled |= union & ledger
        union |= ledger
    if doubled:
        raise LedgerError(f"{what} would hold micro-batches {format_microbatches(doubled)} twice")
    return union


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
