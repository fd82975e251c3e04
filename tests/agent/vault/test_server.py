"""Vault server and client over loopback, and their failures."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.domain import codec
from elastic.domain.errors import (
    ChannelClosed,
    FieldError,
    StaleError,
    Unanswered,
    VaultError,
    VaultUnreachable,
)
from elastic.rpc.bulk.transfer import Reply, VaultClient, split_address
from elastic.rpc.frames import FrameStream
from elastic.store.shared_memory import checksum
from tests.agent.vault.copies import LocalWriter, content, gradient, make, put
from tests.patience import LONG_S


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault("a", tmp_path / "vault")


@pytest.fixture
def server(vault: Vault) -> Iterator[VaultServer]:
    server = VaultServer(vault, timeout_s=LONG_S).start()
    yield server
    server.close()


@pytest.fixture
def client(server: VaultServer) -> Iterator[VaultClient]:
    client = VaultClient(server.address, node="b", timeout_s=LONG_S)
    yield client
    client.close()


def test_connections_of_vanished_machines_end(server: VaultServer, client: VaultClient) -> None:
    """The kernel probes an idle connection, on both sides, and closes it without an answer."""
    client.inventory()
    (served,) = server._streams
    assert client._stream is not None
    for sock in (served._sock, client._stream._sock):
        assert sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
        idle_s, interval_s, probes = (
            sock.getsockopt(socket.IPPROTO_TCP, option)
            for option in (socket.TCP_KEEPIDLE, socket.TCP_KEEPINTVL, socket.TCP_KEEPCNT)
        )
        assert idle_s + probes * interval_s <= 60, "a minute, and not two hours"


def test_put_get_list_over_one_connection(vault: Vault, client: VaultClient) -> None:
    data = [content(n, 300_000 * n + 1) for n in range(4)]
    copies = [make(d, layer=n) for n, d in enumerate(data)]
    client.put([(copy, memoryview(d)) for copy, d in zip(copies, data, strict=True)])
    assert (
        client.inventory()
        == vault.inventory()
        == tuple(dataclasses.replace(c, node="a") for c in copies)
    )
    for copy, d in zip(copies, data, strict=True):
        assert bytes(client.get(copy)) == d
        out = bytearray(len(d))
        client.get(copy, memoryview(out))
        assert bytes(out) == d


def test_a_bundle_is_kept_whole_or_not_at_all(vault: Vault, client: VaultClient) -> None:
    good, bad = content(1), content(2)
    first, second = make(good, layer=1), make(bad, layer=2)
    with pytest.raises(VaultError, match="arrived corrupt"):
        client.put([(first, memoryview(good)), (second, memoryview(b"?" * len(bad)))])
    assert vault.inventory() == ()
    client.put([(first, memoryview(good)), (second, memoryview(bad))])
    assert len(vault.inventory()) == 2


def test_refusals_are_clean_and_the_connection_goes_on(vault: Vault, client: VaultClient) -> None:
    vault.fence(3)
    data = bytes(3 << 20)
    with pytest.raises(StaleError, match="below 3"):
        client.put(
            [(make(data, epoch=2), memoryview(data)), (make(data, epoch=3), memoryview(data))]
        )
    with pytest.raises(VaultError, match="not in the vault of a"):
        client.get(make(data))
    client.put([(make(data, epoch=3), memoryview(data))])
    assert len(client.inventory()) == 1


def test_the_same_bundle_twice_is_one(vault: Vault, client: VaultClient) -> None:
    data = content(5)
    copy = make(data)
    for _ in range(2):
        client.put([(copy, memoryview(data))])
    assert len(vault.inventory()) == 1 and vault.check_integrity() == ()


def test_get_notices_corruption_and_the_vault_drops_it(
    vault: Vault, client: VaultClient, tmp_path: Path
) -> None:
    writer = LocalWriter(tmp_path / "worker")
    copy = make(content(1))
    vault.publish(writer.write(0, copy, content(1)))
    writer.slots[0].view(9)[3] ^= 1
    with pytest.raises(VaultError, match="does not match its checksum"):
        client.get(copy)
    assert vault.inventory() == ()


ALTERED: list[dict[str, Any]] = [
    {"microbatches": frozenset({0, 2})},
    {"step": 2},
    {"layer": 1},
    {"checksum": checksum(content(1))},
]
"""Changes of a gradient's description; the last one is a checksum of the bytes alone."""


