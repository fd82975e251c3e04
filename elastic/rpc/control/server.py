"""The coordinator's side: one session per node, and calls of the command line.

Session callbacks `on_open`, `on_message` and `on_close` run on the event loop, one after another,
in order per session, and must return at once. With thousands of nodes, a switch to another thread
would cost more than the callback. `on_call` runs on a small pool and may block.

Both sides announce their versions; a node whose version does not fit is refused. A message that
cannot be read is answered with `Rejected`, and the session goes on. A bad call ends
with INVALID_ARGUMENT. If a node knows a newer term than this server, another coordinator took over,
and the session of this node ends.

With certificates (`elastic.rpc.security.tls`) gRPC serves mutual TLS (1.2 or 1.3). With a join
token a session or call is accepted only with a proof over a nonce of this server
(`elastic.rpc.security.token_proof`); the call CHALLENGE returns one. Rejections are counted
(`elastic.rpc.security.rejections`), also those of repeated messages.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from msgspec.structs import replace

from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.core.protocol.version import ProtocolVersion, incompatibility
from elastic.domain.errors import ElasticError, FieldError, StaleError, UsageError
from elastic.rpc.control.broadcast import BroadcastEncoder
from elastic.rpc.control.channel_options import (
    PROTOCOL_KEY,
    TERM,
    check_address,
    server_options,
)
from elastic.rpc.control.connection_watch import PORT, ConnectionWatch
from elastic.rpc.control.envelope import (
    CHALLENGE,
    MAX_BODY_BYTES,
    MAX_CALL_BYTES,
    MAX_CALLER_CHARS,
    PIECE,
    PING,
    PONG,
    SERVICE,
    SESSION_VERSION,
    Envelope,
    Rejected,
    from_wire,
    pack_call,
    to_wire,
    unpack,
    unpack_call,
)
from elastic.rpc.control.event_loop import event_loop, run, run_callback
from elastic.rpc.frames import version_in, version_text
from elastic.rpc.security import tls
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.roles import BY, CHANGES, Role
from elastic.rpc.security.token_proof import TokenGate, digest

log = logging.getLogger(__name__)
CALL_THREADS = 4
WORDS_CHARS = 2000
"""Longest error text in an answer: gRPC drops answers whose headers exceed 8 KiB."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who makes a call, as its metadata says. The proof of the token covers role and name."""

    role: Role
    name: str
    """Name of the user and machine; nobody checks it. "": a client of the former version."""
    peer: str

    @classmethod
    def of(cls, context: Any) -> Caller:
        given = dict(context.invocation_metadata() or ())
        role, name = _role(given.get("role", "")), str(given.get("caller", ""))
        readable = name.isascii() and name.isprintable()
        return cls(role, name[:MAX_CALLER_CHARS] if readable else "", context.peer())

    @property
    def words(self) -> tuple[str, ...]:
        """The words of the proof; none from a client of the former version."""
        return (self.role.value, self.name) if self.name else ()

    def __str__(self) -> str:
        return f"{self.role} {self.name or 'unnamed'} at {self.peer}"


class Superseded(ElasticError):
    """This coordinator may be deposed, and does not answer: the caller asks at the next address."""


def _role(given: Any) -> Role:
    """Return the role that a client claims."""
    text = str(given)
    return Role(text) if text in [*Role] else Role.MEMBER


class ClientSession:
    """A node's open stream. All methods are thread-safe and return at once."""

    def __init__(
        self,
        sender: str,
        peer: str,
        term: Callable[[], int],
        encoder: BroadcastEncoder,
        version: ProtocolVersion,
    ) -> None:
        """`encoder` is shared by the sessions of one coordinator. `version`: the node's."""
        self.sender, self.peer, self._term, self._encoder = sender, peer, term, encoder
        self.version = version
        self._outbox: asyncio.Queue[Envelope] = asyncio.Queue()
        self.open = True
        """False after the stream has ended."""

    def __repr__(self) -> str:
        return f"Session({self.sender or 'unnamed'} at {self.peer})"

    def send(self, message: Any, epoch: int) -> bool:
        """Queue a message of `elastic.core.protocol.messages`.

        Return False, and send nothing, if the stream has ended or the node's version cannot read
        the message.
        """
        if not self.open:
            return False
        envelope = self._encoder.pack(message, term=self._term(), epoch=epoch, node=self.sender)
        if not self.version.reads(envelope.kind):
            return False
        event_loop().call_soon_threadsafe(self._outbox.put_nowait, envelope)
        return True

    def answer_ping(self) -> None:
        """Send a pong. Call this on the event loop."""
        self._outbox.put_nowait(Envelope(self._term(), 0, PONG, b""))

    async def write_to(self, context: Any) -> None:
        """Send the queued messages until cancelled."""
        for number in itertools.count(1):
            await context.write(replace(await self._outbox.get(), sequence=number))


