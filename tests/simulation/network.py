"""Simulated machines, links and sockets.

A connection is two one-way streams, in order and without duplicates, as TCP has them. Each link
(from host, to host) has a latency and a rate, and can lose all packets for some time: a stream over
it then waits, and goes on after the link is well again. The acknowledgements of a stream use the
other direction, so a sender also fills its window if only these are lost.

A process that ends closes its connections; a host without power says nothing. A connection to a
port on which nobody listens is refused; one to a host without power, or over a bad link, hangs.

`Sockets` stands in for the module `socket`.
"""

from __future__ import annotations

import itertools
import math
import os
import socket as real_socket
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from tests.simulation.primitives import process_of
from tests.simulation.scheduler import Process, Scheduler, Task

WINDOW_BYTES = 64 << 10
"""Bytes of a stream that are not acknowledged yet; a sender waits for room."""
RETRANSMIT_S = 0.2
FIRST_DESCRIPTOR = 1 << 20
"""Descriptors of sockets are above those of real files."""
FIN, RESET = "fin", "reset"


@dataclass
class Trouble:
    """A fault that only shows when something needs the bad part."""

    number: int = 0
    """Number of the error that is raised."""
    hits: int = 0
    """Operations that met the fault."""

    def hit(self) -> None:
        """Meet the fault. Raises OSError if it has a number."""
        self.hits += 1
        if self.number:
            raise OSError(self.number, os.strerror(self.number))


class Host:
    """A machine."""

    def __init__(self, network: Network, name: str, address: str) -> None:
        self.network, self.name, self.address = network, name, address
        self.up = True
        self.ports: dict[Any, Listener] = {}
        self.next_port = 20000
        self.ends: dict[Endpoint, None] = {}
        self.disk_error: Trouble | None = None
        self.disk_slow: Trouble | None = None
        self.disk_hangs: Trouble | None = None
        self.memory_error: Trouble | None = None
        self.disk_waits = 0
        """Operations that have waited for the disk."""
        self.disk_s, self.memory_rate = network.disk_s, network.memory_rate

    def power_off(self) -> None:
        self.up = False
        self.ports.clear()
        for end in list(self.ends):
            end.vanish()

    def process_ended(self, process: Process) -> None:
        """Close what the process had open."""
        for port in [p for p, one in self.ports.items() if one.process is process]:
            self.ports.pop(port).close()
        for end in [one for one in self.ends if one.process is process]:
            end.close(reset=bool(end.inbox))


class Link:
    """A one-way path between two hosts."""

    def __init__(self, latency_s: float, rate: float) -> None:
        self.latency_s, self.rate = latency_s, rate
        self.lost_until = -1.0
        """Time until which every packet is lost."""


class Network:
    def __init__(self, scheduler: Scheduler, latency_s: float, rate: float) -> None:
        """`latency_s`, `rate` (bytes/s): of every link until `link` is changed."""
        self.scheduler, self.latency_s, self.rate = scheduler, latency_s, rate
        self.hosts: dict[str, Host] = {}
        self.links: dict[tuple[str, str], Link] = {}
        self.refused: dict[frozenset[str], float] = {}
        """Time until which new connections between two hosts fail at once."""
        self.losses = 0
        """Packets that were lost."""
        self.memory_rate, self.disk_s = 64e6, 0.001
        """Of new hosts: bytes per second of an allocation of memory, and time of an operation that
        waits for the disk."""

    def add_host(self, name: str, address: str) -> Host:
        host = self.hosts[address] = Host(self, name, address)
        return host

    def link(self, a: Host, b: Host) -> Link:
        key = a.address, b.address
        if key not in self.links:
            near = a is b
            spread = 1.0 if near else self.scheduler.uniform(0.5, 1.5)
            latency_s = 0.00003 if near else self.latency_s * spread
            self.links[key] = Link(latency_s, 1e9 if near else self.rate)
        return self.links[key]

    def cut(self, a: Host, b: Host, seconds: float) -> None:
        """Lose all packets from `a` to `b` for `seconds`."""
        if a is not b:
            link = self.link(a, b)
            link.lost_until = max(link.lost_until, self.scheduler.now + seconds)

    def reset(self, host: Host) -> None:
        """Reset all connections of `host` to other hosts."""
        for end in list(host.ends):
            other = end.other
            if other is not None and other.host is not host:
                end.broken()
                other.broken()

    def refuse(self, a: Host, b: Host, seconds: float) -> None:
        """Reset the connections between `a` and `b`, and let new ones fail at once, for
        `seconds`."""
        self.refused[frozenset((a.address, b.address))] = self.scheduler.now + seconds
        for end in list(a.ends):
            if end.other is not None and end.other.host is b:
                end.other.broken()
                end.broken()

    def lost(self, a: Host, b: Host) -> bool:
        return self.link(a, b).lost_until > self.scheduler.now

    def send(self, a: Host, b: Host, arrive: Callable[[], object], nbytes: int = 0) -> None:
        """Call `arrive` after the latency of the link, when a packet gets through."""
        link = self.link(a, b)
        delay_s = link.latency_s * self.scheduler.uniform(1.0, 1.3) + nbytes / link.rate
        self.scheduler.at(delay_s, lambda: self._arrive(a, b, arrive, RETRANSMIT_S))

    def _arrive(self, a: Host, b: Host, arrive: Callable[[], object], pause_s: float) -> None:
        if not self.lost(a, b):
            arrive()
            return
        self.losses += 1
        later = min(2 * pause_s, 2.0)
        self.scheduler.at(pause_s, lambda: self._arrive(a, b, arrive, later))


