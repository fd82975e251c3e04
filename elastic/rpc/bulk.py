"""The vaults' bulk protocol: requests, and the client that agents and workers use.

Frames (`elastic.rpc.frames`) whose header is {"kind": request, "body": fields}; payloads are the copies'
bytes, one after another. A copy for which the header names a codec comes in its blocks (`elastic.rpc.blocks`) in place
of its bytes; the length of the payload and all checksums are those of the raw bytes all the same. Every request is
answered by a `Reply`, whose `error` is empty when all went well.

    Put(copies) + bytes   verified, then kept: all of them or none; the reply is the acknowledgement. Large bundles
                          `ask` between header and bytes: an error is then the only reply, and no bytes follow
    Get(key)              the copy's bytes
    Locate(key, node)     where the copy lies in shared memory; only for requesters on the vault's own node
    Inventory()           all whole copies
    Verify(key)           compare a copy with its checksum again; a corrupt one is dropped
    Probe() + bytes       nothing: what a link carries can be seen from how long it takes

Where a join token is set, a connection begins with `elastic.rpc.greeting`; with certificates all of it is TLS.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain import codec
from elastic.domain.errors import ChannelClosed, ElasticError, FieldError, StaleError, VaultError, VaultFull
from elastic.domain.types import Copy
from elastic.rpc import security
from elastic.rpc.blocks import CODECS, read_blocks, send_blocks
from elastic.rpc.compressing import Compressing
from elastic.rpc.frames import Stream
from elastic.rpc.greeting import greet, wrap_client

BUFFER_BYTES = 1 << 20
"""Socket buffers: fewer turns between the two sides of a big copy."""


@dataclass(frozen=True, slots=True)
class Put:
    copies: tuple[Copy, ...]
    codecs: tuple[str, ...] = ()
    """How each copy comes; (): all as they are."""
    ask: bool = False
    """The payload waits for a first reply: whether there is room."""


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
    """The error is a refusal of an old epoch."""
    full: bool = False
    """The error is that there is no room."""
    copies: tuple[Copy, ...] = ()
    codec: str = ""
    """How the copy that was asked for comes."""
    path: str = ""
    offset: int = 0


REQUESTS: dict[str, type] = {kind.__name__: kind for kind in (Put, Get, Locate, Inventory, Verify, Probe)}


ASK_BYTES = 4 << 20
"""Bundles from this size on ask for room before they are sent."""


def tune(sock: socket.socket) -> socket.socket:
    """Set the options that both sides of a bulk connection want."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
    return sock


