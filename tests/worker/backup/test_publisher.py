"""The publisher with real replicas, vaults and sockets."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.core.protocol.messages import Published
from elastic.domain.errors import StaleError
from elastic.domain.types import GRADIENT, REDUCED, STATE, Copy
from elastic.rpc.frames import CHUNK_BYTES, Channel
from elastic.worker.backup import items
from elastic.worker.backup.items import PendingCopy
from elastic.worker.backup.publisher import Publisher
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from tests.agent.vault.nodes import MiniNode, nodes
from tests.patience import LONG_S
from tests.worker.model.toy_model import replicas, run, state_of, toy_stack, train


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[list[MiniNode]]:
    with nodes(tmp_path, "a", "b") as made:
        yield made


COPY_DEVICE: list[torch.device | None] = [None]
"""Device of background copies; None: copies are made in the main thread."""


@pytest.fixture(params=[None, torch.device("cpu")], ids=["main-thread", "beside"], autouse=True)
def either_way(request: pytest.FixtureRequest) -> None:
    COPY_DEVICE[0] = request.param


def publisher_of(node: MiniNode) -> Publisher:
    publisher = Publisher(
        node.worker_channel().send, node.directory / "slots", node.name, copy_device=COPY_DEVICE[0]
    )
    node.on_acked = publisher.on_acked
    return publisher


def ledgers(node: MiniNode) -> dict[int, list[set[int]]]:
    """Layer -> the ledgers of its gradients, smallest first."""
    copies = sorted(node.vault.inventory(), key=lambda c: len(c.microbatches))
    return {
        n: [set(c.microbatches) for c in copies if (c.kind, c.layer) == (GRADIENT, n)]
        for n in range(3)
    }


def restored(node: MiniNode, copy: Copy, layers: list[LayerReplica]) -> LayerReplica:
    fetcher = Fetcher(node.name, {node.name: node.server.address})
    fresh = replicas(empty=True)[copy.layer]
    data = fetcher.fetch(copy).data
    if copy.kind == STATE:
        fresh.read_state(data)
    else:
        fresh.add_gradient(data, copy.microbatches, copy.losses)
    fetcher.close()
    return fresh


def test_large_copies_report_progress_while_they_are_published_and_fetched(
    pair: list[MiniNode],
) -> None:
    a, _ = pair
    signs = list[int]()
    publisher = Publisher(
        a.worker_channel().send,
        a.directory / "slots",
        "a",
        copy_device=COPY_DEVICE[0],
        on_progress=lambda: signs.append(1),
    )
    a.on_acked = publisher.on_acked
    nbytes = 5 * CHUNK_BYTES

    def write(out: torch.Tensor) -> None:
        out.fill_(7)

    item = PendingCopy(STATE, 0, 0, nbytes, write)
    abandon = AbandonSignal()
    publisher.wait_acked(publisher.publish([item], 1, "", abandon), abandon)
    assert len(signs) == 2 + 5, "for the slot, the copy, and each chunk"
    (copy,) = a.vault.inventory()
    for node in ("a", "b"):
        signs.clear()
        fetcher = Fetcher(node, {"a": a.server.address}, on_progress=lambda: signs.append(1))
        data = fetcher.fetch(copy).data
        fetcher.close()
        assert len(data) == nbytes and bool((data == 7).all())
        assert len(signs) >= 5


def test_gradients_reach_the_peer_after_every_microbatch(pair: list[MiniNode]) -> None:
    a, b = pair
    publisher, abandon, layers = publisher_of(a), AbandonSignal(), replicas()
    sums = {}
    for index in (2, 0, 3):
        run(layers, 0, index)
        bundle = publisher.publish_gradients(layers, 0, 1, "b", abandon)
        for r in layers:
            sums[r.index, frozenset(r.ledger)] = (r.gradient.clone(), dict(r.losses))
    publisher.wait_acked(bundle, abandon)
    assert ledgers(a) == ledgers(b) == {n: [{0, 2}, {0, 2, 3}] for n in range(3)}
    for copy in b.vault.inventory():
        fresh = restored(b, copy, layers)
        gradient, losses = sums[copy.layer, copy.microbatches]
        assert torch.equal(fresh.gradient, gradient) and fresh.losses == losses
        assert (copy.step, copy.epoch, copy.owner, copy.shard) == (0, 1, "a", 0)


def test_a_live_state_is_compared_with_its_own_copy(pair: list[MiniNode]) -> None:
    publisher, abandon, layers = publisher_of(pair[0]), AbandonSignal(), replicas()
    assert publisher.is_sound(layers[1]) is None, "no copy yet"
    train(layers, 1)
    publisher.wait_acked(publisher.publish_states(layers, 1, "", abandon=abandon), abandon)
    assert [publisher.is_sound(layer) for layer in layers] == [True, True, True]
    weight = next(iter(layers[1].parameters)).detach().view(-1)
    weight.view(torch.int32)[0] ^= 1
    assert [publisher.is_sound(layer) for layer in layers] == [True, False, True]
    layers[2].skip_update()
    assert publisher.is_sound(layers[2]) is None, "no copy of this version"


def test_states_reach_the_peer_and_some_stay_local(pair: list[MiniNode]) -> None:
    a, b = pair
    publisher, abandon, layers = publisher_of(a), AbandonSignal(), replicas()
    for _ in range(3):
        bundle = publisher.publish_states(layers, 1, "b", {0, 2}, abandon)
        publisher.wait_acked(bundle, abandon)
        train(layers, 1)
    assert sorted((c.layer, c.step) for c in b.vault.inventory()) == [
        (0, 1),
        (0, 2),
        (2, 1),
        (2, 2),
    ]
    assert sorted((c.layer, c.step) for c in a.vault.inventory()) == [
        (n, v) for n in (0, 1, 2) for v in (1, 2)
    ]
    publisher.publish_states(layers, 1, "b", abandon=abandon)
    publisher.wait_acked(publisher.publish_states(layers, 1, "b", abandon=abandon), abandon)
    for copy in (c for c in b.vault.inventory() if c.step == 3):
        assert torch.equal(state_of(restored(b, copy, layers)), state_of(layers[copy.layer]))


def test_an_unchanged_copy_is_not_announced_again(pair: list[MiniNode]) -> None:
    a, _ = pair
    publisher, abandon, layers = publisher_of(a), AbandonSignal(), replicas()
    assert publisher.publish_gradients(layers, 0, 1, "b", abandon) == 0, "nothing accumulated yet"
    state = publisher.publish_states(layers, 1, "b", abandon=abandon)
    run(layers, 0, 0)
    first = publisher.publish_gradients(layers, 0, 1, "b", abandon)
    assert publisher.publish_gradients(layers, 0, 1, "b", abandon) == first
    assert publisher.publish_gradients(layers, 0, 1, "") == first, "at the peer is also here"
    assert publisher.publish_states(layers, 1, "") == state
    layers[0].ledger.add(1)  # Only one layer has a new micro-batch.
    second = publisher.publish_gradients(layers, 0, 1, "b", abandon)
    publisher.wait_acked(second, abandon)
    sizes = [len(a.heard.get(timeout=LONG_S).copies) for _ in range(3)]
    assert sizes == [3, 3, 1] and second == first + 1


class Recorder:
    """A channel without acknowledgements."""

    def __init__(self) -> None:
        self.sent: list[Published] = []
        self.two = threading.Event()

    def send(self, message: Published) -> None:
        self.sent.append(message)
        if len(self.sent) == 2:
            self.two.set()

    def paths(self, layer: int) -> list[str]:
        return [c.path for message in self.sent for c in message.copies if c.copy.layer == layer]


def test_a_slot_is_written_again_only_after_its_acknowledgement(tmp_path: Path) -> None:
    recorder, layers = Recorder(), replicas()
    publisher = Publisher(recorder.send, tmp_path, "a")
    abandon, done = AbandonSignal(), threading.Event()

    def publish_three() -> None:
        for index in range(3):
            run(layers, 0, index)
            publisher.publish_gradients(layers, 0, 1, "b", abandon)
        done.set()

    thread = threading.Thread(target=publish_three, daemon=True)
    thread.start()
    assert recorder.two.wait(LONG_S)
    assert not done.wait(0.1) and len(recorder.sent) == 2
    publisher.on_acked(1)
    assert done.wait(LONG_S)
    first, second, third = recorder.paths(0)
    assert first == third != second


def test_waits_end_with_the_epoch(tmp_path: Path) -> None:
    recorder, layers = Recorder(), replicas()
    publisher, abandon = Publisher(recorder.send, tmp_path, "a"), AbandonSignal()
    for index in range(2):
        run(layers, 0, index)
        bundle = publisher.publish_gradients(layers, 0, 1, "b", abandon)
    threading.Timer(0.1, abandon.set, ("epoch 2",)).start()
    run(layers, 0, 2)
    with pytest.raises(EpochAbandoned, match="epoch 2"):
        publisher.publish_gradients(layers, 0, 1, "b", abandon)
    with pytest.raises(EpochAbandoned):
        publisher.wait_acked(bundle, abandon)
    assert len(recorder.sent) == 2
    publisher.publish_gradients(layers, 0, 1, "")  # to the local vault: does not wait
    assert len(set(recorder.paths(0))) == 3
    assert recorder.sent[-1].peer == "" and recorder.sent[-1].copies[0].copy.microbatches == {
        0,
        1,
        2,
    }


def test_the_local_vault_can_always_roll_forward(tmp_path: Path) -> None:
    """After each announcement it has state v and the final gradients of v, or state v+1."""
    with nodes(tmp_path, "a") as (a,):
        abandon, layers = AbandonSignal(), replicas()
        recorder = Recorder()
        publisher = Publisher(recorder.send, tmp_path / "slots", "a")
        final = {0, 1, 2, 3}

        def rollable(version: int) -> bool:
            here = a.vault.inventory()
            for layer in range(3):
                states = {c.step for c in here if c.kind == STATE and c.layer == layer}
                whole = {c.step for c in here if c.layer == layer and c.microbatches == final}
                if version + 1 not in states and not (version in states and version in whole):
                    return False
            return True

        def deliver() -> None:
            for message in recorder.sent:
                a.take(message)
                publisher.on_acked(message.bundle)
            recorder.sent.clear()

        publisher.publish_states(layers, 1, "", abandon=abandon)
        for step in range(5):
            for index in sorted(final):
                run(layers, step, index)
                publisher.publish_gradients(layers, step, 1, "", abandon)
                assert step == 0 or rollable(step - 1)
                deliver()
            assert rollable(step)
            for replica in layers:
                replica.update(replica.gradient.clone(), 1.0, 0.1)
                replica.clear()
            publisher.publish_states(layers, 1, "", abandon=abandon)
            assert rollable(step), "slots are written, the announcement is not read yet"
            deliver()


def test_reduced_gradients_use_rings_of_their_own(pair: list[MiniNode]) -> None:
    a, _ = pair
    publisher, abandon, layers = publisher_of(a), AbandonSignal(), replicas(toy_stack(tied=True))
    tied = [layers[0], layers[2]]
    for step in range(3):
        for index in range(2):
            run(layers, step, index)
            publisher.publish_gradients(layers, step, 1, "b", abandon)
        reduced = {r.index: torch.arange(40.0) + 10 * step + r.index for r in tied} | {
            1: torch.zeros(1)
        }
        copies = items.reduced_gradients(tied, reduced, step)
        bundle = publisher.publish(copies, 1, "b", abandon)
        assert publisher.publish(copies, 1, "b", abandon) == bundle
        publisher.wait_acked(bundle, abandon)
        for r in layers:
            r.clear()
    for node in pair:
        found = [c for c in node.vault.inventory() if c.kind == REDUCED]
        assert sorted((c.step, c.layer) for c in found) == [(1, 0), (1, 2), (2, 0), (2, 2)]
        for copy in found:
            data = torch.frombuffer(bytearray(node.vault.read(copy.key)), dtype=torch.float32)
            assert torch.equal(data, torch.arange(40.0) + 10 * copy.step + copy.layer)
            assert (copy.microbatches, copy.owner, copy.epoch, copy.losses) == (
                frozenset({0, 1}),
                "a",
                1,
                (),
            )
        assert node.vault.check_integrity() == ()
    gradients = [
        (c.layer, c.step, len(c.microbatches)) for c in a.vault.inventory() if c.kind == GRADIENT
    ]
    assert sorted(gradients) == [(n, 2, size) for n in range(3) for size in (1, 2)], (
        "rings of their own"
    )


def test_a_reduced_gradient_waits_for_its_slot(tmp_path: Path) -> None:
    recorder, layers = Recorder(), replicas()
    publisher, abandon = Publisher(recorder.send, tmp_path, "a"), AbandonSignal()
    run(layers, 0, 0)
    for step in range(2):
        copies = items.reduced_gradients(layers[:1], {0: torch.ones(5)}, step)
        publisher.publish(copies, 1, "b", abandon)
    threading.Timer(0.1, abandon.set, ("epoch 2",)).start()
    with pytest.raises(EpochAbandoned, match="epoch 2"):
        copies = items.reduced_gradients(layers[:1], {0: torch.ones(5)}, 2)
        publisher.publish(copies, 1, "b", abandon)
    assert [m.copies[0].copy.step for m in recorder.sent] == [0, 1]
    assert len(set(recorder.paths(0))) == 2


def test_copies_of_an_old_epoch_stay_until_trimmed(pair: list[MiniNode]) -> None:
    a, _ = pair
    publisher, abandon, layers = publisher_of(a), AbandonSignal(), replicas()
    for index in range(2):
        run(layers, 0, index)
        publisher.wait_acked(publisher.publish_gradients(layers, 0, 1, "b", abandon), abandon)
    for epoch in (2, 3):
        for index in range(2):
            run(layers, 0, 10 * epoch + index)
            publisher.wait_acked(
                publisher.publish_gradients(layers, 0, epoch, "b", abandon), abandon
            )
    kept = {c.epoch for c in a.vault.inventory()}
    before = publisher._pool.allocated_bytes
    assert kept == {1, 2, 3} and a.vault.check_integrity() == ()
    a.vault.trim(3)
    for epoch in (4, 5):
        run(layers, 0, 10 * epoch)
        publisher.wait_acked(publisher.publish_gradients(layers, 0, epoch, "b", abandon), abandon)
    assert publisher._pool.allocated_bytes == before, "slots came back"
    with pytest.raises(StaleError):
        publisher.publish_gradients(layers, 0, 4, "b", abandon)


def test_growing_state_gets_bigger_slots(pair: list[MiniNode]) -> None:
    a, _ = pair
    publisher, abandon, layers = publisher_of(a), AbandonSignal(), replicas()
    sizes = [layers[0].state_nbytes()]
    for _ in range(4):
        publisher.wait_acked(publisher.publish_states(layers, 1, "b", abandon=abandon), abandon)
        train(layers, 1)
        sizes.append(layers[0].state_nbytes())
    assert sizes[0] < sizes[1] == sizes[-1]
    newest = max((c for c in a.vault.inventory() if c.layer == 0), key=lambda c: c.step)
    assert newest.step == 3 and a.vault.check_integrity() == ()


def test_a_worker_killed_during_a_copy_loses_only_that_copy(tmp_path: Path) -> None:
    with nodes(tmp_path, "a") as (a,):
        path = str(tmp_path / "agent.sock")
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(path)
        listener.listen(1)
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(p or os.getcwd() for p in sys.path)
        }
        command = [
            sys.executable,
            "-m",
            "tests.worker.backup.interrupted_writer",
            path,
            str(tmp_path / "slots"),
        ]
        pipe = subprocess.PIPE
        worker = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment)
        try:
            a.listen(Channel(listener.accept()[0]))
            for _ in range(3):
                a.acked.get(timeout=LONG_S)
            print("go", file=worker.stdin, flush=True)
            assert worker.stdout is not None and worker.stdout.readline() == "in the middle\n"
        finally:
            worker.send_signal(signal.SIGKILL)
            worker.wait(LONG_S)
            listener.close()
        assert a.ended.wait(LONG_S)
        # Layer 1 was half written over its older gradient; layer 0 was written, not announced.
        assert ledgers(a) == {0: [{0, 1}], 1: [{0, 1}], 2: [{0}, {0, 1}]}
        assert a.vault.check_integrity() == ()
        layers = replicas()
        for index in range(2):
            run(layers, 0, index)
            for copy in (c for c in a.vault.inventory() if len(c.microbatches) == index + 1):
                assert torch.equal(restored(a, copy, layers).gradient, layers[copy.layer].gradient)
