"""Parities at their keeper: what goes in, what never does, and what becomes a copy."""

from __future__ import annotations

import dataclasses
import itertools
import random
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from elastic.agent.vault.replicator import Sending, portions
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.domain.errors import StaleError, VaultError, VaultFull
from elastic.domain.types import PARITY, STATE, Copy, Lane
from elastic.rpc.bulk import VaultClient
from elastic.store.slots import checksum
from elastic.worker.recovery.fetch import Fetched, Fetcher
from elastic.worker.recovery.rebuild import WrongParity, rebuilt
from tests.agent.vault.copies import content, make, put
from tests.patience import LONG_S

MEMBERS = ("a", "b", "c")
LANE = Lane(0, MEMBERS)
SIZES = {"a": 1000, "b": 3001, "c": 2048}
LAYERS = {"a": 0, "b": 4, "c": 7}


@pytest.fixture
def vault(tmp_path: Path) -> Vault:
    return Vault("k", tmp_path / "vault", fallback=tmp_path / "more")


def part(owner: str, step: int = 0, epoch: int = 1, lane: Lane = LANE) -> tuple[Copy, bytes]:
    data = content(ord(owner) + 11 * step, SIZES[owner])
    return make(data, owner=owner, layer=LAYERS[owner], step=step, epoch=epoch, lane=lane), data


def xor(*runs: bytes) -> bytes:
    size = max(map(len, runs))
    total = 0
    for run in runs:
        total ^= int.from_bytes(run.ljust(size, b"\0"), "little")
    return total.to_bytes(size, "little")


def parities(vault: Vault) -> list[Copy]:
    assert vault.check_integrity() == ()
    return [copy for copy in vault.inventory() if copy.kind == PARITY]


def fill(vault: Vault, step: int, epoch: int = 1) -> None:
    for owner in MEMBERS:
        put(vault, *part(owner, step, epoch))


@pytest.mark.parametrize("order", list(itertools.permutations(MEMBERS)))
def test_it_is_a_copy_when_all_are_in_whatever_their_order(vault: Vault, order: tuple[str, ...]) -> None:
    for owner in order:
        assert vault.inventory() == ()
        put(vault, *part(owner))
    (copy,) = vault.inventory()
    assert (copy.kind, copy.layer, copy.shard, copy.step, copy.epoch) == (PARITY, 0, 0, 0, 1)
    assert (copy.owner, copy.node, copy.nbytes) == ("a+b+c", "k", 3001)
    assert [(p.owner, p.layer, p.nbytes) for p in copy.parts] == [
        ("a", 0, 1000),
        ("b", 4, 3001),
        ("c", 7, 2048),
    ]
    assert [p.checksum for p in copy.parts] == [checksum(part(owner)[1]) for owner in MEMBERS]
    assert bytes(vault.read(copy.key)) == xor(*(part(owner)[1] for owner in MEMBERS))


def test_portions_of_shared_states_go_in_as_such(vault: Vault) -> None:
    for index, owner in enumerate(LANE.members):
        copy, data = part(owner)
        put(vault, replace(copy, portion=(index, len(LANE.members))), data)
    (copy,) = parities(vault)
    assert [p.portion for p in copy.parts] == [(i, len(LANE.members)) for i in range(len(LANE.members))]


def test_what_comes_twice_goes_in_once(vault: Vault) -> None:
    a, data = part("a")
    for copy in (a, a, dataclasses.replace(a, sequence=a.sequence + 50)):
        put(vault, copy, data)
    put(vault, *part("b"))
    put(vault, *part("b"))
    put(vault, *part("c"))
    before = parities(vault)
    put(vault, *part("c"))
    assert parities(vault) == before and len(before) == 1
    assert bytes(vault.read(before[0].key)) == xor(*(part(owner)[1] for owner in MEMBERS))


def test_other_bytes_of_the_same_part_spoil_a_parity_that_is_not_whole(vault: Vault) -> None:
    copy, _ = part("a")
    put(vault, *part("a"))
    other = content(99, copy.nbytes)
    put(vault, dataclasses.replace(copy, checksum=checksum(other), sequence=copy.sequence + 99), other)
    put(vault, *part("b"))
    put(vault, *part("c"))
    assert parities(vault) == []


def test_one_from_outside_the_lane_does_not_go_in(vault: Vault) -> None:
    put(vault, *part("a", lane=Lane(0, ("b", "c"))))
    for owner in ("b", "c"):
        put(vault, *part(owner, lane=Lane(0, ("b", "c"))))
    assert [p.owner for p in parities(vault)[0].parts] == ["b", "c"]


