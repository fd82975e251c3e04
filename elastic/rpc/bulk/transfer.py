"""The vaults' bulk protocol: the requests, and the client of agents and workers.

Each request is a frame (`elastic.rpc.frames`) with the header {"kind": request, "body": fields};
the payload is the bytes of the copies, one after another. If the header names a codec for a copy,
the copy is sent as blocks (`elastic.rpc.bulk.blocks`); payload length and checksums still count
raw bytes. Every request is answered by a `Reply`, whose `error` is empty on success.

    Put(copies) + bytes   verified, then kept: all or none; the reply is the acknowledgement.
                          Large bundles `ask` between header and bytes: after an error no
                          bytes follow
    Get(key)              the copy's bytes
    Locate(key, node)     position of the copy in shared memory; only on the vault's own node
    Inventory()           all whole copies
    Verify(key)           compare a copy with its checksum again; a corrupt one is dropped
    Probe() + bytes       discarded; the time until the reply measures the link

With certificates or a join token, a connection begins with `elastic.rpc.bulk.handshake`.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain import codec
from elastic.domain.checksum import checksum_problem
from elastic.domain.errors import (
    ChannelClosed,
    ElasticError,
    FieldError,
    SlotError,
    StaleError,
    Unanswered,
    VaultError,
    VaultFull,
    VaultUnreachable,
    describe,
)
from elastic.domain.types import Copy
from elastic.rpc.bulk.blocks import read_copy, send_copy
from elastic.rpc.bulk.compression import CompressionPolicy
from elastic.rpc.bulk.handshake import authenticate, wrap_client
from elastic.rpc.frames import FrameStream
from elastic.rpc.security import tls
from elastic.rpc.security.expiry import with_expiry

BUFFER_BYTES = 1 << 20
"""Size of socket buffers: a large copy then needs fewer switches between both sides."""
KEEPALIVE_IDLE_S, KEEPALIVE_INTERVAL_S, KEEPALIVE_PROBES = 30, 10, 3
"""The kernel probes an idle connection after the first time, at these intervals, and closes it if
so many probes get no answer. Otherwise the connection of a vanished machine would stay for ever."""


@dataclass(frozen=True, slots=True)
class Put:
    copies: tuple[Copy, ...]
    codecs: tuple[str, ...] = ()
    """Codec of each copy; (): all uncompressed."""
    ask: bool = False
    """Whether the client waits for a reply about free room before it sends the payload."""


@dataclass(frozen=True, slots=True)
class Get:
    key: str


@dataclass(frozen=True, slots=True)
class Locate:
    key: str
    node: str


@dataclass(frozen=True, slots=True)
class Inventory:
    pass


@dataclass(frozen=True, slots=True)
class Verify:
    key: str


@dataclass(frozen=True, slots=True)
class Probe:
    pass


@dataclass(frozen=True, slots=True)
class Reply:
    error: str = ""
    stale: bool = False
    """Whether the error is an old epoch."""
    full: bool = False
    """Whether the error is a lack of room."""
    broken: bool = False
    """Whether the vault can create no slots, for another reason than a lack of room."""
    copies: tuple[Copy, ...] = ()
    codec: str = ""
    """Codec of the requested copy."""
    path: str = ""
    offset: int = 0


REQUESTS: dict[str, type] = {
    kind.__name__: kind for kind in (Put, Get, Locate, Inventory, Verify, Probe)
}


ASK_BYTES = 4 << 20
"""Bundles of this size or more ask for room before they are sent."""
LEAST_BYTES_PER_SECOND = 256 << 20
"""Slowest allocation of memory for a bundle. The client waits longer for a larger bundle."""


def tune(sock: socket.socket) -> socket.socket:
    """Set the socket options of a bulk connection."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    return sock


