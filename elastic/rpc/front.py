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
from pathlib import Path

from elastic.errors import FieldError
from elastic.rpc.refusals import REFUSALS, Reason
from elastic.rpc.security import Contexts, why

log = logging.getLogger(__name__)
HANDSHAKE_S = 5.0
MOST_HANDSHAKES = 256
"""At a time; more wait in the kernel's queue."""
MOST_CONNECTIONS = 16_384
READ_BYTES = 256 << 10
PORT = "coordinator"


class Front:
    """Passes what comes over TLS at `address` on to `backend`, the Unix socket's address for gRPC."""

    def __init__(self, contexts: Contexts) -> None:
        self._contexts = contexts
        self._folder = Path(tempfile.mkdtemp(prefix="elastic-rpc-"))  # mode 0700
        self._path = str(self._folder / "grpc.sock")
        self.backend = f"unix:{self._path}"
        self._handshakes = asyncio.Semaphore(MOST_HANDSHAKES)
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
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _spawn(self, work: object) -> None:
        task = asyncio.ensure_future(work)  # type: ignore[call-overload]
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            await self._handshakes.acquire()
            try:
                sock, peer = await loop.sock_accept(listener)
            except OSError as error:  # no descriptors left, or a connection that is gone already
                self._handshakes.release()
                log.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(0.1)
                continue
            if len(self._tasks) > MOST_CONNECTIONS:
                REFUSALS.count(PORT, Reason.TOO_MANY, peer, f"{len(self._tasks)} connections stand")
                sock.close()
                self._handshakes.release()
                continue
            self._spawn(self._serve(sock, f"{peer[0]}:{peer[1]}"))

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        try:
            found = await self._shake(sock, peer)
        finally:
            self._handshakes.release()
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