@pytest.mark.parametrize("changes", ALTERED)
def test_a_copy_with_an_altered_description_does_not_arrive(
    vault: Vault, client: VaultClient, changes: dict[str, Any]
) -> None:
    altered = dataclasses.replace(gradient(content(1), 1, {0, 1}), **changes)
    with pytest.raises(VaultError, match="arrived corrupt"):
        client.put([(altered, memoryview(content(1)))])
    assert vault.inventory() == ()


@pytest.mark.parametrize("changes", ALTERED)
def test_a_copy_with_an_altered_description_is_not_read(
    vault: Vault, client: VaultClient, tmp_path: Path, changes: dict[str, Any]
) -> None:
    """The description changed in the vault: a peer and the writer of checkpoints refuse it."""
    altered = dataclasses.replace(gradient(content(1), 1, {0, 1}), **changes)
    local = LocalWriter(tmp_path / "worker").write(0, altered, content(1))
    readers: tuple[Callable[[], object], ...] = (
        lambda: client.get(altered),
        lambda: vault.read(altered.key),
    )
    for read in readers:
        vault.publish(local)
        with pytest.raises(VaultError, match=r"does not match its checksum|torn or corrupt"):
            read()
        assert vault.inventory() == (), "the vault dropped it"


def test_locate_is_for_the_own_node(vault: Vault, server: VaultServer, client: VaultClient) -> None:
    copy = put(vault, make(content(1)), content(1))
    own = VaultClient(server.address, node="a")
    assert own.locate(copy) == (vault.locate(copy.key).path, 64)
    with pytest.raises(VaultError, match="cannot map"):
        client.locate(copy)
    own.close()


def test_sizes_that_do_not_fit(client: VaultClient, vault: Vault) -> None:
    copy = put(vault, make(content(1)), content(1))
    with pytest.raises(VaultError, match="are wanted"):
        client.get(copy, memoryview(bytearray(5)))
    with pytest.raises(VaultError):
        client.put([(copy, memoryview(b"short"))])
    assert bytes(client.get(copy)) == content(1), "a new connection is made"


def test_a_closed_vault_is_an_error_at_once(server: VaultServer, client: VaultClient) -> None:
    assert client.inventory() == ()
    server.close()
    began = time.monotonic()
    for _ in range(2):
        with pytest.raises(VaultUnreachable, match=server.address):
            client.inventory()
    assert time.monotonic() - began < LONG_S, "the call ends before its timeout"


def test_a_hung_vault_does_not_hang_its_clients() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        client = VaultClient(address, timeout_s=0.1)
        with pytest.raises(Unanswered, match="no progress"):
            client.inventory()
        data = bytes(32 << 20)
        with pytest.raises(Unanswered, match=r"no progress .* while it allocated"):
            client.put([(make(data), memoryview(data))])


def test_a_vault_that_sends_a_trickle_makes_no_progress() -> None:
    """Each byte comes within the time limit, but a copy of 4 GiB would take years."""
    copy, limit_s, ended = make(bytes(1 << 20)), 0.5, threading.Event()

    def serve(listener: socket.socket) -> None:
        sock, _ = listener.accept()
        stream = FrameStream(sock, LONG_S)
        with contextlib.closing(stream), contextlib.suppress(ChannelClosed):
            stream.receive()
            stream.begin(codec.encode(Reply()), copy.nbytes)
            while not ended.wait(limit_s / 10):
                stream.write(memoryview(b"x"))

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(2) as pool:
        serving = pool.submit(serve, listener)
        client = VaultClient(f"127.0.0.1:{listener.getsockname()[1]}", timeout_s=limit_s)
        try:
            reading = pool.submit(client.get, copy)
            with pytest.raises(VaultError, match="no progress"):
                reading.result(LONG_S / 4)
        finally:
            ended.set()
            client.close()
        serving.result(LONG_S)