class Endpoint:
    """One side of a connection."""

    def __init__(self, host: Host, process: Process) -> None:
        self.host, self.process = host, process
        self.other: Endpoint | None = None
        self.inbox: deque[Any] = deque()
        self.ended = ""
        """"": open for reading; fin or reset: the other side ended the connection."""
        self.closed = False
        self.unacked = 0
        self.stuck: deque[tuple[Any, int]] = deque()
        """Sent, but not arrived, in order."""
        self.flying = False
        self.free_at = 0.0
        self.waiters: list[Task] = []
        self.on_arrival: Callable[[], object] | None = None
        host.ends[self] = None

    @property
    def network(self) -> Network:
        return self.host.network

    @property
    def scheduler(self) -> Scheduler:
        return self.host.network.scheduler

    def transmit(self, item: Any, nbytes: int) -> None:
        """Send bytes or an object, in order; never blocks."""
        if self.other is None or self.closed or self.ended == RESET:
            return
        self.unacked += nbytes
        link = self.network.link(self.host, self.other.host)
        now = self.scheduler.now
        self.free_at = max(self.free_at, now) + nbytes / link.rate
        delay_s = self.free_at - now + link.latency_s * self.scheduler.uniform(1.0, 1.3)
        self.stuck.append((item, nbytes))
        self.scheduler.at(delay_s, lambda: self._fly(RETRANSMIT_S))

    def _fly(self, pause_s: float, again: bool = False) -> None:
        """The oldest packet reaches the other host, or is lost and sent again later."""
        other = self.other
        if other is None or not self.stuck or (self.flying and not again):
            return
        if not self.host.up:
            return
        if self.network.lost(self.host, other.host) or not other.host.up:
            self.network.losses += 1
            self.flying = True
            later = min(2 * pause_s, 2.0)
            self.scheduler.at(pause_s, lambda: self._fly(later, True))
            return
        everything = self.flying
        self.flying = False
        while self.stuck:
            item, nbytes = self.stuck.popleft()
            other.receive(item)
            if nbytes:
                self.network.send(other.host, self.host, lambda n=nbytes: self._acked(n))  # type: ignore[misc]
            if not everything:
                break

    def _acked(self, nbytes: int) -> None:
        self.unacked -= nbytes
        self.changed()

    def receive(self, item: Any) -> None:
        if not self.host.up:
            return
        if item in (FIN, RESET) and isinstance(item, str):
            self.ended = self.ended or item
        elif self.closed or not self.process.alive:
            self._refuse()
            return
        else:
            self.inbox.append(item)
        self.changed()

    def broken(self) -> None:
        """The network resets the connection. What has not arrived is lost."""
        self.stuck.clear()
        self.flying = False
        self.receive(RESET)

    def _refuse(self) -> None:
        other = self.other
        if other is not None and other.ended == "":
            self.network.send(self.host, other.host, lambda: other.receive(RESET))

    def changed(self) -> None:
        waiters, self.waiters = self.waiters, []
        for task in waiters:
            self.scheduler.wake(task)
        if self.on_arrival is not None:
            self.on_arrival()

    def wait(self, end: float | None) -> None:
        """Block until something changes. Raises TimeoutError."""
        left = None if end is None else end - self.scheduler.now
        if left is not None and left <= 0:
            raise TimeoutError("timed out")
        me = self.scheduler.current
        if me is not None:
            self.waiters.append(me)
        self.scheduler.pause(left)
        if me in self.waiters:
            self.waiters.remove(me)

    def close(self, reset: bool = False) -> None:
        if not self.closed:
            if self.host.up:
                self.transmit(RESET if reset else FIN, 0)
            self.closed = True
            self.host.ends.pop(self, None)
            self.changed()

    def vanish(self) -> None:
        self.closed = True
        self.host.ends.pop(self, None)