def test_a_torn_arrival_leaves_no_trace(vault: Vault) -> None:
    put(vault, *part("a"))
    copy, data = part("b")
    with pytest.raises(VaultError, match="arrived corrupt"):
        put(vault, copy, data[:-1] + bytes([data[-1] ^ 1]))
    vault.store(copy).abort()
    put(vault, copy, data)
    put(vault, *part("c"))
    assert bytes(vault.read(parities(vault)[0].key)) == xor(*(part(owner)[1] for owner in MEMBERS))


def test_the_whole_one_stays_while_the_next_is_made_and_the_one_before_goes(vault: Vault) -> None:
    fill(vault, 0)
    put(vault, *part("b", 1))
    assert [p.step for p in parities(vault)] == [0]
    put(vault, *part("a", 1))
    put(vault, *part("c", 1))
    assert [p.step for p in parities(vault)] == [0, 1]
    put(vault, *part("a", 2))
    assert [p.step for p in parities(vault)] == [1]
    room = vault.allocated_bytes
    for step in range(2, 6):
        fill(vault, step)
    assert [p.step for p in parities(vault)] == [4, 5]
    assert vault.allocated_bytes <= room + 4096


def test_the_last_whole_one_outlives_one_that_never_becomes_whole(vault: Vault) -> None:
    fill(vault, 0)
    put(vault, *part("a", 1))
    put(vault, *part("a", 2))
    put(vault, *part("b", 1))  # late, and of no use any more
    assert [p.step for p in parities(vault)] == [0]
    put(vault, *part("b", 2))
    put(vault, *part("c", 2))
    put(vault, *part("c", 3))
    assert [p.step for p in parities(vault)] == [2]


def test_lanes_ranks_and_groups_do_not_mix(vault: Vault) -> None:
    for lane, shard in ((LANE, 0), (LANE, 1), (Lane(1, MEMBERS), 0), (Lane(0, ("a", "b")), 0)):
        for owner in lane.members:
            copy, data = part(owner, lane=lane)
            put(vault, dataclasses.replace(copy, shard=shard), data)
    found = {(p.layer, p.shard, p.owner) for p in parities(vault)}
    assert found == {(0, 0, "a+b+c"), (0, 1, "a+b+c"), (1, 0, "a+b+c"), (0, 0, "a+b")}


def test_a_new_epoch_begins_anew_and_the_old_stays_until_it_is_trimmed(vault: Vault) -> None:
    fill(vault, 3)
    put(vault, *part("a", 4))
    vault.fence(2)
    with pytest.raises(StaleError):
        put(vault, *part("b", 4))
    put(vault, *part("a", 3, 2))
    put(vault, *part("b", 3, 2))
    assert [(p.step, p.epoch) for p in parities(vault)] == [(3, 1)]
    put(vault, *part("c", 3, 2))
    assert [(p.step, p.epoch) for p in parities(vault)] == [(3, 1), (3, 2)]
    vault.trim(2)
    assert [(p.step, p.epoch) for p in parities(vault)] == [(3, 2)]
    room = vault.allocated_bytes
    put(vault, *part("b", 4, 2))  # takes the room of what was under way
    assert vault.allocated_bytes == room


def test_one_that_was_arriving_when_its_epoch_was_trimmed_is_refused(vault: Vault) -> None:
    copy, data = part("a")
    incoming = vault.store(copy)
    incoming.buffer[:] = data
    vault.trim(2)
    with pytest.raises(StaleError):
        incoming.commit()


def test_bytes_that_flip_between_two_arrivals_spoil_it_and_are_told(tmp_path: Path) -> None:
    told: list[Copy] = []
    vault = Vault("k", tmp_path / "vault", on_corrupt=told.append)
    fill(vault, 0)
    put(vault, *part("a", 1))
    (lane,) = vault._parities._lanes.values()
    slot = lane[1].slot
    assert slot is not None
    slot.view(10)[3] ^= 4
    put(vault, *part("b", 1))
    put(vault, *part("c", 1))
    assert [(copy.kind, copy.owner, copy.step) for copy in told] == [(PARITY, "a+b+c", 1)]
    assert [p.step for p in parities(vault)] == [0]


def test_a_whole_one_is_verified_as_other_copies_are(tmp_path: Path) -> None:
    told: list[Copy] = []
    vault = Vault("k", tmp_path / "vault", on_corrupt=told.append)
    fill(vault, 0)
    (copy,) = vault.inventory()
    assert vault.flip_bytes() == 1 and not vault.verify(copy.key)
    assert told == [copy] and vault.inventory() == ()


