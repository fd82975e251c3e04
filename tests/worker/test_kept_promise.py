"""A worker outside the scope of a change: it halts at its meeting point and keeps its layers.

Workers a and b are the stages of one pipeline; c is another pipeline. The worker of node a is real,
apart from its steps and its links.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elastic.core.protocol import messages as m
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import DivergenceError, VaultError
from elastic.domain.types import Assignment, Divergence, Unit
from elastic.planning.plan.plan import parse_plan
from elastic.rpc.frames import Channel, listen_unix
from elastic.worker.control.agent_client import AgentClient
from elastic.worker.epoch_session import EpochSession
from elastic.worker.model.layers import TensorParallel
from elastic.worker.recovery.state_loader import LoadedStage
from elastic.worker.transport.cancellation import EpochAbandoned, LinkFailed
from tests.patience import LONG_S
from tests.worker.control.test_agent_client import settings_of
from tests.worker.model.toy_model import replicas, run

PLAN = """plan epoch={epoch} layers=4 microbatches=4 tp=1 backup=stream+snapshot
pipeline 0 microbatches=0-1: a[0:3] b[3:4]
pipeline 1 microbatches=2-3: c[0:4]
"""
OUTSIDE = m.Halt(2, outside=("a", "b"), lost=("c",))
STEP = 5


def assignment(epoch: int, **more: Any) -> Assignment:
    return Assignment(parse_plan(PLAN.format(epoch=epoch)), STEP, **more)


class Links:
    """Links that are open until they are closed."""

    def __init__(self) -> None:
        self.closed = threading.Event()

    def close(self) -> None:
        self.closed.set()


class Worker:
    """The worker of node a, in epoch 1. `orders` come from its agent, `sent` is what that reads."""

    def __init__(self, path: Path) -> None:
        with listen_unix(path) as listener:
            self.client = AgentClient(settings_of(path))
            self._agent = Channel(listener.accept()[0])
        assert isinstance(self._agent.receive(), m.Hello)
        self.links = Links()
        self.context: Any = SimpleNamespace(
            agent=self.client,
            unit=Unit("a"),
            tp=TensorParallel(0, 1),
            settings=SimpleNamespace(timeouts=DEFAULT_TIMEOUTS),
            job=SimpleNamespace(
                spec=SimpleNamespace(n_steps=9), optimizer=SimpleNamespace(check=lambda **_: None)
            ),
            injector=SimpleNamespace(reach=lambda *_: None),
            replicas={layer.index: layer for layer in replicas()},
            evaluated=None,
            protection=None,
            left_links=None,
        )
        for replica in self.context.replicas.values():
            replica.version = STEP

    def order(self, message: Any) -> None:
        """Receive an order in the thread of the caller."""
        self.client._receive(message, lambda acked: None)

    def read(self) -> Any:
        """Return the next message that the agent reads."""
        return self._agent.receive()

    def session(self, order: m.Install) -> EpochSession:
        session = EpochSession(self.context, order)
        session._links = self.links  # type: ignore[assignment]
        return session

    def start(self, step: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> threading.Thread:
        """Run a session in a thread whose first step behaves as `step` does."""
        session = self.session(m.Install(1, assignment(1)))
        steps = SimpleNamespace(
            run=lambda *_: step(),
            record=None,
            runner=SimpleNamespace(step=STEP, started={0, 1}, sent={0, 1}),
        )

        def install(session: EpochSession) -> Any:
            session._steps = steps  # type: ignore[assignment]
            return steps

        monkeypatch.setattr(EpochSession, "_install", install)
        thread = threading.Thread(target=session.run, daemon=True)
        thread.start()
        return thread

    def close(self) -> None:
        self.client.close()
        self.client._channel.close()
        self._agent.close()


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[Worker]:
    made = Worker(tmp_path / "agent.sock")
    yield made
    made.close()


def test_a_worker_that_computes_goes_on_and_halts_complete(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> None:
        meeting = worker.client.meeting
        meeting.depart(STEP)
        worker.order(OUTSIDE)
        assert not worker.client._abandon.is_set()
        meeting.arrive()

    thread = worker.start(step, monkeypatch)
    assert worker.read() == m.Promise(2, 1, STEP)
    halted = worker.read()
    assert (halted.epoch, halted.step, halted.complete) == (2, STEP, True)
    thread.join(LONG_S)
    assert worker.context.left_links is worker.links and not worker.links.closed.is_set()


def test_a_worker_in_the_reduction_halts_complete(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrived = threading.Event()

    def step() -> None:
        worker.client.meeting.depart(STEP)
        worker.client.meeting.arrive()
        arrived.set()
        assert worker.client._abandon.wait(LONG_S)
        worker.client._abandon.check()

    thread = worker.start(step, monkeypatch)
    assert arrived.wait(LONG_S)
    worker.order(OUTSIDE)
    assert worker.read() == m.Promise(2, 1, STEP)
    assert worker.read().complete
    thread.join(LONG_S)
    assert worker.context.left_links is worker.links and not worker.links.closed.is_set()


@pytest.mark.parametrize("order", [OUTSIDE, m.Halt(2), m.Halt(2, outside=("b",)), m.Stop(0, "")])
def test_a_failed_collective_is_reported_and_a_promise_may_follow(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, order: Any
) -> None:
    def step() -> None:
        worker.client.meeting.depart(STEP)
        worker.client.meeting.arrive()
        raise LinkFailed((2,), "broken")

    thread = worker.start(step, monkeypatch)
    failed = worker.read()
    assert isinstance(failed, m.CommFailed) and failed.nodes == ("c",)
    assert not worker.links.closed.is_set(), "worker b may still compute"
    worker.order(order)
    if order == OUTSIDE:
        assert worker.read() == m.Promise(2, 1, STEP)
    if not isinstance(order, m.Stop):
        assert worker.read().complete is (order == OUTSIDE)
    thread.join(LONG_S)
    assert worker.links.closed.is_set() is (order != OUTSIDE)
    assert (worker.context.left_links is worker.links) is (order == OUTSIDE)


def test_a_promise_with_a_failed_run_is_not_kept(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    def step() -> None:
        worker.client.meeting.depart(STEP)
        worker.order(OUTSIDE)
        raise LinkFailed((1,), "broken")

    worker.start(step, monkeypatch)
    assert worker.read() == m.Promise(2, 1, STEP)
    assert isinstance(worker.read(), m.CommFailed)
    assert worker.read().complete is False
    assert worker.links.closed.is_set(), "the whole pipeline leaves"
    assert worker.context.left_links is None


def test_a_promise_is_not_kept_if_the_parameters_are_wrong(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The holders find that they have other gradients than each other."""

    def step() -> None:
        worker.client.meeting.depart(STEP)
        worker.client.meeting.arrive()
        worker.order(OUTSIDE)
        raise DivergenceError(STEP, (Divergence(3, 0, "norm", (("b", "1"), ("c", "2"))),))

    worker.start(step, monkeypatch)
    assert worker.read() == m.Promise(2, 1, STEP)
    assert isinstance(worker.read(), m.Diverged)
    assert worker.read().complete is False
    assert worker.links.closed.is_set()


