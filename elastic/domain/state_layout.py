"""Byte layout of a layer's state, readable without torch.

    8 bytes   little-endian length H of the header
    H bytes   JSON {"version": v, "tensors": [...], "extra": {...}}, padded so that 8 + H is a
              multiple of 64
    ...       tensors, raw little-endian, each at its `offset`: a multiple of 64 from the start

If holders share a layer's optimizer state, each has a portion: a range (`span`) of the elements of
every flattened tensor, and every scalar. `shape` is always that of the whole tensor. `join` puts
the portions together.

Tensor names are `param/NAME`, `master/NAME` (float32 masters of low-precision parameters) and
`optim/NAME/KEY`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod

from elastic.domain import codec
from elastic.domain.errors import VaultError
from elastic.domain.types import WHOLE, Portion

ALIGNMENT = 64
GRAIN = 64
"""Tensors are divided at multiples of this many elements. It is a multiple of the length of vector
instructions, so an update of a portion gives the same bits as an update of the whole tensor."""
COPY_BYTES = 1 << 20
"""Bytes that are copied at a time. A copy keeps the interpreter's lock, for which the threads of
heartbeats wait."""
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
    """Name of torch's type, such as float32."""
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    shard_dim: int = -1
    """Dimension along which TP ranks split the tensor; -1: every rank has the whole tensor."""


@dataclass(frozen=True, slots=True)
class StateHeader:
    """Header of a state, or of a portion of it."""

    version: int
    tensors: tuple[TensorEntry, ...]
    extra: dict[str, str]
    """Optimizer state that is not a tensor, as JSON texts."""
    portion: Portion = WHOLE


def align(n: int) -> int:
    return -(-n // ALIGNMENT) * ALIGNMENT


def span(shape: Sequence[int], portion: Portion) -> tuple[int, int]:
    """Return the range [first, last) of a flattened tensor's elements that a portion has. Every
    portion has all scalars."""
    count, (index, number) = prod(shape), portion
    if not shape or number == 1:
        return 0, count
    part = -(-count // number // GRAIN) * GRAIN
    return min(index * part, count), min((index + 1) * part, count)


def plan_layout(
    version: int,
    tensors: Sequence[tuple[str, str, tuple[int, ...], int]],
    extra: dict[str, str],
    portion: Portion = WHOLE,
) -> tuple[bytes, StateHeader, int]:
    """Lay out `tensors`: (name, dtype, shape, shard_dim).

    Returns (header bytes, header, total bytes).
    """
    room = 4096
    while True:
        entries, offset = [], room
        for name, dtype, shape, shard_dim in tensors:
            first, last = span(shape, portion)
            nbytes = (last - first) * ITEM_BYTES[dtype]
            entries.append(TensorEntry(name, dtype, shape, offset, nbytes, shard_dim))
            offset = align(offset + nbytes)
        header = StateHeader(version, tuple(entries), extra, portion)
        text = codec.dumps(header).encode()
        if len(text) + 8 <= room:
            text = text.ljust(room - 8)
            return len(text).to_bytes(8, "little") + text, header, offset
        room = align(len(text) + 1024)


def join(
    runs: Sequence[memoryview], allocate: Callable[[int], memoryview] | None = None
) -> memoryview:
    """Join the bytes of all portions of a state, given in any order, to those of the whole state.

    `allocate(nbytes)` returns a writable buffer; None: use a bytearray. Raises VaultError unless
    `runs` are all portions of one version.
    """
    headers = sorted(((read_header(run), run) for run in runs), key=lambda pair: pair[0].portion)
    first = headers[0][0]
    number, versions = len(headers), {header.version for header, _ in headers}
    if [header.portion for header, _ in headers] != [(i, number) for i in range(number)] or len(
        versions
    ) > 1:
        found = [(header.portion, header.version) for header, _ in headers]
        raise VaultError(f"these (portion, version) pairs do not make a whole state: {found}")
    # The first portion has elements of every tensor.
    rows = [(e.name, e.dtype, e.shape, e.shard_dim) for e in first.tensors]
    text, whole, nbytes = plan_layout(first.version, rows, first.extra)
    out = allocate(nbytes) if allocate is not None else memoryview(bytearray(nbytes))
    out[: len(text)] = text
    end = len(text)
    for entry in whole.tensors:
        out[end : entry.offset] = bytes(entry.offset - end)
        end = entry.offset
        for header, run in headers if entry.shape else headers[:1]:
            part = next(
                (e for e in header.tensors if e.name == entry.name), replace(entry, nbytes=0)
            )
            if (part.dtype, part.shape) != (entry.dtype, entry.shape):
                raise VaultError(f"{entry.name} is {part.dtype} {part.shape} in one portion only")
            data = run[part.offset : part.offset + part.nbytes]
            copy_bytes(out[end : end + len(data)], data)
            end += len(data)
        if end != entry.offset + entry.nbytes:
            filled = end - entry.offset
            raise VaultError(f"{entry.name}: portions have {filled} of {entry.nbytes} bytes")
    out[end:] = bytes(nbytes - end)
    return out


def copy_bytes(target: memoryview, source: memoryview) -> None:
    """Copy all bytes of `source` to `target`, which has the same size, in pieces of COPY_BYTES."""
    for start in range(0, len(source), COPY_BYTES):
        target[start : start + COPY_BYTES] = source[start : start + COPY_BYTES]


def read_header(data: memoryview) -> StateHeader:
    """Parse the header at the start of `data`. Raises VaultError if it is not a state header."""
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise VaultError(f"state header of {length} bytes in a run of {len(data)}")
    try:
        return codec.decode(StateHeader, json.loads(bytes(data[8 : 8 + length])))
    except ValueError as error:
        raise VaultError(f"state header is not JSON: {error}") from error
