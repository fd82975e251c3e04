"""Cost of backups, and speed at which vaults move bytes: `python -m benchmarks.backup.vault`.

Pairs of (our vault, bare socket) are measured in turns in one run. The ratio is the median of the
pairs. The peer is a separate process.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import Row, save
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import Published
from elastic.domain.checksum import copy_checksum
from elastic.domain.types import STATE, Copy
from elastic.rpc.bulk.transfer import VaultClient, tune
from elastic.store.shared_memory import checksum
from elastic.worker.backup.publisher import Publisher
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.transport.cancellation import AbandonSignal

MIB = 1 << 20
SIZE = 64 * MIB
TURNS = 9


def memory_directory() -> Path:
    """Return a new directory, in shared memory if there is any."""
    shared = Path("/dev/shm")
    return Path(tempfile.mkdtemp(prefix="elastic-bench-", dir=shared if shared.is_dir() else None))


def describe(data: memoryview, sequence: int, node: str = "") -> Copy:
    copy = Copy(STATE, 0, 0, sequence, 1, "a", sequence, len(data), "", node=node)
    return replace(copy, checksum=copy_checksum(copy, checksum(data)))


def serve(directory: str, pipe: Connection) -> None:
    """Run the peer: a vault server, and a bare socket that answers with one byte."""
    vault = Vault("b", Path(directory) / "b")
    server = VaultServer(vault).start()
    plain = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.address, plain.getsockname()[1]))
    sock, _ = plain.accept()
    tune(sock)
    buffer = memoryview(bytearray(SIZE))
    while True:
        position = 0
        while position < SIZE:
            count = sock.recv_into(buffer[position:])
            if count == 0:
                return
            position += count
        sock.sendall(b"k")


def timed(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def transfers(directory: Path) -> list[Row]:
    """Return rows: put and get over loopback against a bare socket that copies equal bytes."""
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(target=serve, args=(str(directory), there), daemon=True)
    process.start()
    address, port = pipe.recv()
    client = VaultClient(address, node="a")
    bare = tune(socket.create_connection(("127.0.0.1", port)))
    data = memoryview(bytearray(os.urandom(SIZE)))
    out = memoryview(bytearray(SIZE))
    spent: dict[str, list[float]] = {"bare": [], "put": [], "get": []}
    for sequence in range(1, TURNS + 3):
        copy = describe(data, sequence)
        figures = {
            "bare": timed(lambda: (bare.sendall(data), bare.recv(1))),  # type: ignore[func-returns-value]
            "put": timed(lambda copy=copy: client.put([(copy, data)])),  # type: ignore[misc]
            "get": timed(lambda copy=copy: client.get(copy, out)),  # type: ignore[misc]
        }
        if sequence > 2:
            for name, seconds in figures.items():
                spent[name].append(seconds)
    bare.close()
    client.close()
    process.terminate()
    process.join()
    rates = {name: SIZE / MIB / statistics.median(seconds) for name, seconds in spent.items()}
    ratios = {
        name: statistics.median(b / s for b, s in zip(spent["bare"], spent[name], strict=True))
        for name in ("put", "get")
    }
    return [
        Row("bare socket, 64 MiB", rates["bare"], "MiB/s", None, "higher"),
        Row("vault put, verified", rates["put"], "MiB/s", None, "higher"),
        Row("vault get, verified", rates["get"], "MiB/s", None, "higher"),
        Row("vault put / bare socket", ratios["put"], "ratio", 0.8, "higher"),
        Row("vault get / bare socket", ratios["get"], "ratio", 0.8, "higher"),
    ]


class Lump:
    """Stand-in for a layer: its gradient is one tensor of SIZE bytes."""

    index, losses = 0, {}  # type: ignore[var-annotated]
    gradient_nbytes = SIZE

    def __init__(self) -> None:
        self.flat = torch.randint(0, 255, (SIZE,), dtype=torch.uint8)
        self.ledger: set[int] = set()

    def write_gradient(self, out: torch.Tensor) -> None:
        out.copy_(self.flat)


class Loop:
    """Stand-in for the channel to the agent: acknowledges at once, keeps the last message."""

    publisher: Publisher
    last: Published

    def send(self, message: Published) -> None:
        self.last = message
        self.publisher.on_acked(message.bundle)


def local(directory: Path) -> list[Row]:
    """Return rows: publishing in the worker's main thread, and reading through shared memory."""
    loop = Loop()
    loop.publisher = Publisher(loop.send, directory / "slots", "a")
    lump, abandon = Lump(), AbandonSignal()
    vault = Vault("a", directory / "a")
    server = VaultServer(vault).start()
    fetcher = Fetcher("a", {"a": server.address}, abandon)
    publish, copying, fetch = [], [], []
    target = torch.empty_like(lump.flat)
    for index in range(TURNS + 2):
        lump.ledger.add(index)
        spent = timed(lambda: loop.publisher.publish_gradients([lump], 0, 1, "", abandon))  # type: ignore[list-item]
        bare = timed(lambda: target.copy_(lump.flat))
        vault.publish(loop.last.copies[0])
        read = timed(lambda: fetcher.fetch(vault.inventory()[0]))
        if index > 1:
            publish.append(spent)
            copying.append(bare)
            fetch.append(read)
    fetcher.close()
    server.close()
    vault.close()
    per_mib = 1e6 / (SIZE / MIB)
    return [
        Row(
            "publish (copy and checksum)",
            statistics.median(publish) * per_mib,
            "us/MiB",
            None,
            "lower",
        ),
        Row("memory copy alone", statistics.median(copying) * per_mib, "us/MiB", None, "lower"),
        Row(
            "fetch through shared memory",
            statistics.median(fetch) * per_mib,
            "us/MiB",
            None,
            "lower",
        ),
    ]


def main() -> None:
    torch.set_num_threads(1)
    directory = memory_directory()
    try:
        save("vault", transfers(directory) + local(directory))
    finally:
        for path in sorted(directory.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        directory.rmdir()


if __name__ == "__main__":
    main()
