"""One vault that sends copies to another, against a plain socket.

    python -m benchmarks.backup.vault_transport [--quick]

Both send to a second process over loopback with the same socket options. The vault side is the real
code: `VaultClient`, `VaultServer`, checksums, slots in shared memory, one acknowledgement per copy.
The plain side is `sendall`, `recv_into` an existing buffer, and one byte back; nothing is checked.
They take turns, and the first of each pair alternates. The ratio is the median over pairs. The
smallest copies are also sent in bundles with one acknowledgement each, as a worker sends its
layers.

A second measurement reads a state from the vault of the same node through shared memory, as a
restarted worker does, against reading it from the vault of a peer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median

from benchmarks.backup.vault import MIB, describe, memory_directory, timed
from benchmarks.results import Row, save
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.domain.checksum import copy_checksum
from elastic.domain.types import Copy
from elastic.rpc.bulk.transfer import VaultClient, tune
from elastic.store.shared_memory import SharedSlot, checksum
from elastic.worker.recovery.fetch import Fetcher

TARGET = 0.8
WARM = 4
"""Turns that are not counted, in which connections and slots are made."""


@dataclass(frozen=True, kw_only=True)
class TransportSetting:
    sizes: tuple[int, ...] = (MIB, 16 * MIB, 64 * MIB)
    turns: int = 21
    turn_bytes: int = 32 * MIB
    """Least number of bytes that a turn sends: several small copies, one after the other."""
    bundle: int = 16
    """Copies per bundle; only those of the smallest size are bundled."""


QUICK = TransportSetting(sizes=(MIB // 4, MIB), turns=2, turn_bytes=MIB)


def serve(directory: str, largest: int, pipe: Connection) -> None:
    """Run the peer: a vault with its server, and a plain socket."""
    server = VaultServer(Vault("b", Path(directory))).start()
    plain = socket.create_server(("127.0.0.1", 0))
    pipe.send((server.address, plain.getsockname()[1]))
    sock, _ = plain.accept()
    tune(sock)
    buffer = memoryview(bytearray(largest))
    while size := int.from_bytes(sock.recv(8), "little"):
        position = 0
        while position < size:
            position += sock.recv_into(buffer[position:size])
        sock.sendall(b"k")


def put_all(client: VaultClient, copies: list[Copy], data: memoryview, bundle: int = 1) -> None:
    for start in range(0, len(copies), bundle):
        client.put([(copy, data) for copy in copies[start : start + bundle]])


def send_all(sock: socket.socket, times: int, data: memoryview, bundle: int = 1) -> None:
    for _ in range(times // bundle):
        sock.sendall((bundle * data.nbytes).to_bytes(8, "little"))
        for _ in range(bundle):
            sock.sendall(data)
        sock.recv(1)


def measure(
    client: VaultClient,
    plain: socket.socket,
    data: memoryview,
    setting: TransportSetting,
    bundle: int = 1,
) -> list[Row]:
    """Return rows for copies of the size of `data`, sent in bundles of `bundle`."""
    times = max(bundle, setting.turn_bytes // data.nbytes // bundle * bundle)
    first, digest = describe(data, 1), checksum(data)
    pairs: list[tuple[float, float]] = []
    for turn in range(WARM + setting.turns):
        numbers = range(1 + turn * times, 1 + (turn + 1) * times)
        copies = [_next(first, digest, number, layer=number % bundle) for number in numbers]
        ways: list[Callable[[], None]] = [
            lambda c=copies: put_all(client, c, data, bundle),  # type: ignore[misc]
            lambda: send_all(plain, times, data, bundle),
        ]
        if turn % 2:
            bare, ours = timed(ways[1]), timed(ways[0])
        else:
            ours, bare = timed(ways[0]), timed(ways[1])
        if turn >= WARM:
            pairs.append((ours, bare))
    together = f", {bundle} together" if bundle > 1 else ""
    name, sent = f"copies of {data.nbytes / MIB:g} MiB{together}", times * data.nbytes / MIB
    return [
        Row(f"{name}: vault", sent / median(o for o, _ in pairs), "MiB/s", None, "higher"),
        Row(f"{name}: plain socket", sent / median(b for _, b in pairs), "MiB/s", None, "higher"),
        Row(
            f"{name}: vault / plain socket", median(b / o for o, b in pairs), "x", TARGET, "higher"
        ),
    ]


def _next(copy: Copy, digest: str, sequence: int, layer: int = 0) -> Copy:
    """Return a newer copy with the same bytes, whose checksum is `digest`. It replaces older ones,
    whose slots are reused."""
    copy = replace(copy, sequence=sequence, step=sequence, layer=layer)
    return replace(copy, checksum=copy_checksum(copy, digest))


def fetches(
    client: VaultClient, address: str, data: memoryview, setting: TransportSetting
) -> list[Row]:
    """Compare reading a state from the vault of the same node with reading it from a peer's."""
    kept = _next(describe(data, 1, "b"), checksum(data), 1, layer=99)
    client.put([(kept, data)])
    here, there = (Fetcher(node, {"b": address}) for node in ("b", "a"))
    pairs = [
        (timed(lambda: here.fetch(kept)), timed(lambda: there.fetch(kept)))
        for _ in range(WARM + setting.turns)
    ][WARM:]
    assert here.fetch(kept).source == "shared-memory" and there.fetch(kept).source == "peer:b"
    here.close()
    there.close()
    name = f"a state of {data.nbytes / MIB:g} MiB read"
    own, peer = (1e3 * median(times) for times in zip(*pairs, strict=True))
    return [
        Row(f"{name}: through shared memory", own, "ms", None, "lower"),
        Row(f"{name}: from a peer", peer, "ms", None, "lower"),
        Row(f"{name}: shared memory / peer", median(a / b for a, b in pairs), "x", 1.0, "lower"),
    ]


def rows(setting: TransportSetting) -> list[Row]:
    directory = memory_directory()
    context = multiprocessing.get_context("spawn")
    pipe, there = context.Pipe()
    process = context.Process(
        target=serve,
        args=(str(directory / "b"), max(*setting.sizes, setting.bundle * setting.sizes[0]), there),
        daemon=True,
    )
    process.start()
    try:
        address, port = pipe.recv()
        client = VaultClient(address, node="a")
        plain = tune(socket.create_connection(("127.0.0.1", port)))
        out: list[Row] = []
        for layer, size in enumerate(setting.sizes):
            slot = SharedSlot(directory / f"worker-{layer}.slot", size)
            slot.view(size)[:] = os.urandom(size)
            out += measure(client, plain, slot.view(size), setting)
            if not layer:
                out += measure(client, plain, slot.view(size), setting, setting.bundle)
            if size == setting.sizes[1]:
                out += fetches(client, address, slot.view(size), setting)
        plain.sendall(bytes(8))
        plain.close()
        client.close()
        return out
    finally:
        process.terminate()
        process.join()
        shutil.rmtree(directory, ignore_errors=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "--quick", action="store_true", help="small copies, few turns; nothing is written"
    )
    if parser.parse_args().quick:
        for row in rows(QUICK):
            print(f"{row.metric}: {row.value:.4g} {row.unit}")
    else:
        save("vault_transport", rows(TransportSetting()))


if __name__ == "__main__":
    main()
