"""The coordinator's side: one session a node, and calls of the command line.

Callbacks `on_open`, `on_message` and `on_close` run on one thread, one after another, a session's in their
order; `on_call` runs on a small pool beside it and may block. A message that cannot be read is answered with
`Rejected` and the session goes on; a bad call ends with INVALID_ARGUMENT. A sender that knows a newer term
than ours tells us that we were replaced: its session is refused.

With certificates (`elastic.rpc.security`) the port is `elastic.rpc.front`'s. With a join token a session or call is
taken only with a proof over a nonce that this server gave (`elastic.rpc.proofs`; the call CHALLENGE). What is refused
is counted (`elastic.rpc.refusals`), also messages that come twice.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import grpc

from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import ElasticError, FieldError, StaleError, UsageError
from elastic.rpc import elastic_pb2, elastic_pb2_grpc, security
from elastic.rpc.envelope import (
    CHALLENGE,
    MAX_BODY_BYTES,
    MAX_CALL_BYTES,
    PIECE,
    Envelope,
    Rejected,
    from_proto,
    pack_call,
    to_proto,
    unpack,
    unpack_call,
)
from elastic.rpc.front import PORT, Front
from elastic.rpc.loop import Directly, Dispatcher, event_loop, run
from elastic.rpc.options import TERM, check_address, server_options
from elastic.rpc.parcels import Parcels
from elastic.rpc.proofs import Gate, digest
from elastic.rpc.refusals import REFUSALS, Reason

log = logging.getLogger(__name__)
CALL_THREADS = 4
WORDS_CHARS = 2000
"""Of an error that is told: gRPC drops answers whose headers are longer than 8 KiB."""


class Session:
    """A node's open stream. All methods are thread-safe and return at once."""

    def __init__(
        self, sender: str, peer: str, term: Callable[[], int], parcels: Parcels | None = None
    ) -> None:
        """`parcels` are shared by the sessions of one coordinator."""
        self.sender, self.peer, self._parcels = sender, peer, parcels or Parcels()
        self._term = term
        self._outbox: asyncio.Queue[Envelope | None] = asyncio.Queue()
        self._open = True

    def __repr__(self) -> str:
        return f"Session({self.sender or '?'} at {self.peer})"

    @property
    def open(self) -> bool:
        return self._open

    def send(self, message: Any, epoch: int) -> bool:
        """Queue a message of `elastic.core.protocol.messages`. False: the session is closed and nothing was sent."""
        if not self._open:
            return False
        self._put(self._parcels.pack(message, term=self._term(), epoch=epoch, node=self.sender))
        return True

    def close(self) -> None:
        """End the stream once what was queued is sent; `on_close` follows."""
        self._put(None)

    async def write_to(self, context: Any) -> None:
        """Send what is queued until `close`."""
        for number in itertools.count(1):
            envelope = await self._outbox.get()
            if envelope is None:
                return
            await context.write(to_proto(envelope, number))

    def ended(self) -> None:
        """The stream is gone; nothing can be sent any more."""
        self._open = False

    def _put(self, envelope: Envelope | None) -> None:
        event_loop().call_soon_threadsafe(self._outbox.put_nowait, envelope)