def test_closing_a_client_ends_its_call() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = VaultClient(f"127.0.0.1:{silent.getsockname()[1]}", timeout_s=LONG_S)
        errors: list[VaultError] = []

        def ask() -> None:
            try:
                client.inventory()
            except VaultError as error:
                errors.append(error)

        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        connection, _ = silent.accept()
        connection.recv(1)
        client.close()
        asking.join(LONG_S)
        connection.close()
        assert len(errors) == 1


def test_closing_a_client_ends_its_connecting() -> None:
    """A listener with a full queue stands for a machine that answers no SYN."""
    with (
        socket.create_server(("127.0.0.1", 0), backlog=0) as full,
        contextlib.ExitStack() as waiting,
    ):
        for _ in range(2):
            sock = waiting.enter_context(socket.socket())
            sock.setblocking(False)
            sock.connect_ex(full.getsockname())
        client = VaultClient(f"127.0.0.1:{full.getsockname()[1]}", timeout_s=LONG_S)
        threading.Timer(0.1, client.close).start()
        began = time.monotonic()
        with pytest.raises(VaultError):
            client.inventory()
        with pytest.raises(VaultError, match="this side has closed"):
            client.inventory()
        assert time.monotonic() - began < LONG_S


def test_garbage_does_not_harm_the_server(server: VaultServer, client: VaultClient) -> None:
    where = split_address(server.address)
    for raw in (
        b"GET / HTTP/1.0\r\n\r\n" * 10,
        b"\x02\x00\x00\x00{}" + bytes(8),
        b"\x04\x00\x00\x00null" + bytes(8),
    ):
        with socket.create_connection(where) as sock:
            sock.sendall(raw)
            sock.settimeout(LONG_S)
            assert sock.recv(1) == b""
    with socket.create_connection(where) as sock:
        FrameStream(sock).send({"kind": "Put", "body": {"copies": [{"kind": "state"}]}})
        assert sock.recv(1) == b""
    assert client.inventory() == ()


def test_a_client_that_dies_in_the_middle_leaves_nothing(vault: Vault, server: VaultServer) -> None:
    data = bytes(1 << 20)
    copy = make(data)
    sock = socket.create_connection(split_address(server.address))
    stream = FrameStream(sock)
    header = {
        "kind": "Put",
        "body": {"copies": [dataclasses.asdict(copy) | {"microbatches": [], "losses": []}]},
    }
    sent = threading.Thread(target=lambda: _send_half(stream, header, data), daemon=True)
    sent.start()
    sent.join(LONG_S)
    for _ in range(round(100 * LONG_S)):
        if vault.allocated_bytes:
            break
        time.sleep(0.01)
    stream.close()
    server.close()  # waits for the connection's thread
    assert vault.inventory() == ()
    before = vault.allocated_bytes
    put(vault, make(data), data)
    assert before == vault.allocated_bytes, "the room is free again"


def _send_half(stream: FrameStream, header: object, data: bytes) -> None:
    stream.begin(header, len(data))
    stream.write(memoryview(data)[: len(data) // 2])


@pytest.mark.parametrize("address", ["", "here", "host:", "host:99999", ":80", "host:-1"])
def test_bad_addresses(address: str) -> None:
    with pytest.raises(FieldError, match="HOST:PORT"):
        VaultClient(address)


def test_a_taken_port_is_a_clear_error(server: VaultServer, vault: Vault) -> None:
    with pytest.raises(FieldError, match="free local address"):
        VaultServer(vault, port=split_address(server.address)[1]).start()
