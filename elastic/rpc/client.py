"""A node's side of its stream to the coordinator, and one-shot calls.

A `Session` looks for its coordinator for as long as it is open: a dead coordinator is found again within
about half a second of its return. Nothing is kept while it is away; a node tells its whole condition anew in
`on_up`. Of several coordinators the one with the highest term is followed (`elastic.core.election`). All
addresses are tried all the time: one that took over is found although the former one is only paused, and its
stream open.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from elastic.core.election import accepts
from elastic.core.timeouts import DEFAULT
from elastic.errors import ElasticError, FieldError, UsageError
from elastic.rpc import elastic_pb2_grpc
from elastic.rpc.envelope import (
    Envelope,
    Rejected,
    from_proto,
    pack,
    pack_call,
    to_proto,
    unpack,
    unpack_call,
)
from elastic.rpc.loop import Dispatcher, event_loop, run
from elastic.rpc.options import RETRY_MAX_S, RETRY_MIN_S, TERM, addresses_of, client_options

log = logging.getLogger(__name__)


class Session:
    """Keeps one stream open, to the leader among `address` (host:port, several separated by commas), from the
    moment it is made until `close`.

    Callbacks run on one thread of this session, in order: `on_up()` when the coordinator has accepted the
    stream, `on_message(message, envelope)`, `on_down(reason)` when it is lost; up and down alternate.
    Messages of an older term than the highest seen are dropped (and counted in `stale`).
    """

    def __init__(
        self,
        address: str,
        *,
        on_message: Callable[[Any, Envelope], object],
        on_up: Callable[[], object],
        on_down: Callable[[str], object],
        sender: str,
        keepalive_s: float = DEFAULT.keepalive_s,
    ) -> None:
        addresses = addresses_of(address)
        self.address, self.sender = address, sender
        self.term = 0
        """Highest coordinator term seen."""
        self.stale = 0
        """Messages refused because their term was older."""
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._outbox: asyncio.Queue[Envelope] | None = None
        self._closed = False
        self._active: Any = None
        """The stream that is followed, and ..."""
        self._active_term = 0
        self._left: set[Any] = set()
        """Streams given up for a newer coordinator's."""
        self._dispatcher = Dispatcher(f"rpc-{sender}")
        self._tasks = run(self._start(addresses, keepalive_s))

    @property
    def up(self) -> bool:
        return self._outbox is not None

    def send(self, message: Any, epoch: int) -> bool:
        """Queue a message and return at once; thread-safe. False: the coordinator is away, nothing was
        queued.
        """
        outbox = self._outbox
        if outbox is None:
            return False
        envelope = pack(message, term=self.term, epoch=epoch, sender=self.sender)
        event_loop().call_soon_threadsafe(outbox.put_nowait, envelope)
        return True

    def close(self) -> None:
        """End the stream. No callback begins any more, and none is running when this returns, unless it is
        called from one. Idempotent.
        """
        if not self._closed:
            self._closed = True
            self._dispatcher.abandon()
            run(self._cancel())
            self._dispatcher.close()

    async def _start(self, addresses: tuple[str, ...], keepalive_s: float) -> set[asyncio.Task[None]]:
        return {asyncio.create_task(self._keep_up(address, keepalive_s)) for address in addresses}

    async def _cancel(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)

    async def _keep_up(self, address: str, keepalive_s: float) -> None:
        """Open one stream after another. gRPC itself searches for the server; the wait here is between
        streams.
        """
        delay_s = RETRY_MIN_S
        async with grpc.aio.insecure_channel(address, options=client_options(keepalive_s)) as channel:
            stub = elastic_pb2_grpc.CoordinatorStub(channel)
            while True:
                started = time.monotonic()
                await self._stream(stub.Session(metadata=(("sender", self.sender),), wait_for_ready=True))
                lived_s = time.monotonic() - started
                delay_s = RETRY_MIN_S if lived_s > RETRY_MAX_S else min(2 * delay_s, RETRY_MAX_S)
                await asyncio.sleep(random.uniform(delay_s / 2, delay_s))

    async def _stream(self, call: Any) -> None:
        """Use one stream until it ends."""
        writer: asyncio.Task[None] | None = None
        reason = "closed"
        try:
            await call.wait_for_connection()
            if not self._follow(call, _term_of(await call.initial_metadata())):
                reason = "another coordinator is followed"
                return
            outbox: asyncio.Queue[Envelope] = asyncio.Queue()
            writer = asyncio.create_task(_write(outbox, call))
            self._outbox = outbox
            self._dispatcher.post(self._on_up)
            async for proto in call:
                if call is self._active:
                    self._receive(from_proto(proto))
            reason = "the coordinator ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
        except asyncio.CancelledError:
            if call not in self._left:
                raise
        finally:
            call.cancel()
            self._left.discard(call)
            if writer is not None:
                writer.cancel()
            if call is self._active:
                self._unfollow(reason)
            else:
                log.info("%s: no stream to %s: %s", self.sender, self.address, reason)

    def _follow(self, call: Any, term: int) -> bool:
        """Whether this stream is the one to use from now on; the one used so far is given up for it."""
        if not accepts(term, self.term, self._active_term if self._active is not None else None):
            return False
        if self._active is not None:
            self._left.add(self._active)
            self._active.cancel()
            self._unfollow(f"a coordinator with term {term} took over")
        self._active, self._active_term, self.term = call, term, term
        return True

    def _unfollow(self, reason: str) -> None:
        self._active = self._outbox = None
        self._dispatcher.post(partial(self._on_down, reason))

    def _receive(self, envelope: Envelope) -> None:
        if envelope.term < self.term:
            self.stale += 1
            log.warning("%s of term %d refused: term %d rules", envelope.kind, envelope.term, self.term)
            return
        self.term = envelope.term
        try:
            message = unpack(envelope)
        except FieldError as error:
            log.error("the coordinator sent a message that cannot be read: %s", error)
            return
        if isinstance(message, Rejected):
            log.error("the coordinator could not read a message of kind %s: %s", message.kind, message.text)
            return
        self._dispatcher.post(partial(self._on_message, message, envelope))