class Listener:
    def __init__(self, host: Host, process: Process, port: Any) -> None:
        self.host, self.process, self.port = host, process, port
        self.backlog: deque[tuple[Endpoint, tuple[str, int]]] = deque()
        self.waiters: list[Task] = []
        self.closed_at = math.inf
        self.on_connect: Callable[[], object] | None = None
        host.ports[port] = self

    def connected(self, end: Endpoint, where: tuple[str, int]) -> None:
        self.backlog.append((end, where))
        self.changed()

    def changed(self) -> None:
        waiters, self.waiters = self.waiters, []
        for task in waiters:
            self.host.network.scheduler.wake(task)
        if self.on_connect is not None:
            self.on_connect()

    @property
    def closed(self) -> bool:
        return self.closed_at < math.inf

    def close(self) -> None:
        self.closed_at = min(self.closed_at, self.host.network.scheduler.now)
        if self.host.ports.get(self.port) is self:
            del self.host.ports[self.port]
        self.changed()


def connect(
    host: Host, process: Process, address: str, port: Any, done: Callable[[Any], object]
) -> None:
    """Open a connection; call `done` with the endpoint, or with an OSError. It may never be
    called."""
    network = host.network
    target = network.hosts.get(address)
    refused_until = network.refused.get(frozenset((host.address, address)), 0.0)
    if target is None or refused_until > network.scheduler.now:
        network.scheduler.at(0.0001, lambda: done(OSError(113, "No route to host")))
        return

    def arrived() -> None:
        if not target.up or not host.up:
            return
        listener = target.ports.get(port)
        if listener is None:
            refused = ConnectionRefusedError(111, "Connection refused")
            network.send(target, host, lambda: done(refused))
            return
        mine, theirs = Endpoint(host, process), Endpoint(target, listener.process)
        mine.other, theirs.other = theirs, mine
        listener.connected(theirs, (host.address, 40000))

        def opened() -> None:
            if process.alive:
                done(mine)
            else:
                mine.close(reset=True)

        network.send(target, host, opened)

    network.send(host, target, arrived)


