"""Client of the coordinator: a node's message stream, and single requests.

A `CoordinatorSession` tries to reach its coordinator for as long as it is open. It finds a returned
coordinator within about half a second. It queues no messages while the coordinator is away: in
`on_up` a node sends its whole condition again. Of several coordinators, the session follows the one
with the highest term (`elastic.core.protocol.election`). It tries all addresses all the time, so it
finds a new leader even if the former one is only paused and its stream is open.
"""

from __future__ import annotations

import asyncio
import contextlib
import getpass
import itertools
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import grpc
from msgspec.structs import replace

from elastic.core.protocol.election import accepts_term
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.core.protocol.version import ProtocolVersion, incompatibility
from elastic.domain.errors import ElasticError, FieldError, UsageError
from elastic.rpc.control.channel_options import (
    CONNECT_TIMEOUT_S,
    PROTOCOL_KEY,
    REFUSED_RETRY_MAX_S,
    TERM,
    addresses_of,
    client_options,
    retry_max_s,
)
from elastic.rpc.control.connection_errors import explained
from elastic.rpc.control.connection_watch import together_s
from elastic.rpc.control.envelope import (
    CALL,
    CHALLENGE,
    MAX_CALLER_CHARS,
    PING,
    PONG,
    SESSION,
    SESSION_VERSION,
    Envelope,
    Rejected,
    from_wire,
    pack,
    pack_call,
    pieces,
    to_wire,
    unpack,
    unpack_call,
)
from elastic.rpc.control.event_loop import Dispatcher, ended, event_loop, run
from elastic.rpc.control.reconnect_pauses import ReconnectPauses
from elastic.rpc.control.round_trips import PING_S, RoundTrips
from elastic.rpc.frames import version_in, version_text
from elastic.rpc.security import tls
from elastic.rpc.security.expiry import with_expiry
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.roles import role_of
from elastic.rpc.security.token_proof import answer, digest, new_nonce, proved

log = logging.getLogger(__name__)
ANNOUNCEMENT = (PROTOCOL_KEY, version_text(SESSION_VERSION))
"""Metadata of a session of this version."""
ENDED = "the coordinator ended the stream"
STATUS_LOST = "Internal error from Core"
"""Text of grpc.aio for a stream whose status it lost: the coordinator ended it during a write."""


class CoordinatorStub:
    """The coordinator's methods on a channel of gRPC, synchronous or asyncio.

    Requests are envelopes. Answers are bytes for `from_wire`, because gRPC turns the error of a
    deserializer into an answer of None.
    """

    def __init__(self, channel: Any) -> None:
        self.session = channel.stream_stream(SESSION, request_serializer=to_wire)
        self.call = channel.unary_unary(CALL, request_serializer=to_wire)


