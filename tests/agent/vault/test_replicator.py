"""Delivery in order, also when the peer fails."""

from __future__ import annotations

import queue
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic.agent.vault.replicator import RETRY_S, Replicator
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Incoming, Vault
from elastic.core.protocol.messages import Published
from elastic.domain.errors import VaultError, VaultFull
from elastic.domain.types import Assignment, Copy, Plan
from elastic.rpc.bulk.transfer import VaultClient
from elastic.store import shared_memory
from tests.agent.vault.copies import LocalWriter, content, gradient, make
from tests.agent.vault.nodes import MiniNode, ProcessVault, nodes
from tests.patience import LONG_S


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[MiniNode]]:
    with nodes(tmp_path, "a", "b") as made:
        yield made


@pytest.fixture
def writer(tmp_path: Path) -> LocalWriter:
    return LocalWriter(tmp_path / "worker")


def bundle(
    writer: LocalWriter, number: int, peer: str = "b", epoch: int = 1, layer: int = 0
) -> Published:
    data = content(number)
    copy = gradient(data, 1, set(range(number)), owner="a", epoch=epoch, layer=layer)
    return Published(number, (writer.write(number, copy, data),), peer)


def test_bundles_arrive_and_are_acknowledged_in_order(
    pair: list[MiniNode], writer: LocalWriter
) -> None:
    a, b = pair
    for number in range(1, 6):
        a.take(bundle(writer, number), worker=3)
    assert [a.acked.get(timeout=LONG_S) for _ in range(5)] == [(3, n) for n in range(1, 6)]
    kept = sorted(b.vault.inventory(), key=lambda c: len(c.microbatches))
    assert [(len(c.microbatches), c.owner, c.node) for c in kept] == [(4, "a", "b"), (5, "a", "b")]
    assert [bytes(b.vault.read(c.key)) for c in kept] == [content(4), content(5)]
    assert a.replicator.pending == 0 and b.vault.check_integrity() == ()


def test_local_bundles_wait_their_turn(pair: list[MiniNode], writer: LocalWriter) -> None:
    a, _ = pair
    book = a.replicator.vaults
    a.take(bundle(writer, 1, peer=""))
    assert a.acked.get(timeout=LONG_S) == (0, 1)
    a.replicator.vaults = {}
    a.take(bundle(writer, 2))
    a.take(bundle(writer, 3, peer=""))
    failed = a.failed.get(timeout=LONG_S)
    assert failed[:2] == (2, "b") and "no vault of b is known" in str(failed[2])
    assert a.replicator.pending == 2 and a.acked.empty()
    a.replicator.vaults = book
    assert [a.acked.get(timeout=LONG_S) for _ in range(2)] == [(0, 2), (0, 3)]


def test_an_empty_bundle_is_answered_before_a_held_one(
    pair: list[MiniNode], writer: LocalWriter
) -> None:
    a, _ = pair
    a.replicator.vaults = {}
    a.take(bundle(writer, 1))
    a.failed.get(timeout=LONG_S)
    a.take(Published(2, (), ""))
    assert a.acked.get(timeout=LONG_S) == (0, 2) and a.replicator.pending == 1


def test_a_peer_that_dies_is_reported_once_and_never_acknowledged(
    tmp_path: Path, writer: LocalWriter
) -> None:
    peer = ProcessVault("p", tmp_path / "p")
    with nodes(tmp_path, "a", "b") as (a, _):
        book = a.replicator.vaults
        a.replicator.vaults = {**book, "p": peer.address}
        a.take(bundle(writer, 1, "p"))
        assert a.acked.get(timeout=LONG_S) == (0, 1)
        peer.signal(signal.SIGKILL)
        a.take(bundle(writer, 2, "p"))
        a.take(bundle(writer, 3, "p"))
        number, name, error = a.failed.get(timeout=LONG_S)
        assert (number, name) == (2, "p") and isinstance(error, VaultError)
        a.replicator.reset(2)
        assert a.replicator.pending == 0
        a.take(bundle(writer, 4, "b", epoch=1))  # of the epoch that is over
        a.take(bundle(writer, 5, "b", epoch=2))
        assert a.acked.get(timeout=LONG_S) == (0, 5)
        assert a.failed.empty() and a.acked.empty()


def test_a_peer_that_hangs_is_reported_and_a_reset_ends_the_wait(
    tmp_path: Path, writer: LocalWriter
) -> None:
    peer = ProcessVault("p", tmp_path / "p")
    peer.signal(signal.SIGSTOP)
    try:
        with nodes(tmp_path, "a", "b") as (a, _):
            a.replicator.vaults = {**a.replicator.vaults, "p": peer.address}
            a.take(bundle(writer, 1, "p"))
            a.replicator.reset(2)
            a.take(bundle(writer, 2, "b", epoch=2))
            assert a.acked.get(timeout=LONG_S) == (0, 2)
    finally:
        peer.close()


