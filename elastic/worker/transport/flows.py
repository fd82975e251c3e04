"""A flow: the messages from one rank to another with one tag, in order, all of one dtype and shape.

A header (int64 words: dtype, number of dimensions, dimensions) precedes the first message, on the control
transport. Once it is known, receives are posted as soon as they are asked for, so that the sender need not
wait for the receiver. Flows from the same rank share one order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import torch

from elastic.domain.errors import FieldError
from elastic.worker.transport.cancellation import LinkFailed
from elastic.worker.transport.gloo import Operation

if TYPE_CHECKING:
    from elastic.worker.transport.links import Links

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
        self.inbox = inbox
        self._work: Operation | None = None
        self._buffer: torch.Tensor | None = None

    def post(self, form: Form) -> None:
        links = self.inbox.peer.links
        self._buffer = torch.empty(form[1], dtype=form[0], device=links.data_device)
        self._work = links.data.recv(self._buffer, self.inbox.peer.src, data_tag(self.inbox.tag))

    def wait(self) -> torch.Tensor:
        """The tensor, on the epoch's device. Raises EpochAbandoned or LinkFailed."""
        peer = self.inbox.peer
        with peer.links.guard(peer.src):
            while self._work is None:
                peer.read_header()
            assert self._buffer is not None
            peer.links.data.wait(self._work)
        return self._buffer.to(peer.links.device)


class Peer:
    """What is received from one rank. Receives are posted in the order in which they were asked for, whatever their
    flows: NCCL knows no tags. Hence ask in the order in which the other sends.
    """

    def __init__(self, links: Links, src: int) -> None:
        self.links, self.src = links, src
        self._inboxes: dict[int, Inbox] = {}
        self._unposted: deque[Receive] = deque()

    def expect(self, tag: int) -> Receive:
        inbox = self._inboxes.get(tag)
        if inbox is None:
            inbox = self._inboxes[tag] = Inbox(self, tag)
        receive = Receive(inbox)
        self._unposted.append(receive)
        self._post()
        return receive

    def read_header(self) -> None:
        """Wait for the header that the next receive needs, then post all that can be."""
        self._unposted[0].inbox.read_header()
        self._post()

    def _post(self) -> None:
        while self._unposted and (form := self._unposted[0].inbox.form) is not None:
            self._unposted.popleft().post(form)


class Inbox:
    """The receiving end of a flow."""

    def __init__(self, peer: Peer, tag: int) -> None:
        self.peer, self.tag = peer, tag
        self.form: Form | None = None
        self._header = torch.zeros(2 + MAX_DIMS, dtype=torch.int64)
        self._header_work = peer.links.control.recv(self._header, peer.src, header_tag(tag))

    def read_header(self) -> None:
        self.peer.links.control.wait(self._header_work)
        self.form = unpack_form(self._header, self.peer.src)
