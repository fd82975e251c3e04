"""The coordinator's TLS port: mutual TLS in front of a gRPC server that listens on a Unix socket of this user alone.

gRPC's own TLS tells nobody of handshakes that fail. Here each one is counted with its reason, versions below TLS 1.3
are refused, and certificates are read again when they change. Runs on the process's rpc loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import socket
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from elastic.domain.errors import FieldError
from elastic.rpc.loop import ended
from elastic.rpc.refusals import REFUSALS, Reason
from elastic.rpc.security import Contexts, why
from elastic.rpc.strangers import Strangers

log = logging.getLogger(__name__)
HANDSHAKE_S = 5.0
"""How long a handshake may take, while there are places."""
SPARED_S = 0.5
"""A handshake that is younger leaves its place to nobody: members that all come at once are to get through."""
MOST_HANDSHAKES, MOST_OF_ONE = 256, 64
"""At a time, in all and of one address, unless it is loopback."""
MOST_CONNECTIONS = 16_384
"""Besides."""
READ_BYTES = 256 << 10
PORT = "coordinator"


class Front:
    """Passes what comes over TLS at `address` on to `backend`, the Unix socket's address for gRPC."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-rpc-"))  # mode 0700
        self._path = str(self._folder / "grpc.sock")
        self.backend = f"unix:{self._path}"
        self._strangers, self._left = Strangers[asyncio.Task[None]](), asyncio.Event()
        self._began: dict[asyncio.Task[None], tuple[float, str]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener: socket.socket | None = None

    def listen(self, address: str) -> int:
        """Take connections from now on; the port. Raises FieldError if the address cannot be had."""
        host, _, port = address.rpartition(":")
        try:
            where = (host.strip("[]"), int(port))
            family = socket.getaddrinfo(*where, type=socket.SOCK_STREAM)[0][0]
            self._listener = socket.create_server(where, family=family, backlog=1024)
        except OSError as error:
            remedy = f"a free port of this machine is needed ({error})"
            raise FieldError("address", address, remedy) from error
        self._listener.setblocking(False)
        self._spawn(self._accept(self._listener))
        return int(self._listener.getsockname()[1])

    async def close(self) -> None:
        """End all connections and free the port."""
        if self._listener is not None:
            self._listener.close()
        while self._tasks:
            await ended(self._tasks)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors left, or a connection that is gone already
                log.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(0.1)
                continue
            standing = len(self._tasks) - len(self._strangers)
            if standing > MOST_CONNECTIONS:
                REFUSALS.count(PORT, Reason.TOO_MANY, peer, f"{standing} connections stand")
                sock.close()
                continue
            try:
                await self._room(peer[0])
            except asyncio.CancelledError:
                sock.close()
                raise
            where = f"{peer[0]}:{peer[1]}"
            task = self._spawn(self._serve(sock, where))
            self._began[task] = loop.time(), where
            self._strangers.enter(task, peer[0])
            task.add_done_callback(self._shown)
            await asyncio.sleep(0)  # handshakes that have begun go on first

    async def _room(self, address: str) -> None:
        """Wait until there is a place for another one from `address`, made free if need be."""
        loop = asyncio.get_running_loop()
        own = self._strangers.crowded(address, MOST_OF_ONE)
        if own is not None:
            self._give_up(own)
        while (first := self._strangers.full(MOST_HANDSHAKES)) is not None:
            left_s = self._began[first][0] + SPARED_S - loop.time()
            if left_s <= 0:
                self._give_up(first)
                return
            self._left.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._left.wait(), left_s)

    def _give_up(self, task: asyncio.Task[None]) -> None:
        REFUSALS.count(PORT, Reason.TOO_MANY, self._began[task][1], "its handshake is not over; others wait")
        self._shown(task)
        task.cancel()

    def _shown(self, task: asyncio.Task[None]) -> None:
        """It is no stranger's any more."""
        self._strangers.leave(task)
        self._began.pop(task, None)
        self._left.set()

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        mine = asyncio.current_task()
        assert mine is not None
        try:
            found = await self._shake(sock, peer)
        finally:
            self._shown(mine)
        if found is None:
            return
        reader, writer = found
        try:
            back_reader, back_writer = await asyncio.open_unix_connection(self._path, limit=READ_BYTES)
        except OSError as error:
            log.warning("%s: no server behind the port: %s", peer, error)
            writer.transport.abort()
            return
        pumps = [
            asyncio.ensure_future(_pump(reader, back_writer)),
            asyncio.ensure_future(_pump(back_reader, writer)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            with contextlib.suppress(OSError, RuntimeError):
                back_writer.close()
                writer.close()

    async def _shake(
        self, sock: socket.socket, peer: str
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter] | None:
        """The TLS handshake; None, counted, when it fails."""
        loop = asyncio.get_running_loop()
        reader = asyncio.StreamReader(limit=READ_BYTES)
        protocol = asyncio.StreamReaderProtocol(reader)
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        try:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                sock,
                ssl=self._contexts.server("h2"),
                ssl_handshake_timeout=HANDSHAKE_S,
                ssl_shutdown_timeout=1.0,
            )
        except (OSError, FieldError) as error:
            REFUSALS.count(PORT, why(error), peer, error)
            sock.close()
            return None
        return reader, asyncio.StreamWriter(transport, protocol, reader, loop)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Pass bytes on until one side ends."""
    with contextlib.suppress(OSError):
        while data := await reader.read(READ_BYTES):
            writer.write(data)
            await writer.drain()
