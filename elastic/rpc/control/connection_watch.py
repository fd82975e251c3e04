"""Limits the number of unauthenticated connections to gRPC's TLS port.

gRPC ends a handshake after HANDSHAKE_S, but it neither limits the number of handshakes nor reports
failed ones. A flood of silent connections could therefore use up this process's descriptors. So the
watch looks at the sockets of its own process. gRPC tells it how many handshakes began, the system
which connections are open, and the server which of them made a call. A connection is
unauthenticated until its first call. If there are too many, the watch shuts the oldest ones down.

gRPC keeps each socket. The watch duplicates a descriptor only while it looks at it.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import socket
import stat
import urllib.parse
from collections.abc import Iterator
from dataclasses import dataclass

from elastic.core.protocol.timeouts import RECONNECTS_PER_S
from elastic.rpc.security.expiry import with_expiry
from elastic.rpc.security.rejections import REJECTIONS, Reason
from elastic.rpc.security.tls import Certificates
from elastic.rpc.security.unauthenticated import UnauthenticatedConnections

HANDSHAKE_S = 5.0
"""Time limit of a handshake, kept by gRPC (on a port without TLS: of the opening of HTTP/2). It is
longer in large jobs (`together_s`)."""
SPARED_S = 0.5
"""Age below which a handshake is not shut down, so that many members can connect at once."""
MAX_HANDSHAKES, MAX_PER_ADDRESS = 256, 64
"""Unauthenticated connections at a time, in all and from one address unless it is loopback. In
large jobs there may be more in all: two for each node."""
MAX_SPARED = 2048
"""Number of unauthenticated connections above which even younger ones are shut down."""
SHORTEST_LOOK_S, LOOK_S = 0.05, 0.25
"""Shortest time between two looks; time between them while a connection is unauthenticated."""
PORT = "coordinator"
Peer = tuple[str, int]
"""Address and port of the other side."""


def together_s(nodes: int) -> float:
    """Return the time in which all nodes of a job can connect at once.

    Their handshakes take turns, so that all end late. If the server or a node gave up earlier, the
    work would be lost, the node would try again, and no handshake would ever end.
    """
    return nodes / RECONNECTS_PER_S


@dataclass(frozen=True, slots=True)
class _Connection:
    descriptor: int
    peer: Peer
    since: float


class ConnectionWatch:
    """Watches the connections to one port of this process. Only `began` is thread-safe."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        certificates: Certificates | None = None,
        nodes: int = 1,
    ) -> None:
        """`loop` runs everything except `began`. `certificates`: this side's, for error texts.
        `nodes`: number of nodes of the job."""
        self._certificates, self._nodes = certificates, nodes
        self.port = 0
        """Port to watch; set before the first handshake."""
        self._loop = loop
        self._sockets: dict[int, _Connection | None] = {}
        """Sockets of this process by inode; None: not a connection to the port."""
        self._waiting = UnauthenticatedConnections[int]()
        self._authenticated: set[Peer] = set()
        self._began = self._passed = self._failed = self._shut = 0
        self._looked_at = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._closed = False

    def began(self) -> None:
        """Count a handshake that begins. Any thread may call this."""
        self._loop.call_soon_threadsafe(self._handshake_began)

    def authenticated(self, peer: str) -> None:
        """Record a call of `peer`, as gRPC writes it: the handshake succeeded."""
        key = peer_of(peer)
        if key is not None and key not in self._authenticated:
            self._authenticated.add(key)
            self._passed += 1

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()

    def _handshake_began(self) -> None:
        self._began += 1
        self._look_in(max(0.0, self._looked_at + SHORTEST_LOOK_S - self._loop.time()))

    def _look_in(self, seconds: float) -> None:
        """Schedule the next look at the connections, at most this many seconds from now."""
        if self._closed or (
            self._timer is not None and self._timer.when() <= self._loop.time() + seconds
        ):
            return
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, self._look)

    def _look(self) -> None:
        """Compare the sockets of this process with those of the last look."""
        self._timer, self._looked_at = None, self._loop.time()
        before, self._sockets = self._sockets, self._current()
        peers = {found.peer for found in self._sockets.values() if found is not None}
        self._authenticated &= peers
        gone = []
        for inode, ended in before.items():
            if ended is not None and inode not in self._sockets and self._waiting.leave(inode):
                gone.append(ended.peer)
        for inode, found in self._sockets.items():
            if found is None:
                continue
            if found.peer in self._authenticated:
                self._waiting.leave(inode)
            elif inode not in before:
                self._enter(inode, found)
        self._make_room()
        self._count_failures(gone)
        if self._began > self._passed + self._failed + self._shut:
            self._look_in(LOOK_S)

    def _current(self) -> dict[int, _Connection | None]:
        """Return the sockets of this process. Known ones are not inspected again."""
        found: dict[int, _Connection | None] = {}
        for name in os.listdir("/proc/self/fd"):
            try:
                status = os.fstat(int(name))
            except OSError:
                continue
            if stat.S_ISSOCK(status.st_mode):
                inode = status.st_ino
                known = inode in self._sockets
                found[inode] = self._sockets[inode] if known else self._inspect(int(name), inode)
        return found

    def _inspect(self, descriptor: int, inode: int) -> _Connection | None:
        try:
            with _duplicate(descriptor, inode) as sock:
                ip = sock.family in (socket.AF_INET, socket.AF_INET6)
                if not ip or sock.getsockname()[1] != self.port:
                    return None
                host, port = sock.getpeername()[:2]
        except OSError:  # it listens, or has ended
            return None
        return _Connection(descriptor, (_plain(host), port), self._loop.time())

    def _enter(self, inode: int, found: _Connection) -> None:
        host = found.peer[0]
        own = self._waiting.crowded(host, MAX_PER_ADDRESS)
        if own is not None:
            self._shut_down(own)
        self._waiting.enter(inode, host)

    def _make_room(self) -> None:
        """Shut the oldest unauthenticated connections down while there are too many."""
        most = max(MAX_HANDSHAKES, 2 * self._nodes)
        while (first := self._waiting.full(most + 1)) is not None:
            found = self._sockets[first]
            assert found is not None
            young = self._loop.time() - found.since < SPARED_S
            if young and len(self._waiting) <= max(MAX_SPARED, most):
                return
            self._shut_down(first)

    def _shut_down(self, inode: int) -> None:
        found = self._sockets[inode]
        assert found is not None
        self._waiting.leave(inode)
        self._shut += 1
        detail = "its handshake is not over; others wait"
        REJECTIONS.count(PORT, Reason.TOO_MANY, _text(found.peer), detail)
        with contextlib.suppress(OSError), _duplicate(found.descriptor, inode) as sock:
            sock.shutdown(socket.SHUT_RDWR)

    def _count_failures(self, gone: list[Peer]) -> None:
        """Count the handshakes that ended without a call. `gone`: peers seen to be gone."""
        failed = self._began - self._passed - self._shut - len(self._waiting)
        text = "no TLS with a valid certificate of the job's authority"
        detail = with_expiry(text, self._certificates) if failed > self._failed else text
        for _ in range(failed - self._failed):
            peer = _text(gone.pop()) if gone else ""
            REJECTIONS.count(PORT, Reason.HANDSHAKE, peer, detail)
        self._failed = max(self._failed, failed)


def peer_of(text: str) -> Peer | None:
    """Return address and port from gRPC's name of a peer, such as `ipv6:%5B::1%5D:443`, or None."""
    scheme, _, rest = urllib.parse.unquote(text).partition(":")
    host, _, port = rest.rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return _plain(host.strip("[]")), int(port)


def _plain(host: str) -> str:
    """Return an IP address in one spelling. A port for both protocols reports IPv4 inside IPv6."""
    address = ipaddress.ip_address(host.partition("%")[0])
    return str(getattr(address, "ipv4_mapped", None) or address)


def _text(peer: Peer) -> str:
    return f"{peer[0]}:{peer[1]}"


@contextlib.contextmanager
def _duplicate(descriptor: int, inode: int) -> Iterator[socket.socket]:
    """Yield the socket of a descriptor. Raises OSError if another thread has closed it."""
    copy = os.dup(descriptor)
    if os.fstat(copy).st_ino != inode:
        os.close(copy)
        raise OSError(f"descriptor {descriptor} is another file now")
    with socket.socket(fileno=copy) as sock:
        yield sock
