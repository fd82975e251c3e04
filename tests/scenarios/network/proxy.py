"""A TCP proxy that delays and resets the connections through it, on a thread of its own.

The kernel of a test machine may have no delay of its own (netem). The proxy needs no privileges.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import socket
import struct
import threading
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
CHUNK_BYTES = 64 << 10
CLONE_NEWNET = 0x40000000
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER of zero seconds: the kernel closes the connection with a reset."""


class Proxy:
    """Passes connections to `address` on to `target`, each way `rtt_s` / 2 later."""

    def __init__(
        self, target: str, rtt_s: float = 0.0, *, place: str = "127.0.0.1:0", space: str = ""
    ) -> None:
        """`place`: address to listen at; `space`: network namespace of both sides ("": that of
        this process)."""
        self._target, self.rtt_s, self._place, self._space = target, rtt_s, place, space
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()
        self.address = self._run(self._start())
        self.accepted = 0

    def reset(self) -> None:
        """Reset all connections on both sides."""
        self._run(self._reset())

    def close(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _serve(self) -> None:
        if self._space:
            enter(self._space)
        self._loop.run_forever()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _start(self) -> str:
        host, _, port = self._place.rpartition(":")
        self._server = await asyncio.start_server(self._accept, host, int(port))
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.accepted += 1
        host, _, port = self._target.rpartition(":")
        await asyncio.sleep(self.rtt_s)  # the handshake of TCP
        try:
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
        except OSError:
            writer.close()
            return
        self._writers |= {writer, far_writer}
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.create_task(self._pass_on(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass_on(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        """Read at once, and write each chunk after its delay, in order."""
        queue: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def write() -> None:
            while True:
                due, data = await queue.get()
                await asyncio.sleep(max(0.0, due - self._loop.time()))
                if not data:
                    return
                sink.write(data)
                await sink.drain()

        writing = asyncio.create_task(write())
        with contextlib.suppress(OSError):
            data = b"x"
            while data:
                data = await source.read(CHUNK_BYTES)
                queue.put_nowait((self._loop.time() + self.rtt_s / 2, data))
        queue.put_nowait((self._loop.time() + self.rtt_s / 2, b""))
        with contextlib.suppress(OSError):
            await writing
        sink.close()
        self._writers.discard(sink)

    async def _reset(self) -> None:
        writers, self._writers = self._writers, set()
        for writer in writers:
            sock = writer.get_extra_info("socket")
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            writer.transport.abort()

    async def _stop(self) -> None:
        self._server.close()
        await self._reset()
        for task in tuple(self._tasks):
            task.cancel()


def enter(space: str) -> None:
    """Move this thread into a network namespace of ip(8)."""
    with Path("/run/netns", space).open() as file:
        if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"namespace {space}")
