"""One contract, every store: etcd's is a real server."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from elastic.core.protocol.store_spec import StoreSpec
from elastic.domain.errors import FieldError, StaleError
from elastic.store.etcd import EtcdStore
from elastic.store.interface import Conflict, Entry, KeyChange, Lease, Store
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


def take_over(
    bench: Bench, store: Store, name: str, holder: str, ttl_s: float, now: float
) -> Lease:
    """Acquire a lease whose time is over at `now`; where real time counts, as soon as it is."""
    end = time.monotonic() + LONG_S
    while True:
        try:
            return store.acquire(name, holder, ttl_s, now)
        except Conflict:
            if not bench.own_clock or time.monotonic() > end:
                raise
        time.sleep(0.02)


@pytest.fixture
def token(store: Store) -> int:
    return store.acquire("coordinator", "a", 10.0, NOW).token


def test_is_a_store(store: Store) -> None:
    assert isinstance(store, Store)


def test_absent_key(store: Store) -> None:
    assert store.get("none") is None
    assert store.list("") == ()


def test_put_get_list_delete(store: Store, token: int) -> None:
    first = store.put_if("job/plan", b"\x00\xff", None, token)
    second = store.put_if("job/epoch", b"", None, token)
    store.put_if("other", b"x", None, token)
    assert store.get("job/plan") == first == Entry("job/plan", b"\x00\xff", first.revision)
    assert store.list("job/") == (second, first)
    assert 1 <= first.revision < second.revision
    store.delete_if("job/plan", first.revision, token)
    assert store.get("job/plan") is None
    assert store.list("job/") == (second,)


def test_prefix_is_taken_literally(store: Store, token: int) -> None:
    for key in ("a%/1", "a_/1", "aX/1", "ä/1"):
        store.put_if(key, b"", None, token)
    assert [e.key for e in store.list("a%")] == ["a%/1"]
    assert [e.key for e in store.list("a_")] == ["a_/1"]
    assert [e.key for e in store.list("ä/")] == ["ä/1"]


def test_compare_and_set(store: Store, token: int) -> None:
    entry = store.put_if("k", b"1", None, token)
    with pytest.raises(Conflict, match=f"k: expected revision absent, found {entry.revision}"):
        store.put_if("k", b"2", None, token)
    with pytest.raises(Conflict, match=f"expected revision 7000, found {entry.revision}"):
        store.put_if("k", b"2", 7000, token)
    with pytest.raises(Conflict, match="found absent"):
        store.put_if("new", b"2", 1, token)
    with pytest.raises(Conflict):
        store.delete_if("k", 7000, token)
    changed = store.put_if("k", b"2", entry.revision, token)
    assert changed.revision > entry.revision
    assert store.get("k") == changed


def test_deleted_key_is_absent_and_revisions_go_on(store: Store, token: int) -> None:
    entry = store.put_if("k", b"1", None, token)
    store.delete_if("k", entry.revision, token)
    with pytest.raises(Conflict, match="found absent"):
        store.put_if("k", b"2", entry.revision, token)
    assert store.put_if("k", b"2", None, token).revision >= entry.revision + 2


@pytest.mark.parametrize("key", ["", "a\x00b", "a\nb", "\ud800"])
def test_bad_keys(store: Store, token: int, key: str) -> None:
    with pytest.raises(FieldError, match="key"):
        store.put_if(key, b"", None, token)
    with pytest.raises(FieldError, match="key"):
        store.get(key)


@pytest.mark.parametrize(
    ("name", "holder", "ttl_s"), [("", "a", 1), ("n", "", 1), ("n", "a", 0), ("n", "a", -1)]
)
def test_bad_leases(store: Store, name: str, holder: str, ttl_s: float) -> None:
    with pytest.raises(FieldError):
        store.acquire(name, holder, ttl_s, NOW)


def test_lease_is_exclusive_until_it_runs_out(bench: Bench, store: Store) -> None:
    lease = store.acquire("coordinator", "a", 1.0, NOW)
    assert lease == Lease("coordinator", "a", lease.token, 1.0, NOW + 1)
    with pytest.raises(Conflict, match=r"held by a for another (0\.5|1\.0) s"):
        bench.open().acquire("coordinator", "b", 1.0, NOW + 0.5)
    taken = take_over(bench, store, "coordinator", "b", 1.0, NOW + 1)
    assert taken.token > lease.token
    assert store.current("coordinator") == taken


def test_holder_takes_its_own_lease_again_at_once(store: Store) -> None:
    old = store.acquire("coordinator", "a", 10.0, NOW)
    new = store.acquire("coordinator", "a", 10.0, NOW + 1)
    assert new.token > old.token
    with pytest.raises(StaleError):
        store.put_if("k", b"", None, old.token)
    store.put_if("k", b"", None, new.token)


def test_renewal_keeps_the_lease(store: Store) -> None:
    lease = store.acquire("coordinator", "a", 10.0, NOW)
    renewed = store.renew(lease, NOW + 8)
    assert (renewed.token, renewed.expires_at) == (lease.token, NOW + 18)
    with pytest.raises(Conflict):
        store.acquire("coordinator", "b", 10.0, NOW + 12)
    assert store.renew(renewed, NOW + 60).expires_at == NOW + 70, "late, but nobody had taken it"


def test_the_superseded_holder_is_fenced(bench: Bench, store: Store) -> None:
    old = store.acquire("coordinator", "a", 0.4, NOW)
    entry = store.put_if("k", b"a", None, old.token)
    other = bench.open()
    new = take_over(bench, other, "coordinator", "b", 0.4, NOW + 2)
    with pytest.raises(StaleError, match=f"token {old.token}"):
        store.put_if("k", b"late", entry.revision, old.token)
    with pytest.raises(StaleError):
        store.delete_if("k", entry.revision, old.token)
    with pytest.raises(StaleError):
        store.renew(old, NOW + 2)
    store.release(old)
    assert other.current("coordinator") == new, "a late release changes nothing"
    assert store.get("k") == entry


def test_release(store: Store) -> None:
    lease = store.acquire("coordinator", "a", 10.0, NOW)
    store.release(lease)
    store.release(lease)
    assert store.current("coordinator") is None
    with pytest.raises(StaleError):
        store.put_if("k", b"", None, lease.token)
    with pytest.raises(StaleError):
        store.renew(lease, NOW)
    assert store.acquire("coordinator", "b", 10.0, NOW).token > lease.token


def test_leases_of_different_names_do_not_fence_each_other(store: Store) -> None:
    one = store.acquire("one", "a", 10.0, NOW)
    two = store.acquire("two", "b", 10.0, NOW)
    assert two.token > one.token
    store.put_if("k1", b"", None, one.token)
    store.put_if("k2", b"", None, two.token)


@pytest.mark.parametrize("forged", [0, -1, 99])
def test_tokens_that_were_never_given_out(store: Store, token: int, forged: int) -> None:
    with pytest.raises(StaleError):
        store.put_if("k", b"", None, forged)


def test_watch_sees_past_and_coming_changes(store: Store, token: int) -> None:
    first = store.put_if("job/a", b"1", None, token)
    store.put_if("other", b"x", None, token)
    watch = store.watch("job/")
    assert watch.next(LONG_S) == KeyChange("job/a", b"1", first.revision)
    assert watch.next(0) is None
    second = store.put_if("job/b", b"2", None, token)
    store.delete_if("job/a", first.revision, token)
    assert watch.next(LONG_S) == KeyChange("job/b", b"2", second.revision)
    assert watch.next(LONG_S) == KeyChange("job/a", None, second.revision + 1)
    watch.close()


def test_watch_from_a_revision(store: Store, token: int) -> None:
    first = store.put_if("a", b"1", None, token)
    second = store.put_if("b", b"2", None, token)
    watch = store.watch("", first.revision)
    assert watch.next(LONG_S) == KeyChange("b", b"2", second.revision)
    watch.close()


def test_watch_wakes_for_a_change_and_ends_when_closed(store: Store, token: int) -> None:
    watch, seen = store.watch(""), []
    got_one = threading.Event()

    def follow() -> None:
        for change in watch:
            seen.append(change.key)
            got_one.set()

    follower = threading.Thread(target=follow)
    follower.start()
    store.put_if("k", b"", None, token)
    assert got_one.wait(LONG_S)
    watch.close()
    watch.close()
    follower.join(LONG_S)
    assert not follower.is_alive()
    assert seen == ["k"]
    assert watch.next(0) is None


def test_threads_race_for_a_counter(store: Store, token: int) -> None:
    def add(times: int) -> None:
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

    threads = [threading.Thread(target=add, args=(10,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    entry = store.get("counter")
    assert entry is not None
    assert entry.value == b"40" and entry.revision >= 40


def test_connections_race_for_a_counter(bench: Bench) -> None:
    """Compare-and-set from several connections, as of several processes under one token."""
    stores = [bench.open() for _ in range(4)]
    token = stores[0].acquire("coordinator", "a", 10.0, NOW).token

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

    threads = [threading.Thread(target=add, args=(store,)) for store in stores]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONG_S)
    entry = stores[0].get("counter")
    assert entry is not None and entry.value == b"40"


def test_a_lease_is_raced_for_and_one_wins(bench: Bench) -> None:
    stores = [bench.open() for _ in range(6)]
    begin, won, lost = threading.Barrier(len(stores)), [], []

    def grab(number: int) -> None:
        begin.wait(LONG_S)
        try:
            won.append(stores[number].acquire("coordinator", f"holder{number}", 60.0, NOW))
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
    lease = store.acquire("coordinator", "a", 60.0, NOW)
    entry = store.put_if("k", b"1", None, lease.token)
    bench.restart()
    again = bench.open()
    assert again.get("k") == store.get("k") == entry
    with pytest.raises(Conflict, match="held by a"):
        again.acquire("coordinator", "b", 60.0, NOW + 1)
    changed = again.put_if("k", b"2", entry.revision, lease.token)
    assert changed.revision > entry.revision, "revisions go on"
    assert again.acquire("coordinator", "a", 60.0, NOW).token > lease.token, "and so do tokens"
    with pytest.raises(StaleError):
        store.put_if("k", b"3", changed.revision, lease.token)


def test_a_lost_watch_goes_on_where_it_was(bench: Bench, store: Store, token: int) -> None:
    watch = store.watch("job/")
    first = store.put_if("job/a", b"1", None, token)
    assert watch.next(LONG_S) == KeyChange("job/a", b"1", first.revision)
    bench.restart()
    second = bench.open().put_if("job/a", b"2", first.revision, token)
    bench.open().delete_if("job/a", second.revision, token)
    seen: list[KeyChange] = []
    while not seen or seen[-1].value is not None:
        change = watch.next(LONG_S)
        assert change is not None
        seen.append(change)
    assert seen[-1] == KeyChange("job/a", None, second.revision + 1)
    assert seen[:-1] in ([], [KeyChange("job/a", b"2", second.revision)])
    watch.close()


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from(["put", "delete", "lease"])), max_size=12
    )
)
def test_embedded_stores_agree(
    tmp_path_factory: pytest.TempPathFactory, operations: list[tuple[str, str]]
) -> None:
    """Any history gives the same entries, tokens and errors in both stores that count from one."""
    memory, sqlite = MemoryStore(), SqliteStore(tmp_path_factory.mktemp("agree") / "store.db")
    for key, operation in operations:
        outcomes = [_outcome(store, key, operation) for store in (memory, sqlite)]
        assert outcomes[0] == outcomes[1]
        assert memory.list("") == sqlite.list("")
    sqlite.close()


def _outcome(store: Store, key: str, operation: str) -> object:
    lease, entry = store.current(key), store.get(key)
    try:
        if operation == "lease":
            return store.acquire(key, "holder", 1.0, NOW)
        token = lease.token if lease else 0
        if operation == "put":
            return store.put_if(key, b"v", entry.revision if entry else None, token)
        store.delete_if(key, entry.revision if entry else 1, token)
        return None
    except (Conflict, StaleError) as error:
        return str(error)
