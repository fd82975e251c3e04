"""The agent's channels to its workers: one Unix socket, one thread a worker."""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.core.protocol import messages as m
from elastic.domain.errors import ChannelClosed, FieldError
from elastic.rpc.frames import Channel, listen_unix

log = logging.getLogger("elastic.agent")
LAST_WORDS_S = 2.0
"""How long the end of a dead worker's channel is waited for, before its exit counts."""


class Workers:
    """Words of workers go to `put` as (generation, local rank, message), a worker's in their order.

    `launched` tells the running launch: its generation and the process of each local rank.
    """

    def __init__(
        self,
        path: Path,
        put: Callable[[Any], object],
        launched: Callable[[], tuple[int, Mapping[int, int]]],
    ) -> None:
        self._put, self._launched = put, launched
        self._channels: dict[int, Channel] = {}
        self._hearers: dict[tuple[int, int], threading.Thread] = {}
        listener = listen_unix(path)
        threading.Thread(target=self._accept, args=(listener,), name="workers", daemon=True).start()

    def tell(self, message: Any, rank: int | None = None) -> None:
        """To one worker, or to all that are connected. A closed channel is no news: its exit is."""
        for number, channel in list(self._channels.items()):
            if rank is None or rank == number:
                with contextlib.suppress(ChannelClosed):
                    channel.send(message)

    def gone(self, rank: int) -> None:
        self._channels.pop(rank, None)

    def forget(self) -> None:
        self._channels.clear()

    def last_words(self, generation: int, rank: int) -> None:
        """Wait until all that a dead worker said was handed on."""
        hearer = self._hearers.pop((generation, rank), None)
        if hearer is not None:
            hearer.join(LAST_WORDS_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return  # closed: the agent ends
            threading.Thread(target=self._hear, args=(Channel(sock),), name="worker", daemon=True).start()

    def _hear(self, channel: Channel) -> None:
        """One worker's words until it is gone."""
        try:
            first = channel.receive()
            if not isinstance(first, m.Attach | m.Failed):
                raise FieldError("first message", type(first).__name__, "a worker begins with Attach")
            rank = first.local_rank
            generation, pids = self._launched()
            if isinstance(first, m.Failed):
                self._put((generation, rank, first))
                return
            if pids.get(rank) != first.pid:
                raise FieldError("pid", first.pid, f"not a worker of this launch ({dict(pids)})")
            self._channels[rank] = channel
            self._hearers[generation, rank] = threading.current_thread()
            self._put((generation, rank, first))
            while True:
                self._put((generation, rank, channel.receive()))
        except ChannelClosed:
            return
        except FieldError as error:
            log.error("a worker's channel is closed: %s", error)
            channel.close()