def split_address(address: str) -> tuple[str, int]:
    """ "host:port" as a pair. Raises FieldError."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise FieldError("vault address", address, "HOST:PORT is needed")
    return host.strip("[]"), int(port)


class VaultClient:
    """One connection to a vault, opened when first needed, reused, and opened again after an error.

    Thread-safe; calls queue. `close` may come from any thread and ends a call in progress at once.
    """

    def __init__(
        self,
        address: str,
        *,
        node: str = "",
        timeout_s: float = DEFAULT_TIMEOUTS.bulk_s,
        pace: Callable[[int], None] | None = None,
        compressing: Compressing | None = None,
        secure: security.Security | None = None,
    ) -> None:
        """`node` is the requester's own; `timeout_s` bounds every wait without progress; `pace` see `Stream`;
        `compressing` decides how copies are sent, None: as they are; `secure`: None: what this process goes by."""
        self.address, self._pace = address, pace
        self._secure = secure or security.current()
        self._compressing = compressing or Compressing("off")
        self._where = split_address(address)
        self._node, self._timeout_s = node, timeout_s
        self._stream: Stream | None = None
        self._closed = False
        self._calling, self._lock = threading.Lock(), threading.Lock()

    def put(self, bundle: Sequence[tuple[Copy, memoryview]]) -> None:
        """Send copies with their bytes; returns once the vault holds all of them, verified.

        Raises StaleError when the vault has been fenced against their epoch, VaultFull when it has no room, VaultError
        for everything else.
        """
        codecs = tuple(self._compressing.codec(copy, data) for copy, data in bundle)
        total = sum(data.nbytes for _, data in bundle)
        copies = tuple(copy for copy, _ in bundle)
        request = Put(copies, codecs if any(codecs) else (), ask=total >= ASK_BYTES)
        with self._calling, self._connected() as stream:
            with _reason_first():
                _begin(stream, request, total, waits=request.ask)
            if request.ask:
                _reply(stream)
            sent, seconds = 0, -time.perf_counter()
            with _reason_first():
                for how, (_, data) in zip(codecs, bundle, strict=True):
                    nbytes, codec_s = send_copy(stream, data, how)
                    sent, seconds = sent + nbytes, seconds - codec_s
            _reply(stream)
            self._compressing.sent(sent, seconds + time.perf_counter())

    def get(self, copy: Copy, out: memoryview | None = None) -> memoryview:
        """Read `copy` into `out` (of its size; by default a new buffer) and return that, verified.

        Raises VaultError if the copy is gone or corrupt.
        """
        data = memoryview(bytearray(copy.nbytes)) if out is None else out
        with self._calling, self._connected() as stream:
            _ask(stream, Get(copy.key))
            reply, nbytes = _reply(stream)
            if nbytes != copy.nbytes or len(data) != nbytes:
                raise VaultError(f"{copy.key}: {nbytes} bytes came, {len(data)} of {copy.nbytes} are wanted")
            hasher = xxhash.xxh3_64()
            problem = read_copy(stream, data, reply.codec, hasher.update)
        if problem is not None or hasher.hexdigest() != copy.checksum:
            self.verify(copy)
            raise VaultError(f"{copy.key} from {self.address} does not match its checksum")
        return data

    def locate(self, copy: Copy) -> tuple[str, int]:
        """(path, offset) of a copy on this very node. VaultError if it is gone or the node another one."""
        with self._calling, self._connected() as stream:
            _ask(stream, Locate(copy.key, self._node))
            reply, _ = _reply(stream)
        return reply.path, reply.offset

    def inventory(self) -> tuple[Copy, ...]:
        with self._calling, self._connected() as stream:
            _ask(stream, Inventory())
            return _reply(stream)[0].copies

    def verify(self, copy: Copy) -> bool:
        """Let the vault look at the copy again; False (and dropped there) if it is not whole."""
        with self._calling, self._connected() as stream:
            _ask(stream, Verify(copy.key))
            return bool(_reply(stream)[0].copies)

    def probe(self, nbytes: int) -> float:
        """Seconds that so many bytes take to the vault, its answer included; they are thrown away there."""
        with self._calling, self._connected() as stream:
            began = time.perf_counter()
            with _reason_first():
                _begin(stream, Probe(), nbytes)
                stream.write(memoryview(bytes(nbytes)))
            _reply(stream)
            return time.perf_counter() - began

    def close(self) -> None:
        """For good; calls in progress and later ones raise VaultError."""
        self._closed = True
        self._drop()

    def _drop(self) -> None:
        with self._lock:
            stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _open(self) -> Stream:
        """The connection, made if there is none; known before it stands, so that `close` can end the wait."""
        if self._stream is not None:
            return self._stream
        family, kind, protocol, _, where = socket.getaddrinfo(*self._where, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, protocol)
        stream = Stream(tune(sock), self._timeout_s)
        stream.pace = self._pace
        with self._lock:
            self._stream = stream
        if self._closed:
            raise ChannelClosed("this side has closed")
        sock.settimeout(self._timeout_s)
        sock.connect(where)
        if self._secure.contexts is not None:
            stream.secured(wrap_client(self._secure, self._where[0]))
        if self._secure.token:
            greet(stream, self._secure.token, self._node)
        return stream

    @contextlib.contextmanager
    def _connected(self) -> Iterator[Stream]:
        """The connection; dropped after anything but a clean answer: it may be in the middle of a frame."""
        try:
            yield self._open()
        except _Refused as refusal:
            raise refusal.error from None
        except TimeoutError as error:
            self._drop()
            raise VaultError(f"vault {self.address} made no progress for {self._timeout_s:g} s") from error
        except (ChannelClosed, FieldError, OSError) as error:
            self._drop()
            raise VaultError(f"vault {self.address}: {error}") from error
        except BaseException:
            self._drop()
            raise


def send_copy(stream: Stream, data: memoryview, how: str) -> tuple[int, float]:
    """Send a copy, as it is ("") or by a codec. Return the bytes sent and the seconds spent on compressing."""
    if how:
        return send_blocks(stream, data)
    stream.write(data)
    return data.nbytes, 0.0


def read_copy(
    stream: Stream, out: memoryview, how: str, on_chunk: Callable[[memoryview], object]
) -> VaultError | None:
    """Fill `out` with a copy that comes as `how` says; `on_chunk` gets it piece by piece.

    Returns what is wrong with the compressed bytes, which are read to their end all the same. Raises FieldError for a
    codec that is none.
    """
    if how not in CODECS:
        raise FieldError("codec", how[:80], f"one of {', '.join(filter(None, CODECS))}")
    if how:
        return read_blocks(stream, out, on_chunk)
    stream.read_into(out, on_chunk)
    return None


def _ask(stream: Stream, request: Any) -> None:
    with _reason_first():
        _begin(stream, request, 0)


def _begin(stream: Stream, request: Any, nbytes: int, waits: bool = False) -> None:
    stream.begin({"kind": type(request).__name__, "body": codec.encode(request)}, nbytes, waits)


def _reason_first() -> contextlib.AbstractContextManager[None]:
    """A vault that refuses early and closes has left its reason to read."""
    return contextlib.suppress(ChannelClosed)


def _reply(stream: Stream) -> tuple[Reply, int]:
    body, nbytes = stream.receive()
    reply = codec.decode(Reply, body)
    if reply.error:
        stream.drain(nbytes)
        kind = StaleError if reply.stale else VaultFull if reply.full else VaultError
        raise _Refused(kind(reply.error))
    return reply, nbytes


class _Refused(Exception):
    """A clean refusal: the connection can be used on."""

    def __init__(self, error: ElasticError) -> None:
        super().__init__(str(error))
        self.error = error
