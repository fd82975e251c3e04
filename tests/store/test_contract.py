"""One contract, every store: etcd's is a real server."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import FieldError, StaleError
from elastic.store.etcd import EtcdStore
from elastic.store.interface import Conflict, Entry, Lease, Store
from elastic.store.sqlite import SqliteStore
from tests.patience import LONG_S
from tests.store.etcds import PATIENT, Etcd, etcd
from tests.store.memory import MemoryStore

NOW = 1000.0
prefixes = (f"contract/{number}" for number in itertools.count())


@dataclass
class Bench:
    """The data of one test, and what can be done to them from outside."""

    open: Callable[[], Store]
    """Another connection, as of another process."""
    restart: Callable[[], None]
    """What keeps the data is killed and started again; connections are left to find out."""
    own_clock: bool
    """The store keeps time by itself: `now` says nothing, real time passes."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Etcd]:
    with etcd(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture(params=["memory", "sqlite", "etcd"])
def bench(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bench]:
    opened: list[Store] = []

    def kept(store: Store) -> Store:
        opened.append(store)
        return store

    if request.param == "memory":
        only = MemoryStore()
        yield Bench(lambda: only, lambda: None, own_clock=False)
    elif request.param == "sqlite":
        file = tmp_path / "store.db"
        yield Bench(lambda: kept(SqliteStore(file)), lambda: None, own_clock=False)
    else:
        cluster: Etcd = request.getfixturevalue("server")
        prefix = next(prefixes)

        def restart() -> None:
            cluster.kill()
            cluster.start()
            cluster.await_ready()

        spec = StoreSpec(url=cluster.url)
        yield Bench(lambda: kept(EtcdStore(spec, prefix, **PATIENT)), restart, own_clock=True)
    for store in opened:
        store.close()


@pytest.fixture
def store(bench: Bench) -> Store:
    return bench.open()


def take_over(bench: Bench, store: Store, holder: str, ttl_s: float, now: float) -> Lease:
    """Acquire a lease whose time is over at `now`; where real time counts, as soon as it is."""
    end = time.monotonic() + LONG_S
    while True:
        try:
            return store.acquire(holder, ttl_s, now)
        except Conflict:
            if not bench.own_clock or time.monotonic() > end:
                raise
        time.sleep(0.02)


@pytest.fixture
def token(store: Store) -> int:
    return store.acquire("a", 10.0, NOW).token


def test_put_and_get(store: Store, token: int) -> None:
    assert store.get("job/plan") is None
    first = store.put_if("job/plan", b"\x00\xff", None, token)
    second = store.put_if("ä%/_", b"", None, token)
    assert store.get("job/plan") == first == Entry("job/plan", b"\x00\xff", first.revision)
    assert store.get("ä%/_") == second and store.get("ä%/") is None
    assert 1 <= first.revision < second.revision


def test_compare_and_set(store: Store, token: int) -> None:
    entry = store.put_if("k", b"1", None, token)
    with pytest.raises(Conflict, match=f"k: expected revision absent, found {entry.revision}"):
        store.put_if("k", b"2", None, token)
    with pytest.raises(Conflict, match=f"expected revision 7000, found {entry.revision}"):
        store.put_if("k", b"2", 7000, token)
    with pytest.raises(Conflict, match="found absent"):
        store.put_if("new", b"2", 1, token)
    changed = store.put_if("k", b"2", entry.revision, token)
    assert changed.revision > entry.revision
    assert store.get("k") == changed


@pytest.mark.parametrize("key", ["", "a\x00b", "a\nb", "\ud800"])
def test_bad_keys(store: Store, token: int, key: str) -> None:
    with pytest.raises(FieldError, match="key"):
        store.put_if(key, b"", None, token)
    with pytest.raises(FieldError, match="key"):
        store.get(key)


@pytest.mark.parametrize(("holder", "ttl_s"), [("", 1), ("a", 0), ("a", -1), ("a", float("inf"))])
def test_bad_leases(store: Store, holder: str, ttl_s: float) -> None:
    with pytest.raises(FieldError):
        store.acquire(holder, ttl_s, NOW)


def test_lease_is_exclusive_until_it_runs_out(bench: Bench, store: Store) -> None:
    lease = store.acquire("a", 1.0, NOW)
    assert lease == Lease("a", lease.token, 1.0)
    with pytest.raises(Conflict, match=r"held by a for another (0\.5|1\.0) s"):
        bench.open().acquire("b", 1.0, NOW + 0.5)
    taken = take_over(bench, store, "b", 1.0, NOW + 1)
    assert taken.token > lease.token
    store.put_if("k", b"", None, taken.token)


def test_holder_takes_its_own_lease_again_at_once(store: Store) -> None:
    old = store.acquire("a", 10.0, NOW)
    new = store.acquire("a", 10.0, NOW + 1)
    assert new.token > old.token
    with pytest.raises(StaleError):
        store.put_if("k", b"", None, old.token)
    store.put_if("k", b"", None, new.token)


def test_renewal_keeps_the_lease(store: Store) -> None:
    lease = store.acquire("a", 10.0, NOW)
    store.renew(lease, NOW + 8)
    with pytest.raises(Conflict):
        store.acquire("b", 10.0, NOW + 17.9)
    store.renew(lease, NOW + 60)  # late, but nobody has taken it
    with pytest.raises(Conflict):
        store.acquire("b", 10.0, NOW + 69.9)
    store.put_if("k", b"", None, lease.token)


def test_the_superseded_holder_is_fenced(bench: Bench, store: Store) -> None:
    old = store.acquire("a", 0.4, NOW)
    entry = store.put_if("k", b"a", None, old.token)
    other = bench.open()
    new = take_over(bench, other, "b", 0.4, NOW + 2)
    with pytest.raises(StaleError, match=f"token {old.token}"):
        store.put_if("k", b"late", entry.revision, old.token)
    with pytest.raises(StaleError):
        store.renew(old, NOW + 2)
    store.release(old)
    assert store.get("k") == entry
    other.put_if("k", b"b", entry.revision, new.token)  # a late release changes nothing


def test_release(store: Store) -> None:
    lease = store.acquire("a", 10.0, NOW)
    store.release(lease)
    store.release(lease)
    for token in (lease.token, 0):
        with pytest.raises(StaleError):
            store.put_if("k", b"", None, token)
    with pytest.raises(StaleError):
        store.renew(lease, NOW)
    assert store.acquire("b", 10.0, NOW).token > lease.token


@pytest.mark.parametrize("forged", [0, -1, 99])
def test_tokens_that_were_never_given_out(store: Store, token: int, forged: int) -> None:
    with pytest.raises(StaleError):
        store.put_if("k", b"", None, forged)


@pytest.mark.parametrize("connections", [1, 4])
def test_threads_race_for_a_counter(bench: Bench, connections: int) -> None:
    """Compare-and-set on one connection, and on several as of several processes."""
    stores = [bench.open() for _ in range(connections)]
    token = stores[0].acquire("a", 10.0, NOW).token

    def add(store: Store) -> None:
        times = 10
        while times:
            entry = store.get("counter")
            value = int(entry.value) + 1 if entry else 1
            try:
                store.put_if(
                    "counter", str(value).encode(), entry.revision if entry else None, token
                )
                times -= 1
            except Conflict:
                continue

    threads = [threading.Thread(target=add, args=(stores[i % connections],)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    entry = stores[0].get("counter")
    assert entry is not None
    assert entry.value == b"40" and entry.revision >= 40


def test_a_lease_is_raced_for_and_one_wins(bench: Bench) -> None:
    stores = [bench.open() for _ in range(6)]
    begin, won, lost = threading.Barrier(len(stores)), [], []

    def grab(number: int) -> None:
        begin.wait(LONG_S)
        try:
            won.append(stores[number].acquire(f"holder{number}", 60.0, NOW))
        except Conflict:
            lost.append(number)

    threads = [threading.Thread(target=grab, args=(number,)) for number in range(len(stores))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    assert len(won) == 1 and len(lost) == len(stores) - 1
    stores[0].put_if("k", b"", None, won[0].token)


def test_everything_is_there_after_a_restart(bench: Bench, store: Store) -> None:
    lease = store.acquire("a", 60.0, NOW)
    entry = store.put_if("k", b"1", None, lease.token)
    bench.restart()
    again = bench.open()
    assert again.get("k") == store.get("k") == entry
    with pytest.raises(Conflict, match="held by a"):
        again.acquire("b", 60.0, NOW + 1)
    changed = again.put_if("k", b"2", entry.revision, lease.token)
    assert changed.revision > entry.revision, "revisions go on"
    assert again.acquire("a", 60.0, NOW).token > lease.token, "and so do tokens"
    with pytest.raises(StaleError):
        store.put_if("k", b"3", changed.revision, lease.token)


@settings(max_examples=40)
@given(st.lists(st.sampled_from(["a", "b", "take", "take over", "renew", "release"])))
def test_embedded_stores_agree(
    tmp_path_factory: pytest.TempPathFactory, operations: list[str]
) -> None:
    """Any history gives the same entries, tokens and errors in both stores that count from one."""
    memory, sqlite = MemoryStore(), SqliteStore(tmp_path_factory.mktemp("agree") / "store.db")
    leases = [Lease("holder", 0, 1.0)]
    for operation in operations:
        outcomes = [_outcome(store, operation, leases[-1]) for store in (memory, sqlite)]
        assert outcomes[0] == outcomes[1]
        if isinstance(outcomes[0], Lease):
            leases.append(outcomes[0])
    assert [memory.get(key) for key in "ab"] == [sqlite.get(key) for key in "ab"]
    sqlite.close()


def _outcome(store: Store, operation: str, lease: Lease) -> object:
    try:
        if operation.startswith("take"):
            return store.acquire(operation, 1.0, NOW)
        if operation == "renew":
            store.renew(lease, NOW)
            return None
        if operation == "release":
            store.release(lease)
            return None
        entry = store.get(operation)
        return store.put_if(operation, b"v", entry.revision if entry else None, lease.token)
    except (Conflict, StaleError) as error:
        return str(error)
