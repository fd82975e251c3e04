"""Communication of one rank in one epoch.

`Links` offers messages between the ranks of a pipeline, all-reduce and all-gather over the holders
of a layer, and a small gather over all ranks.

`open` returns when the ranks of the pipeline are connected, so a pipeline trains while others still
load their layers. Meanwhile a thread connects all ranks, and collectives wait for it
(docs/decisions/054-a-pipeline-trains-alone.md). On GPUs `open` connects all ranks.

Every blocking call ends at once when the epoch's `AbandonSignal` is set (EpochAbandoned), and when
a peer disconnects (LinkFailed). After either error no further call may be made; the next epoch
opens new links. `elastic.worker.transport.gloo` explains how blocked waits are ended.

Earlier stages of the pipeline may still compute when a worker is done with its micro-batches. So
some errors leave the connections open: those of a collective, and those after a gentle signal.
Then the owner of the links closes them. Until then the other ranks do not notice that this rank has
left a collective; they notice the rank that broke it, or the end of the epoch is announced to them.
After a failed message the links close, so that the whole pipeline leaves.

A `tag` names a flow of messages with the same description: types and shapes of the values. A
header with the description precedes the first message of a flow and holds for the whole epoch, so
receives can be posted ahead of the messages. With `varying`, a header precedes each message. All
messages of a peer, over all flows, are received in the order of sending.
"""

from __future__ import annotations

import contextlib
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch._C._distributed_c10d import PrefixStore

from elastic.domain.errors import FieldError
from elastic.rpc.link_shaping import LinkShaper
from elastic.worker.model.checks import Described
from elastic.worker.model.values import Message, ValueSpec
from elastic.worker.transport import threads
from elastic.worker.transport.cancellation import (
    AbandonSignal,
    EpochAbandoned,
    LinkFailed,
    run_abandonable,
)
from elastic.worker.transport.device_fault import is_local_fault
from elastic.worker.transport.gloo import POISON_TAG, GlooTransport
from elastic.worker.transport.host_memory import HostMemoryTransport, device_is_shared
from elastic.worker.transport.interface import Operation, Transport
from elastic.worker.transport.nccl import NcclTransport, await_aborts
from elastic.worker.transport.rendezvous import (
    ALL,
    HERE,
    NEAR,
    agree_on_failed_ranks,
    await_ranks,
    connect_store,
    missing_ranks,
    tell_connected,
)
from elastic.worker.transport.shaped import ShapedTransport
from elastic.worker.transport.value_header import (
    empty_header,
    pack_header,
    text_nbytes,
    unpack_header,
)

VARYING = (
    "all micro-batches must have the same types and shapes, unless the stack is made with "
    "varying=True"
)
_TEXT_TAGS = 2 * POISON_TAG
"""Beyond all other tags, also that of messages which only wake a waiting rank."""
MAX_UNRECEIVED = 32
"""Default of `Links.max_unreceived`."""
OPEN_RANK_S = 0.02
"""Seconds per rank by which many ranks may take longer to connect."""


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """A collective that may still run. Call the object to wait for the result."""

    wait: Callable[[], None]
    done: Callable[[], bool]
    """Returns whether `wait` would return or raise at once."""

    def __call__(self) -> None:
        self.wait()