class Server:
    """The coordinator's server at `address` (host:port; port 0: any free one), until `close`.

    Raises FieldError if the address is not available. `term()` is called for every envelope and
    must not block. The module docstring describes the other callbacks.
    """

    def __init__(
        self,
        address: str,
        *,
        on_open: Callable[[ClientSession], object],
        on_message: Callable[[ClientSession, Any, Envelope], object],
        on_close: Callable[[ClientSession], object],
        on_call: Callable[[str, dict[str, Any]], dict[str, Any]],
        term: Callable[[], int],
        keepalive_s: float = DEFAULT_TIMEOUTS.keepalive_s,
        nodes: int = 1,
        secure: tls.SecuritySettings | None = None,
        version: ProtocolVersion = SESSION_VERSION,
    ) -> None:
        """`nodes`: number of nodes of the job, which may all connect at once. `secure`:
        certificates and token that clients need; None: those of this process. `version`: announced
        to nodes; others are refused."""
        check_address(address, lowest_port=0)
        self._version, self._nodes = version, nodes
        secure = secure or tls.current()
        self._gate, self._certificates = TokenGate(secure.token), secure.certificates
        self._watch: ConnectionWatch | None = None
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self._on_call, self._term, self._encoder = on_call, term, BroadcastEncoder()
        self._pool = ThreadPoolExecutor(CALL_THREADS, "rpc-call")
        self.address = run(self._start(address, keepalive_s))

    def close(self) -> None:
        """End all sessions and free the port."""
        run(self._stop())
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _start(self, address: str, keepalive_s: float) -> str:
        self._server = grpc.aio.server(options=server_options(keepalive_s, self._nodes))
        # Requests arrive as bytes: gRPC turns the error of a deserializer into a request of None.
        methods = {
            "Session": grpc.stream_stream_rpc_method_handler(
                self._session, response_serializer=to_wire
            ),
            "Call": grpc.unary_unary_rpc_method_handler(self._call, response_serializer=to_wire),
        }
        handler = grpc.method_handlers_generic_handler(SERVICE, methods)
        self._server.add_generic_rpc_handlers((handler,))
        try:
            if self._certificates is None:
                port = self._server.add_insecure_port(address)
            else:
                loop = asyncio.get_running_loop()
                self._watch = ConnectionWatch(loop, self._certificates, self._nodes)
                credentials = _credentials(self._certificates, self._watch.began)
                port = self._server.add_secure_port(address, credentials)
                self._watch.port = port
        except RuntimeError as error:
            raise FieldError("address", address, "a free port of this machine is needed") from error
        await self._server.start()
        return f"{address.rpartition(':')[0]}:{port}"

    async def _stop(self) -> None:
        await self._server.stop(grace=None)
        if self._watch is not None:
            self._watch.close()

    async def _admit(self, context: Any, *words: str, role: Role = Role.MEMBER) -> None:
        """Abort the call unless it has a proof of the token of `role`."""
        metadata = dict(context.invocation_metadata() or ())
        nonce, proof = str(metadata.get("nonce", "")), str(metadata.get("proof", ""))
        problem = self._gate.check(nonce, proof, *words, role=role)
        if problem is not None:
            REJECTIONS.count(PORT, problem, context.peer(), " ".join(words[:2]))
            wrong = "the join token is missing or wrong"
            text = wrong if problem is Reason.TOKEN else "this proof was used before"
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    def _peer(self, context: Any) -> str:
        """Return the other side of a call. The call shows that its TLS handshake succeeded."""
        peer: str = context.peer()
        if self._watch is not None:
            self._watch.authenticated(peer)
        return peer

    async def _session(self, requests: AsyncIterator[bytes], context: Any) -> None:
        """Serve one node's stream from its opening to its end."""
        peer = self._peer(context)
        metadata = dict(context.invocation_metadata() or ())
        theirs = version_in(str(metadata.get(PROTOCOL_KEY, "")))
        sender = str(metadata.get("sender", ""))
        session = ClientSession(sender, peer, self._term, self._encoder, theirs)
        await self._admit(context, "session", sender)
        # Before the writer starts: gRPC refuses two sends at a time.
        mine = (TERM, str(self._term())), (PROTOCOL_KEY, version_text(self._version))
        await context.send_initial_metadata(mine)
        await self._check_version(context, session, mine)
        run_callback(partial(self._on_open, session))
        tasks: set[asyncio.Task[None]] = set()
        try:
            tasks.add(asyncio.create_task(self._read(session, requests)))
            tasks.add(asyncio.create_task(session.write_to(context)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for error in filter(None, (task.exception() for task in done)):
                log.info("%s ended: %s", session, error)
                if isinstance(error, StaleError):
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            session.open = False
            run_callback(partial(self._on_close, session))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _check_version(
        self, context: Any, session: ClientSession, mine: tuple[tuple[str, str], ...]
    ) -> None:
        """Abort the call of a node whose version does not fit. `mine`: metadata of this side; it is
        sent at the end too, because gRPC may drop what was sent just before an error."""
        node = session.sender or "a node"
        problem = incompatibility(self._version, session.version, "the coordinator", node)
        if problem:
            REJECTIONS.count(PORT, Reason.VERSION, session, problem)
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, problem, mine)

    async def _read(self, session: ClientSession, requests: AsyncIterator[bytes]) -> None:
        """Pass every message to `on_message` until the stream ends."""
        newest, begun = 0, bytearray()
        async for request in requests:
            try:
                envelope = from_wire(request)
            except FieldError as error:
                REJECTIONS.count(PORT, Reason.MALFORMED, session, error)
                raise
            if envelope.sequence <= newest and newest:
                detail = f"{envelope.kind} {envelope.sequence}"
                REJECTIONS.count(PORT, Reason.REPLAYED, session, detail)
                session.send(Rejected(envelope.kind[:80], "it was received before"), 0)
                continue
            newest = envelope.sequence
            if envelope.term > self._term():
                REJECTIONS.count(PORT, Reason.STALE, session, f"it knows term {envelope.term}")
                known = f"{session.sender} knows {envelope.term}"
                raise StaleError(f"this coordinator has term {self._term()}, {known}")
            begun += envelope.body
            if len(begun) > MAX_BODY_BYTES:
                size = f"{len(begun)} bytes and more"
                REJECTIONS.count(PORT, Reason.OVERSIZE, session, size)
                raise FieldError("body", size, f"at most {MAX_BODY_BYTES}")
            if envelope.kind == PING:
                session.answer_ping()
                continue
            if envelope.kind == PIECE:
                continue
            envelope, begun = replace(envelope, body=bytes(begun)), bytearray()
            try:
                if envelope.common:
                    field = f"{envelope.kind}.common"
                    raise FieldError(field, "...", "only a coordinator sends it")
                message = unpack(envelope)
            except FieldError as error:
                REJECTIONS.count(PORT, Reason.MALFORMED, session, error)
                session.send(Rejected(envelope.kind[:80], str(error)), 0)
            else:
                run_callback(partial(self._on_message, session, message, envelope))

    async def _authorize(self, context: Any, envelope: Envelope, caller: Caller) -> None:
        """Abort the call unless the caller proves its role, and the role may make this call."""
        words = ["call", envelope.kind, digest(envelope.body), *caller.words]
        await self._admit(context, *words, role=caller.role)
        if not self._gate.open and not caller.role.may(envelope.kind):
            REJECTIONS.count(PORT, Reason.FORGED, caller, f"{envelope.kind} of a {caller.role}")
            text = f"a {caller.role} may only read; {envelope.kind} needs the join token or the"
            text += " token of an operator (see `elastic token`)"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)

    async def _call(self, request: bytes, context: Any) -> Envelope:
        """Answer one question of the command line."""
        peer = self._peer(context)
        if len(request) > MAX_CALL_BYTES:
            REJECTIONS.count(PORT, Reason.OVERSIZE, peer, f"a call of {len(request)} bytes")
            text = f"at most {MAX_CALL_BYTES} bytes may be asked"
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, text)
        try:
            envelope = from_wire(request)
            caller = Caller.of(context)
            if envelope.kind != CHALLENGE:
                await self._authorize(context, envelope, caller)
            body = unpack_call(envelope)
        except FieldError as error:
            REJECTIONS.count(PORT, Reason.MALFORMED, peer, error)
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _words(error))
        try:
            if envelope.kind == CHALLENGE:
                role = _role(body.get("role", ""))
                challenge = self._gate.challenge(str(body.get("nonce", "")), role)
                return pack_call(CHALLENGE, {**challenge, "roles": True}, self._term())
            if envelope.kind in CHANGES:
                body = {**body, BY: str(caller)}
            answer = await event_loop().run_in_executor(
                self._pool, self._on_call, envelope.kind, body
            )
            return pack_call(envelope.kind, answer, self._term())
        except UsageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _words(error))
        except Superseded as error:
            await context.abort(grpc.StatusCode.ABORTED, _words(error))
        except ElasticError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _words(error))
        raise AssertionError("abort raises")


def _credentials(
    certificates: tls.Certificates, began: Callable[[], None]
) -> grpc.ServerCredentials:
    """Return credentials for mutual TLS. gRPC calls `began` at each handshake, on any thread."""

    def configuration() -> grpc.ServerCertificateConfiguration:
        ca, chain, key = certificates.pem()
        return grpc.ssl_server_certificate_configuration([(key, chain)], root_certificates=ca)

    served = certificates.server()

    def newest() -> grpc.ServerCertificateConfiguration | None:
        """Called by gRPC before each handshake. Return None if the certificates have not changed.

        gRPC 1.85 crashes if certificates are often returned while other handshakes begin (decision
        033).
        """
        nonlocal served
        began()
        found = certificates.server()
        if found is served:
            return None
        served = found
        return configuration()

    return grpc.dynamic_ssl_server_credentials(
        configuration(), newest, require_client_authentication=True
    )


def _words(error: ElasticError) -> str:
    """Return the error as a text that fits into an answer: it may quote the question."""
    return str(error)[:WORDS_CHARS].encode(errors="backslashreplace").decode()
