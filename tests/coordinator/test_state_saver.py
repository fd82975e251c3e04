"""Saving before acting, keeping and losing the lease, and runs that share a name."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from elastic.coordinator.leadership import LeaseKeeper, RunMembership, stand_by
from elastic.coordinator.records import state_saver as saving
from elastic.coordinator.records.saved_state import read_state
from elastic.coordinator.records.state_saver import StateSaver
from elastic.core.job.state import JobState, Policy, Send
from elastic.core.protocol.messages import Halt
from elastic.domain.errors import ElasticError, StaleError
from elastic.store.interface import Conflict, Entry, Lease, StoreError, StoreUnavailable
from tests.patience import LONG_S
from tests.store.memory import MemoryStore

STATES = [JobState(policy=Policy(), epoch=epoch) for epoch in range(9)]


class UnreliableStore(MemoryStore):
    """A store that can be away, refuse writes, and lose the answer to a write."""

    away = loses = refuses = False

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        if self.refuses:
            raise StoreError("request too large")
        if self.away:
            raise StoreUnavailable("cut off")
        entry = super().put_if(key, value, expected, token)
        if self.loses:
            raise StoreUnavailable("the answer was lost")
        return entry


class Bench:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(saving, "retry_s", lambda failures: 0.0)
        self.store, self.done = UnreliableStore(), list[Any]()
        self.lease = self.store.acquire("a", 1.0, 0.0)
        self.saver = StateSaver(self.store, self.lease, "k", None)
        self.saver.report = lambda kind, data: self.done.append(kind)

    def decide(self, number: int, what: object = None) -> None:
        self.saver.hold(what, lambda: self.done.append(number))
        self.saver.save(STATES[number])


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def test_no_action_happens_before_the_save(bench: Bench) -> None:
    bench.decide(1)
    bench.store.away = True
    bench.decide(2)
    bench.decide(3)
    bench.saver.flush()
    assert bench.done == [1, "store-lost"] and bench.saver.away
    bench.store.away = False
    assert bench.saver.due()
    bench.saver.retry()
    assert bench.done == [1, "store-lost", "store-back", 2, 3], "all of it, in its order"
    entry = bench.store.get("k")
    assert entry is not None and b'"epoch":3' in entry.value
    assert not bench.saver.away


def test_a_store_that_refuses_counts_as_away(bench: Bench) -> None:
    told = list[dict[str, Any]]()

    def report(kind: str, data: dict[str, Any]) -> None:
        bench.done.append(kind)
        told.append(data)

    bench.saver.report = report
    bench.decide(1)
    bench.store.refuses = True
    bench.decide(2)
    bench.decide(3)
    assert bench.done == [1, "store-lost"] and bench.saver.away and bench.saver.due()
    assert told == [{"why": "request too large"}]
    bench.store.refuses = False
    bench.saver.retry()
    assert bench.done == [1, "store-lost", "store-back", 2, 3] and saved(bench) == 3


def test_a_replaced_coordinator_ends_even_if_the_store_refused(bench: Bench) -> None:
    bench.store.refuses = True
    bench.decide(1)
    bench.store.acquire("b", 1.0, 100.0)
    bench.store.refuses = False
    with pytest.raises(StaleError):
        bench.decide(2)
    assert bench.done == []


def logged(bench: Bench) -> tuple[str, ...]:
    """The events in the saved state."""
    entry = bench.store.get("k")
    return read_state(entry.value).log if entry is not None else ()


def test_events_are_saved_with_their_decision(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later ones take their place; those that follow while the store is away come together."""
    monkeypatch.setattr(saving, "LOG_BYTES", 8)
    written = list[bytes]()

    def decide(number: int, *lines: bytes) -> None:
        for line in lines:
            bench.saver.record(line, written.append)
        bench.decide(number)

    decide(1, b"one\n", b"too long\n", b"two\n")
    assert logged(bench) == ("one\n", "two\n")
    assert written == [b"one\n", b"too long\n", b"two\n"]
    bench.store.away = True
    decide(2, b"3\n")
    decide(3, b"4\n")
    assert len(written) == 3 and logged(bench) == ("one\n", "two\n")
    bench.store.away = False
    bench.saver.retry()
    assert written[3:] == [b"3\n", b"4\n"] and logged(bench) == ("3\n", "4\n")
    decide(4)
    assert logged(bench) == ()


def test_a_repeated_message_is_held_once(bench: Bench) -> None:
    bench.store.away = True
    for _ in range(3):
        bench.decide(1, Send("node0", Halt(1)))
    bench.decide(2, Send("node0", Halt(2)))
    bench.store.away = False
    bench.saver.retry()
    assert bench.done == ["store-lost", "store-back", 1, 2]