class CoordinatorSession:
    """Keeps a stream to the leader open until `close`.

    `address` is host:port; several are separated by commas.

    Callbacks run on one thread of this session, in order. `on_up()` is called when the coordinator
    has accepted the stream, `on_message(message, envelope)` for each message, and `on_down(reason)`
    when the stream is lost; up and down alternate. A message of an older term than the highest seen
    is dropped and counted as rejected. `on_refused(why)` is called once per coordinator whose
    version does not fit; the session tries again with growing pauses.
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
        ping_s: float = 0.0,
        nodes: int = 1,
        secure: tls.SecuritySettings | None = None,
        on_refused: Callable[[str], object] = lambda why: None,
        version: ProtocolVersion = SESSION_VERSION,
    ) -> None:
        """`ping_s`: least pause between measurements of the round-trip time. `nodes`: number of
        nodes of the job, which may all connect at once. `secure`: certificates and token of this
        side; None: those of this process. `version`: announced to coordinators."""
        addresses = addresses_of(address)
        self._secure, self._version = secure or tls.current(), version
        self._on_refused, self._nodes = on_refused, nodes
        # Without TLS a longer attempt only delays the next one, after a cut of the network.
        takes_turns = self._secure.certificates is not None
        self._connect_s = max(CONNECT_TIMEOUT_S, together_s(nodes) if takes_turns else 0.0)
        self._peer = ProtocolVersion()
        """Version of the coordinator that is followed."""
        self._refusals: dict[str, str] = {}
        """Reason per address at which a coordinator of another version was found."""
        self.address, self.sender = address, sender
        self.term = 0
        """Highest coordinator term seen."""
        self._on_message, self._on_up, self._on_down = on_message, on_up, on_down
        self._outbox: asyncio.Queue[Envelope] | None = None
        self._closed = False
        self._active: Any = None
        """The stream in use; None: there is none."""
        self._active_term = 0
        self._left: set[Any] = set()
        """Streams that were cancelled in favour of a newer coordinator's."""
        self._round_trips = RoundTrips(max(PING_S, ping_s))
        self._problems: dict[str, str] = {}
        """Newest reason per address for which no stream was opened."""
        self._dispatcher = Dispatcher(f"rpc-{sender}")
        self._tasks = run(self._start(addresses, keepalive_s))

    @property
    def up(self) -> bool:
        return self._outbox is not None

    @property
    def problem(self) -> str:
        """Newest reason per address for which no coordinator is followed; "": none is known yet."""
        problems = dict(self._problems)
        if len(problems) == 1:
            return next(iter(problems.values()))
        return "; ".join(f"{address}: {why}" for address, why in sorted(problems.items()))

    @property
    def rtt_s(self) -> float:
        """Least round-trip time to the coordinator in the newest measurements; 0: unknown."""
        return self._round_trips.least_s

    def send(self, message: Any, epoch: int) -> bool:
        """Queue a message. Return False, without queueing, if there is no stream, or if the
        coordinator's version cannot read the message. Thread-safe."""
        outbox = self._outbox
        if outbox is None:
            return False
        envelope = pack(message, term=self.term, epoch=epoch, sender=self.sender)
        if not self._peer.reads(envelope.kind):
            return False
        event_loop().call_soon_threadsafe(outbox.put_nowait, envelope)
        return True

    def close(self) -> None:
        """End the stream. Idempotent. No callback runs afterwards, except one that calls this."""
        if not self._closed:
            self._closed = True
            self._dispatcher.abandon()
            run(ended(self._tasks))
            self._dispatcher.close()

    async def _start(
        self, addresses: tuple[str, ...], keepalive_s: float
    ) -> set[asyncio.Task[None]]:
        return {asyncio.create_task(self._keep_up(address, keepalive_s)) for address in addresses}

    async def _keep_up(self, address: str, keepalive_s: float) -> None:
        """Open streams to `address`, one after another, with pauses. gRPC itself reconnects."""
        pauses = ReconnectPauses()
        while True:
            stamp = self._stamp()
            options = client_options(keepalive_s, self._connect_s, self._nodes)
            async with _channel(grpc.aio, address, options, self._secure) as channel:
                while self._stamp() == stamp:
                    started = time.monotonic()
                    followed = await self._attempt(address, channel)
                    lasted_s = time.monotonic() - started
                    refused = address in self._refusals
                    longest_s = REFUSED_RETRY_MAX_S if refused else retry_max_s(self._nodes)
                    pause_s = pauses.after(lasted_s, followed=followed, longest_s=longest_s)
                    await asyncio.sleep(random.uniform(pause_s / 2, pause_s))

    def _stamp(self) -> tls.Stamp:
        """Return the version of the certificates: if it changes, the connection is made again."""
        certificates = self._secure.certificates
        return certificates.stamp() if certificates is not None else ()

    async def _attempt(self, address: str, channel: grpc.aio.Channel) -> bool:
        """Prove this side's identity if that is required, and use one stream until it ends. Return
        whether the stream was followed."""
        stub = CoordinatorStub(channel)
        metadata: tuple[tuple[str, str], ...] = (
            ("sender", self.sender),
            (PROTOCOL_KEY, version_text(self._version)),
        )
        if self._secure.token or self._secure.certs is not None:
            mine = new_nonce()
            question = pack_call(CHALLENGE, {"nonce": mine})
            try:
                reply = unpack_call(from_wire(await stub.call(question, timeout=self._connect_s)))
                metadata += _proof(self._secure.token, mine, reply, "session", self.sender)
            except grpc.aio.AioRpcError as error:
                why = with_expiry(str(error.details()), self._secure.certificates)
                self._no_stream(address, why)
                if _is_tls_failure(why):
                    REJECTIONS.count("agent", Reason.HANDSHAKE, address, why)
                await _is_ready(channel)  # The next attempt reports why there is no connection.
                return False
            except ElasticError as error:
                REJECTIONS.count("agent", Reason.TOKEN, address, error)
                self._no_stream(address, str(error))
                return False
        if not await _is_ready(channel):
            self._no_stream(address, await self._why_silent(stub))
            return False
        return await self._stream(address, stub.session(metadata=metadata))

    async def _why_silent(self, stub: CoordinatorStub) -> str:
        """Return why there is no connection. A request fails with the reason; a stream waits."""
        try:
            question = pack_call(CHALLENGE, {"nonce": new_nonce()})
            await stub.call(question, timeout=self._connect_s)
        except grpc.aio.AioRpcError as error:
            return with_expiry(explained(str(error.details())), self._secure.certificates)
        return f"no connection within {self._connect_s:g} s"

    def _no_stream(self, address: str, why: str) -> None:
        """Note why there is no stream to `address`, and log it if that is new."""
        if self._problems.get(address) != why:
            log.info("%s: no stream to %s: %s", self.sender, address, why)
        self._problems[address] = why

    async def _stream(self, address: str, call: Any) -> bool:
        """Use one stream until it ends. Return whether it was followed."""
        tasks: list[asyncio.Task[None]] = []
        reason, followed = "closed", False
        try:
            reason = await self._open(address, call)
            if reason:
                return False
            followed = True
            self._problems.pop(address, None)
            outbox: asyncio.Queue[Envelope] = asyncio.Queue()
            tasks.append(asyncio.create_task(_write(outbox, call)))
            self._outbox = outbox
            ping = Envelope(self.term, 0, PING, b"", self.sender)
            send_ping = partial(outbox.put_nowait, ping)
            tasks.append(asyncio.create_task(self._round_trips.measure(send_ping)))
            self._dispatcher.post(self._on_up)
            newest = 0
            async for data in call:
                if call is not self._active:
                    continue
                envelope = from_wire(data)
                if envelope.sequence <= newest and newest:
                    REJECTIONS.count("agent", Reason.REPLAYED, address, envelope.kind)
                    continue
                newest = envelope.sequence
                self._receive(address, envelope)
            reason = ENDED
        except grpc.aio.AioRpcError as error:
            reason = self._failure(address, error)
        except FieldError as error:
            reason = str(error)
            REJECTIONS.count("agent", Reason.MALFORMED, address, reason)
        except asyncio.CancelledError:
            if call not in self._left:
                raise
        finally:
            call.cancel()
            self._left.discard(call)
            for task in tasks:
                task.cancel()
            if call is self._active:
                self._problems[address] = reason
                self._unfollow(reason)
            else:
                self._no_stream(address, reason)
        return followed

    async def _open(self, address: str, call: Any) -> str:
        """Wait until a coordinator opens the stream, and follow it; return why not, or "".

        A busy coordinator may take long. The wait has no limit of its own, because giving up and
        asking again would make it busier; if it is gone, the connection ends.
        """
        opened = await call.initial_metadata()
        if not _text_of(opened, TERM):
            return await _why_refused(call)
        return self._consider(address, call, opened)

    def _consider(self, address: str, call: Any, metadata: Any) -> str:
        """Follow the coordinator that opened the stream `call`; return why not, or ""."""
        theirs = version_in(_text_of(metadata, PROTOCOL_KEY))
        if refusal := self._refusal(address, theirs):
            return refusal
        if not self._follow(call, _term_of(metadata)):
            return "another coordinator is followed"
        self._peer = theirs
        return ""

    def _failure(self, address: str, error: grpc.aio.AioRpcError) -> str:
        """Return why a stream failed; report a coordinator of another version or token."""
        for sent in (error.initial_metadata(), error.trailing_metadata()):
            if _text_of(sent, TERM):
                self._refusal(address, version_in(_text_of(sent, PROTOCOL_KEY)))
        reason = error.details() or str(error.code())
        if reason == STATUS_LOST:
            reason = ENDED
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            REJECTIONS.count("agent", Reason.TOKEN, address, reason)
        return with_expiry(reason, self._secure.certificates)

    def _refusal(self, address: str, theirs: ProtocolVersion) -> str:
        """Return why the coordinator's version does not fit; "": it fits. Report it once."""
        name = f"the coordinator at {address}"
        problem = incompatibility(self._version, theirs, self.sender, name)
        if not problem:
            self._refusals.pop(address, None)
        elif self._refusals.get(address) != problem:
            self._refusals[address] = problem
            REJECTIONS.count("agent", Reason.VERSION, address, problem)
            self._dispatcher.post(partial(self._on_refused, problem))
        return problem

    def _follow(self, call: Any, term: int) -> bool:
        """Use this stream instead of the former one. Return False if `accepts_term` refuses it."""
        active_term = self._active_term if self._active is not None else None
        if not accepts_term(term, self.term, active_term):
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
            what = f"{envelope.kind} of term {envelope.term}: term {self.term} rules"
            REJECTIONS.count("agent", Reason.STALE, address, what)
            return
        self.term = envelope.term
        if envelope.kind == PONG:
            self._round_trips.answered()
            return
        try:
            message = unpack(envelope)
        except FieldError as error:
            log.error("the coordinator sent a message that cannot be read: %s", error)
            return
        if isinstance(message, Rejected):
            if message.kind == PING:  # an older coordinator; there will be no other ping
                return
            log.error("the coordinator could not read a %s: %s", message.kind, message.text)
            return
        self._dispatcher.post(partial(self._on_message, message, envelope))