def test_a_later_order_breaks_a_promise(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> None:
        worker.client.meeting.depart(STEP)
        worker.order(OUTSIDE)
        worker.order(m.Halt(3))
        worker.client.meeting.arrive()

    worker.start(step, monkeypatch)
    assert worker.read() == m.Promise(2, 1, STEP)
    halted = worker.read()
    assert (halted.epoch, halted.complete) == (3, False)
    assert worker.links.closed.is_set()


def test_the_layers_stay_with_their_sums(worker: Worker) -> None:
    layers = list(worker.context.replicas.values())
    run(layers, STEP, 0)
    run(layers, STEP, 1)
    session = worker.session(m.Install(2, assignment(2, promised=((0, (0, 1)),))))
    kept = session._kept_layers(lambda: None)
    assert kept is not None and kept.sources == ["memory"] * 3 and not kept.messages
    assert all(a is b for a, b in zip(kept.replicas, layers, strict=True))
    assert all(layer.ledger == {0, 1} for layer in layers)


def test_the_layers_of_other_pipelines_have_recipes(worker: Worker) -> None:
    session = worker.session(m.Install(2, assignment(2, promised=((1, (2, 3)),))))
    assert session._kept_layers(lambda: None) is None


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda layers: layers.pop(1), "layer 1, .*: this worker does not hold it"),
        (lambda layers: setattr(layers[2], "version", 6), "layer 2, .*: it has version 6, not 5"),
        (lambda layers: layers[0].ledger.remove(1), "layer 0, .*: its sum lacks micro-batches 1"),
        (lambda layers: layers[0].ledger.add(3), "layer 0, .*: its sum also has micro-batches 3"),
    ],
)
def test_layers_that_are_not_as_promised(
    worker: Worker, change: Callable[[dict[int, Any]], None], text: str
) -> None:
    for layer in worker.context.replicas.values():
        layer.ledger |= {0, 1}
    change(worker.context.replicas)
    session = worker.session(m.Install(2, assignment(2, promised=((0, (0, 1)),))))
    with pytest.raises(VaultError, match=text):
        session._kept_layers(lambda: None)


