"""Length-prefixed frames over a stream socket, and typed messages on top of them.

    u32  length of the header | header: JSON | u64  length of the payload | payload
    (little-endian)

`FrameStream` carries frames with bulk payloads (vaults). `Channel` carries the dataclasses of
`elastic.core.protocol.messages` between a worker and its agent. Any end of a connection (end of
file, reset, a closed descriptor) is a `ChannelClosed`; a malformed frame is a `FieldError`. The
other end may have the next or the former version (`elastic.core.protocol.version`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import socket
import ssl
import struct
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from elastic.core.protocol import messages
from elastic.core.protocol.version import ProtocolVersion, this_version
from elastic.domain import codec
from elastic.domain.errors import ChannelClosed, FieldError, UnknownMessage

MAX_HEADER_BYTES = 64 << 20
MAX_PAYLOAD_BYTES = 1 << 40
LEAST_CHUNK_BYTES, CHUNK_BYTES = 256 << 10, 2 << 20
"""Bounds of one read, which is a quarter of the data: a checksum of the chunk is then computed from
the CPU's cache while the rest arrives."""
PROGRESS_BYTES = 256 << 10
"""Bytes that count as progress: a transfer has failed if it moves fewer within the time limit,
unless they are its last ones. Also the number of bytes that are sent at a time with TLS."""
PIECE_BYTES = 64 << 10
"""Bytes sent at a time on a shaped link."""
SIOCOUTQNSD = 0x894B
"""Request of Linux for the bytes in the send queue of a socket that were not sent yet."""
_MORE = getattr(socket, "MSG_MORE", 0)
"""Flag that keeps a header in the kernel until its payload follows: one packet, one wake-up of the
reader."""
_HEADER, _PAYLOAD = struct.Struct("<I"), struct.Struct("<Q")


def dataclasses_of(*modules: ModuleType) -> dict[str, type]:
    """Return the dataclasses that the modules define, by name."""
    return {
        name: kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
        if kind.__module__ == module.__name__
    }


KINDS = dataclasses_of(messages)
"""Every message that a `Channel` carries, by class name."""
CHANNEL_VERSION = this_version(tuple(sorted(KINDS)))
"""Announcement of this process to the other end of a `Channel`."""
_KINDS_NEEDED = "a message of elastic.core.protocol.messages is needed"


class TooLarge(FieldError):
    """A frame is longer than allowed."""