def call(
    address: str,
    kind: str,
    body: dict[str, Any],
    timeout_s: float = 5.0,
    secure: tls.SecuritySettings | None = None,
) -> dict[str, Any]:
    """Send a question to the first coordinator that can be reached; return its answer.

    `address` is host:port; several are separated by commas. `secure`: certificates and token of
    this side; None: those of this process. Raises UsageError if no coordinator can be reached or it
    refuses the question, ElasticError if it cannot carry it out; the texts are the coordinator's.
    """
    secure = secure or tls.current()
    failed: list[Unreachable] = []
    for one in addresses_of(address):
        try:
            return _call(one, kind, body, timeout_s, secure)
        except Unreachable as error:
            failed.append(error)
    raise next((error for error in failed if isinstance(error, PassedOn)), failed[-1])


class Unreachable(UsageError):
    """No coordinator answers at an address."""


class PassedOn(Unreachable):
    """A coordinator that may be deposed does not answer."""


def _call(
    address: str, kind: str, body: dict[str, Any], timeout_s: float, secure: tls.SecuritySettings
) -> dict[str, Any]:
    # It makes one attempt: a busy coordinator may take all the time for the handshake.
    options = client_options(DEFAULT_TIMEOUTS.keepalive_s, connect_s=timeout_s)
    with _channel(grpc, address, options, secure) as channel:
        stub = CoordinatorStub(channel)
        question = pack_call(kind, body)
        metadata: tuple[tuple[str, str], ...] = ()
        try:
            if secure.token:
                mine, role = new_nonce(), role_of(secure.token)
                asked = pack_call(CHALLENGE, {"nonce": mine, "role": role.value})
                reply = unpack_call(from_wire(stub.call(asked, timeout=timeout_s)))
                words = ["call", kind, digest(question.body)]
                if reply.get("roles"):  # a coordinator of the former version knows none
                    metadata = (("role", role.value), ("caller", _caller()))
                    words += [text for _, text in metadata]
                metadata += _proof(secure.token, mine, reply, *words)
            answered = stub.call(question, timeout=timeout_s, metadata=metadata)
        except grpc.RpcError as error:
            raise _in_words(address, kind, timeout_s, error, secure.certificates) from error
    return unpack_call(from_wire(answered))


