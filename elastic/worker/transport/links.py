"""The communication of one epoch: point to point between stages, sums over holders, small gathers over all.

Every blocking call ends at once when the epoch's `AbandonSignal` is set (EpochAbandoned) and when a peer goes away
(LinkFailed). After either, the links are closed for good; the next epoch opens its own. `elastic.worker.transport.gloo`
says how waits are ended.

Point-to-point messages are numbered by `tag` only to separate flows, each of tensors of one form: all messages of a
peer are received in the order in which they were sent. The first message of a flow is preceded by a header with its
dtype and shape, which then hold for the whole epoch, so that receives can be posted ahead.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch._C._distributed_c10d import PrefixStore

from elastic.domain.errors import FieldError
from elastic.rpc.shaping import Shaper
from elastic.worker.transport import threads
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned, LinkFailed, run_abandonable
from elastic.worker.transport.device_fault import is_local_device_fault
from elastic.worker.transport.gloo import GlooTransport, Operation, Transport, groups_of_rank
from elastic.worker.transport.rendezvous import agree_on_failed_ranks, connect_store
from elastic.worker.transport.shaped import ShapedTransport
from elastic.worker.transport.tensor_header import MAX_DIMS, TensorSpec, spec_of, pack_header, unpack_header

MAX_UNRECEIVED = 32
"""Messages under way from one rank before a send waits for the oldest of them, unless more are allowed for."""


class _ErrorTranslator:
    """Turns a transport's RuntimeError into what really happened."""

    def __init__(self, links: Links, peer: int | None) -> None:
        self._links, self._peer = links, peer

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            if is_local_device_fault(error) and not self._links.abandon.is_set():
                return  # no link's fault
            raise self._links.failure(self._peer, error) from error
        if error is None:
            self._links.abandon.check()


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A reduction under way; to call it waits until the tensor holds the sum."""

    wait: Callable[[], None]
    done: Callable[[], bool]
    """Whether waiting would end at once, well or not."""

    def __call__(self) -> None:
        self.wait()


class Links:
    """Open links of one rank; made by `open`."""

    def __init__(
        self, epoch: int, rank: int, world_size: int, device: torch.device, abandon: AbandonSignal
    ) -> None:
        self.epoch, self.rank, self.world_size = epoch, rank, world_size
        self.device, self.abandon = device, abandon
        self.data_device = device
        self._store: PrefixStore | None = None
        self._control: GlooTransport | None = None
        self._data: Transport | None = None
        self._peers: dict[int, IncomingMessages] = {}
        self._forms: dict[tuple[int, int], TensorSpec] = {}
        self._unreceived: deque[tuple[Operation, torch.Tensor, Transport]] = deque()
        self.most_unreceived = MAX_UNRECEIVED
        self._sets_opened = threading.Event()
        self._sets_error: list[RuntimeError] = []

    @classmethod
    def open(
        cls,
        *,
        epoch: int,
        rank: int,
        world_size: int,
        store_address: str,
        device: torch.device,
        timeout_s: float,
        abandon: AbandonSignal,
        host: str = "127.0.0.1",
        holder_sets: Sequence[tuple[int, ...]] = (),
        pairs: Sequence[tuple[int, int]] = (),
        backend: str = "",
        shaper: Shaper | None = None,
        remote: Collection[int] = (),
    ) -> Links:
        """Meet all other ranks of `epoch` at the store and connect.

        Args:
            store_address: "host:port" of the store that the plan names.
            timeout_s: for opening and for every later wait; a last resort, far above any honest wait.
            host: address of this node that the others reach.
            holder_sets: all sets of ranks that will ever reduce together, the same on every rank.
            pairs: all (sender, receiver) that will ever communicate, the same on every rank.
            backend: gloo | nccl for data; "" chooses by device. gloo on CUDA goes through host memory.
            shaper: makes gloo's data to the ranks in `remote` as slow as a given network.

        Raises:
            EpochAbandoned: `abandon` was set meanwhile.
            LinkFailed: the store or a rank could not be reached.
        """
        links = cls(epoch, rank, world_size, device, abandon)
        if world_size == 1:
            links._sets_opened.set()
            return links
        nccl = (backend or ("nccl" if device.type == "cuda" else "gloo")) == "nccl"
        links.data_device = device if nccl else torch.device("cpu")

        def meet() -> tuple[GlooTransport, Transport]:
            links._store = store = connect_store(store_address, epoch, timeout_s)
            control = GlooTransport(store, rank, world_size, timeout_s, host)
            if nccl:
                return control, links._open_data(store, control, timeout_s, pairs)
            return control, ShapedTransport(control, shaper, remote) if shaper else control

        def discard(pair: tuple[GlooTransport, Transport]) -> None:
            pair[0].close()
            pair[1].close()

        try:
            links._control, links._data = run_abandonable(meet, abandon, f"open-epoch{epoch}", discard)
        except RuntimeError as error:
            raise LinkFailed((), f"epoch {epoch} could not be opened: {error}") from error
        abandon.subscribe(links.close)
        threads.start(f"sets-epoch{epoch}", lambda: links._open_sets(groups_of_rank(rank, holder_sets)))
        return links

    def _open_data(
        self, store: PrefixStore, control: GlooTransport, timeout_s: float, pairs: Sequence[tuple[int, int]]
    ) -> Transport:
        from elastic.worker.transport.nccl import NcclTransport

        try:
            return NcclTransport(PrefixStore("nccl", store), self.rank, self.device, timeout_s, pairs)
        except RuntimeError:
            control.close()
            raise

    def _open_sets(self, sets: Sequence[tuple[int, ...]]) -> None:
        """Runs beside the first micro-batches; `all_reduce` waits for it."""
        try:
            for ranks in sets:
                self.data.open_set(ranks)
        except RuntimeError as error:
            self._sets_error.append(error)
        self._sets_opened.set()

    @property
    def control(self) -> GlooTransport:
        assert self._control is not None, "a single rank communicates with nobody"
        return self._control

    @property
    def data(self) -> Transport:
        assert self._data is not None, "a single rank communicates with nobody"
        return self._data

    def guard(self, peer: int | None = None) -> _ErrorTranslator:
        return _ErrorTranslator(self, peer)

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0) -> None:
        """Hand `tensor` to `dst` without waiting. It must not change until `flush`.

        Raises FieldError if dtype or shape differ from the first tensor of this flow.
        """
        tensor = tensor.detach().to(self.data_device).contiguous()
        form = spec_of(tensor)
        known = self._forms.get((dst, tag))
        if known is not None and known != form:
            text = f"within an epoch tensors of one flow are alike; the first was {known[0]} {known[1]}"
            raise FieldError(f"tensor for rank {dst}", form, text)
        with self.guard(dst):
            if known is None:
                self._forms[(dst, tag)] = form
                header = pack_header(form)
                self._keep(self.control.send(header, dst, header_tag(tag)), header, self.control)
            self._keep(self.data.send(tensor, dst, data_tag(tag)), tensor, self.data)

    def _keep(self, work: Operation, tensor: torch.Tensor, transport: Transport) -> None:
        """Hold what is being sent. gloo cannot tell when it is gone: of too many the oldest is waited for."""
        self._unreceived.append((work, tensor, transport))
        while self._unreceived and self._unreceived[0][0].is_completed():
            self._unreceived.popleft()
        if len(self._unreceived) > self.most_unreceived:
            oldest, _, transport = self._unreceived.popleft()
            transport.wait(oldest)

    def recv(self, src: int, tag: int = 0) -> Receive:
        """Expect the next message of a flow. Never blocks. Ask in the order in which `src` sends, over all flows."""
        with self.guard(src):
            peer = self._peers.get(src)
            if peer is None:
                peer = self._peers[src] = IncomingMessages(self, src)
            return peer.expect(tag)

    def flush(self) -> None:
        """Wait until everything sent is gone."""
        with self.guard():
            while self._unreceived:
                work, _, transport = self._unreceived.popleft()
                transport.wait(work)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Every rank's CPU `tensor` (same shape and dtype everywhere), in rank order."""
        if self.world_size == 1:
            self.abandon.check()
            return [tensor.clone()]
        outputs = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with self.guard():
            self.control.wait(self.control.all_gather(outputs, tensor, tuple(range(self.world_size))))
        return outputs

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> PendingCollective:
        """Begin to sum `tensor` in place over `ranks` (ascending, this rank among them).

        All of them must begin their common reductions and gathers in the same order.
        """
        if len(ranks) == 1:
            return PendingCollective(self.abandon.check, lambda: True)
        with self.guard():
            self._need_sets()
            staged = tensor.to(self.data_device)
            work = self.data.all_reduce(staged, ranks)

        def wait() -> None:
            with self.guard():
                self.data.wait(work)
            if staged is not tensor:
                tensor.copy_(staged)

        return PendingCollective(wait, lambda: bool(work.is_completed()))

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> PendingCollective:
        """Begin to fill `outputs` with the `tensor` (alike everywhere) of each of `ranks`; see `all_reduce`."""
        with self.guard():
            self._need_sets()
            staged = [output.to(self.data_device) for output in outputs]
            work = self.data.all_gather(staged, tensor.to(self.data_device), ranks)

        def wait() -> None:
            with self.guard():
                self.data.wait(work)
            for output, found in zip(outputs, staged, strict=True):
                if found is not output:
                    output.copy_(found)

        return PendingCollective(wait, lambda: bool(work.is_completed()))

    def _need_sets(self) -> None:
        """Wait until the sets are open, or raise when the epoch is left."""
        if not self._sets_opened.is_set():
            self.abandon.subscribe(self._sets_opened.set)
            self._sets_opened.wait()
            self.abandon.unsubscribe(self._sets_opened.set)
            self.abandon.check()
        if self._sets_error:
            raise RuntimeError(str(self._sets_error[0]))

    def failure(self, peer: int | None, error: BaseException) -> Exception:
        """What an error of the transport means. Closes the links, so that the other ranks learn of it too."""
        if self.abandon.is_set():
            return EpochAbandoned(self.abandon.reason)
        if isinstance(error, LinkFailed):
            return error
        suspects = self.control.disconnected() or (() if peer is None else (peer,))
        ranks = agree_on_failed_ranks(self._store, suspects, self.abandon)
        self.close()
        return LinkFailed(ranks, str(error).split("\n")[0][:200])

    def close(self) -> None:
        """End this epoch's communication in this process; blocked waits raise. Returns at once."""
        self.abandon.unsubscribe(self.close)
        for transport in {id(t): t for t in (self._control, self._data) if t is not None}.values():
            threads.start(f"close-epoch{self.epoch}", transport.close)