def test_old_links_close_when_the_pipeline_has_met_again(
    worker: Worker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until then, another worker of the pipeline may still compute in the old epoch."""
    old, found = Links(), list[bool]()
    worker.context.left_links = old

    def connect(session: EpochSession) -> Any:
        found.append(old.closed.is_set())
        return Links()

    def begin(*_: Any) -> Any:
        found.append(old.closed.is_set())
        worker.order(m.Stop(0, "enough"))
        raise EpochAbandoned("enough")

    monkeypatch.setattr(EpochSession, "_open_links", connect)
    monkeypatch.setattr(EpochSession, "_runner", begin)
    for layer in worker.context.replicas.values():
        layer.ledger |= {0, 1}
    EpochSession(worker.context, m.Install(2, assignment(2, promised=((0, (0, 1)),)))).run()
    assert found == [False, True] and worker.context.left_links is None


def test_old_links_close_when_the_next_session_fails(worker: Worker) -> None:
    old = Links()
    worker.context.left_links = old
    session = EpochSession(worker.context, m.Install(2, assignment(2, promised=((0, (0, 1)),))))
    worker.order(m.Stop(0, ""))
    session.run()
    assert isinstance(worker.read(), m.CommFailed), "the sums lack what was promised"
    assert old.closed.is_set() and worker.context.left_links is None


@pytest.mark.parametrize("pipeline", [0, 1])
def test_the_time_of_a_step_begins_where_the_worker_began_it(
    worker: Worker, monkeypatch: pytest.MonkeyPatch, pipeline: int
) -> None:
    """This worker is in pipeline 0. If another pipeline went on, the step begins anew here."""
    found: list[float] = []

    def step(*arguments: Any) -> Any:
        found.append(arguments[4])
        worker.order(m.Stop(0, "enough"))
        raise EpochAbandoned("enough")

    for name in ("_open_links", "_evaluation_runner", "_evaluate"):
        monkeypatch.setattr(EpochSession, name, lambda *_: Links())
    monkeypatch.setattr(EpochSession, "_runner", lambda *_: SimpleNamespace(run=step))
    loaded = LoadedStage([*worker.context.replicas.values()], ["peer"] * 3)
    monkeypatch.setattr(EpochSession, "_load_layers", lambda *_: loaded)
    for layer in worker.context.replicas.values():
        layer.ledger |= {0, 1}
    worker.context.step_began = 12.5
    promised = ((pipeline, (0, 1)),)
    EpochSession(worker.context, m.Install(2, assignment(2, promised=promised))).run()
    assert (found == [12.5]) == (pipeline == 0)
    assert found == [worker.context.step_began]