def _channel(
    api: Any, address: str, options: list[tuple[str, Any]], secure: tls.SecuritySettings
) -> Any:
    """Return a channel of gRPC's `api` (synchronous or asyncio) to `address`."""
    certificates = secure.certificates
    if certificates is None:
        return api.insecure_channel(address, options=options)
    ca, cert, key = certificates.pem()
    credentials = grpc.ssl_channel_credentials(ca, key, cert)
    named = [("grpc.ssl_target_name_override", secure.name)] if secure.name else []
    return api.secure_channel(address, credentials, options=[*options, *named])


def _is_tls_failure(why: str) -> bool:
    """Return whether gRPC's text is about TLS. The handshaker of TCP is the connection itself: it
    fails while a coordinator's pod is replaced."""
    return "tcp handshaker" not in why and ("andshake" in why or "ertificate" in why)


def _caller() -> str:
    """Return the name of this user, for the coordinator's events. Nobody checks it."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # this user has no entry in the system's list
        user = str(os.getuid())
    text = f"{user}@{socket.gethostname()}"
    return text.encode("ascii", "replace").decode()[:MAX_CALLER_CHARS]


def _proof(
    token: str, mine: str, reply: dict[str, Any], *words: str
) -> tuple[tuple[str, str], ...]:
    """Return metadata that answers a challenge. Raises UsageError if the tokens differ."""
    nonce = str(reply.get("nonce", ""))
    if token and not proved(token, str(reply.get("proof", "")), "server", mine, nonce):
        raise UsageError("the coordinator does not know the join token: is it this job's?")
    return ("nonce", nonce), ("proof", answer(token, nonce, *words))


def _term_of(metadata: Any) -> int:
    """Return the term with which a coordinator opened a stream; 0: not given."""
    text = _text_of(metadata, TERM)
    return int(text) if text.isdecimal() else 0


def _text_of(metadata: Any, key: str) -> str:
    """Return the value of a metadata key; "": not given."""
    return str(dict(metadata or ()).get(key, ""))


async def _is_ready(channel: grpc.aio.Channel) -> bool:
    """Wait a limited time for a connection; return whether there is one.

    No stream is opened before. If this process were too busy to notice in time that the coordinator
    has accepted it, it would leave a stream that the coordinator takes for a node's session.
    """
    try:
        await asyncio.wait_for(channel.channel_ready(), CONNECT_TIMEOUT_S)
    except (TimeoutError, RuntimeError):  # the latter if gRPC's watch of the channel fails
        return False
    return True


async def _why_refused(call: Any) -> str:
    """Wait for the end of a stream that was opened without a term, thus refused. Raises the
    coordinator's reason; returns one if it gives none."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(call.read(), CONNECT_TIMEOUT_S)
    return "the coordinator opened it without a term"


