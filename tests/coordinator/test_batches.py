"""One save for all waiting events; nothing is sent, written or counted before it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest

from elastic.coordinator import event_queue as inbox
from elastic.coordinator import service
from elastic.coordinator.event_queue import WallClock
from elastic.coordinator.leadership import STATE_KEY, RunMembership
from elastic.coordinator.metrics import CoordinatorMetrics
from elastic.coordinator.queries import status
from elastic.coordinator.records import state_saver as saving
from elastic.coordinator.records.run_directory import read_json
from elastic.coordinator.service import Coordinator, StreamOpened
from elastic.core.job.state import ProgressWatch, Tick
from elastic.core.protocol.messages import Failed, Heartbeat, NodePhase, NodeReport
from elastic.domain.types import JobSpec, LayerSpec, NodeInfo
from elastic.store.interface import Entry, StoreUnavailable
from elastic.telemetry import read_events
from tests.coordinator.helpers import ManualLoop, three_nodes
from tests.patience import LONG_S
from tests.store.memory import MemoryStore

SPEC = JobSpec((LayerSpec(8, 8, 8, 1.0, 2.0),) * 4, 4, 10)


class CountingStore(MemoryStore):
    """A store that can be away, and counts its writes."""

    away, saves = False, 0

    def put_if(self, key: str, value: bytes, expected: int | None, token: int) -> Entry:
        if self.away:
            raise StoreUnavailable("cut off")
        self.saves += 1
        return super().put_if(key, value, expected, token)


class FakeSession:
    """Keeps the types of the messages that are sent on it."""

    peer = "here"

    def __init__(self, sender: str) -> None:
        self.sender = sender
        self.sent: list[str] = []

    def send(self, message: Any, epoch: int) -> bool:
        self.sent.append(type(message).__name__)
        return True


class Bench:
    def __init__(self, folder: Path) -> None:
        config = three_nodes(folder, backup="stream+snapshot")
        self.folder, self.store = folder, CountingStore()
        lease = self.store.acquire("a", 60.0, 0.0)
        self.counted = CoordinatorMetrics("j", lambda: 0.0)
        self.lease, self.run = lease, RunMembership(self.store, folder)
        self.arguments = config, "127.0.0.1:0", self.store, lease, self.run
        self.coordinator = Coordinator(*self.arguments, self.counted)
        self.sessions = {node: FakeSession(node) for node in ("a", "b", "c")}
        self.saved = self.store.saves

    def take(self, *messages: Any) -> None:
        """Handle the messages as one batch."""
        for message in messages:
            node = message.node if isinstance(message, Heartbeat) else message.info.node
            self.coordinator._handle((self.sessions[node], message))
        self.coordinator._decide()

    def record_end(self) -> None:
        """The disk takes the records of the end; then the coordinator tells it."""
        assert self.coordinator._records.ended.wait(LONG_S)
        self.coordinator._tell_everybody()

    def reach_store(self) -> None:
        """The store is back, and the coordinator's next attempt to save succeeds."""
        self.store.away = False
        self.coordinator._saver.retry()
        self.coordinator._decide()

    def saves(self) -> int:
        """Number of saves since the last call."""
        before, self.saved = self.saved, self.store.saves
        return self.saved - before

    def told(self) -> list[str]:
        assert self.coordinator._records.flush(LONG_S)
        return [event["kind"] for event in read_events(self.folder / "events.jsonl")]

    def sent(self) -> list[list[str]]:
        return [session.sent for session in self.sessions.values()]

    def metrics(self) -> str:
        return generate_latest(self.counted.registry).decode()


@pytest.fixture
def loop(monkeypatch: pytest.MonkeyPatch) -> ManualLoop:
    """Request it before `bench`, so that the coordinator uses this clock."""
    made = ManualLoop()
    monkeypatch.setattr(WallClock, "now", lambda clock: made.now)
    monkeypatch.setattr(inbox, "event_loop", lambda: made)
    return made


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.setattr(saving, "retry_s", lambda failures: 0.0)
    made = Bench(tmp_path)
    yield made
    made.coordinator._keeper.close()
    made.coordinator._server.close()


def came(node: str) -> NodeReport:
    return NodeReport(NodeInfo(node, f"{node}-1", "h:1"), NodePhase.EMPTY, 0)


def attached(node: str) -> NodeReport:
    return replace(came(node), phase=NodePhase.IDLE, able=True, elastic=True, spec=SPEC, restart=0)


def test_one_save_for_a_batch_of_events(bench: Bench) -> None:
    bench.take(*map(came, "abc"))
    assert bench.saves() == 1 and bench.told().count("joined") == 3
    assert bench.sent() == [["Launch"]] * 3
    bench.take(*map(attached, "abc"))
    assert bench.saves() == 1
    assert bench.sent() == [["Launch", "Halt"]] * 3
    bench.take(Heartbeat("a", "a-1", 0, 0))
    assert bench.saves() == 0, "heartbeats alone are not saved"


