"""Header of a tensor: its dtype and shape as int64 words.

`elastic.worker.transport.links` sends a header before the first message of a flow, and
`elastic.worker.backup.activation_log` stores one before every logged message.
"""

from __future__ import annotations

import torch

from elastic.domain.errors import FieldError
from elastic.worker.transport.cancellation import LinkFailed

DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int64,
    torch.int32,
    torch.uint8,
)
MAX_DIMS = 8

TensorSpec = tuple[torch.dtype, tuple[int, ...]]
"""dtype and shape."""


def spec_of(tensor: torch.Tensor) -> TensorSpec:
    """Return dtype and shape of `tensor`."""
    return tensor.dtype, tuple(tensor.shape)


def pack_header(spec: TensorSpec) -> torch.Tensor:
    """Encode `spec` as int64 [2 + MAX_DIMS]. Raises FieldError if such a tensor cannot be sent."""
    dtype, shape = spec
    if dtype not in DTYPES or len(shape) > MAX_DIMS:
        remedy = f"at most {MAX_DIMS} dimensions of {', '.join(map(str, DTYPES))}"
        raise FieldError("tensor to send", spec, remedy)
    return torch.tensor([DTYPES.index(dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))])


def unpack_header(header: torch.Tensor, src: int) -> TensorSpec:
    """Decode the header that rank `src` sent. Raises LinkFailed if it is malformed."""
    code, n_dims, *dims = header.tolist()
    if not (0 <= code < len(DTYPES) and 0 <= n_dims <= MAX_DIMS and min(dims) >= 0):
        raise LinkFailed((src,), f"malformed header {header.tolist()}")
    return DTYPES[code], tuple(dims[:n_dims])