async def _write(outbox: asyncio.Queue[Envelope], call: Any) -> None:
    """Send the queued messages. The reader reports the end of the stream."""
    try:
        numbers = itertools.count(1)
        while True:
            for envelope in pieces(await outbox.get()):
                await call.write(replace(envelope, sequence=next(numbers)))
    except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
        return


def _in_words(
    address: str, kind: str, timeout_s: float, error: Any, certificates: tls.Certificates | None
) -> ElasticError:
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.INVALID_ARGUMENT:
        return UsageError(details)
    if code is grpc.StatusCode.FAILED_PRECONDITION:
        return ElasticError(details)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UsageError(f"{details}; give the job's with --join-token-file or --run-dir")
    if code is grpc.StatusCode.ABORTED:
        return PassedOn(f"the coordinator at {address} may be deposed: {details}")
    if code is grpc.StatusCode.UNAVAILABLE:
        remedy = "is the job running, and are address and --certs right?"
        why = with_expiry(explained(str(details)), certificates)
        return Unreachable(f"no coordinator answers at {address} ({why}); {remedy}")
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return Unreachable(
            f"the coordinator at {address} did not answer {kind!r} within {timeout_s:g} s: it is "
            "stopped or busy, or another program holds the address"
        )
    return ElasticError(f"the coordinator at {address} failed on {kind!r}: {code.name}: {details}")