def test_no_action_of_a_batch_happens_before_the_save(bench: Bench) -> None:
    bench.take(*map(came, "ab"))
    before = bench.told()
    bench.store.away = True
    bench.take(came("c"), *map(attached, "abc"))
    bench.take(Heartbeat("a", "a-1", 0, 0))
    assert (
        bench.sent() == [[]] * 3
        and [kind for kind in bench.told() if kind != "store-lost"] == before
    )
    assert 'elastic_events_total{kind="joined"} 2.0' in bench.metrics()
    bench.reach_store()
    assert bench.sent() == [["Launch", "Halt"]] * 3
    later = bench.told()[len(before) :]
    assert later.count("joined") == 1 and later.index("joined") < later.index("halt")
    assert 'elastic_events_total{kind="joined"} 3.0' in bench.metrics()


def test_no_node_is_dismissed_because_of_an_unsaved_decision(
    loop: ManualLoop, bench: Bench
) -> None:
    """A successor would not know the decision, and the node would have given up its membership."""
    bench.take(*map(came, "abc"))
    bench.take(*map(attached, "abc"))
    bench.store.away = True
    coordinator, sent = bench.coordinator, bench.sessions["c"].sent
    while "c" in coordinator._state.members:
        loop.advance(0.1)
        coordinator._now = loop.now
        bench.take(*(Heartbeat(node, f"{node}-1", 0, 0) for node in "ab"))
        coordinator._handle(Tick())
        coordinator._decide()
    before = list(sent)
    for _ in range(5):
        bench.take(Heartbeat("c", "c-1", 0, 0))
    assert sent == before and "Fenced" not in before
    bench.reach_store()
    assert sent[len(before) :].count("Fenced") == 2, "by the decision, and once for all heartbeats"


def test_no_join_is_refused_because_of_an_unsaved_decision(bench: Bench) -> None:
    """The member that has the name has joined only in the memory of this coordinator."""
    bench.store.away = True
    bench.take(came("a"))
    second = bench.sessions["a"] = FakeSession("a")
    bench.take(replace(came("a"), info=NodeInfo("a", "a-2", "h:2")))
    assert second.sent == []
    bench.reach_store()
    assert second.sent == ["JoinRefused"]


def test_waiting_events_count_as_of_their_arrival(loop: ManualLoop, bench: Bench) -> None:
    """It is busy for four lease times; two nodes send heartbeats, the third one is silent."""
    events = bench.coordinator._events
    events.start()
    for node in "abc":
        events.receive(bench.sessions[node], came(node))
    bench.coordinator._turn()
    assert set(bench.coordinator._state.members) == {"a", "b", "c"}
    for _ in range(24):
        loop.advance(0.5)
        for node in "ab":
            events.receive(bench.sessions[node], Heartbeat(node, f"{node}-1", 0, 0))
    loop.advance(0.5)
    while len(events):
        bench.coordinator._turn()
    assert set(bench.coordinator._state.members) == {"a", "b"}


def test_a_report_without_consequences_is_saved_later(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.take(*map(came, "ab"))
    bench.saves()
    at = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: at)
    bench.take(replace(came("a"), step=1))
    bench.coordinator._events.put(Tick())
    bench.coordinator._turn()
    assert bench.saves() == 0
    monkeypatch.setattr(time, "monotonic", lambda: at + saving.MAX_DELAY_S)
    bench.coordinator._events.put(Tick())
    bench.coordinator._turn()
    assert bench.saves() == 1


def test_metrics_over_several_terms(bench: Bench) -> None:
    bench.take(*map(came, "abc"))
    leading = bench.metrics()
    assert "elastic_coordinator_leader 1.0" in leading and "elastic_coordinator_term 1.0" in leading
    assert 'elastic_nodes{state="starting"} 3.0' in leading
    bench.counted.stand_by()
    waiting = bench.metrics()
    assert (
        "elastic_coordinator_leader 0.0" in waiting
        and 'elastic_events_total{kind="joined"} 3.0' in waiting
    )
    assert "elastic_coordinator_term" not in waiting and "elastic_nodes{" not in waiting


def test_the_end_waits_for_members_that_are_cut_off(bench: Bench) -> None:
    """They are told as soon as they reconnect."""
    bench.take(*map(came, "abc"))
    bench.take(*map(attached, "abc"))
    coordinator = bench.coordinator
    coordinator._handle((bench.sessions["c"], None))
    bench.take(replace(attached("a"), failed=Failed("bad", 7)))
    bench.record_end()
    assert coordinator._unaware == {"c"} and coordinator._ending
    bench.sessions["c"] = FakeSession("c")
    bench.take(attached("c"))
    assert bench.sessions["c"].sent == ["Stop"] and not coordinator._unaware


