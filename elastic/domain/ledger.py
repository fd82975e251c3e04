"""Ledgers: sets of micro-batches whose gradients a layer already holds.

Stored or sent, a ledger is a `frozenset[int]` of indices. Where many ledgers are compared, each is
a bit mask (bit i stands for micro-batch i). In each step, every layer must sum the gradient of each
micro-batch exactly once:

- `LayerReplica.collect` (`elastic.worker.replica.replica`) adds a gradient to the accumulator and
  its micro-batch to the ledger. Sums from other holders, and copies from vaults during a recovery,
  come with their ledgers.
- `elastic.worker.engine.commit` checks before every optimizer update that the ledgers of each
  layer's holders hold every micro-batch once; otherwise it raises LedgerError.
- `elastic.core.recovery.recovery` keeps only gradients with disjoint ledgers after a fault.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from elastic.domain.errors import FieldError

EMPTY = "-"
"""Text of an empty set of indices."""


def format_indices(indices: Iterable[int]) -> str:
    """Return the indices as text, with runs as FIRST-LAST: (0, 1, 2, 5) is 0-2,5."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][1] + 1:
            runs[-1][1] = index
        else:
            runs.append([index, index])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs) or EMPTY


def parse_indices(text: str, field: str = "indices") -> tuple[int, ...]:
    """Parse the text of `format_indices`. Raises FieldError that names `field`."""
    if text == EMPTY:
        return ()
    indices: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part)
        first = int(match[1]) if match else 0
        last = int(match[2] or match[1]) if match else -1
        if last < first or last - first >= 1 << 20:
            remedy = "write indices as 0-3,5 with each range ascending, or - for none"
            raise FieldError(field, text, remedy)
        indices.extend(range(first, last + 1))
    return tuple(indices)


def to_mask(microbatches: Iterable[int]) -> int:
    """Return the bit mask of a set of micro-batches."""
    return sum(1 << index for index in frozenset(microbatches))


def from_mask(mask: int) -> frozenset[int]:
    """Return the set of micro-batches in a bit mask."""
    return frozenset(i for i in range(mask.bit_length()) if mask >> i & 1)
