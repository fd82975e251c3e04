"""Serves a vault to peers and local workers over TCP; the protocol is `elastic.rpc.bulk.transfer`.

One thread a connection: a node has a handful of peers, and each waits in the kernel.
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
from elastic.core.protocol.timeouts import DEFAULT
from elastic.domain import codec
from elastic.domain.errors import ChannelClosed, ElasticError, FieldError, StaleError, VaultError, VaultFull
from elastic.domain.types import Copy
from elastic.rpc.bulk.blocks import CODECS, drain_blocks
from elastic.rpc.bulk.compression import CompressionPolicy
from elastic.rpc.bulk.handshake import HANDSHAKE_S, HandshakeRejected, verify_client, wrap_server
from elastic.rpc.bulk.transfer import (
    REQUESTS,
    Get,
    Inventory,
    Locate,
    Probe,
    Put,
    Reply,
    VaultClient,
    Verify,
    read_copy,
    send_copy,
    tune,
)
from elastic.rpc.frames import FrameStream, TooLarge
from elastic.rpc.security import tls
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.token_proof import TokenGate
from elastic.rpc.security.unauthenticated import UnauthenticatedConnections

__all__ = ["VaultClient", "VaultServer"]

TELLING_BYTES = 8 << 20
"""Copies that are got tell of the link if they are larger than this: smaller ones vanish into buffers at once."""

MOST_CONNECTIONS = 1024
"""More than any node has peers and workers; each has a thread."""
MOST_STRANGERS, MOST_OF_ONE = 256, 32
"""Connections besides, that have not shown yet whose they are; and those of one address, unless it is loopback."""
ACCEPT_AGAIN_S = 0.1
"""After a connection that could not be taken."""
MOST_PROBE_BYTES = 16 << 20
PORT = "vault"

log = logging.getLogger(__name__)


class VaultServer:
    """`start()` listens; `address` is then host:port. A client that stalls within a frame is dropped."""

    def __init__(
        self,
        vault: Vault,
        host: str = "127.0.0.1",
        port: int = 0,
        *,
        timeout_s: float = DEFAULT.serve_s,
        pace: Callable[[int], None] | None = None,
        compressing: CompressionPolicy | None = None,
        secure: tls.SecuritySettings | None = None,
        received: Callable[[Sequence[Copy]], object] = lambda copies: None,
    ) -> None:
        """`pace`: see `FrameStream`. `compressing` decides how copies are sent; None: as they are. `secure`: what is asked
        of those who come; None: what this process goes by. `received` hears of copies that were taken in, from any
        thread."""
        secure = secure or tls.current()
        self._gate, self._certificates = TokenGate(secure.token), secure.certificates
        self._pace, self._compressing = pace, compressing or CompressionPolicy("off")
        self._received = received
        self._vault, self._where, self._timeout_s = vault, (host, port), timeout_s
        self._listener: socket.socket | None = None
        self._streams: set[FrameStream] = set()
        self._strangers, self._known = UnauthenticatedConnections[FrameStream](), set[FrameStream]()
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self.address = ""

    def start(self) -> VaultServer:
        """Raises FieldError if the address is not free."""
        try:
            self._listener = socket.create_server(self._where, backlog=64)
        except OSError as error:
            address = f"{self._where[0]}:{self._where[1]}"
            raise FieldError("vault address", address, f"a free local address is needed: {error}") from error
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
            except OSError as error:  # closed; or no descriptors are left, or the connection is gone already
                if self._listener is None:
                    return
                log.warning("a connection could not be taken: %s", error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            with self._lock:
                if self._listener is None:
                    sock.close()
                    return
                stream = FrameStream(tune(sock))
                stream.pace = self._pace
                stream.until = time.monotonic() + min(HANDSHAKE_S, self._timeout_s)
                self._room(where[0])
                self._strangers.enter(stream, where[0])
                self._streams.add(stream)
                self._spawn(self._serve, stream, f"{where[0]}:{where[1]}")

    def _room(self, address: str) -> None:
        """For another stranger from `address`; in the lock."""
        strangers = self._strangers
        first = strangers.crowded(address, MOST_OF_ONE) or strangers.full(MOST_STRANGERS)
        if first is not None:
            whose = strangers.leave(first)
            REJECTIONS.count(PORT, Reason.TOO_MANY, whose, "it has not shown whose it is; others wait")
            first.hang_up()

    def _serve(self, stream: FrameStream, peer: str) -> None:
        try:
            node = self._welcome(stream, peer)
            if node is None or not self._proven(stream, peer):
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
        except Exception as error:  # whatever came must not take the vault along
            log.exception("vault %s: a client is dropped", self._vault.node)
            REJECTIONS.count(PORT, Reason.MALFORMED, peer, type(error).__name__)
        finally:
            stream.close()
            with self._lock:
                self._streams.discard(stream)
                self._known.discard(stream)
                self._strangers.leave(stream)

    def _proven(self, stream: FrameStream, peer: str) -> bool:
        """It is no stranger's any more. False: it was given up meanwhile, or there are too many that are proven."""
        with self._lock:
            if not self._strangers.leave(stream):
                return False
            standing = len(self._known)
            if standing < MOST_CONNECTIONS:
                self._known.add(stream)
                return True
        REJECTIONS.count(PORT, Reason.TOO_MANY, peer, f"{standing} connections stand")
        return False

    def _welcome(self, stream: FrameStream, peer: str) -> str | None:
        """TLS and join token, as far as they are asked for: the node that is there ("": nobody was asked), or None."""
        try:
            if self._certificates is not None:
                stream.secured(wrap_server(self._certificates))
        except (ssl.SSLError, OSError) as error:
            REJECTIONS.count(PORT, tls.rejection_reason(error), peer, error)
            return None
        if self._gate.open:
            return ""
        found = verify_client(stream, self._gate)
        if isinstance(found, HandshakeRejected):
            REJECTIONS.count(PORT, found.reason, peer, found.text)
            return None
        return found

    def _answer(self, stream: FrameStream, header: Any, nbytes: int, node: str) -> None:
        """Carry out one request of `node`; its errors go back as a reply and the connection goes on."""
        kind = REQUESTS.get(str(header.get("kind", ""))) if isinstance(header, dict) else None
        if kind is None:
            raise FieldError("vault request", str(header)[:80], f"one of {', '.join(REQUESTS)}")
        request: Any = codec.decode(kind, header.get("body"))
        try:
            if isinstance(request, Locate) and node and request.node != node:
                REJECTIONS.count(PORT, Reason.FORGED, node, f"it asks in the name of {request.node}")
                raise VaultError(f"this connection is of {node}, not of {request.node}")
            if isinstance(request, Put):
                self._put(stream, request, nbytes)
                return
            if nbytes and (not isinstance(request, Probe) or nbytes > MOST_PROBE_BYTES):
                raise FieldError("payload bytes", nbytes, f"{header['kind']} comes without, or with fewer")
            stream.drain(nbytes)
            if isinstance(request, Get):
                self._get(stream, request.key)
                return
            reply = self._look(request)
        except (ChannelClosed, FieldError):
            raise
        except ElasticError as error:
            reply = _refusal(error)
        stream.send(codec.encode(reply))

    def _look(self, request: Locate | Inventory | Verify | Probe) -> Reply:
        if isinstance(request, Probe):
            return Reply()
        if isinstance(request, Inventory):
            return Reply(copies=self._vault.inventory())
        if isinstance(request, Verify):
            good = self._vault.verify(request.key)
            return Reply(copies=(self._vault.copy(request.key),) if good else ())
        if request.node != self._vault.node:
            raise VaultError(f"{request.node} cannot map memory of {self._vault.node}")
        local = self._vault.locate(request.key)
        return Reply(path=local.path, offset=local.offset)

    def _get(self, stream: FrameStream, key: str) -> None:
        copy = self._vault.copy(key)
        with self._vault.lease(key) as view:
            how = self._compressing.codec(copy, view)
            stream.begin(codec.encode(Reply(codec=how)), view.nbytes)
            began = time.perf_counter()
            sent, codec_s = send_copy(stream, view, how)
            if sent >= TELLING_BYTES:
                self._compressing.sent(sent, time.perf_counter() - began - codec_s)

    def _put(self, stream: FrameStream, request: Put, nbytes: int) -> None:
        """Take a bundle in: every copy verified before the first is kept."""
        copies, codecs = request.copies, request.codecs or ("",) * len(request.copies)
        if sum(copy.nbytes for copy in copies) != nbytes or min((c.nbytes for c in copies), default=0) < 0:
            raise FieldError("payload bytes", nbytes, "the sum of the copies' sizes is needed")
        if len(codecs) != len(copies) or not set(codecs) <= set(CODECS):
            raise FieldError(
                "codecs", str(codecs)[:80], f"{len(copies)} of {', '.join(filter(None, CODECS))}"
            )
        incoming, error = self._reserve(copies)
        try:
            if request.ask:
                stream.send(codec.encode(_answer_of(error)))
                if error is not None:
                    return
            digests = []
            for number, (copy, how) in enumerate(zip(copies, codecs, strict=True)):
                if error is None:
                    hasher = xxhash.xxh3_64()
                    error = read_copy(stream, incoming[number].buffer, how, hasher.update)
                    digests.append(hasher.hexdigest())
                else:  # what is left of the payload, so that the connection stays in step
                    drain_blocks(stream, copy.nbytes) if how else stream.drain(copy.nbytes)
            if error is None:
                error = self._commit(list(zip(incoming, digests, strict=True)))
            if error is None:
                self._received(copies)
        finally:
            for arrival in incoming:
                arrival.abort()
        stream.send(codec.encode(_answer_of(error)))

    def _reserve(self, copies: tuple[Copy, ...]) -> tuple[list[Incoming], ElasticError | None]:
        """Room for all copies before the first byte, or why there is none."""
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


def _answer_of(error: ElasticError | None) -> Reply:
    return Reply() if error is None else _refusal(error)


def _refusal(error: ElasticError) -> Reply:
    return Reply(error=str(error), stale=isinstance(error, StaleError), full=isinstance(error, VaultFull))
