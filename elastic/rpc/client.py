"""A node's side of its stream to the coordinator, and one-shot calls.

A `Session` looks for its coordinator for as long as it is open: a dead coordinator is found again within
about half a second of its return. Nothing is kept while it is away; a node tells its whole condition anew in
`on_up`. Of several coordinators the one with the highest term is followed (`elastic.core.protocol.election`). All
addresses are tried all the time: one that took over is found although the former one is only paused, and its
stream open.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc

from elastic.core.protocol.election import accepts_term
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import ElasticError, FieldError, UsageError
from elastic.rpc import elastic_pb2_grpc, security
from elastic.rpc.envelope import (
    CHALLENGE,
    Envelope,
    Rejected,
    from_proto,
    pack,
    pack_call,
    pieces,
    to_proto,
    unpack,
    unpack_call,
)
from elastic.rpc.loop import Dispatcher, ended, event_loop, run
from elastic.rpc.options import (
    CONNECT_TIMEOUT_S,
    RETRY_MAX_S,
    RETRY_MIN_S,
    TERM,
    addresses_of,
    client_options,
)
from elastic.rpc.proofs import answer, digest, new_nonce, proved
from elastic.rpc.refusals import REFUSALS, Reason

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
        keepalive_s: float = DEFAULT_TIMEOUTS.keepalive_s,
        secure: security.Security | None = None,
    ) -> None:
        """`secure`: what this side proves itself with; None: what this process goes by."""
        addresses = addresses_of(address)
        self._secure = secure or security.current()
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
        self._silent: set[str] = set()
        """Addresses of which it was told that they do not answer."""
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
            run(ended(self._tasks))
            self._dispatcher.close()

    async def _start(self, addresses: tuple[str, ...], keepalive_s: float) -> set[asyncio.Task[None]]:
        return {asyncio.create_task(self._keep_up(address, keepalive_s)) for address in addresses}

    async def _keep_up(self, address: str, keepalive_s: float) -> None:
        """Open one stream after another. gRPC itself searches for the server; the wait here is between
        streams.
        """
        delay_s = RETRY_MIN_S
        while True:
            stamp = self._stamp()
            async with _channel(grpc.aio, address, client_options(keepalive_s), self._secure) as channel:
                while self._stamp() == stamp:
                    started = time.monotonic()
                    await self._attempt(address, channel)
                    lived_s = time.monotonic() - started
                    delay_s = RETRY_MIN_S if lived_s > RETRY_MAX_S else min(2 * delay_s, RETRY_MAX_S)
                    await asyncio.sleep(random.uniform(delay_s / 2, delay_s))

    def _stamp(self) -> security.Stamp:
        """Other than before: the certificates were replaced, and the next connection goes by the new ones."""
        contexts = self._secure.contexts
        return contexts.stamp() if contexts is not None else ()

    async def _attempt(self, address: str, channel: grpc.aio.Channel) -> None:
        """Prove who we are, where that is asked, and use one stream until it ends."""
        stub = elastic_pb2_grpc.CoordinatorStub(channel)
        metadata: tuple[tuple[str, str], ...] = (("sender", self.sender),)
        if self._secure.token or self._secure.certs is not None:
            mine = new_nonce()
            question = to_proto(pack_call(CHALLENGE, {"nonce": mine}))
            try:
                reply = unpack_call(from_proto(await stub.Call(question, timeout=CONNECT_TIMEOUT_S)))
                self._silent.discard(address)
                metadata += _proof(self._secure.token, mine, reply, "session", self.sender)
            except grpc.aio.AioRpcError as error:
                if address not in self._silent:
                    log.info("%s: %s does not answer: %s", self.sender, address, error.details())
                self._silent.add(address)
                if "andshake" in str(error.details()) or "ertificate" in str(error.details()):
                    REFUSALS.count("agent", Reason.HANDSHAKE, address, error.details())
                await _ready(channel)
                return
            except ElasticError as error:
                REFUSALS.count("agent", Reason.TOKEN, address, error)
                return
        await self._stream(address, stub.Session(metadata=metadata, wait_for_ready=True))

    async def _stream(self, address: str, call: Any) -> None:
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
            newest = 0
            async for proto in call:
                if call is not self._active:
                    continue
                envelope = from_proto(proto)
                if envelope.sequence <= newest and newest:
                    REFUSALS.count("agent", Reason.REPLAYED, address, envelope.kind)
                    continue
                newest = envelope.sequence
                self._receive(address, envelope)
            reason = "the coordinator ended the stream"
        except grpc.aio.AioRpcError as error:
            reason = error.details() or str(error.code())
            if error.code() is grpc.StatusCode.UNAUTHENTICATED:
                REFUSALS.count("agent", Reason.TOKEN, address, reason)
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
                log.info("%s: no stream to %s: %s", self.sender, address, reason)

    def _follow(self, call: Any, term: int) -> bool:
        """Whether this stream is the one to use from now on; the one used so far is given up for it."""
        if not accepts_term(term, self.term, self._active_term if self._active is not None else None):
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

    def _receive(self, address: str, envelope: Envelope) -> None:
        if envelope.term < self.term:
            self.stale += 1
            what = f"{envelope.kind} of term {envelope.term}: term {self.term} rules"
            REFUSALS.count("agent", Reason.STALE, address, what)
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


def call(
    address: str,
    kind: str,
    body: dict[str, Any],
    timeout_s: float = 5.0,
    secure: security.Security | None = None,
) -> dict[str, Any]:
    """Ask the coordinator at `address` (several separated by commas: the one of them that answers) one question.

    Raises UsageError if it cannot be reached or refuses the question (with its words), ElasticError if it
    cannot do what was asked. `secure`: what this side proves itself with; None: what this process goes by.
    """
    secure = secure or security.current()
    *others, last = addresses_of(address)
    for other in others:
        try:
            return _call(other, kind, body, timeout_s, secure)
        except Unreachable:
            continue
    return _call(last, kind, body, timeout_s, secure)


class Unreachable(UsageError):
    """No coordinator answers at an address."""


def _call(
    address: str, kind: str, body: dict[str, Any], timeout_s: float, secure: security.Security
) -> dict[str, Any]:
    with _channel(grpc, address, client_options(keepalive_s=DEFAULT_TIMEOUTS.keepalive_s), secure) as channel:
        stub = elastic_pb2_grpc.CoordinatorStub(channel)
        question = pack_call(kind, body)
        metadata: tuple[tuple[str, str], ...] = ()
        try:
            if secure.token:
                mine = new_nonce()
                reply = stub.Call(to_proto(pack_call(CHALLENGE, {"nonce": mine})), timeout=timeout_s)
                words = ("call", kind, digest(question.body))
                metadata = _proof(secure.token, mine, unpack_call(from_proto(reply)), *words)
            answered = stub.Call(to_proto(question), timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise _in_words(address, kind, timeout_s, error) from error
    return unpack_call(from_proto(answered))


def _channel(api: Any, address: str, options: list[tuple[str, Any]], secure: security.Security) -> Any:
    """A channel of gRPC's `api` (synchronous or asyncio) to `address`."""
    contexts = secure.contexts
    if contexts is None:
        return api.insecure_channel(address, options=options)
    ca, cert, key = contexts.pem()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    named = [("grpc.ssl_target_name_override", secure.name)] if secure.name else []
    return api.secure_channel(address, credentials, options=[*options, *named])