class FrameStream:
    """Frames over a connected socket. `close` and `hang_up` may be called from any thread."""

    def __init__(self, sock: socket.socket, timeout_s: float | None = None) -> None:
        self._sock: socket.socket | ssl.SSLSocket = sock
        self._ended = False
        self.timeout_s = timeout_s
        """A call raises TimeoutError if it waits longer than these seconds for the next
        `PROGRESS_BYTES`, or for the rest of its data; None: no limit."""
        self.until: float | None = None
        """Deadline (time.monotonic) after which every call raises TimeoutError; None: none."""
        self.most_header, self.most_payload = MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES
        """Longest header and payload accepted; smaller for peers that have not authenticated."""
        self.pace: Callable[[int], None] | None = None
        """Slows a link down: called with 0 before a payload, and with the size of each piece before
        the piece is sent. It may wait. None: no delay."""

    def send(self, header: Any, payload: Iterable[memoryview] = ()) -> None:
        """Send one frame. Its payload is the bytes of `payload`, one flat view after the other."""
        parts = tuple(payload)
        self.begin(header, sum(part.nbytes for part in parts))
        for part in parts:
            self.write(part)

    def begin(self, header: Any, nbytes: int, waits: bool = False) -> None:
        """Send the header of a frame. The caller must then `write` the payload of `nbytes`.

        `waits`: the caller does something else first, so the header is sent at once.
        """
        text = json.dumps(header, separators=(",", ":")).encode()
        _limit("header", len(text), MAX_HEADER_BYTES)
        _limit("payload", nbytes, MAX_PAYLOAD_BYTES)
        plain = not isinstance(self._sock, ssl.SSLSocket)
        more = _MORE if plain and nbytes and self.pace is None and not waits else 0
        self._write(memoryview(_HEADER.pack(len(text)) + text + _PAYLOAD.pack(nbytes)), more)
        if self.pace is not None and nbytes:
            self.pace(0)

    def write(self, part: memoryview) -> None:
        """Send the next bytes of the payload that `begin` announced; `part` is a flat byte view."""
        if self.pace is None:
            self._write(part)
            return
        for start in range(0, part.nbytes, PIECE_BYTES):
            piece = part[start : start + PIECE_BYTES]
            self.pace(piece.nbytes)
            self._write(piece)

    def receive(self) -> tuple[Any, int]:
        """Return the header of the next frame and the size of its payload.

        The caller must read or drain the payload.
        """
        (length,) = _HEADER.unpack(self.read(_HEADER.size))
        _limit("header", length, self.most_header)
        rest = self.read(length + _PAYLOAD.size)
        text, (nbytes,) = rest[:length], _PAYLOAD.unpack_from(rest, length)
        _limit("payload", nbytes, self.most_payload)
        try:
            return json.loads(text), nbytes
        except (ValueError, RecursionError) as error:
            raise FieldError("frame header", bytes(text[:80]), f"not JSON: {error}") from error

    def read(self, nbytes: int) -> bytearray:
        """Return the next `nbytes`."""
        data = bytearray(nbytes)
        self.read_into(memoryview(data))
        return data

    def read_into(
        self, out: memoryview, on_chunk: Callable[[memoryview], object] | None = None
    ) -> None:
        """Fill `out` (flat bytes). `on_chunk` gets every piece as it arrives."""
        position, chunk = 0, min(max(LEAST_CHUNK_BYTES, len(out) // 4), CHUNK_BYTES)
        patience = _Patience(self)
        with _closing_errors():
            while position < len(out):
                self._sock.settimeout(patience.begin())
                count = self._sock.recv_into(out[position : position + chunk])
                patience.moved(count)
                if count == 0:
                    raise ChannelClosed("the other side closed the connection")
                if on_chunk is not None:
                    on_chunk(out[position : position + count])
                position += count

    def drain(self, nbytes: int) -> None:
        """Read and discard `nbytes` of payload."""
        scratch = memoryview(bytearray(min(nbytes, CHUNK_BYTES)))
        while nbytes > 0:
            self.read_into(scratch[:nbytes])
            nbytes -= min(nbytes, len(scratch))

    def begins(self) -> bool:
        """Wait for the first byte; return False if the other side closes without sending any."""
        with _closing_errors():
            self._sock.settimeout(_Patience(self).begin())
            return bool(self._sock.recv(1, socket.MSG_PEEK))

    def secured(self, wrap: Callable[[socket.socket], ssl.SSLSocket]) -> None:
        """Switch to TLS with the socket that `wrap` returns.

        Raises OSError (ssl.SSLError) if the handshake fails.
        """
        self._sock.settimeout(_Patience(self).begin())
        self._sock = secure = wrap(self._sock)
        if self._ended:  # closed while `wrap` had taken the socket over
            raise ChannelClosed("this side has closed the connection")
        try:
            secure.do_handshake()
        except OSError:  # the error of a bad certificate is also a ValueError
            raise
        except (AttributeError, ValueError) as error:
            raise ChannelClosed(f"this side has closed: {error}") from error

    @property
    def delivered(self) -> bool:
        """Whether the other machine is connected and has acknowledged all bytes that this one sent
        (TCP). Its kernel does so however busy its processes are."""
        with contextlib.suppress(OSError, ValueError):
            self._sock.getpeername()
            return self._queued(termios.TIOCOUTQ) == self._queued(SIOCOUTQNSD)
        return False

    def _queued(self, request: int) -> int:
        """Return the number of bytes in the send queue of the socket, by the kernel's `request`."""
        found = fcntl.ioctl(self._sock.fileno(), request, bytes(4))
        return int.from_bytes(found, sys.byteorder)

    def hang_up(self) -> None:
        """Wake a blocked call, whose thread must then call `close` to free the descriptor."""
        self._ended = True
        with contextlib.suppress(OSError, ValueError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.hang_up()
        self._sock.close()

    def _write(self, data: memoryview, flags: int = 0) -> None:
        """Send `data`. The time limit applies to each `PROGRESS_BYTES`; `sendall` would apply it to
        all data, also if they move."""
        # A call sends what has room, but with TLS all that it gets.
        position, most = 0, PROGRESS_BYTES if isinstance(self._sock, ssl.SSLSocket) else len(data)
        patience = _Patience(self)
        with _closing_errors():
            while position < len(data):
                try:
                    self._sock.settimeout(patience.begin())
                    count = self._sock.send(data[position : position + most], flags)
                except OSError:
                    self._end_sending()
                    raise
                patience.moved(count)
                position += count

    def _end_sending(self) -> None:
        """Send nothing more, because the other side may be inside a frame. Its answer can still be
        read."""
        sock = self._sock
        # `SSLSocket.shutdown` would end reading too.
        plain: Any = super(ssl.SSLSocket, sock) if isinstance(sock, ssl.SSLSocket) else sock
        with contextlib.suppress(OSError, ValueError):
            plain.shutdown(socket.SHUT_WR)


class _Patience:
    """The time that one read or write may still wait.

    Only waiting inside the calls of the socket counts: this process may be slow to use the data.
    """

    def __init__(self, stream: FrameStream) -> None:
        self._stream = stream
        self._left_s, self._moved = stream.timeout_s, 0
        self._began = 0.0

    def begin(self) -> float | None:
        """Return the seconds that the next call may wait; None: no limit. Raises TimeoutError if
        the time is over."""
        left_s, until = self._left_s, self._stream.until
        self._began = time.monotonic()
        if left_s is not None and left_s <= 0:
            raise TimeoutError(f"fewer than {PROGRESS_BYTES} bytes moved within the time limit")
        if until is None:
            return left_s
        if until <= self._began:
            raise TimeoutError("it took too long altogether")
        return until - self._began if left_s is None else min(until - self._began, left_s)

    def moved(self, nbytes: int) -> None:
        """Count the bytes that the call has moved. Enough bytes renew the time limit."""
        if self._left_s is None:
            return
        waited_s = time.monotonic() - self._began
        self._moved += nbytes
        # A call succeeds after its limit only if this process was stopped or starved meanwhile.
        if self._moved >= PROGRESS_BYTES or waited_s > self._left_s:
            self._left_s, self._moved = self._stream.timeout_s, 0
        else:
            self._left_s -= waited_s


class Channel:
    """Typed messages over a connected socket. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._stream = FrameStream(sock)
        self._sending = threading.Lock()
        self.peer = ProtocolVersion()
        """Version of the other end; as long as it is unknown, all messages are sent."""

    def send(self, message: Any) -> None:
        """Send a protocol message, unless the peer's version cannot read it.

        Raises ChannelClosed if the peer is gone.
        """
        name = type(message).__name__
        if KINDS.get(name) is not type(message):
            raise FieldError("message", name, _KINDS_NEEDED)
        if not self.peer.reads(name):
            return
        frame = {"kind": name, "body": codec.encode(message)}
        with self._sending:
            self._stream.send(frame)

    def receive(self) -> Any:
        """Wait for the next message.

        The channel stays usable after a FieldError, which is an UnknownMessage if this version does
        not know the kind of the message.
        """
        header, nbytes = self._stream.receive()
        self._stream.drain(nbytes)
        kind = KINDS.get(str(header.get("kind"))) if isinstance(header, dict) else None
        if kind is None:
            raise UnknownMessage("message.kind", str(header)[:80], _KINDS_NEEDED)
        return codec.decode(kind, header.get("body"), newer=True)

    def close(self) -> None:
        """Close the connection; a blocked `receive` raises ChannelClosed."""
        self._stream.close()


def version_text(version: ProtocolVersion) -> str:
    """Return an announcement as text, for the metadata of a session or the environment."""
    return codec.dumps(version)


def version_in(text: str) -> ProtocolVersion:
    """Return the announcement in `text`; a text that is none counts as no announcement."""
    try:
        return codec.decode(ProtocolVersion, json.loads(text or "{}"), newer=True)
    except (ValueError, RecursionError, FieldError):
        return ProtocolVersion()


def listen_unix(path: Path) -> socket.socket:
    """Return a socket that listens at `path`, for this user alone. Replace an older file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    os.chmod(path, 0o600)
    listener.listen(64)
    return listener


def connect_unix(path: str) -> Channel:
    """Connect to the agent's socket at `path`. Raises ChannelClosed if no agent listens there."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.connect(path)
    except OSError as error:
        sock.close()
        raise ChannelClosed(f"no agent listens at {path}: {error}") from error
    return Channel(sock)


@contextlib.contextmanager
def _closing_errors() -> Iterator[None]:
    """Turn every OSError except a timeout into ChannelClosed: the connection is gone."""
    try:
        yield
    except TimeoutError:
        raise
    except (OSError, ValueError) as error:  # ValueError: TLS of a socket that was closed meanwhile
        raise ChannelClosed(f"connection lost: {error}") from error


def _limit(name: str, nbytes: int, limit: int) -> None:
    if nbytes > limit:
        raise TooLarge(
            f"frame {name} bytes", nbytes, f"at most {limit} are allowed; is the peer ours?"
        )