class Links:
    """Links of one rank in one epoch, made by `open`. Without other ranks it has no transports."""

    control: GlooTransport
    """Transport of headers and gathers, on CPU tensors."""
    data: Transport
    """Transport of activations and gradients, on `device`."""

    def __init__(
        self,
        epoch: int,
        rank: int,
        world_size: int,
        device: torch.device,
        abandon: AbandonSignal,
        open_s: float,
        varying: bool = False,
    ) -> None:
        """`open_s`: limit for the store, for connecting to ranks that are there, and for opening a
        group."""
        self.epoch, self.rank, self.world_size = epoch, rank, world_size
        self.device, self.abandon, self._open_s = device, abandon, open_s
        self._varying = varying
        self._store: PrefixStore | None = None
        self._timeout_s = 0.0
        self._flows: dict[tuple[int, int], _IncomingHeader] = {}
        """(rank, tag) -> header of the flow that this rank receives; empty with `varying`."""
        self._unposted: dict[int, deque[Receive]] = defaultdict(deque)
        """Rank -> receives that wait for the header of their flow, or behind such a receive."""
        self._sent_specs: dict[tuple[int, int], ValueSpec] = {}
        """(rank, tag) -> description of the flow's messages; empty with `varying`."""
        self._unreceived: deque[tuple[Operation, torch.Tensor, Transport]] = deque()
        self.max_unreceived = MAX_UNRECEIVED
        """Maximum number of messages in flight from this rank; further sends wait."""
        self._all_open = threading.Event()
        """Set when all ranks are connected, or cannot be (`_open_error`)."""
        self._open_error: Exception | None = None
        self._closing = threading.Event()
        """Set by `close`: the thread that connects all ranks ends."""

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
        pipeline: Collection[int] | None = None,
        shaper: LinkShaper | None = None,
        remote: Collection[int] = (),
        open_s: float | None = None,
        varying: bool = False,
    ) -> Links:
        """Connect to the ranks of this rank's pipeline in `epoch`, and begin to connect to all.

        Args:
            store_address: "host:port" of the store that the plan names.
            timeout_s: limit for each wait, also for slower ranks; a last resort.
            host: address of this node that the other ranks can reach.
            holder_sets: all groups of ranks that will ever reduce together; equal on all ranks.
            pairs: all (sender, receiver) that will ever communicate; equal on all ranks.
            pipeline: ranks that exchange messages, with this one; equal on all of these ranks.
                None: all ranks.
            shaper: delays CPU tensors to the ranks in `remote`; None: no delay.
            open_s: limit for reaching the store, and for connecting once all ranks are there;
                None: `timeout_s`.
            varying: whether the messages of a flow may differ in type and shape; equal on all
                ranks.

        Raises:
            EpochAbandoned: `abandon` was set meanwhile.
            LinkFailed: the store or a rank could not be reached; with the ranks that are missing.
                If that is a rank of another pipeline, `check` raises it, or the next operation.
            RuntimeError: this rank's own node is at fault.
        """
        within_s = timeout_s if open_s is None else open_s + world_size * OPEN_RANK_S
        links = cls(epoch, rank, world_size, device, abandon, within_s, varying)
        links._timeout_s = timeout_s
        if device.type == "cuda":
            run_abandonable(await_aborts, abandon, links._name)
        if world_size == 1:
            links._all_open.set()
            return links
        on_host = device.type != "cuda"
        everybody = tuple(range(world_size))
        near = tuple(sorted(pipeline)) if pipeline is not None and on_host else everybody

        def connect_data() -> tuple[GlooTransport, Transport]:
            shaped = ShapedTransport(control, shaper, remote) if shaper else control
            return control, links._connect_devices(shaped, control, pairs, holder_sets)

        try:
            control = links._connect_near(store_address, near, host)
            opened = run_abandonable(connect_data, abandon, links._name, _close_all)
            with _closed_on_error(opened):
                links._run(partial(tell_connected, control.store, rank, NEAR), within_s)
        except RuntimeError as error:
            found = links._not_open(error, near, HERE, NEAR)
            if found is error:  # an error that is its own cause would never be read to its end
                raise
            raise found from error
        links.control, links.data = opened
        abandon.subscribe(links._on_abandoned)
        groups = sorted(ranks for ranks in set(holder_sets) if rank in ranks)
        threads.start(f"open-all-{epoch}", partial(links._open_all, near, everybody, groups))
        return links

    def _connect_near(self, store_address: str, near: tuple[int, ...], host: str) -> GlooTransport:
        """Reach the store, wait until the ranks `near` have loaded their layers, and connect."""
        rank, timeout_s = self.rank, self._timeout_s

        def meet() -> PrefixStore:
            self._store = connect_store(store_address, self.epoch, self._open_s)
            # A client of the store serves one thread at a time; `_store` is for failed ranks.
            return cast(PrefixStore, self._store.clone())  # type: ignore[attr-defined]

        def connect() -> GlooTransport:
            return GlooTransport(store, rank, near, timeout_s, host)

        store = run_abandonable(meet, self.abandon, self._name, within_s=self._open_s)
        # Some ranks load longer than others, so the short limit begins when all are there.
        args = store, rank, near, timeout_s, self.abandon, self._closing
        self._run(partial(await_ranks, *args))
        close = GlooTransport.close
        return run_abandonable(connect, self.abandon, self._name, close, within_s=self._open_s)

    @property
    def _name(self) -> str:
        return f"open-epoch{self.epoch}"

    def _run(self, work: Callable[[], None], within_s: float | None = None) -> None:
        run_abandonable(work, self.abandon, self._name, within_s=within_s)

    def _not_open(self, error: Exception, ranks: tuple[int, ...], *circles: str) -> Exception:
        """Return the cause why `ranks` could not connect. `circles`: as of `missing_ranks`. Raises
        EpochAbandoned."""
        if not isinstance(error, RuntimeError) or is_local_fault(error):
            self.abandon.check()
            return error
        missing = missing_ranks(self._store, self.rank, ranks, circles, self.abandon)
        self.abandon.check()
        return LinkFailed(missing, f"epoch {self.epoch} could not be opened: {error}")

    def _connect_devices(
        self,
        on_host: Transport,
        control: GlooTransport,
        pairs: Sequence[tuple[int, int]],
        holder_sets: Sequence[tuple[int, ...]],
    ) -> Transport:
        """Return a transport for tensors of this rank's device: `on_host` for the CPU.

        Raises RuntimeError, and closes `control`.
        """
        if self.device.type != "cuda":
            return on_host
        try:
            if device_is_shared(control, self.rank, self.world_size, self.device):
                return HostMemoryTransport(on_host)
            store = PrefixStore("nccl", control.store)
            transport = NcclTransport(store, self.rank, self.device, self._timeout_s)
            self.abandon.subscribe(transport.close)
            try:
                transport.open(pairs, holder_sets)
            except BaseException:
                transport.close()
                raise
            finally:
                self.abandon.unsubscribe(transport.close)
            return transport
        except RuntimeError:
            control.close()
            raise

    def _open_all(
        self, near: tuple[int, ...], everybody: tuple[int, ...], groups: Sequence[tuple[int, ...]]
    ) -> None:
        """Connect to all ranks, and open the groups, while the first micro-batches run.

        If that fails, the epoch cannot end well: `check` raises the error between two actions, and
        the owner closes the links.
        """
        try:
            if near != everybody:
                args = self.control.store, self.rank, everybody, self._timeout_s
                self._run(partial(await_ranks, *args, self.abandon, self._closing))
                self._run(partial(self.control.open_group, everybody), self._open_s)
                self._run(partial(tell_connected, self.control.store, self.rank, ALL), self._open_s)
            # All ranks open their groups in this order, so no two ranks wait for each other.
            for ranks in groups:
                self._run(partial(self.data.open_group, ranks), self._open_s)
        except EpochAbandoned:
            pass
        except Exception as error:  # noqa: BLE001 - `check` raises it on the main thread
            if not self._closing.is_set():  # else the main thread has left, with its own error
                with contextlib.suppress(EpochAbandoned):
                    self._open_error = self._why_apart(error, everybody)
        finally:
            self._all_open.set()

    def _why_apart(self, error: Exception, everybody: tuple[int, ...]) -> Exception:
        """Return the cause why not all ranks are connected, as all ranks agree. Raises
        EpochAbandoned."""
        ended = self.control.disconnected() if isinstance(error, RuntimeError) else ()
        found = self._not_open(error, everybody, HERE, NEAR, ALL)
        if not isinstance(found, LinkFailed):
            return found
        suspects = ended or found.ranks
        ranks = agree_on_failed_ranks(self._store, suspects, self.abandon, nobody=True)
        return LinkFailed(ranks, found.detail)

    def check(self) -> None:
        """Raise the error because of which the ranks could not connect, if there is one."""
        if self._open_error is not None:
            self.abandon.check()
            raise self._open_error

    @contextmanager
    def translate_errors(
        self, peer: int | None = None, *, collective: bool = False
    ) -> Iterator[None]:
        """Raise EpochAbandoned or LinkFailed for a transport's RuntimeError inside the block.

        A fault of this rank's own node is raised as it is. `peer` is suspected if the cause is
        unknown. LinkFailed closes the links unless a `collective` failed. If the epoch is
        abandoned, raises EpochAbandoned even without an error.
        """
        try:
            yield
        except RuntimeError as error:
            if is_local_fault(error) and not self.abandon.is_set():
                raise
            failure = self._failure(peer, error)
            if isinstance(failure, LinkFailed) and not collective:
                self.close()
            raise failure from error
        self.abandon.check()

    def send(self, message: Message | torch.Tensor, dst: int, tag: int = 0) -> None:
        """Start to send `message` to `dst`. Its tensor must not change until `flush`.

        Blocks only while more than `max_unreceived` messages are in flight. Raises FieldError if
        type or shape differ from the first message of this flow, unless they may vary.
        """
        if isinstance(message, torch.Tensor):
            message = Message.of(message)
        spec = message.spec
        first = self._sent_specs.get((dst, tag))
        if first is not None and first != spec:
            what = Described(f"a value of {spec.describe()} after one of {first.describe()}")
            raise FieldError("value between layers", what, VARYING)
        with self.translate_errors(dst):
            if first is None:
                if not self._varying:
                    self._sent_specs[(dst, tag)] = spec
                header, text = pack_header(spec)
                work = self.control.send(header, dst, header_tag(tag))
                self._keep(work, header, self.control)
                if text.numel():
                    self._keep(self.control.send(text, dst, text_tag(tag)), text, self.control)
            tensor = message.tensor
            self._keep(self.data.send(tensor, dst, data_tag(tag)), tensor, self.data)

    def _keep(self, work: Operation, tensor: torch.Tensor, transport: Transport) -> None:
        """Keep a tensor that is being sent; if there are too many, wait for the oldest message.

        The limit is needed because gloo does not report the receipt of a message.
        """
        self._unreceived.append((work, tensor, transport))
        while self._unreceived and self._unreceived[0][0].is_completed():
            self._unreceived.popleft()
        if len(self._unreceived) > self.max_unreceived:
            oldest, _, transport = self._unreceived.popleft()
            transport.wait(oldest)

    def recv(self, src: int, tag: int = 0) -> Receive:
        """Post a receive of the next message of a flow, and return it. Never blocks.

        Post receives in the order in which `src` sends, over all of its flows.
        """
        with self.translate_errors(src):
            header = self._flows.get((src, tag))
            if header is None:
                words = empty_header()
                work = self.control.recv(words, src, header_tag(tag))
                header = _IncomingHeader(words, work)
                if not self._varying:
                    self._flows[(src, tag)] = header
            receive = Receive(self, src, tag, header)
            self._unposted[src].append(receive)
            self._post(src)
            return receive

    def read_header(self, src: int) -> None:
        """Wait for the header that the oldest unposted receive needs, then post receives."""
        receive = self._unposted[src][0]
        header = receive.header
        self.control.wait(header.work)
        try:
            text = torch.zeros(text_nbytes(header.words), dtype=torch.uint8)
            if text.numel():
                self.control.wait(self.control.recv(text, src, text_tag(receive.tag)))
            header.spec = unpack_header(header.words, text)
        except FieldError as error:
            raise LinkFailed((src,), f"malformed header: {error}") from error
        self._post(src)

    def _post(self, src: int) -> None:
        """Post the receives whose dtype and shape are known.

        NCCL has no tags, so receives of all flows are posted in the order of `recv`. A receive is
        posted as soon as its header has arrived, so that the sender need not wait for it.
        """
        unposted = self._unposted[src]
        while unposted and (spec := unposted[0].header.spec) is not None:
            receive, (dtype, shape) = unposted.popleft(), spec.message
            buffer = torch.empty(shape, dtype=dtype, device=self.device)
            receive.posted = self.data.recv(buffer, src, data_tag(receive.tag)), buffer

    def flush(self) -> None:
        """Wait until all sent messages have left."""
        with self.translate_errors():
            while self._unreceived:
                work, _, transport = self._unreceived.popleft()
                transport.wait(work)

    def gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the CPU `tensor` of every rank, in rank order. Shapes and dtypes must be equal."""
        if self.world_size == 1:
            self.abandon.check()
            return [tensor.clone()]
        outputs = [torch.empty_like(tensor) for _ in range(self.world_size)]
        all_ranks = tuple(range(self.world_size))
        with self.translate_errors(collective=True):
            self._await_all()
            self.control.wait(self.control.all_gather(outputs, tensor, all_ranks))
        return outputs

    def all_reduce(self, tensor: torch.Tensor, ranks: tuple[int, ...]) -> PendingCollective:
        """Start to sum `tensor` in place over `ranks` (ascending, including this rank).

        All of these ranks must start their common collectives in the same order. Keep the tensors
        of a collective until it is done.
        """
        if len(ranks) == 1:
            return PendingCollective(self.abandon.check, lambda: True)
        return self._collective(lambda: self.data.all_reduce(tensor, ranks))

    def all_gather(
        self, outputs: list[torch.Tensor], tensor: torch.Tensor, ranks: tuple[int, ...]
    ) -> PendingCollective:
        """Start to fill `outputs[i]` with the `tensor` of `ranks[i]`, of equal shape on all ranks.

        See `all_reduce` for the order of collectives.
        """
        return self._collective(lambda: self.data.all_gather(outputs, tensor, ranks))

    def _collective(self, begin: Callable[[], Operation]) -> PendingCollective:
        with self.translate_errors(collective=True):
            self._await_all()
            work = begin()

        def wait() -> None:
            with self.translate_errors(collective=True):
                self.data.wait(work)

        return PendingCollective(wait, lambda: bool(work.is_completed()))

    def _await_all(self) -> None:
        """Wait until all ranks are connected. Raises as `check` does, and EpochAbandoned."""
        if not self._all_open.is_set():
            self.abandon.subscribe(self._all_open.set)
            self._all_open.wait()
            self.abandon.unsubscribe(self._all_open.set)
        self.abandon.check()  # perhaps the groups were not opened because of it
        self.check()

    def _failure(self, peer: int | None, error: RuntimeError) -> Exception:
        """Return the cause of a transport's `error`: EpochAbandoned, LinkFailed, or the error of
        the thread that connects all ranks."""
        if self.abandon.is_set():
            return EpochAbandoned(self.abandon.reason)
        if self._open_error is not None:
            return self._open_error
        suspects = self.control.disconnected() or (() if peer is None else (peer,))
        ranks = agree_on_failed_ranks(self._store, suspects, self.abandon)
        return LinkFailed(ranks, str(error).split("\n")[0][:200])

    def _on_abandoned(self) -> None:
        if self.abandon.gentle:
            for transport in self._transports():
                transport.wake()
        else:
            self.close()

    def close(self) -> None:
        """Close all transports; blocked waits raise. Returns at once."""
        self._closing.set()
        self.abandon.unsubscribe(self._on_abandoned)
        for transport in self._transports():
            threads.start(f"close-epoch{self.epoch}", transport.close)

    def _transports(self) -> list[Transport]:
        both = (self.control, self.data) if self.world_size > 1 else ()
        return list({id(transport): transport for transport in both}.values())


@dataclass(slots=True, eq=False)
class _IncomingHeader:
    """Description of one message, or of all messages from one rank with one tag."""

    words: torch.Tensor
    work: Operation
    spec: ValueSpec | None = None
    """None until the header has arrived."""


@dataclass(slots=True, eq=False)
class Receive:
    """An expected message. `Links.recv` makes it."""

    links: Links
    src: int
    tag: int
    header: _IncomingHeader
    posted: tuple[Operation, torch.Tensor] | None = None
    """The transport's receive and its buffer, once the message's type and shape are known."""

    def wait(self) -> torch.Tensor:
        """Return the tensor of the message. Raises as `message` does."""
        return self.message().tensor

    def message(self) -> Message:
        """Return the message, on the links' device. Raises EpochAbandoned or LinkFailed."""
        with self.links.translate_errors(self.src):
            while self.posted is None:
                self.links.read_header(self.src)
            work, buffer = self.posted
            self.links.data.wait(work)
        assert self.header.spec is not None
        return Message(self.header.spec, buffer)


@contextmanager
def _closed_on_error(transports: tuple[GlooTransport, Transport]) -> Iterator[None]:
    """Close `transports` if the block raises."""
    try:
        yield
    except BaseException:
        _close_all(transports)
        raise


def _close_all(transports: tuple[GlooTransport, Transport]) -> None:
    for transport in transports:
        transport.close()


def data_tag(tag: int) -> int:
    """Transport tag of a flow's messages."""
    return 2 * tag


def header_tag(tag: int) -> int:
    """Transport tag of a flow's headers."""
    return 2 * tag + 1


def text_tag(tag: int) -> int:
    """Transport tag of the texts of headers. A receive of one is posted when its header has come,
    and receives of further headers may be posted by then."""
    return _TEXT_TAGS + tag
