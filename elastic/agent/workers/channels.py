"""Channels from the agent to its workers: one Unix socket, two threads per worker.

One thread reads the worker's messages, the other one sends: a stopped worker reads nothing, and
neither the agent nor the other workers may wait for it.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from elastic.core.protocol import messages as m
from elastic.domain.errors import ChannelClosed, FieldError, UnknownMessage, describe
from elastic.rpc.frames import Channel, listen_unix

log = logging.getLogger("elastic.agent")
DRAIN_S = 2.0
"""Upper limit of the wait for the last messages of a dead worker."""
ACCEPT_RETRY_S = 0.1
"""Pause after a connection could not be accepted."""


class _Sender:
    """Sends messages to one worker on a thread of its own, until the channel or this is closed.

    After a failed send the channel is closed, so that the worker ends and starts again. Otherwise
    it would wait for ever for the message, such as an acknowledgement.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._queue: queue.SimpleQueue[Any] = queue.SimpleQueue()
        threading.Thread(target=self._run, name="to-worker", daemon=True).start()

    def put(self, message: Any) -> None:
        self._queue.put(message)

    def close(self) -> None:
        """End the thread after the messages queued so far. Does not wait."""
        self._queue.put(None)

    def _run(self) -> None:
        while (message := self._queue.get()) is not None:
            try:
                self._channel.send(message)
            except FieldError:
                log.exception("a message cannot be sent to a worker")
            except ChannelClosed as error:
                log.warning("the connection to a worker is closed: %s", error)
                self._channel.close()
                return


class WorkerChannels:
    """Connects the agent with its workers, which attach to a Unix socket at `path`.

    `put(generation, local rank, message)` is called for each message of a worker, in order. If a
    message cannot be read, or the worker cannot be served, `Crashed` is put in its place, and the
    worker's connection ends. `launched()` returns the generation (number) of the running launch and
    its process id per local rank.
    """

    def __init__(
        self,
        path: Path,
        put: Callable[[int, int, Any], object],
        launched: Callable[[], tuple[int, Mapping[int, int]]],
    ) -> None:
        self._put, self._launched = put, launched
        self._senders: dict[int, _Sender] = {}
        self._receivers: dict[tuple[int, int], threading.Thread] = {}
        listener = listen_unix(path)
        threading.Thread(target=self._accept, args=(listener,), name="workers", daemon=True).start()

    def send(self, message: Any, rank: int | None = None) -> None:
        """Queue a message to the worker `rank`, or to all connected workers (None). Closed channels
        are skipped, because the worker's exit is reported anyway."""
        for number, sender in list(self._senders.items()):
            if rank is None or rank == number:
                sender.put(message)

    def remove(self, rank: int) -> None:
        sender = self._senders.pop(rank, None)
        if sender is not None:
            sender.close()

    def clear(self) -> None:
        for rank in list(self._senders):
            self.remove(rank)

    def drain(self, generation: int, rank: int) -> None:
        """Wait until all messages of a dead worker have been passed on."""
        receiver = self._receivers.pop((generation, rank), None)
        if receiver is not None:
            receiver.join(DRAIN_S)

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:  # no descriptors are left, for example
                if listener.fileno() < 0:
                    return
                log.warning("a worker's connection could not be accepted: %s", error)
                time.sleep(ACCEPT_RETRY_S)
                continue
            channel = Channel(sock)
            try:
                threading.Thread(
                    target=self._receive, args=(channel,), name="worker", daemon=True
                ).start()
            except Exception:  # such as too many threads; the port must stay open for others
                log.exception("a worker's connection could not be served")
                channel.close()
                time.sleep(ACCEPT_RETRY_S)

    def _receive(self, channel: Channel) -> None:
        """Pass on one worker's messages until its connection ends."""
        generation, rank = -1, -1
        try:
            hello = channel.receive()
            if not isinstance(hello, m.Hello):
                raise FieldError("first message", type(hello).__name__, "Hello must come first")
            channel.peer, rank = hello.version, hello.local_rank
            generation, pids = self._launched()
            own = pids.get(rank) == hello.pid
            if own:
                self._receivers[generation, rank] = threading.current_thread()
                self._put(generation, rank, hello)
            while True:
                try:
                    message = channel.receive()
                except UnknownMessage as error:
                    log.info("worker %d sent a message of a newer version: %s", rank, error)
                    continue
                if not own and not isinstance(message, m.Failed):
                    remedy = f"not a worker of this launch ({dict(pids)})"
                    raise FieldError("pid", hello.pid, remedy)
                if isinstance(message, m.Attach):
                    self.remove(rank)
                    self._senders[rank] = _Sender(channel)
                self._put(generation, rank, message)
        except ChannelClosed:
            return
        except FieldError as error:
            log.error("a worker's channel is closed: %s", error)
            self._give_up(channel, generation, rank, f"cannot read its message: {describe(error)}")
        except Exception as error:  # such as too many threads; the worker must not wait for ever
            log.exception("a worker's channel is closed")
            self._give_up(channel, generation, rank, f"cannot serve it: {describe(error)}")

    def _give_up(self, channel: Channel, generation: int, rank: int, problem: str) -> None:
        """End the connection of a worker, and report the problem if it is one of this launch."""
        if (generation, rank) in self._receivers:
            self._put(generation, rank, m.Crashed(f"its agent {problem}", rank))
        channel.close()