def call(address: str, kind: str, body: dict[str, Any], timeout_s: float = 5.0) -> dict[str, Any]:
    """Ask the coordinator at `address` (several separated by commas: the one of them that answers) one question.

    Raises UsageError if it cannot be reached or refuses the question (with its words), ElasticError if it
    cannot do what was asked.
    """
    *others, last = addresses_of(address)
    for other in others:
        try:
            return _call(other, kind, body, timeout_s)
        except Unreachable:
            continue
    return _call(last, kind, body, timeout_s)


class Unreachable(UsageError):
    """No coordinator answers at an address."""


def _call(address: str, kind: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
    with grpc.insecure_channel(address, options=client_options(DEFAULT.keepalive_s)) as channel:
        stub = elastic_pb2_grpc.CoordinatorStub(channel)
        try:
            answer = stub.Call(to_proto(pack_call(kind, body)), timeout=timeout_s)
        except grpc.RpcError as error:
            raise _in_words(address, kind, timeout_s, error) from error
    return unpack_call(from_proto(answer))


def _term_of(metadata: Any) -> int:
    """The term with which a coordinator opened a stream; 0: it did not say."""
    text = str(dict(metadata or ()).get(TERM, "0"))
    return int(text) if text.isdecimal() else 0


async def _write(outbox: asyncio.Queue[Envelope], call: Any) -> None:
    """Send what is queued. A stream that ends meanwhile is the reader's news, not ours."""
    try:
        while True:
            await call.write(to_proto(await outbox.get()))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return


def _in_words(address: str, kind: str, timeout_s: float, error: Any) -> ElasticError:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return UsageError(details)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return ElasticError(details)
    if code is grpc.StatusCode.UNAVAILABLE:
        remedy = "is the job running, and the address right?"
        return Unreachable(f"no coordinator answers at {address} ({details}); {remedy}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unreachable(f"the coordinator at {address} did not answer {kind!r} within {timeout_s:g} s")
    return ElasticError(f"the coordinator at {address} failed on {kind!r}: {code.name}: {details}")
