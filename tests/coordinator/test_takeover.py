"""A coordinator begins a run, or takes one over."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from elastic.config import JobConfig
from elastic.coordinator import service
from elastic.coordinator.leadership import STATE_KEY, RunMembership
from elastic.coordinator.metrics import CoordinatorMetrics
from elastic.coordinator.queries import Query
from elastic.coordinator.records import run_directory
from elastic.coordinator.service import Coordinator
from elastic.core.job.membership import end_job
from elastic.core.job.state import JobPhase
from elastic.core.protocol.messages import NodeReport
from elastic.domain import codec
from elastic.domain.errors import FieldError, StaleError
from elastic.rpc.control.server import Superseded
from elastic.store import checkpoint_directory
from elastic.store.checkpoint_format import CheckpointFile
from elastic.store.interface import Entry, Lease
from elastic.telemetry import read_events
from tests.coordinator.helpers import three_nodes
from tests.coordinator.test_batches import FakeSession, attached, came
from tests.patience import LONG_S
from tests.store.memory import MemoryStore


def started(folder: Path, store: MemoryStore, lease: Lease) -> Coordinator:
    """A coordinator with a run directory of its own, and a checkpoint directory beside it."""
    folder.mkdir(exist_ok=True)
    config = three_nodes(folder, checkpoint_dir=str(folder.parent / "checkpoints"))
    run, metrics = RunMembership(store, folder), CoordinatorMetrics("j", time.time)
    return Coordinator(config, "127.0.0.1:0", store, lease, run, metrics)


def test_the_status_names_the_leader(tmp_path: Path) -> None:
    store = MemoryStore()
    config = three_nodes(tmp_path, checkpoint_dir=str(tmp_path / "checkpoints"))
    lease = store.acquire("j", LONG_S, time.time())
    run, metrics = RunMembership(store, tmp_path), CoordinatorMetrics("j", time.time)
    made = Coordinator(config, "127.0.0.1:0", store, lease, run, metrics, name="demo-coordinator-1")
    try:
        asked = Query("status", {}, Future())
        made._answer(asked)
        answer = asked.answer.result(timeout=LONG_S)
    finally:
        close(made)
    leader = {"name": "demo-coordinator-1", "address": made._server.address}
    assert answer["coordinator"] == leader and answer["term"] == lease.token


def close(coordinator: Coordinator) -> None:
    coordinator._keeper.close()
    coordinator._server.close()


def test_a_coordinator_that_may_be_deposed_answers_no_question(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It cannot renew its lease, and the nodes follow another one. A leader whose store is away
    answers, because its nodes are connected."""
    store = MemoryStore()
    made = started(tmp_path, store, store.acquire("j", LONG_S, time.time()))
    monkeypatch.setattr(JobConfig, "standbys", True)

    def answered() -> bool:
        asked = Query("status", {}, Future())
        made._answer(asked)
        return not isinstance(asked.answer.exception(LONG_S), Superseded)

    try:
        assert answered()
        monkeypatch.setattr(type(made._keeper), "certain", False)
        assert not answered()
        made._sessions["node0"] = FakeSession("node0")  # type: ignore[assignment]
        assert answered()
    finally:
        close(made)


def part_of(folder: Path, step: int, run: str) -> Path:
    """A part of a checkpoint that an agent of `run` has written."""
    staging = checkpoint_directory.staging_path(folder / "checkpoints", step)
    staging.mkdir(parents=True, exist_ok=True)
    (staging / "layer-0000-tp-0.safetensors").write_bytes(b"state")
    entry = CheckpointFile("layer-0000-tp-0.safetensors", 0, 0, 5, "", 1, 1, run=run)
    (staging / "layer-0000-tp-0.json").write_text(codec.dumps(entry))
    return staging / entry.name


class RenewedStore(MemoryStore):
    """A store that tells when the lease is renewed."""

    def __init__(self) -> None:
        super().__init__()
        self.renewed = threading.Event()

    def renew(self, lease: Lease, now: float) -> None:
        super().renew(lease, now)
        self.renewed.set()


