"""The backup parts of agents: vault, server, replicator, and a worker's channel."""

from __future__ import annotations

import multiprocessing
import queue
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path

from elastic.agent.vault.replicator import Replicator
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import Published
from elastic.domain.errors import ChannelClosed, ElasticError
from elastic.rpc.frames import Channel
from tests.launcher.helpers import send
from tests.patience import LONG_S


class MiniNode:
    """A vault with its server and replicator. `heard` has the announcements, `acked` the
    acknowledged bundles."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name, self.directory = name, directory
        self.vault = Vault(name, directory / "vault")
        self.server = VaultServer(self.vault, timeout_s=LONG_S).start()
        self.acked: queue.Queue[tuple[int, int]] = queue.Queue()
        self.failed: queue.Queue[tuple[int, str, ElasticError]] = queue.Queue()
        self.failed_epochs: list[int] = []
        self.heard: queue.Queue[Published] = queue.Queue()
        self.on_acked: Callable[[int], object] = lambda bundle: None
        self.refused: list[int] = []
        """Bundles for which the peer had no room."""
        self.replicator = Replicator(self.vault, self._on_acked, self._on_failed, timeout_s=LONG_S)
        self.ended = threading.Event()

    def _on_acked(self, worker: int, bundle: int, kept: bool) -> None:
        self.refused += [] if kept else [bundle]
        self.on_acked(bundle)
        self.acked.put((worker, bundle))

    def _on_failed(self, epoch: int, bundle: int, peer: str, error: ElasticError) -> None:
        self.failed_epochs.append(epoch)
        self.failed.put((bundle, peer, error))

    def take(self, published: Published, worker: int = 0) -> None:
        """Handle an announcement as an agent does."""
        for local in published.copies:
            self.vault.publish(local)
        self.replicator.submit(worker, published)
        self.heard.put(published)

    def worker_channel(self) -> Channel:
        """The worker's end of a channel; a thread of this node reads the other end."""
        here, there = socket.socketpair()
        self.listen(Channel(here))
        return Channel(there)

    def listen(self, channel: Channel) -> None:
        def hear() -> None:
            try:
                while True:
                    self.take(channel.receive())
            except ChannelClosed:
                self.ended.set()

        threading.Thread(target=hear, daemon=True).start()

    def close(self) -> None:
        self.replicator.close()
        self.server.close()
        self.vault.close()


@contextmanager
def nodes(directory: Path, *names: str) -> Iterator[list[MiniNode]]:
    """Nodes that know each other's vaults."""
    made = [MiniNode(name, directory / name) for name in names]
    for node in made:
        node.replicator.vaults = {other.name: other.server.address for other in made}
    try:
        yield made
    finally:
        for node in made:
            node.close()


def _serve(name: str, directory: str, pipe: Connection) -> None:
    server = VaultServer(Vault(name, Path(directory))).start()
    pipe.send(server.address)
    pipe.recv()


class ProcessVault:
    """A vault in a process of its own, which can be killed or stopped."""

    def __init__(self, name: str, directory: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(name, str(directory), there), daemon=True
        )
        self._process.start()
        self.address: str = self._pipe.recv()

    def signal(self, number: signal.Signals) -> None:
        send(self._process.pid or 0, number)
        if number == signal.SIGKILL:
            self._process.join(LONG_S)

    def close(self) -> None:
        if self._process.is_alive():
            self.signal(signal.SIGCONT)
            self.signal(signal.SIGKILL)
