"""How a layer's state lies in a flat run of bytes, readable without torch.

    8 bytes   little-endian length H of the header
    H bytes   JSON: {"version": v, "tensors": [...], "extra": {...}}, padded with blanks: 8 + H is a multiple of 64
    ...       tensors, raw little-endian, each at its `offset` (a multiple of 64, from the start of the run)

Tensor names are `param/NAME`, `master/NAME` (fp32 masters of low-precision parameters) and `optim/NAME/KEY`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from elastic.core import codec
from elastic.errors import VaultError

ALIGNMENT = 64
ITEM_BYTES = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "uint8": 1,
    "bool": 1,
}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of a layer's state."""

    name: str
    dtype: str
    """torch's name without the prefix, e.g. float32."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard_dim: int = -1
    """Dimension along which TP ranks split the whole tensor; -1: every rank has all of it."""


@dataclass(frozen=True, slots=True)
class StateHeader:
    version: int
    tensors: tuple[TensorEntry, ...]
    extra: dict[str, str]
    """Optimizer state that is not a tensor, as JSON texts."""


def align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def plan_layout(
    version: int, tensors: list[tuple[str, str, tuple[int, ...], int]], extra: dict[str, str]
) -> tuple[bytes, StateHeader, int]:
    """Lay out `tensors` (name, dtype, shape, shard_dim). Return (header bytes, header, total bytes)."""
    room = 4096
    while True:
        entries, offset = [], room
        for name, dtype, shape, shard_dim in tensors:
            count = 1
            for extent in shape:
                count *= extent
            entries.append(TensorEntry(name, dtype, shape, offset, count * ITEM_BYTES[dtype], shard_dim))
            offset = align(offset + entries[-1].nbytes)
        header = StateHeader(version, tuple(entries), extra)
        text = codec.dumps(header).encode()
        if len(text) + 8 <= room:
            text = text.ljust(room - 8)
            return len(text).to_bytes(8, "little") + text, header, offset
        room = align(len(text) + 1024)


def read_header(data: memoryview) -> StateHeader:
    """Parse the header at the start of `data`. Raises VaultError if it is no header."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise VaultError(f"state header of {length} bytes in a run of {len(data)}")
    try:
        return codec.decode(StateHeader, json.loads(bytes(data[8 : 8 + length])))
    except ValueError as error:
        raise VaultError(f"state header is not JSON: {error}") from error