def test_the_end_is_told_on_every_open_connection(bench: Bench) -> None:
    """Also to a node that was dropped, and checks itself before it joins again."""
    bench.take(*map(came, "abc"))
    bench.take(*map(attached, "abc"))
    strangers: list[Any] = [FakeSession(node) for node in "def"]
    members: list[Any] = list(bench.sessions.values())
    silent, late, gone = strangers
    coordinator = bench.coordinator
    for session in (*members, silent, gone):
        coordinator._handle(StreamOpened(session))
    coordinator._handle((gone, None))
    bench.take(replace(attached("a"), failed=Failed("bad", 7)))
    bench.record_end()
    assert silent.sent == ["Stop"] and not gone.sent
    assert all(session.sent.count("Stop") == 1 for session in members)
    coordinator._handle(StreamOpened(late))
    assert late.sent == ["Stop"]
    assert not coordinator._may_leave(), "they have not closed their connections"
    for session in (*members, silent, late):
        coordinator._handle((session, None))
    assert coordinator._records.ended.wait(LONG_S) and coordinator._may_leave()


def two_streams(coordinator: Coordinator) -> tuple[Any, Any]:
    """Two open streams of node a, the older one first."""
    older, newer = FakeSession("a"), FakeSession("a")
    streams: list[Any] = [older, newer]
    for session in streams:
        coordinator._handle(StreamOpened(session))
    return older, newer


def test_a_late_message_of_an_old_stream_does_not_take_the_orders(bench: Bench) -> None:
    """The node has reconnected. Messages of both streams are read, the newest first."""
    coordinator = bench.coordinator
    old, new = two_streams(coordinator)
    for session in (new, old):
        coordinator._handle((session, came("a")))
    coordinator._decide()
    coordinator._handle((old, None))
    assert coordinator._sessions["a"] is new and coordinator._state.members["a"].connected


def test_a_new_agent_of_a_node_gets_its_orders_on_an_older_stream(bench: Bench) -> None:
    """It waited while its name was in use, and the former agent reconnected meanwhile."""
    coordinator = bench.coordinator
    waiting, former = two_streams(coordinator)
    coordinator._handle((former, came("a")))
    coordinator._decide()
    coordinator._state = coordinator._state.of(members={})
    other = replace(came("a").info, incarnation="a-2")
    coordinator._handle((waiting, replace(came("a"), info=other)))
    assert coordinator._sessions["a"] is waiting


def test_the_end_is_recorded_before_it_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A coordinator that dies in between leaves nodes that wait for the next one."""
    hung, coordinator = threading.Event(), bench.coordinator
    coordinator._records._disk.post(lambda: hung.wait(LONG_S))
    bench.take(*map(came, "abc"))
    bench.take(*map(attached, "abc"))
    bench.take(replace(attached("a"), failed=Failed("bad", 7)))
    coordinator._tell_everybody()
    assert coordinator._state.ending is not None
    assert not any("Stop" in sent for sent in bench.sent()) and not coordinator._ending
    late = coordinator._told_by + 0.01
    monkeypatch.setattr(WallClock, "now", lambda clock: late)
    coordinator._tell_everybody()
    assert all("Stop" in sent for sent in bench.sent()), "a disk that hangs is not waited for"
    hung.set()


def test_a_recorded_end_that_the_store_has_lost_is_told(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The former coordinator died after it had written exit.json, before it told the nodes."""
    monkeypatch.setattr(service, "LINGER_S", 0.0)  # no node is there that must be told
    bench.take(*map(came, "abc"))
    bench.take(*map(attached, "abc"))
    running = bench.store.get(STATE_KEY)
    bench.take(replace(attached("a"), failed=Failed("bad", 7)))
    assert running is not None and bench.coordinator._records.ended.wait(LONG_S)
    bench.coordinator._keeper.close()
    lost, lease = bench.store.get(STATE_KEY), bench.lease
    assert lost is not None and not bench.run.is_over()
    bench.store.put_if(STATE_KEY, running.value, lost.revision, lease.token)
    end = read_json(bench.folder / "exit.json")
    made = Coordinator(*bench.arguments, bench.counted, end)
    assert made.run() == 7 and made._unaware == {"a", "b", "c"}
    assert bench.run.is_over() and bench.told().count("end") == 1


def test_ticks_say_that_orders_are_held(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    ticks = list[Tick]()
    monkeypatch.setattr(bench.coordinator, "_apply", ticks.append)
    bench.coordinator._handle(Tick(0.1))
    bench.store.away = True
    bench.coordinator._saver.save(bench.coordinator._state.of(epoch=7))
    bench.coordinator._handle(Tick(0.2))
    assert ticks == [Tick(0.1), Tick(0.2, held=True)]


def test_the_status_tells_failed_attempts(bench: Bench) -> None:
    assert status(bench.coordinator._state)["stalled"] == {}
    watch = ProgressWatch(attempts=3, cause="contact lost with b", retry_at=1e12)
    told = status(bench.coordinator._state.of(watch=watch))["stalled"]
    assert told["attempts"] == 3 and told["cause"] == "contact lost with b"
    assert told["next_attempt_in_s"] > 0