def split_address(address: str) -> tuple[str, int]:
    """Return the host and port of `address`. Raises FieldError unless it is HOST:PORT."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise FieldError("vault address", address, "HOST:PORT is needed")
    return host.strip("[]"), int(port)


class VaultClient:
    """Client of one vault. A call opens the connection if there is none, or after an error.

    Thread-safe; calls queue. `close` may come from any thread and ends a call in progress at once.
    """

    def __init__(
        self,
        address: str,
        *,
        node: str = "",
        timeout_s: float = DEFAULT_TIMEOUTS.bulk_s,
        pace: Callable[[int], None] | None = None,
        compressing: CompressionPolicy | None = None,
        secure: tls.SecuritySettings | None = None,
        peer: str = "",
    ) -> None:
        """`node`: the client's node. `timeout_s`: longest wait without progress. `pace`: see
        `FrameStream`. `compressing` chooses codecs; None: uncompressed. `secure`: security
        settings; None: those of this process. `peer`: the vault's node, for error texts."""
        self.address, self._pace = address, pace
        self._name = f"vault of {peer} at {address}" if peer else f"vault {address}"
        self._secure = secure or tls.current()
        self._compressing = compressing or CompressionPolicy("off")
        self._where = split_address(address)
        self._node, self._timeout_s = node, timeout_s
        self._stream: FrameStream | None = None
        self._closed = False
        self._calling, self._lock = threading.Lock(), threading.Lock()

    def put(self, bundle: Sequence[tuple[Copy, memoryview]]) -> None:
        """Send copies with their bytes. Wait until the vault has verified and stored all of them.

        Raises StaleError if the vault rejects their epoch, VaultFull if it has no room, SlotError
        if it can create no slots, VaultError otherwise.
        """
        codecs = tuple(self._compressing.codec(copy, data) for copy, data in bundle)
        total = sum(data.nbytes for _, data in bundle)
        copies = tuple(copy for copy, _ in bundle)
        request = Put(copies, codecs if any(codecs) else (), ask=total >= ASK_BYTES)
        with self._connected() as stream:
            _begin(stream, request, total, waits=request.ask)
            if request.ask:
                self._await_room(stream, total)
            sent, seconds = 0, -time.perf_counter()
            with _reason_first():
                for how, (_, data) in zip(codecs, bundle, strict=True):
                    nbytes, codec_s = send_copy(stream, data, how)
                    sent, seconds = sent + nbytes, seconds - codec_s
            _reply(stream)
            self._compressing.sent(sent, seconds + time.perf_counter())

    def get(
        self,
        copy: Copy,
        out: memoryview | None = None,
        on_chunk: Callable[[memoryview], object] = lambda chunk: None,
    ) -> memoryview:
        """Fetch and verify `copy`. Return its bytes in `out`, which has its size (None: a new
        buffer). `on_chunk` gets them piece by piece.

        Raises VaultUnreachable or Unanswered if the vault is not reached or does not answer, and
        VaultError if the copy is gone or corrupt.
        """
        data = memoryview(bytearray(copy.nbytes)) if out is None else out
        with self._connected() as stream:
            _begin(stream, Get(copy.key))
            reply, nbytes = _reply(stream)
            if nbytes != copy.nbytes or len(data) != nbytes:
                raise VaultError(
                    f"{copy.key}: {nbytes} bytes came, {len(data)} of {copy.nbytes} are wanted"
                )
            hasher = xxhash.xxh3_64()

            def received(chunk: memoryview) -> None:
                hasher.update(chunk)
                on_chunk(chunk)

            problem = read_copy(stream, data, reply.codec, received)
        wrong = str(problem or checksum_problem(copy, hasher.hexdigest()))
        if wrong:
            self.verify(copy)
            raise VaultError(f"{copy.key} from {self._name} does not match its checksum: {wrong}")
        return data

    def locate(self, copy: Copy) -> tuple[str, int]:
        """Return the path and offset of a copy in shared memory of this node.

        Raises VaultError if the copy is gone or on another node.
        """
        reply = self._ask(Locate(copy.key, self._node))
        return reply.path, reply.offset

    def inventory(self) -> tuple[Copy, ...]:
        return self._ask(Inventory()).copies

    def verify(self, copy: Copy) -> bool:
        """Let the vault check the copy again. Return False if it was corrupt or is gone."""
        return bool(self._ask(Verify(copy.key)).copies)

    def probe(self, nbytes: int) -> float:
        """Return the seconds from sending `nbytes`, which the vault discards, to its answer."""
        with self._connected() as stream:
            began = time.perf_counter()
            _begin(stream, Probe(), nbytes)
            with _reason_first():
                stream.write(memoryview(bytes(nbytes)))
            _reply(stream)
            return time.perf_counter() - began

    def disconnect(self) -> None:
        """End the connection after the calls in progress. The next call opens another one."""
        with self._calling:
            self._drop()

    def close(self) -> None:
        """Close for good; calls in progress and later ones raise VaultError."""
        self._closed = True
        self._drop()

    def _ask(self, request: Any) -> Reply:
        with self._connected() as stream:
            _begin(stream, request)
            return _reply(stream)[0]

    def _await_room(self, stream: FrameStream, nbytes: int) -> None:
        """Wait for the reply about room for `nbytes`. The vault allocates memory before it."""
        limit_s = self._timeout_s + nbytes / LEAST_BYTES_PER_SECOND
        stream.timeout_s = limit_s
        try:
            _reply(stream)
        except TimeoutError as error:
            text = f"{limit_s:g} s while it allocated {nbytes} bytes"
            raise self._silence(text) from error
        finally:
            stream.timeout_s = self._timeout_s

    def _silence(self, duration: str) -> VaultError:
        """Return the error of a call without progress for `duration`."""
        stream = self._stream
        kind = Unanswered if stream is not None and stream.delivered else VaultUnreachable
        return kind(f"{self._name} made no progress for {duration}")

    def _explain(self, error: Exception) -> str:
        """Return the text of a failed connection; a failed TLS handshake is called one."""
        tls_failed = isinstance(error, ssl.SSLError) or isinstance(error.__cause__, ssl.SSLError)
        text = f"TLS handshake failed: {error}" if tls_failed else describe(error)
        return with_expiry(text, self._secure.certificates)

    def _drop(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open(self) -> FrameStream:
        """Return the connection; open it if there is none.

        It is registered before it is open, so that `close` can end the wait.
        """
        if self._stream is not None:
            return self._stream
        family, kind, protocol, _, where = socket.getaddrinfo(
            *self._where, type=socket.SOCK_STREAM
        )[0]
        sock = socket.socket(family, kind, protocol)
        stream = FrameStream(tune(sock), self._timeout_s)
        stream.pace = self._pace
        with self._lock:
            self._stream = stream
        if self._closed:
            raise ChannelClosed("this side has closed")
        sock.settimeout(self._timeout_s)
        sock.connect(where)
        if self._secure.certificates is not None:
            stream.secured(wrap_client(self._secure, self._where[0]))
        if self._secure.token:
            authenticate(stream, self._secure.token, self._node)
        return stream

    @contextlib.contextmanager
    def _connected(self) -> Iterator[FrameStream]:
        """Yield the connection to one call at a time.

        The connection is dropped after any error that is not a whole reply, because it may be
        inside a frame.
        """
        with self._calling:
            try:
                yield self._open()
            except _Refused as refusal:
                raise refusal.error from None
            except TimeoutError as error:
                silence = self._silence(f"{self._timeout_s:g} s")
                self._drop()
                raise silence from error
            except FieldError as error:
                self._drop()
                raise VaultError(f"{self._name}: {self._explain(error)}") from error
            except (ChannelClosed, OSError) as error:
                self._drop()
                raise VaultUnreachable(f"{self._name}: {self._explain(error)}") from error
            except BaseException:
                self._drop()
                raise


def _begin(stream: FrameStream, request: Any, nbytes: int = 0, waits: bool = False) -> None:
    header = {"kind": type(request).__name__, "body": codec.encode(request)}
    with _reason_first():
        stream.begin(header, nbytes, waits)


def _reason_first() -> contextlib.AbstractContextManager[None]:
    """Ignore a closed connection while sending: a vault that rejects early has sent its reason."""
    return contextlib.suppress(ChannelClosed)


def _reply(stream: FrameStream) -> tuple[Reply, int]:
    body, nbytes = stream.receive()
    reply = codec.decode(Reply, body, newer=True)
    if reply.error:
        stream.drain(nbytes)
        raise _Refused(_error_of(reply))
    return reply, nbytes


def _error_of(reply: Reply) -> ElasticError:
    kinds = ((reply.stale, StaleError), (reply.full, VaultFull), (reply.broken, SlotError))
    return next((kind for given, kind in kinds if given), VaultError)(reply.error)


class _Refused(Exception):
    """The vault replied with an error; the connection remains usable."""

    def __init__(self, error: ElasticError) -> None:
        super().__init__(str(error))
        self.error = error
