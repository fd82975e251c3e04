"""Serves a vault to peers and local workers over TCP; the protocol is `elastic.rpc.bulk.transfer`.

One thread serves each connection: a node has only a few peers.
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import xxhash

from elastic.agent.vault.vault import Incoming, Vault
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain import codec
from elastic.domain.errors import (
    ChannelClosed,
    ElasticError,
    FieldError,
    SlotError,
    StaleError,
    VaultError,
    VaultFull,
)
from elastic.domain.types import Copy
from elastic.rpc.bulk.blocks import CODECS, drain_copy, read_copy, send_copy
from elastic.rpc.bulk.compression import CompressionPolicy
from elastic.rpc.bulk.handshake import HANDSHAKE_S, verify_client, wrap_server
from elastic.rpc.bulk.transfer import (
    REQUESTS,
    Get,
    Inventory,
    Locate,
    Probe,
    Put,
    Reply,
    Verify,
    tune,
)
from elastic.rpc.frames import FrameStream, TooLarge
from elastic.rpc.security import tls
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.token_proof import TokenGate
from elastic.rpc.security.unauthenticated import UnauthenticatedConnections

MIN_MEASURED_BYTES = 8 << 20
"""Least bytes of a transfer that measures the link. Smaller copies fit into socket buffers."""
MAX_CONNECTIONS = 1024
"""Upper limit of authenticated connections; no node has so many peers and workers."""
MAX_UNAUTHENTICATED, MAX_PER_ADDRESS = 256, 32
"""Upper limits of unauthenticated connections: in all, and from one address except loopback."""
ACCEPT_RETRY_S = 0.1
"""Pause after a connection could not be accepted."""
MAX_PROBE_BYTES = 16 << 20
PORT = "vault"

log = logging.getLogger(__name__)


class VaultServer:
    """Serves one vault over TCP from `start` until `close`. `address` is host:port after `start`. A
    client that stalls inside a frame is disconnected."""

    def __init__(
        self,
        vault: Vault,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        timeout_s: float = DEFAULT_TIMEOUTS.serve_s,
        pace: Callable[[int], None] | None = None,
        compressing: CompressionPolicy | None = None,
        secure: tls.SecuritySettings | None = None,
        received: Callable[[Sequence[Copy]], object] = lambda copies: None,
    ) -> None:
        """`pace`: see `FrameStream`. `compressing` chooses a codec per copy; None: uncompressed.
        `secure`: security settings; None: those of this process. `received(copies)` is called, on
        any thread, for each bundle that was stored."""
        secure = secure or tls.current()
        self._gate, self._certificates = TokenGate(secure.token), secure.certificates
        self._pace, self._compressing = pace, compressing or CompressionPolicy("off")
        self._received = received
        self._vault, self._where, self._timeout_s = vault, (host, port), timeout_s
        self._listener: socket.socket | None = None
        self._streams: set[FrameStream] = set()
        self._authenticated: set[FrameStream] = set()
        self._unauthenticated = UnauthenticatedConnections[FrameStream]()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.address = ""

    def start(self) -> VaultServer:
        """Listen; return this server. Raises FieldError if the address is not free."""
        try:
            self._listener = socket.create_server(self._where, backlog=64)
        except OSError as error:
            remedy = f"a free local address is needed: {error}"
            address = f"{self._where[0]}:{self._where[1]}"
            raise FieldError("vault address", address, remedy) from error
        host, port = self._listener.getsockname()[:2]
        self.address = f"{host}:{port}"
        self._spawn(self._accept, self._listener)
        return self

    def close(self) -> None:
        """End every connection and wait for the threads."""
        with self._lock:
            listener, self._listener = self._listener, None
            streams, threads = tuple(self._streams), tuple(self._threads)
        if listener is not None:
            FrameStream(listener).close()
        for stream in streams:
            stream.close()
        for thread in threads:
            thread.join(self._timeout_s)

    def _spawn(self, target: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=target, args=args, name="vault", daemon=True)
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, where = listener.accept()
            except OSError as error:  # closed, no descriptors are left, or the client is gone
                if self._listener is None:
                    return
                log.warning("a connection could not be accepted: %s", error)
                time.sleep(ACCEPT_RETRY_S)
                continue
            try:
                self._welcome(sock, where)
            except Exception:  # such as too many threads; the vault must stay open for others
                log.exception("a connection could not be served")
                sock.close()

    def _welcome(self, sock: socket.socket, where: tuple[str, int]) -> None:
        """Serve a connection from `where` on a thread of its own, unless the vault is closed."""
        with self._lock:
            if self._listener is None:
                sock.close()
                return
            stream = FrameStream(tune(sock))
            stream.pace = self._pace
            stream.until = time.monotonic() + min(HANDSHAKE_S, self._timeout_s)
            self._make_room(where[0])
            self._unauthenticated.enter(stream, where[0])
            self._streams.add(stream)
            self._spawn(self._serve, stream, f"{where[0]}:{where[1]}")

    def _make_room(self, address: str) -> None:
        """Hang up the oldest unauthenticated connection if too many are open; needs the lock."""
        waiting = self._unauthenticated
        oldest = waiting.crowded(address, MAX_PER_ADDRESS) or waiting.full(MAX_UNAUTHENTICATED)
        if oldest is not None:
            peer = waiting.leave(oldest)
            REJECTIONS.count(PORT, Reason.TOO_MANY, peer, "it did not authenticate; others wait")
            oldest.hang_up()

    def _serve(self, stream: FrameStream, peer: str) -> None:
        try:
            node = self._authenticate(stream, peer)
            if node is None or not self._admit(stream, peer):
                return
            stream.until = None
            while True:
                stream.timeout_s = None
                header, nbytes = stream.receive()
                stream.timeout_s = self._timeout_s
                self._answer(stream, header, nbytes, node)
        except (ChannelClosed, TimeoutError) as error:
            log.debug("vault connection ended: %s", error)
        except TooLarge as error:
            REJECTIONS.count(PORT, Reason.OVERSIZE, peer, error)
        except FieldError as error:
            REJECTIONS.count(PORT, Reason.MALFORMED, peer, error)
        except Exception as error:  # no request may end the vault
            log.exception("vault %s: a client is disconnected", self._vault.node)
            REJECTIONS.count(PORT, Reason.MALFORMED, peer, type(error).__name__)
        finally:
            stream.close()
            with self._lock:
                self._streams.discard(stream)
                self._authenticated.discard(stream)
                self._unauthenticated.leave(stream)

    def _admit(self, stream: FrameStream, peer: str) -> bool:
        """Count the connection as authenticated. Return False if it was hung up or too many are
        open."""
        with self._lock:
            if not self._unauthenticated.leave(stream):
                return False
            number = len(self._authenticated)
            if number < MAX_CONNECTIONS:
                self._authenticated.add(stream)
                return True
        REJECTIONS.count(PORT, Reason.TOO_MANY, peer, f"{number} connections are open")
        return False

    def _authenticate(self, stream: FrameStream, peer: str) -> str | None:
        """Set up TLS and check the join token, if required. Return the client's node, "" if no
        token is required, or None if the client was rejected or only tried the port."""
        if self._certificates is None and self._gate.open:
            return ""
        try:
            if not stream.begins():
                return None
            if self._certificates is not None:
                stream.secured(wrap_server(self._certificates))
        except (ssl.SSLError, OSError) as error:
            if self._certificates is not None:
                REJECTIONS.count(PORT, tls.rejection_reason(error), peer, error)
            return None
        if self._gate.open:
            return ""
        node, problem = verify_client(stream, self._gate)
        if problem is not None:
            REJECTIONS.count(PORT, problem, peer, f"as {node}" if node else "no proof")
            return None
        return node

    def _answer(self, stream: FrameStream, header: Any, nbytes: int, node: str) -> None:
        """Carry out one request of `node` and reply. The connection ends after a ChannelClosed or
        FieldError; any other ElasticError is sent as the reply."""
        kind = REQUESTS.get(str(header.get("kind", ""))) if isinstance(header, dict) else None
        if kind is None:
            raise FieldError("vault request", str(header)[:80], f"one of {', '.join(REQUESTS)}")
        request: Any = codec.decode(kind, header.get("body"), newer=True)
        try:
            if isinstance(request, Locate) and node and request.node != node:
                REJECTIONS.count(PORT, Reason.FORGED, node, f"it claims to be {request.node}")
                raise VaultError(f"this connection belongs to {node}, not to {request.node}")
            if isinstance(request, Put):
                self._put(stream, request, nbytes)
                return
            if nbytes and (not isinstance(request, Probe) or nbytes > MAX_PROBE_BYTES):
                raise FieldError("payload bytes", nbytes, f"{header['kind']} allows none, or fewer")
            stream.drain(nbytes)
            if isinstance(request, Get):
                self._get(stream, request.key)
                return
            reply = self._look_up(request)
        except (ChannelClosed, FieldError):
            raise
        except ElasticError as error:
            reply = _reply_for(error)
        stream.send(codec.encode(reply))

    def _look_up(self, request: Locate | Inventory | Verify | Probe) -> Reply:
        if isinstance(request, Probe):
            return Reply()
        if isinstance(request, Inventory):
            return Reply(copies=self._vault.inventory())
        if isinstance(request, Verify):
            good = self._vault.verify(request.key)
            return Reply(copies=(self._vault.copy(request.key),) if good else ())
        if request.node != self._vault.node:
            raise VaultError(f"{request.node} cannot map the memory of {self._vault.node}")
        local = self._vault.locate(request.key)
        return Reply(path=local.path, offset=local.offset)

    def _get(self, stream: FrameStream, key: str) -> None:
        copy = self._vault.copy(key)
        with self._vault.lease(key) as view:
            codec_name = self._compressing.codec(copy, view)
            stream.begin(codec.encode(Reply(codec=codec_name)), view.nbytes)
            began = time.perf_counter()
            sent, codec_s = send_copy(stream, view, codec_name)
            if sent >= MIN_MEASURED_BYTES:
                self._compressing.sent(sent, time.perf_counter() - began - codec_s)

    def _put(self, stream: FrameStream, request: Put, nbytes: int) -> None:
        """Receive a bundle and reply. No copy is kept before all of them are verified."""
        copies, codecs = request.copies, request.codecs or ("",) * len(request.copies)
        sizes = [copy.nbytes for copy in copies]
        if sum(sizes) != nbytes or min(sizes, default=0) < 0:
            raise FieldError("payload bytes", nbytes, "must be the sum of the copies' sizes")
        if len(codecs) != len(copies) or not set(codecs) <= set(CODECS):
            remedy = f"must be {len(copies)} of {', '.join(filter(None, CODECS))}"
            raise FieldError("codecs", str(codecs)[:80], remedy)
        incoming, error = self._reserve(copies)
        try:
            if request.ask:
                stream.send(codec.encode(_reply_for(error)))
                if error is not None:
                    return
            digests = []
            for number, (copy, codec_name) in enumerate(zip(copies, codecs, strict=True)):
                if error is None:
                    hasher = xxhash.xxh3_64()
                    error = read_copy(stream, incoming[number].buffer, codec_name, hasher.update)
                    digests.append(hasher.hexdigest())
                else:  # skip the rest of the payload, so that the connection stays usable
                    drain_copy(stream, copy.nbytes, codec_name)
            if error is None:
                error = self._commit(list(zip(incoming, digests, strict=True)))
            if error is None:
                self._received(copies)
        finally:
            for arrival in incoming:
                arrival.abort()
        stream.send(codec.encode(_reply_for(error)))

    def _reserve(self, copies: tuple[Copy, ...]) -> tuple[list[Incoming], ElasticError | None]:
        """Reserve room for all copies. Return the reservations, or [] and the error."""
        try:
            return self._vault.store_all(copies), None
        except (VaultError, StaleError) as error:
            return [], error

    def _commit(self, incoming: list[tuple[Incoming, str]]) -> ElasticError | None:
        try:
            for arrival, digest in incoming:
                arrival.verify(digest)
            for arrival, digest in incoming:
                arrival.commit(digest)
        except (VaultError, StaleError) as error:
            return error
        return None


def _reply_for(error: ElasticError | None) -> Reply:
    text = "" if error is None else str(error)
    return Reply(
        error=text,
        stale=isinstance(error, StaleError),
        full=isinstance(error, VaultFull),
        broken=isinstance(error, SlotError),
    )