class Receive:
    """An expected message: requested early, waited for late."""

    def __init__(self, inbox: IncomingFlow) -> None:
        self.inbox = inbox
        self._work: Operation | None = None
        self._buffer: torch.Tensor | None = None

    def post(self, form: TensorSpec) -> None:
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


class IncomingMessages:
    """All messages from one rank, in the order in which that rank sends them.

    NCCL knows no tags, so receives of all flows are posted in the order of `expect`. A receive is
    posted as soon as the header of its flow is known, so that the sender need not wait for it.
    """

    def __init__(self, links: Links, src: int) -> None:
        self.links, self.src = links, src
        self._inboxes: dict[int, IncomingFlow] = {}
        self._unposted: deque[Receive] = deque()

    def expect(self, tag: int) -> Receive:
        inbox = self._inboxes.get(tag)
        if inbox is None:
            inbox = self._inboxes[tag] = IncomingFlow(self, tag)
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


class IncomingFlow:
    """The receiving end of one flow: all messages from one rank with one tag."""

    def __init__(self, peer: IncomingMessages, tag: int) -> None:
        self.peer, self.tag = peer, tag
        self.form: TensorSpec | None = None
        self._header = torch.zeros(2 + MAX_DIMS, dtype=torch.int64)
        self._header_work = peer.links.control.recv(self._header, peer.src, header_tag(tag))

    def read_header(self) -> None:
        self.peer.links.control.wait(self._header_work)
        self.form = unpack_header(self._header, self.peer.src)


def data_tag(tag: int) -> int:
    """Transport tag of a flow's messages."""
    return 2 * tag


def header_tag(tag: int) -> int:
    """Transport tag of a flow's header."""
    return 2 * tag + 1