def test_a_peer_that_comes_back_gets_what_was_held(tmp_path: Path, writer: LocalWriter) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        a.replicator.vaults = {"b": b.server.address}
        b.server.close()
        a.take(bundle(writer, 1))
        assert a.failed.get(timeout=LONG_S)[1] == "b"
        b.server.start()
        a.replicator.vaults = {"b": b.server.address}
        assert a.acked.get(timeout=LONG_S) == (0, 1)


def test_fenced_off_bundles_are_held(pair: list[MiniNode], writer: LocalWriter) -> None:
    """The peer has entered the next epoch. The failure is reported for the epoch before."""
    a, b = pair
    a.replicator.reset(6)
    b.vault.fence(7)
    a.take(bundle(writer, 1, epoch=6))
    assert "below 7" in str(a.failed.get(timeout=LONG_S)[2])
    assert a.failed_epochs == [6]
    assert a.acked.empty() and b.vault.inventory() == ()


def test_superseded_bundles_are_not_skipped(
    pair: list[MiniNode], writer: LocalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The local index has dropped bundle 1 before its turn; it is sent nevertheless."""
    a, b = pair
    held = a.replicator.vaults
    a.replicator.vaults = {}
    first, *newer = (bundle(writer, n) for n in (1, 2, 3))
    for published in (first, *newer):
        a.take(published)
    assert {c.key for c in a.vault.inventory()} == {p.copies[0].copy.key for p in newer}
    sent: queue.Queue[int] = queue.Queue()
    store = b.vault.store

    def record(copy: Copy, *, trusted: bool = False) -> Incoming:
        sent.put(len(copy.microbatches))
        return store(copy, trusted=trusted)

    monkeypatch.setattr(b.vault, "store", record)
    a.replicator.vaults = held
    assert [a.acked.get(timeout=LONG_S)[1] for _ in range(3)] == [1, 2, 3]
    assert [sent.get(timeout=LONG_S) for _ in range(3)] == [1, 2, 3]
    assert sorted(len(c.microbatches) for c in b.vault.inventory()) == [2, 3]
    assert b.vault.check_integrity() == ()


def test_waiting_costs_few_attempts(
    pair: list[MiniNode], writer: LocalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, _ = pair
    a.replicator.vaults = {}
    client, tried = a.replicator._client, list[Any]()

    def record(bundle: Any) -> VaultClient:
        tried.append(bundle)
        return client(bundle)

    monkeypatch.setattr(a.replicator, "_client", record)
    began = time.monotonic()
    a.take(Published(1, (writer.write(1, make(content(1)), content(1)),), "b"))
    a.failed.get(timeout=LONG_S)
    time.sleep(0.3)
    assert 1 <= len(tried) <= 1 + (time.monotonic() - began) / RETRY_S


def test_where_there_is_no_room_training_goes_on(tmp_path: Path, writer: LocalWriter) -> None:
    """Bundles for a full peer are given up and acknowledged; this is reported once."""
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    small = Vault("s", tmp_path / "s", limit=3 * 4096)
    server = VaultServer(small, timeout_s=LONG_S).start()
    with nodes(tmp_path, "a") as (a,):
        a.replicator.close()
        a.replicator = Replicator(
            a.vault,
            a._on_acked,
            a._on_failed,
            timeout_s=30,
            no_room=lambda peer, why: told.put((peer, why)),
        )
        a.replicator.vaults = {"s": server.address}
        for number in range(1, 6):
            a.take(bundle(writer, number, "s", layer=number))
        assert [a.acked.get(timeout=LONG_S) for _ in range(5)] == [(0, n) for n in range(1, 6)]
        assert a.failed.empty() and a.refused == [4, 5]
        peer, why = told.get(timeout=LONG_S)
        assert peer == "s" and "--vault-memory" in why and told.empty()
        kept = sorted(small.inventory(), key=lambda c: c.layer)
        assert [c.layer for c in kept] == [1, 2, 3], "the limit is three copies of one page"
        assert [bytes(small.read(c.key)) for c in kept] == [content(n) for n in (1, 2, 3)]
        small.trim(2)
        a.replicator.reset(2)
        a.take(bundle(writer, 6, "s", epoch=2))
        assert a.acked.get(timeout=LONG_S) == (0, 6)
        assert [c.epoch for c in small.inventory()] == [2], "room again"
    server.close()
    small.close()


def test_a_vault_that_can_create_no_slots_refuses_copies_and_training_goes_on(
    tmp_path: Path, writer: LocalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: queue.Queue[tuple[str, str]] = queue.Queue()
    keeper = Vault("s", tmp_path / "s")
    server = VaultServer(keeper, timeout_s=LONG_S).start()

    def fails(path: Path, nbytes: int) -> None:
        raise OSError(5, "Input/output error")

    with nodes(tmp_path, "a") as (a,):
        a.replicator.close()
        a.replicator = Replicator(
            a.vault,
            a._on_acked,
            a._on_failed,
            timeout_s=30,
            broken=lambda peer, why: told.put((peer, why)),
        )
        a.replicator.vaults = {"s": server.address}
        published = [bundle(writer, number, "s") for number in (1, 2)]
        monkeypatch.setattr(shared_memory, "SharedSlot", fails)
        for one in published:
            a.take(one)
        assert [a.acked.get(timeout=LONG_S) for _ in range(2)] == [(0, 1), (0, 2)]
        assert a.failed.empty() and a.refused == [1, 2]
        peer, why = told.get(timeout=LONG_S)
        assert peer == "s" and told.empty()
        assert "cannot create a slot" in why and "Input/output error" in why
    server.close()
    keeper.close()


def test_bundles_for_a_lost_peer_are_acknowledged_as_not_kept(
    pair: list[MiniNode], writer: LocalWriter
) -> None:
    """Those for the other peer arrive, in their turn. Nothing is reported."""
    a, b = pair
    a.replicator.vaults = {**a.replicator.vaults, "lost": "127.0.0.1:1"}
    a.replicator.stop_holding(("lost",))
    for number, peer in enumerate(("lost", "b", "", "lost", "b"), 1):
        a.take(bundle(writer, number, peer, layer=number))
    assert [a.acked.get(timeout=LONG_S) for _ in range(5)] == [(0, n) for n in range(1, 6)]
    assert a.refused == [1, 4] and a.failed.empty()
    assert sorted(copy.layer for copy in b.vault.inventory()) == [2, 5]


def test_the_held_bundle_and_its_followers_are_finished_at_once(
    pair: list[MiniNode], writer: LocalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pause after a failure would last longer than the test, and the attempt is not repeated.
    A bundle for another peer is still held."""
    monkeypatch.setattr("elastic.agent.vault.replicator.RETRY_S", 10 * LONG_S)
    monkeypatch.setattr("elastic.agent.vault.replicator.MAX_RETRY_S", 10 * LONG_S)
    a, _ = pair
    a.replicator.close()
    a.replicator = Replicator(a.vault, a._on_acked, a._on_failed)
    for number, peer in enumerate(("x", "x", "", "y"), 1):
        a.take(bundle(writer, number, peer, layer=number))
    assert a.failed.get(timeout=LONG_S)[:2] == (1, "x")
    a.replicator.stop_holding(("x",))
    assert [a.acked.get(timeout=LONG_S) for _ in range(3)] == [(0, 1), (0, 2), (0, 3)]
    assert a.failed.get(timeout=LONG_S)[:2] == (4, "y")
    assert a.refused == [1, 2] and a.replicator.pending == 1
    a.replicator.stop_holding(None)
    assert a.acked.get(timeout=LONG_S) == (0, 4)
    assert a.refused == [1, 2, 4] and a.failed.empty()


def test_every_bundle_that_fails_is_finished_and_the_others_are_sent(
    pair: list[MiniNode], writer: LocalWriter
) -> None:
    a, b = pair
    a.replicator.stop_holding(None)
    a.replicator.stop_holding(("lost",))  # does not narrow the order before it
    b.vault.fence(2)
    for number, (peer, epoch) in enumerate((("b", 1), ("b", 2), ("unknown", 2)), 1):
        a.take(bundle(writer, number, peer, epoch, layer=number))
    assert [a.acked.get(timeout=LONG_S) for _ in range(3)] == [(0, n) for n in range(1, 4)]
    assert a.refused == [1, 3] and a.failed.empty()
    assert [copy.layer for copy in b.vault.inventory()] == [2]


def test_a_transfer_to_a_lost_peer_is_broken_off(tmp_path: Path, writer: LocalWriter) -> None:
    """The peer hangs, so without the order the transfer would last until its limit."""
    peer = ProcessVault("p", tmp_path / "p")
    peer.signal(signal.SIGSTOP)
    try:
        with nodes(tmp_path, "a") as (a,):
            a.replicator.close()
            a.replicator = Replicator(a.vault, a._on_acked, a._on_failed, timeout_s=10 * LONG_S)
            a.replicator.vaults = {"p": peer.address}
            a.take(bundle(writer, 1, "p"))
            deadline = time.monotonic() + LONG_S
            while not a.replicator._clients and time.monotonic() < deadline:
                time.sleep(0.01)
            a.replicator.stop_holding(("p",))
            a.take(bundle(writer, 2, "p"))
            assert [a.acked.get(timeout=LONG_S) for _ in range(2)] == [(0, 1), (0, 2)]
            assert a.refused == [1, 2] and a.failed.empty()
    finally:
        peer.close()


@pytest.mark.parametrize("enters", [False, True])
@pytest.mark.parametrize("peers", [("b",), None])
def test_bundles_are_held_again_after_a_reset_and_in_the_next_epoch(
    pair: list[MiniNode], writer: LocalWriter, peers: tuple[str, ...] | None, enters: bool
) -> None:
    a, b = pair
    a.replicator.stop_holding(peers)
    if enters:
        a.replicator.enter(2, Assignment(Plan(2, 1, 1, 1, ()), 0))
    else:
        a.replicator.reset(2)
        a.replicator.vaults = {}
    a.take(bundle(writer, 1, epoch=2))
    assert a.failed.get(timeout=LONG_S)[:2] == (1, "b")
    a.replicator.vaults = {"b": b.server.address}
    assert a.acked.get(timeout=LONG_S) == (0, 1)
    assert a.refused == [] and len(b.vault.inventory()) == 1


def test_a_refusal_of_a_lost_peer_is_not_reported(
    pair: list[MiniNode], writer: LocalWriter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer has answered that it has no room when the order comes."""
    told: queue.Queue[str] = queue.Queue()
    a, _ = pair
    a.replicator.close()
    a.replicator = Replicator(
        a.vault, a._on_acked, a._on_failed, no_room=lambda peer, why: told.put(peer)
    )

    def refuse(bundle: object) -> VaultFull:
        a.replicator.stop_holding(("b",))
        return VaultFull("no room")

    monkeypatch.setattr(a.replicator, "_deliver", refuse)
    a.take(bundle(writer, 1))
    assert a.acked.get(timeout=LONG_S) == (0, 1)
    assert a.refused == [1] and told.empty() and a.failed.empty()


def place(published: Published) -> tuple[str, int]:
    local = published.copies[0]
    return local.path, local.offset


def test_full_peers_are_reported_once_each(tmp_path: Path, writer: LocalWriter) -> None:
    """States and gradients may go to two peers, and both may be full."""
    told: queue.Queue[str] = queue.Queue()
    full = [Vault(name, tmp_path / name, limit=1) for name in ("s", "t")]
    servers = [VaultServer(vault, timeout_s=LONG_S).start() for vault in full]
    with nodes(tmp_path, "a") as (a,):
        a.replicator.close()
        a.replicator = Replicator(
            a.vault, a._on_acked, a._on_failed, no_room=lambda peer, why: told.put(peer)
        )
        for epoch in (1, 2):
            a.replicator.reset(epoch)
            a.replicator.vaults = {"s": servers[0].address, "t": servers[1].address}
            for number in range(6):
                a.take(bundle(writer, number, "st"[number % 2], epoch))
            assert [a.acked.get(timeout=LONG_S) for _ in range(6)] == [(0, n) for n in range(6)]
            assert [told.get_nowait() for _ in range(told.qsize())] == ["s", "t"]
    for server in servers:
        server.close()


def test_no_error_ends_the_thread_or_loses_an_acknowledgement(
    tmp_path: Path, writer: LocalWriter, caplog: pytest.LogCaptureFixture
) -> None:
    """The callbacks of checkpoints and metrics fail. Then the sending itself fails once."""
    failures = iter([KeyError("link of b")])

    def fail(*args: object) -> None:
        raise MemoryError("a checkpoint does not fit")

    def fail_once(*args: object) -> None:
        for error in failures:
            raise error

    with nodes(tmp_path, "a", "b") as (a, b):
        a.replicator.close()
        a.replicator = Replicator(
            a.vault, a._on_acked, a._on_failed, prepare=fail, sent=fail_once, delivered=fail
        )
        a.replicator.vaults = {"b": b.server.address}
        a.take(bundle(writer, 1))
        a.take(bundle(writer, 2))
        assert [a.acked.get(timeout=LONG_S) for _ in range(2)] == [(0, 1), (0, 2)]
        number, peer, error = a.failed.get(timeout=LONG_S)
        assert (number, peer) == (1, "b") and "KeyError: 'link of b'" in str(error)
    assert "a checkpoint does not fit" in caplog.text
