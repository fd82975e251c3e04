"""A flow: the messages from one rank to another with one tag, in order, all of one dtype and shape.

A header (int64 words: dtype, number of dimensions, dimensions) precedes the first message, on the control
transport. Once it is known, receives are posted as soon as they are asked for, so that the sender need not
wait for the receiver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch._C._distributed_c10d import Work

from elastic.errors import FieldError
from elastic.worker.abandon import LinkFailed

if TYPE_CHECKING:
    from elastic.worker.links import Links

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

Form = tuple[torch.dtype, tuple[int, ...]]


def data_tag(tag: int) -> int:
    return 2 * tag


def header_tag(tag: int) -> int:
    return 2 * tag + 1


def form_of(tensor: torch.Tensor) -> Form:
    return tensor.dtype, tuple(tensor.shape)


def pack_form(form: Form) -> torch.Tensor:
    """The header. Raises FieldError for what cannot be sent."""
    dtype, shape = form
    if dtype not in DTYPES or len(shape) > MAX_DIMS:
        raise FieldError(
            "tensor to send", form, f"at most {MAX_DIMS} dimensions of {', '.join(map(str, DTYPES))}"
        )
    return torch.tensor([DTYPES.index(dtype), len(shape), *shape, *[0] * (MAX_DIMS - len(shape))])


def unpack_form(header: torch.Tensor, src: int) -> Form:
    """The form that `pack_form` packed. Raises LinkFailed if it is none."""
    code, n_dims, *dims = header.tolist()
    if not (0 <= code < len(DTYPES) and 0 <= n_dims <= MAX_DIMS and min(dims) >= 0):
        raise LinkFailed((src,), f"malformed header {header.tolist()}")
    return DTYPES[code], tuple(dims[:n_dims])


class Receive:
    """A message that is expected: asked for early, waited for late."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._work: Work | None = None
        self._buffer: torch.Tensor | None = None

    def post(self, form: Form) -> None:
        links = self._inbox.links
        self._buffer = torch.empty(form[1], dtype=form[0], device=links.data_device)
        self._work = links.data.recv(self._buffer, self._inbox.src, data_tag(self._inbox.tag))

    def wait(self) -> torch.Tensor:
        """The tensor, on the epoch's device. Raises EpochAbandoned or LinkFailed."""
        links = self._inbox.links
        with links.guard(self._inbox.src):
            if self._work is None:
                self._inbox.read_header()
            assert self._work is not None and self._buffer is not None
            links.data.wait(self._work)
        return self._buffer.to(links.device)


class Inbox:
    """The receiving end of a flow."""

    def __init__(self, links: Links, src: int, tag: int) -> None:
        self.links, self.src, self.tag = links, src, tag
        self._form: Form | None = None
        self._unposted: list[Receive] = []
        self._header = torch.zeros(2 + MAX_DIMS, dtype=torch.int64)
        self._header_work = links.control.recv(self._header, src, header_tag(tag))

    def expect(self) -> Receive:
        receive = Receive(self)
        if self._form is None:
            self._unposted.append(receive)
        else:
            receive.post(self._form)
        return receive

    def read_header(self) -> None:
        """Wait for the header, then post all receives that were asked for."""
        self.links.control.wait(self._header_work)
        self._form = unpack_form(self._header, self.src)
        for receive in self._unposted:
            receive.post(self._form)
        self._unposted.clear()