def test_a_delayed_state_is_saved_later(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.decide(1)
    bench.saver.save_later(STATES[2])
    bench.saver.hold(None, lambda: bench.done.append("passing"))
    bench.saver.flush()
    assert bench.done == [1, "passing"] and saved(bench) == 1, "actions do not wait for it"
    assert not bench.saver.due(), "not yet"
    bench.saver.save_later(STATES[3])
    at = time.monotonic() + saving.MAX_DELAY_S
    monkeypatch.setattr(time, "monotonic", lambda: at)
    assert bench.saver.due()
    bench.saver.retry()
    assert saved(bench) == 3 and not bench.saver.due()


def test_a_decision_saves_the_delayed_state(bench: Bench) -> None:
    bench.saver.save_later(STATES[2])
    bench.decide(3)
    assert saved(bench) == 3 and bench.done == [3]
    bench.saver.retry()
    assert saved(bench) == 3, "the delayed state is not saved again"


def test_a_delayed_state_replaces_an_unsaved_one(bench: Bench) -> None:
    bench.store.away = True
    bench.decide(1)
    bench.saver.save_later(STATES[2])
    bench.store.away = False
    bench.saver.retry()
    assert saved(bench) == 2 and bench.done == [1]


def saved(bench: Bench) -> int:
    entry = bench.store.get("k")
    assert entry is not None
    return int(json.loads(entry.value)["epoch"])


def test_a_save_whose_answer_was_lost_is_found_again(bench: Bench) -> None:
    bench.decide(1)
    bench.store.loses = True
    bench.decide(2)
    bench.store.loses = False
    bench.decide(3)
    assert bench.done == [1, 2, 3], "and one failure alone is no outage"


def test_nothing_happens_after_the_lease_is_lost(bench: Bench) -> None:
    bench.store.away = True
    bench.decide(1)
    bench.store.acquire("b", 1.0, 100.0)
    bench.store.away = False
    with pytest.raises(StaleError):
        bench.saver.retry()
    assert bench.done == []


def test_a_keeper_renews_the_lease_and_reports_its_loss() -> None:
    store, lost, renewed = MemoryStore(), list[ElasticError](), threading.Event()
    told = threading.Event()
    lease = store.acquire("a", 0.1, 0.0)

    def now() -> float:
        renewed.set()
        return 50.0

    def on_lost(error: ElasticError) -> None:
        lost.append(error)
        told.set()

    keeper = LeaseKeeper(store, lease, now, on_lost, LONG_S)
    assert renewed.wait(LONG_S) and not lost
    store.acquire("b", 60.0, 200.0)
    assert told.wait(LONG_S)
    assert isinstance(lost[0], StaleError)
    keeper.close()


def test_a_leader_that_is_not_ready_in_time_keeps_the_lease_no_longer() -> None:
    """Its disk hangs. Another coordinator takes the lease, and the first one is told."""
    store, lost = MemoryStore(), queue.Queue[ElasticError]()
    lease = store.acquire("a", 0.1, time.monotonic())
    keeper = LeaseKeeper(store, lease, time.monotonic, lost.put, 0.2)
    end = time.monotonic() + LONG_S
    second = None
    while second is None:
        assert time.monotonic() < end, "the lease is renewed for ever"
        with contextlib.suppress(Conflict):
            second = store.acquire("b", 60.0, time.monotonic())
        time.sleep(0.01)
    assert lost.empty()
    keeper.ready.set()
    assert isinstance(lost.get(timeout=LONG_S), StaleError)


def test_an_unexpected_error_does_not_end_the_renewals(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    store, renewed = MemoryStore(), threading.Event()
    lease, errors = store.acquire("a", 0.1, 0.0), iter([KeyError("lease")])

    def renew(lease: Lease, now: float) -> None:
        for error in errors:
            raise error
        renewed.set()

    monkeypatch.setattr(store, "renew", renew)
    keeper = LeaseKeeper(store, lease, lambda: 50.0, lambda error: None, LONG_S)
    assert renewed.wait(LONG_S)
    keeper.close()
    assert "KeyError: 'lease'" in caplog.text


def test_a_standby_waits_for_the_lease(tmp_path: Path) -> None:
    store, times, told = MemoryStore(), iter([0.0, 1.0, 2.0, 11.0]), list[ElasticError]()
    first, run = store.acquire("a", 10.0, 0.0), RunMembership(store, tmp_path)
    lease = stand_by(store, run, "b", 10.0, lambda: next(times), told.append)
    assert lease.token > first.token and next(times, None) is None
    assert [type(error) for error in told] == [Conflict], "it is told once"


def test_runs_with_the_same_name(tmp_path: Path) -> None:
    """A standby keeps its own run, finished or not; a later coordinator begins a new one."""
    store = MemoryStore()
    token = store.acquire("a", 10.0, 0.0).token
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        os.mkdir(folder)
    leader, standby, later = (RunMembership(store, folder) for folder in folders)
    standby.join_current()
    assert not leader.adopt() and standby.name == ""
    leader.begin("first", token)
    standby.join_current()
    leader.end(token)
    later.join_current()
    assert (standby.name, later.name) == ("first", "")
    assert standby.adopt() and not later.adopt()
    later.begin("second", token)
    assert RunMembership(store, folders[2]).adopt(), "started again, it knows its run"
    assert standby.adopt() and standby.name == "second"


def test_nobody_waits_for_the_disk_that_has_the_name_of_the_run(tmp_path: Path) -> None:
    """A standby, a coordinator that takes over, and one that ends the job. A named pipe without a
    reader or writer stands for a disk that hangs."""
    store = MemoryStore()
    token = store.acquire("a", 10.0, 0.0).token
    leader, standby = (RunMembership(store, tmp_path) for _ in range(2))
    leader.begin("first", token)
    standby.join_current()
    (tmp_path / "store-run").unlink()
    for name in ("store-run", f"store-run.{os.getpid()}.tmp"):
        os.mkfifo(tmp_path / name)
    done = threading.Event()

    def work() -> None:
        standby.join_current()
        assert standby.adopt() and standby.name == "first"
        leader.end(token)
        leader.begin("second", token)
        assert RunMembership(store, tmp_path).adopt() and leader.name == "second"
        done.set()

    threading.Thread(target=work, daemon=True).start()
    assert done.wait(LONG_S)