class SimSocket:
    """A stream socket. Unix sockets have their path as port of the own host."""

    def __init__(self, sockets: Sockets, end: Endpoint | None = None) -> None:
        self._sockets, self._scheduler = sockets, sockets.scheduler
        self._process = process_of(self._scheduler)
        self._end, self._listener = end, None
        self._timeout: float | None = None
        self._closed = self._shut = False
        self._peeked = b""
        self._waiting: Task | None = None
        self._where: Any = None
        self._number = sockets.numbered(self)

    def __hash__(self) -> int:
        """The order of a set of sockets is the same in each run of a seed."""
        return self._number

    @property
    def _host(self) -> Host:
        return self._process.host  # type: ignore[no-any-return]

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def setsockopt(self, *_: Any) -> None:
        pass

    def fileno(self) -> int:
        return -1 if self._closed else self._number

    def getpeername(self) -> Any:
        connection = self._open()
        if connection.ended == RESET:
            raise OSError(107, "Transport endpoint is not connected")
        return self._where

    @property
    def unacked(self) -> int:
        """Number of bytes that the other host has not acknowledged."""
        return self._open().unacked

    def getsockname(self) -> Any:
        return self._where

    # ---- server ----

    def bind(self, where: Any) -> None:
        if isinstance(where, tuple):
            port = where[1]
            if not port:
                port = self._host.next_port
                self._host.next_port += 1
            where = (where[0], port)
        else:
            port = where
        if port in self._host.ports:
            raise OSError(98, "Address already in use")
        self._where = where
        self._listener = Listener(self._host, self._process, port)  # type: ignore[assignment]

    def listen(self, backlog: int = 64) -> None:
        pass

    def accept(self) -> tuple[SimSocket, Any]:
        listener: Any = self._listener
        while not listener.backlog:
            if self._closed or listener.closed:
                raise OSError(9, "Bad file descriptor")
            listener.waiters.append(self._scheduler.current)
            self._scheduler.pause(self._timeout)
        end, where = listener.backlog.popleft()
        return SimSocket(self._sockets, end), where

    # ---- client ----

    def connect(self, where: Any) -> None:
        result: list[Any] = []
        me = self._scheduler.current
        assert me is not None
        self._waiting = me

        def done(found: Any) -> None:
            if self._closed or self._shut or result:
                if isinstance(found, Endpoint):
                    found.close(reset=True)
                return
            result.append(found)
            self._scheduler.wake(me)

        address, port = where if isinstance(where, tuple) else (self._host.address, where)
        connect(self._host, self._process, address, port, done)
        end = None if self._timeout is None else self._scheduler.now + self._timeout
        while not result:
            if self._shut or self._closed:
                raise ConnectionResetError(104, "Connection reset by peer")
            left = None if end is None else end - self._scheduler.now
            if left is not None and left <= 0:
                result.append(None)
                raise TimeoutError("timed out")
            self._scheduler.pause(left)
        self._waiting = None
        if isinstance(result[0], OSError):
            if isinstance(where, str):
                raise FileNotFoundError(2, "No such file or directory")
            raise result[0]
        self._end = result[0]

    # ---- data ----

    def send(self, data: Any, flags: int = 0) -> int:
        """Send all of `data`."""
        view = memoryview(data).cast("B")
        end = None if self._timeout is None else self._scheduler.now + self._timeout
        self._scheduler.may_yield()
        for start in range(0, len(view), WINDOW_BYTES // 4):
            piece = bytes(view[start : start + WINDOW_BYTES // 4])
            while True:
                connection = self._open()
                if connection.ended == RESET or self._shut:
                    raise BrokenPipeError(32, "Broken pipe")
                if connection.unacked + len(piece) <= WINDOW_BYTES or not connection.unacked:
                    break
                connection.wait(end)
            connection.transmit(piece, len(piece))
        return len(view)

    def recv_into(self, out: Any) -> int:
        data = self._receive(len(out))
        out[: len(data)] = data
        return len(data)

    def recv(self, nbytes: int, flags: int = 0) -> bytes:
        data = self._receive(nbytes)
        if flags & real_socket.MSG_PEEK and data:
            self._open().inbox.appendleft(data)
        return data

    def _receive(self, nbytes: int) -> bytes:
        end = None if self._timeout is None else self._scheduler.now + self._timeout
        while True:
            connection = self._open()
            if connection.inbox:
                data = connection.inbox.popleft()
                if len(data) > nbytes:
                    connection.inbox.appendleft(data[nbytes:])
                return bytes(data[:nbytes])
            if self._shut or connection.ended == FIN:
                return b""
            if connection.ended == RESET:
                raise ConnectionResetError(104, "Connection reset by peer")
            connection.wait(end)

    def _open(self) -> Endpoint:
        if self._closed or self._end is None:
            raise OSError(9, "Bad file descriptor")
        return self._end

    def shutdown(self, how: int) -> None:
        self._shut = True
        if self._listener is not None:
            listener: Any = self._listener
            listener.close()
        elif self._end is not None:
            if not self._end.closed:
                self._end.transmit(FIN, 0)
            self._end.changed()
        elif self._waiting is not None:
            self._scheduler.wake(self._waiting)
        else:
            raise OSError(107, "Transport endpoint is not connected")

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._listener is not None:
            listener: Any = self._listener
            listener.close()
        if self._end is not None:
            self._end.close()
        if self._waiting is not None:
            self._scheduler.wake(self._waiting)


class Sockets:
    """Stands in for the module `socket`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self.scheduler = scheduler
        self._numbers = itertools.count(FIRST_DESCRIPTOR)
        self._sockets: WeakValueDictionary[int, SimSocket] = WeakValueDictionary()

    def numbered(self, sock: SimSocket) -> int:
        """Return a file descriptor for the socket."""
        number = next(self._numbers)
        self._sockets[number] = sock
        return number

    def unacked(self, descriptor: int) -> int:
        """Return the number of sent bytes that are not acknowledged."""
        return self._sockets[descriptor].unacked

    def socket(self, *_: Any) -> SimSocket:
        return SimSocket(self)

    def create_server(self, where: tuple[str, int], backlog: int = 64) -> SimSocket:
        sock = SimSocket(self)
        sock.bind(where)
        return sock

    def getaddrinfo(self, host: str, port: int, **_: Any) -> list[Any]:
        return [(real_socket.AF_INET, real_socket.SOCK_STREAM, 6, "", (host, port))]

    def gethostbyname(self, name: str) -> str:
        return name

    def gethostname(self) -> str:
        return process_of(self.scheduler).host.name  # type: ignore[no-any-return]

    def __getattr__(self, name: str) -> Any:
        return getattr(real_socket, name)
