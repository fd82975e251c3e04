"""Copies on the wire, as they are or compressed.

A compressed copy of n bytes is sent as ceil(n / BLOCK_BYTES) blocks. Each block holds BLOCK_BYTES
of the copy; the last block holds the rest:

    u32  bytes of the block (little-endian) | a Blosc buffer: bit shuffle over 8 bytes, then LZ4

A block is compressed while the one before it is sent, and neither side holds more than one. The
receiver trusts nothing in a block: it knows the raw size from the copy, and verifies the copy's
checksum over the raw bytes.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator

import blosc
from blosc.blosc_extension import error as CorruptBuffer

from elastic.domain.errors import FieldError, VaultError
from elastic.rpc.frames import FrameStream

BLOSC = "blosc"
"""Name of the codec in requests and replies; "" means uncompressed."""
CODECS = ("", BLOSC)
BLOCK_BYTES = 1 << 20
_OVERHEAD = 16
"""Most bytes by which compression can enlarge a block: Blosc's header."""
_LENGTH = struct.Struct("<I")
_SIZES = struct.Struct("<4xIII")
"""Fields of a Blosc header: raw bytes, block size, compressed bytes."""

blosc.set_nthreads(1)
blosc.set_releasegil(True)


def pack(raw: memoryview) -> bytes:
    """Compress one block of at most BLOCK_BYTES."""
    packed: bytes = blosc.compress(raw, typesize=8, clevel=5, shuffle=blosc.BITSHUFFLE, cname="lz4")
    return packed


def unpack(block: bytes | bytearray, out: memoryview) -> None:
    """Decompress `block` into `out`. Raises VaultError if it is corrupt or of another size."""
    if len(block) < _OVERHEAD:
        raise VaultError(f"a compressed block of {len(block)} bytes")
    nbytes, _, packed = _SIZES.unpack_from(block)
    if nbytes != len(out) or packed != len(block):
        raise VaultError(
            f"a compressed block says {nbytes} bytes in {packed}, not {len(out)} in {len(block)}"
        )
    try:
        raw = blosc.decompress(bytes(block))
    except CorruptBuffer as error:
        raise VaultError(f"a compressed block is corrupt: {error}") from error
    if len(raw) != len(out):
        raise VaultError(f"a compressed block held {len(raw)} bytes, not {len(out)}")
    out[:] = raw


def send_copy(stream: FrameStream, data: memoryview, how: str) -> tuple[int, float]:
    """Send a copy with the codec `how`; return bytes sent and seconds spent on compression."""
    if not how:
        stream.write(data)
        return data.nbytes, 0.0
    sent, spent = 0, 0.0
    for piece in _pieces(data):
        began = time.perf_counter()
        block = pack(piece)
        spent += time.perf_counter() - began
        stream.write(memoryview(_LENGTH.pack(len(block)) + block))
        sent += _LENGTH.size + len(block)
    return sent, spent


def read_copy(
    stream: FrameStream, out: memoryview, how: str, on_chunk: Callable[[memoryview], object]
) -> VaultError | None:
    """Read a copy with the codec `how` into `out`; `on_chunk` gets the raw bytes piece by piece.

    Return the first error of a corrupt block, or None. All blocks are read even then, so that the
    connection stays usable. Raises FieldError for an unknown codec or an impossible block length.
    """
    if how not in CODECS:
        raise FieldError("codec", how[:80], f"one of {', '.join(filter(None, CODECS))}")
    if not how:
        stream.read_into(out, on_chunk)
        return None
    problem: VaultError | None = None
    for piece in _pieces(out):
        block = _read_block(stream, len(piece))
        if problem is None:
            try:
                unpack(block, piece)
            except VaultError as error:
                problem = error
            else:
                on_chunk(piece)
    return problem


def drain_copy(stream: FrameStream, nbytes: int, how: str) -> None:
    """Read and discard a copy of `nbytes` with the codec `how`."""
    if not how:
        stream.drain(nbytes)
        return
    for start in range(0, nbytes, BLOCK_BYTES):
        _read_block(stream, min(BLOCK_BYTES, nbytes - start))


def _read_block(stream: FrameStream, raw: int) -> bytearray:
    (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
    if length > raw + _OVERHEAD:
        text = f"at most {raw + _OVERHEAD} hold {raw} bytes"
        raise FieldError("compressed block bytes", length, text)
    return stream.read(length)


def _pieces(data: memoryview) -> Iterator[memoryview]:
    for start in range(0, len(data), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]
