"""safetensors files, written from views and read back as views, without torch or numpy.

The package safetensors is not used here: its raw interface changed incompatibly between versions
and needs all tensors at once. The format is short: header length (u64, little-endian), JSON header,
then the tensors without gaps.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import xxhash

from elastic.domain.errors import FieldError
from elastic.domain.state_layout import ITEM_BYTES

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "bfloat16": "BF16",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
    "bool": "BOOL",
}
_NAMES = {code: name for name, code in DTYPES.items()}
_REMEDY = "a whole safetensors file is needed"


class RawTensor(NamedTuple):
    """A tensor as raw little-endian bytes."""

    name: str
    dtype: str
    """torch's name of the type without `torch.`, for example bfloat16."""
    shape: tuple[int, ...]
    data: memoryview


def encode(tensors: Sequence[RawTensor], metadata: dict[str, str]) -> list[memoryview]:
    """Return the content of a file, in pieces that refer to the tensors' bytes."""
    ordered = sorted(tensors, key=lambda t: (-ITEM_BYTES[t.dtype], t.name))
    header: dict[str, Any] = {"__metadata__": metadata}
    position = 0
    for tensor in ordered:
        end = position + tensor.data.nbytes
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    start = memoryview(len(text).to_bytes(8, "little") + text)
    return [start, *(tensor.data for tensor in ordered)]


def write(path: Path, tensors: Sequence[RawTensor], metadata: dict[str, str]) -> tuple[int, str]:
    """Write and sync a new file. Return its size in bytes and its xxh3-64, hexadecimal."""
    hasher = xxhash.xxh3_64()
    with open(path, "xb") as file:
        for piece in encode(tensors, metadata):
            hasher.update(piece)
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), hasher.hexdigest()


def read(path: Path) -> tuple[dict[str, str], list[RawTensor]]:
    """Return the metadata and the tensors of a file. The tensors are views of the mapped file.

    Raises FieldError if the file is torn or is no safetensors file.
    """
    return parse(open_map(path), path)


def parse(data: memoryview, name: object) -> tuple[dict[str, str], list[RawTensor]]:
    """Return the metadata and the tensors of the content of a file. The tensors are views of it.

    Raises FieldError, with `name`, if the content is torn or is no safetensors file.
    """
    length = int.from_bytes(data[:8], "little")
    if not 0 < length <= len(data) - 8:
        raise FieldError("file", str(name), _REMEDY)
    try:
        header = json.loads(bytes(data[8 : 8 + length]))
        metadata = header.pop("__metadata__", {})
        tensors = [_tensor(name, entry, data[8 + length :]) for name, entry in header.items()]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FieldError(
            "file", str(name), f"{_REMEDY} ({type(error).__name__}: {error})"
        ) from error
    return metadata, tensors


def open_map(path: Path) -> memoryview:
    """Map a file, read-only. Raises FieldError if it cannot be read or is empty."""
    try:
        with open(path, "rb") as file:
            return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    except (OSError, ValueError) as error:
        raise FieldError("file", str(path), f"{_REMEDY} ({error})") from error


def _tensor(name: str, entry: dict[str, Any], data: memoryview) -> RawTensor:
    start, end = entry["data_offsets"]
    dtype, shape = _NAMES[entry["dtype"]], tuple(int(extent) for extent in entry["shape"])
    nbytes = ITEM_BYTES[dtype] * math.prod(shape)
    if not 0 <= start <= end <= len(data) or end - start != nbytes:
        raise ValueError(f"{name} at {start} to {end} of {len(data)} bytes")
    return RawTensor(name, dtype, shape, data[start:end])
