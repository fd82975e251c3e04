"""Copies in the background: their order, their consistency, and their errors."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from elastic.core.protocol.messages import Failed, Published
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS
from elastic.domain.errors import ElasticError
from elastic.domain.types import GRADIENT, STATE, UPDATE
from elastic.worker.backup import items
from elastic.worker.backup.copier import Copier
from elastic.worker.backup.publisher import Publisher
from elastic.worker.epoch_session import EpochSession
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal
from tests.patience import LONG_S
from tests.worker.model.toy_model import CPU, replicas, run, state_of

WAIT_S = LONG_S


class Recorder:
    """Records announcements with the bytes in the slots at that time."""

    def __init__(self) -> None:
        self.sent: list[Published] = []
        self.data: dict[tuple[str, int], bytes] = {}
        self.announced = threading.Semaphore(0)

    def send(self, message: Published) -> None:
        for local in message.copies:
            with open(local.path, "rb") as file:
                file.seek(local.offset)
                self.data[local.copy.kind, local.copy.layer] = file.read(local.copy.nbytes)
        self.sent.append(message)
        self.announced.release()


class BlockedWrite:
    """Makes a write of `layer` wait for the event `go`."""

    def __init__(self, layer: LayerReplica, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go = threading.Event(), threading.Event()
        self._write = getattr(layer, name)
        monkeypatch.setattr(layer, name, self)

    def __call__(self, *args: Any) -> None:
        self.begun.set()
        assert self.go.wait(WAIT_S)
        self._write(*args)


@pytest.fixture
def recorder() -> Recorder:
    return Recorder()


@pytest.fixture
def publisher(recorder: Recorder, tmp_path: Path) -> Publisher:
    return Publisher(recorder.send, tmp_path, "a", copy_device=CPU)


def test_jobs_run_in_order_and_their_copies_in_parallel() -> None:
    errors: list[BaseException] = []
    done: list[object] = []
    copier, meet = Copier(CPU, errors.append), threading.Barrier(3)
    first = copier.start([lambda: meet.wait(WAIT_S)] * 3, lambda found: done.append(len(found)))
    copier.start([lambda: 7], done.append)
    first.result()
    copier.settle()
    assert done == [3, [7]] and not errors
    copier.close()


def test_a_gradient_does_not_change_while_it_is_written(
    publisher: Publisher, recorder: Recorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = replicas()
    run(layers, 0, 0)
    before = bytes(layers[1].gradient.numpy().tobytes())
    blocked = BlockedWrite(layers[1], "write_gradient", monkeypatch)
    publisher.publish_gradients(layers, 0, 1, "b", AbandonSignal())
    assert blocked.begun.wait(WAIT_S) and not recorder.sent, "the main thread goes on"
    changed = threading.Event()

    def next_microbatch() -> None:
        run(layers, 0, 1)
        changed.set()

    worker = threading.Thread(target=next_microbatch)
    worker.start()
    assert not changed.wait(0.2)
    blocked.go.set()
    worker.join(WAIT_S)
    assert changed.is_set() and recorder.data[GRADIENT, 1] == before
    assert layers[1].ledger == {0, 1}
    assert [set(c.copy.microbatches) for c in recorder.sent[0].copies] == [{0}] * 3


@pytest.mark.parametrize("change", ["update", "clear", "set_aside", "start_round", "read_state"])
def test_changes_of_the_source_wait_for_the_copy(
    publisher: Publisher, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, change: str
) -> None:
    layers = replicas()
    layer = layers[0]
    run(layers, 0, 0)
    state, reduced = state_of(layer), layer.gradient.clone()
    blocked = BlockedWrite(layer, "write_state", monkeypatch)
    publisher.publish_states([layer], 1, "b", abandon=AbandonSignal())
    assert blocked.begun.wait(WAIT_S)
    changes: dict[str, Any] = {
        "update": lambda: layer.update(reduced, 1.0, 0.1),
        "clear": layer.clear,
        "set_aside": layer.set_aside,
        "start_round": layer.start_round,
        "read_state": lambda: layer.read_state(state),
    }
    worker = threading.Thread(target=changes[change])
    worker.start()
    worker.join(0.1)
    assert worker.is_alive()
    blocked.go.set()
    worker.join(WAIT_S)
    assert not worker.is_alive() and recorder.data[STATE, 0] == bytes(state.numpy())


@pytest.mark.parametrize("whole", [True, False])
def test_a_failure_is_reported_after_the_copies_or_a_limit(
    publisher: Publisher, recorder: Recorder, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    """The agents write the checkpoint that is due from these copies."""
    layers, order = replicas(), list[str]()
    blocked = BlockedWrite(layers[0], "write_state", monkeypatch)
    publisher.publish_states(layers, 1, "b", abandon=AbandonSignal())
    assert blocked.begun.wait(WAIT_S)
    timeouts = replace(DEFAULT_TIMEOUTS, bulk_s=WAIT_S if whole else 0.01)

    def failed(message: Failed) -> None:
        assert message.version == layers[0].version and message.exit_code == 1
        order.extend(["copies"] * len(recorder.sent) + ["failure"])

    session = EpochSession.__new__(EpochSession)
    session._context = cast(
        Any,
        SimpleNamespace(
            publisher=publisher,
            replicas=dict(enumerate(layers)),
            agent=SimpleNamespace(send=failed),
            settings=SimpleNamespace(timeouts=timeouts, local_rank=0),
        ),
    )
    if whole:
        threading.Timer(0.1, blocked.go.set).start()
    with pytest.raises(SystemExit):
        session._fail(ElasticError("oops"))
    blocked.go.set()
    assert order == (["copies", "failure"] if whole else ["failure"])
    publisher.settle()


def test_update_inputs_do_not_change_with_the_gradients(recorder: Recorder, tmp_path: Path) -> None:
    """A publisher without a copy device, as on a CPU, has made the copies when it returns."""
    layers, publisher = replicas(), Publisher(recorder.send, tmp_path, "a")
    run(layers, 0, 0)
    reduced = {layer.index: layer.gradient.clone() for layer in layers}
    expected = {n: layers[n].update_input(reduced[n], 0.5).numpy().tobytes() for n in range(3)}
    copies = items.updates(layers, reduced, 0.5)
    publisher.publish(copies, 1, "b", AbandonSignal())
    for tensor in reduced.values():
        tensor.zero_()  # The next reduction uses the same buffers.
    assert all(recorder.data[UPDATE, n] == expected[n] for n in range(3))


def test_a_waiting_caller_gets_the_error_of_a_copy(
    publisher: Publisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers, abandon = replicas(), AbandonSignal()
    run(layers, 0, 0)

    def fail(out: torch.Tensor) -> None:
        raise ElasticError("oops")

    monkeypatch.setattr(layers[2], "write_gradient", fail)
    bundle = publisher.publish_gradients(layers, 0, 1, "b", abandon)
    with pytest.raises(ElasticError, match="oops"):
        publisher.wait_acked(bundle, abandon)
    with pytest.raises(ElasticError, match="oops"):
        publisher.settle()