class Server:
    """Serves on `address` (host:port; port 0: any free one) from the moment it is made until `close`.

    Raises FieldError if the address cannot be had. `term` is asked for every envelope and must not block.
    """

    def __init__(
        self,
        address: str,
        *,
        on_open: Callable[[Session], object],
        on_message: Callable[[Session, Any, Envelope], object],
        on_close: Callable[[Session], object],
        on_call: Callable[[str, dict[str, Any]], dict[str, Any]],
        term: Callable[[], int],
        keepalive_s: float = DEFAULT_TIMEOUTS.keepalive_s,
        prompt: bool = False,
        secure: security.Security | None = None,
    ) -> None:
        """`prompt`: the callbacks of sessions return at once, and need no thread of their own: with thousands of
        nodes its turns cost more than they do. `secure`: what is asked of those who come; None: what this process
        goes by."""
        check_address(address, lowest_port=0)
        secure = secure or security.current()
        self._gate, self._contexts = Gate(secure.token), secure.contexts
        self._front: Front | None = None
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self._on_call, self._term, self._parcels = on_call, term, Parcels()
        self._dispatcher: Dispatcher | Directly = Directly() if prompt else Dispatcher("rpc-server")
        self._pool = ThreadPoolExecutor(CALL_THREADS, "rpc-call")
        try:
            self.address = run(self._start(address, keepalive_s))
        except BaseException:
            self._dispatcher.close()
            raise

    def close(self) -> None:
        """End all sessions and free the port; every `on_close` has run afterwards."""
        run(self._stop())
        self._dispatcher.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    async def _start(self, address: str, keepalive_s: float) -> str:
        self._server = grpc.aio.server(options=server_options(keepalive_s))
        servicer = SimpleNamespace(Session=self._session, Call=self._call)
        elastic_pb2_grpc.add_CoordinatorServicer_to_server(servicer, self._server)
        self._front = Front(self._contexts) if self._contexts is not None else None
        try:
            port = self._server.add_insecure_port(self._front.backend if self._front else address)
        except RuntimeError as error:
            raise FieldError("address", address, "a free port of this machine is needed") from error
        await self._server.start()
        if self._front is not None:
            try:
                port = self._front.listen(address)
            except FieldError:
                await self._stop()
                raise
        return f"{address.rpartition(':')[0]}:{port}"

    async def _stop(self) -> None:
        if self._front is not None:
            await self._front.close()
        await self._server.stop(grace=None)

    async def _admit(self, context: Any, *words: str) -> None:
        """Abort the call unless it comes with a proof of the join token."""
        metadata = dict(context.invocation_metadata() or ())
        nonce, proof = str(metadata.get("nonce", "")), str(metadata.get("proof", ""))
        problem = self._gate.check(nonce, proof, *words)
        if problem is not None:
            REFUSALS.count(PORT, problem, context.peer(), " ".join(words[:2]))
            text = (
                "the join token is missing or wrong"
                if problem is Reason.TOKEN
                else "this proof was used before"
            )
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, text)

    async def _session(self, requests: AsyncIterator[elastic_pb2.Envelope], context: Any) -> None:
        """One node's stream, from its opening to its end."""
        metadata = dict(context.invocation_metadata() or ())
        session = Session(str(metadata.get("sender", "")), context.peer(), self._term, self._parcels)
        await self._admit(context, "session", session.sender)
        self._dispatcher.post(partial(self._on_open, session))
        tasks: set[asyncio.Task[None]] = set()
        try:
            # Not beside a write: gRPC refuses two sends at a time.
            await context.send_initial_metadata(((TERM, str(self._term())),))
            tasks.add(asyncio.create_task(self._read(session, requests)))
            tasks.add(asyncio.create_task(session.write_to(context)))
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for error in filter(None, (task.exception() for task in done)):
                log.info("%s ended: %s", session, error)
                if isinstance(error, StaleError):
                    await context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        finally:
            session.ended()
            self._dispatcher.post(partial(self._on_close, session))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, session: Session, requests: AsyncIterator[elastic_pb2.Envelope]) -> None:
        """Hand on every message until the node ends the stream or is gone."""
        newest, begun = 0, bytearray()
        async for request in requests:
            envelope = from_proto(request)
            if envelope.sequence <= newest and newest:
                REFUSALS.count(PORT, Reason.REPLAYED, session, f"{envelope.kind} {envelope.sequence}")
                session.send(Rejected(envelope.kind[:80], "it came before"), 0)
                continue
            newest = envelope.sequence
            if envelope.term > self._term():
                REFUSALS.count(PORT, Reason.STALE, session, f"it knows term {envelope.term}")
                raise StaleError(
                    f"this coordinator has term {self._term()}, {session.sender} knows {envelope.term}"
                )
            begun += envelope.body
            if len(begun) > MAX_BODY_BYTES:
                REFUSALS.count(PORT, Reason.OVERSIZE, session, f"{len(begun)} bytes and more")
                raise FieldError("body", f"{len(begun)} bytes and more", f"at most {MAX_BODY_BYTES}")
            if envelope.kind == PIECE:
                continue
            envelope, begun = replace(envelope, body=bytes(begun)), bytearray()
            try:
                if envelope.common:
                    raise FieldError(f"{envelope.kind}.common", "...", "only a coordinator says it to many")
                message = unpack(envelope)
            except FieldError as error:
                REFUSALS.count(PORT, Reason.MALFORMED, session, error)
                session.send(Rejected(envelope.kind[:80], str(error)), 0)
            else:
                self._dispatcher.post(partial(self._on_message, session, message, envelope))

    async def _call(self, request: elastic_pb2.Envelope, context: Any) -> elastic_pb2.Envelope:
        """One question of the command line."""
        envelope = from_proto(request)
        nbytes = len(envelope.body) + len(envelope.common)
        if nbytes > MAX_CALL_BYTES:
            REFUSALS.count(PORT, Reason.OVERSIZE, context.peer(), f"a call of {nbytes} bytes")
            await context.abort(
                grpc.StatusCode.INVALID_ARGUMENT, f"at most {MAX_CALL_BYTES} bytes may be asked"
            )
        if envelope.kind != CHALLENGE:
            await self._admit(context, "call", envelope.kind, digest(envelope.body))
        try:
            body = self._question(envelope, context.peer())
            if envelope.kind == CHALLENGE:
                return to_proto(pack_call(CHALLENGE, self._challenge(body), self._term()))
            answer = await event_loop().run_in_executor(self._pool, self._on_call, envelope.kind, body)
            return to_proto(pack_call(envelope.kind, answer, self._term()))
        except UsageError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, _words(error))
        except ElasticError as error:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, _words(error))
        raise AssertionError("abort raises")

    def _question(self, envelope: Envelope, peer: str) -> dict[str, Any]:
        try:
            return unpack_call(envelope)
        except FieldError as error:
            REFUSALS.count(PORT, Reason.MALFORMED, peer, error)
            raise

    def _challenge(self, body: dict[str, Any]) -> dict[str, Any]:
        """A nonce to answer, and this server's own proof, over the asking side's."""
        nonce, theirs = self._gate.nonce(), str(body.get("nonce", ""))
        return {"nonce": nonce, "proof": self._gate.show(theirs, nonce)}


def _words(error: ElasticError) -> str:
    """What was asked may be in it: any length, any characters."""
    return str(error)[:WORDS_CHARS].encode(errors="backslashreplace").decode()