def test_memory_holds_two_versions_and_what_arrives_not_a_copy_of_everybody(tmp_path: Path) -> None:
    size = 1 << 20
    lanes = [Lane(i, ("a", "b", "c", "d")) for i in range(4)]
    vault = Vault("k", tmp_path / "vault", limit=int(2 * 4 * size + 3 * size))
    with_server = VaultServer(vault).start()
    clients = {owner: VaultClient(with_server.address) for owner in "abcd"}
    try:
        for step in range(4):
            threads = [
                threading.Thread(target=_send, args=(clients[owner], _bundle(owner, step, lanes, size - 64)))
                for owner in clients
            ]
            for thread in threads:
                thread.start()
                thread.join()
            assert len([p for p in parities(vault) if p.step == step]) == 4, step
    finally:
        for client in clients.values():
            client.close()
        with_server.close()


def _send(client: VaultClient, bundle: list[Sending]) -> None:
    for portion in portions(bundle):
        client.put(portion)


def _bundle(owner: str, step: int, lanes: list[Lane], size: int) -> list[Sending]:
    data = random.Random(f"{owner}{step}").randbytes(size)
    return [
        (make(data, owner=owner, layer=lane.index, step=step, lane=lane), memoryview(data)) for lane in lanes
    ]


def test_what_goes_into_parities_is_sent_one_by_one_and_the_rest_together() -> None:
    lanes = [(copy, memoryview(data)) for copy, data in (part("a"), part("b"))]
    rest = [(make(content(i), layer=i), memoryview(content(i))) for i in range(2)]
    assert portions([lanes[0], rest[0], lanes[1], rest[1]]) == [rest, [lanes[0]], [lanes[1]]]
    assert portions(rest) == [rest]


def test_without_room_it_never_becomes_whole_and_the_former_stays(tmp_path: Path) -> None:
    vault = Vault("k", tmp_path / "vault", limit=12_500)
    fill(vault, 0)
    put(vault, make(content(1, 8000), owner="z", layer=9), content(1, 8000))
    with pytest.raises(VaultFull):
        for owner in MEMBERS:
            put(vault, *part(owner, 1))
    assert [p.step for p in parities(vault)] == [0]
    vault._pool.limit = 30_000
    fill(vault, 2)
    assert 2 in [p.step for p in parities(vault)]


def test_members_that_send_at_the_same_time(vault: Vault) -> None:
    server = VaultServer(vault).start()

    def send(owner: str) -> None:
        client = VaultClient(server.address)
        for step in range(5):
            copy, data = part(owner, step)
            client.put([(copy, memoryview(data))])
            barrier.wait(LONG_S)
        client.close()

    barrier = threading.Barrier(3)
    threads = [threading.Thread(target=send, args=(owner,)) for owner in MEMBERS]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    server.close()
    assert [p.step for p in parities(vault)][-1] == 4
    assert bytes(vault.read(parities(vault)[-1].key)) == xor(*(part(owner, 4)[1] for owner in MEMBERS))


# ---- and back


@pytest.mark.parametrize("lost", MEMBERS)
def test_any_one_of_different_sizes_comes_back_from_the_others(tmp_path: Path, lost: str) -> None:
    keeper, survivors = Vault("k", tmp_path / "k"), Vault("s", tmp_path / "s")
    fill(keeper, 0)
    (parity,) = keeper.inventory()
    gone, data = part(lost)
    others = [put(survivors, *part(owner, lane=None)) for owner in MEMBERS if owner != lost]  # type: ignore[arg-type]
    servers = [VaultServer(vault).start() for vault in (keeper, survivors)]
    fetcher = Fetcher("x", {"k": servers[0].address, "s": servers[1].address})
    try:
        sources = [parity, *others]
        found = rebuilt(gone, sources, fetcher.fetch_all(sources))
        assert bytes(found.data.numpy()) == data and found.source == "peer:k"
        with pytest.raises(WrongParity, match="layer"):
            rebuilt(dataclasses.replace(gone, checksum="0" * 16), sources, fetcher.fetch_all(sources))
        fetcher.disown(parity)
        assert keeper.inventory() == ()
    finally:
        fetcher.close()
        for server in servers:
            server.close()


def test_what_was_fetched_is_not_changed(vault: Vault) -> None:
    import torch

    fill(vault, 0)
    (parity,) = vault.inventory()
    runs = [bytes(vault.read(parity.key)), part("b")[1], part("c")[1]]
    fetched = [Fetched(torch.frombuffer(bytearray(run), dtype=torch.uint8), "peer:k") for run in runs]
    copy, data = part("a")
    assert copy.kind == STATE
    assert bytes(rebuilt(copy, [parity, part("b")[0], part("c")[0]], fetched).data.numpy()) == data
    assert [bytes(f.data.numpy()) for f in fetched] == runs
