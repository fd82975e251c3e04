"""Description of a value, which precedes its message or its copy.

`elastic.worker.transport.links` sends a header ahead of the messages that it describes, and
`elastic.worker.backup.activation_log` stores one before every logged message. A header has int64
words. For a value of one tensor they are its type, its number of dimensions and its shape. For
every other value they are -1 and the length of a JSON text, which follows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from elastic.domain import codec
from elastic.domain.errors import FieldError
from elastic.worker.model.values import SENDABLE, TENSOR, PartSpec, ValueSpec

MAX_DIMS = 8
N_WORDS = 2 + MAX_DIMS
MAX_TEXT_BYTES = 1 << 20
"""Longest text; that of a value of ten thousand tensors."""
_HAS_TEXT = -1


def empty_header() -> Tensor:
    """Return a tensor to receive a header."""
    return torch.zeros(N_WORDS, dtype=torch.int64)


def pack_header(spec: ValueSpec) -> tuple[Tensor, Tensor]:
    """Return the header of `spec`, int64 [N_WORDS], and its text, uint8 [n], often empty.

    Raises FieldError for a value of so many tensors that it cannot be described.
    """
    part = spec.parts[0] if len(spec.parts) == 1 else None
    if part is not None and not spec.is_packed and len(part.shape) <= MAX_DIMS:
        code = SENDABLE.index(part.dtype) + (0 if part.gradient else len(SENDABLE))
        words, text = [code, len(part.shape), *part.shape], b""
    else:
        text = codec.dumps(spec).encode()
        words = [_HAS_TEXT, len(text)]
    if len(text) > MAX_TEXT_BYTES:
        raise FieldError("value to send", f"{len(spec.parts)} tensors", "hand on fewer tensors")
    padding = [0] * (N_WORDS - len(words))
    return torch.tensor(words + padding), torch.tensor(list(text), dtype=torch.uint8)


def text_nbytes(header: Tensor) -> int:
    """Return the bytes of the text that follows `header`. Raises FieldError if it is malformed."""
    code, length, *_ = header.tolist()
    if code != _HAS_TEXT:
        return 0
    if not 0 < length <= MAX_TEXT_BYTES:
        raise FieldError("header", header.tolist(), f"a text of 1 to {MAX_TEXT_BYTES} bytes")
    return int(length)


def unpack_header(header: Tensor, text: Tensor) -> ValueSpec:
    """Return the description in a header. Raises FieldError if it is malformed."""
    code, n_dims, *dims = header.tolist()
    if code == _HAS_TEXT:
        return codec.loads(ValueSpec, bytes(text.tolist()))
    if not (0 <= code < 2 * len(SENDABLE) and 0 <= n_dims <= MAX_DIMS):
        raise FieldError("header", header.tolist(), f"a type and at most {MAX_DIMS} dimensions")
    gradient, dtype = code < len(SENDABLE), SENDABLE[code % len(SENDABLE)]
    return ValueSpec(TENSOR, (PartSpec(dtype, tuple(dims[:n_dims]), gradient=gradient),))