async def _ready(channel: grpc.aio.Channel) -> None:
    """Wait until the other side can be reached, but not for long: then the next attempt tells why it cannot."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)


def _proof(token: str, mine: str, reply: dict[str, Any], *words: str) -> tuple[tuple[str, str], ...]:
    """Metadata that answers a challenge. Raises UsageError when the other side does not know the token."""
    nonce = str(reply.get("nonce", ""))
    if token and not proved(token, str(reply.get("proof", "")), "server", mine, nonce):
        raise UsageError("the coordinator does not know the join token: is it this job's?")
    return ("nonce", nonce), ("proof", answer(token, nonce, *words))


def _term_of(metadata: Any) -> int:
    """The term with which a coordinator opened a stream; 0: it did not say."""
    text = str(dict(metadata or ()).get(TERM, "0"))
    return int(text) if text.isdecimal() else 0


async def _write(outbox: asyncio.Queue[Envelope], call: Any) -> None:
    """Send what is queued. A stream that ends meanwhile is the reader's news, not ours."""
    try:
        numbers = itertools.count(1)
        while True:
            for envelope in pieces(await outbox.get()):
                await call.write(to_proto(envelope, next(numbers)))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return


def _in_words(address: str, kind: str, timeout_s: float, error: Any) -> ElasticError:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return UsageError(details)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return ElasticError(details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UsageError(f"{details}; give the job's with --join-token-file or --run-dir")
    if code is grpc.StatusCode.UNAVAILABLE:
        remedy = "is the job running, and are address and --certs right?"
        return Unreachable(f"no coordinator answers at {address} ({details}); {remedy}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unreachable(f"the coordinator at {address} did not answer {kind!r} within {timeout_s:g} s")
    return ElasticError(f"the coordinator at {address} failed on {kind!r}: {code.name}: {details}")