def test_the_lease_is_kept_while_the_first_state_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A look through the checkpoints takes longer than a lease."""
    store, real, renewed = RenewedStore(), run_directory.initial_state, list[bool]()

    def slow(*args: Any) -> Any:
        store.renewed.clear()
        renewed.append(store.renewed.wait(LONG_S))
        return real(*args)

    monkeypatch.setattr(run_directory, "initial_state", slow)
    close(started(tmp_path / "a", store, store.acquire("a", 0.2, time.time())))
    assert renewed == [True]


def test_a_start_that_fails_does_not_keep_the_lease(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, former = MemoryStore(), set(threading.enumerate())

    def fail(*_: Any) -> Any:
        raise FieldError("checkpoint directory", "x", "cannot be opened")

    monkeypatch.setattr(run_directory, "initial_state", fail)
    with pytest.raises(FieldError):
        started(tmp_path / "a", store, store.acquire("a", 0.2, time.time()))
    for thread in set(threading.enumerate()) - former:
        if thread.name == "lease":
            thread.join(LONG_S)
            assert not thread.is_alive()


@pytest.mark.parametrize(
    ("module", "name"),
    [(run_directory, "initial_state"), (checkpoint_directory, "discard_incomplete")],
    ids=["before its first save", "after it"],
)
def test_a_deposed_coordinator_removes_no_files_of_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, name: str
) -> None:
    """The first coordinator is paused at its start. Another one leads, and an agent writes a part
    of a checkpoint."""
    store, real = MemoryStore(), getattr(module, name)
    paused, goes_on, ended = threading.Event(), threading.Event(), list[StaleError | None]()

    def pausing(*args: Any) -> Any:
        if threading.current_thread().name == "first":
            paused.set()
            assert goes_on.wait(LONG_S)
        return real(*args)

    def first() -> None:
        try:
            close(started(tmp_path / "a", store, store.acquire("a", 60.0, 0.0)))
            ended.append(None)
        except StaleError as error:
            ended.append(error)

    (tmp_path / "checkpoints").mkdir()
    monkeypatch.setattr(module, name, pausing)
    thread = threading.Thread(target=first, name="first", daemon=True)
    thread.start()
    assert paused.wait(LONG_S)
    second = started(tmp_path / "b", store, store.acquire("b", 60.0, 100.0))
    part = part_of(tmp_path, 2, second._state.run)
    goes_on.set()
    thread.join(LONG_S)
    assert ended and isinstance(ended[0], StaleError) is (module is run_directory)
    assert part.exists()
    close(second)


def test_files_of_former_runs_are_removed_before_the_launch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by the next coordinator, if the first one dies between its save and the removal."""
    real, store = checkpoint_directory.discard_incomplete, MemoryStore()

    class Died(BaseException):
        pass

    def die(*_: Any) -> None:
        raise Died

    part = part_of(tmp_path, 2, "former")
    monkeypatch.setattr(checkpoint_directory, "discard_incomplete", die)
    with pytest.raises(Died):
        started(tmp_path / "a", store, store.acquire("a", 60.0, 0.0))
    monkeypatch.setattr(checkpoint_directory, "discard_incomplete", real)
    assert part.exists()
    second = started(tmp_path / "a", store, store.acquire("b", 60.0, 100.0))
    assert second._adopted and not part.parent.exists()
    close(second)


@pytest.mark.parametrize(("place", "summary"), [("b", False), ("a", True)])
def test_a_standby_that_leads_after_the_end_summarizes_only_the_events_of_a_leader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str, summary: bool
) -> None:
    """On a machine of its own it has none; on the leader's machine the leader may have died before
    it wrote the summary."""
    monkeypatch.setattr(service, "LINGER_S", 0.0)
    store = MemoryStore()
    lease = store.acquire("a", 60.0, 0.0)
    leader = started(tmp_path / "a", store, lease)
    leader._log_event("coordinator", {"term": lease.token})
    assert leader._records.flush(LONG_S)
    state, _ = end_job(leader._state, JobPhase.FINISHED, 0, "all 5 steps done")
    close(leader)
    before = store.get(STATE_KEY)
    assert before is not None
    store.put_if(STATE_KEY, codec.dumps(state).encode(), before.revision, lease.token)
    standby = started(tmp_path / place, store, store.acquire("b", 60.0, 100.0))
    assert standby._adopted and standby.run() == 0
    assert (tmp_path / place / "exit.json").exists()
    assert (tmp_path / place / "summary.json").exists() == summary


@pytest.mark.parametrize("written", [False, True], ids=["dies before its records", "after them"])
def test_events_of_the_last_saved_decision_are_written_once(tmp_path: Path, written: bool) -> None:
    """A coordinator dies right after a save, and another one has its state."""

    class DyingStore(MemoryStore):
        dies = False

        def put_if(self, *args: Any) -> Entry:
            entry = super().put_if(*args)
            if self.dies:
                raise Died
            return entry

    class Died(BaseException):
        pass

    def take(coordinator: Coordinator, *messages: NodeReport) -> None:
        for message in messages:
            node = message.info.node
            coordinator._handle((sessions[node], message))
        coordinator._decide()

    sessions = {node: FakeSession(node) for node in "abc"}
    store = DyingStore()
    first = started(tmp_path / "a", store, store.acquire("a", 60.0, 0.0))
    take(first, *map(came, "abc"))
    store.dies = not written
    if written:
        take(first, *map(attached, "abc"))
    else:
        with pytest.raises(Died):
            take(first, *map(attached, "abc"))
    assert first._records.flush(LONG_S)
    close(first)
    store.dies = False
    before = [event["kind"] for event in read_events(tmp_path / "a" / "events.jsonl")]
    assert ("job" in before) is ("halt" in before) is written
    second = started(tmp_path / "a", store, store.acquire("b", 60.0, 100.0))
    second._announce()
    take(second, *map(attached, "abc"))
    assert second._records.flush(LONG_S)
    kinds = [event["kind"] for event in read_events(tmp_path / "a" / "events.jsonl")]
    assert kinds.count("job") == kinds.count("halt") == 1 and kinds.count("joined") == 3
    assert kinds.index("halt") < kinds.index("coordinator")
    close(second)
