"""Logged messages: written by the sender, kept until the update of their step, then dropped."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.agent.vault.replicator import Replicator
from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import Published
from elastic.domain.errors import VaultError, VaultFull
from elastic.domain.types import ACTIVATION, COTANGENT, GRADIENT, LOGS, STATE, Copy
from elastic.store.shared_memory import slot_capacity
from elastic.worker.backup.activation_log import ActivationLog, LoggedMessage, read_message
from elastic.worker.backup.items import PendingCopy
from elastic.worker.backup.publisher import Publisher
from elastic.worker.model.values import Message
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from tests.agent.vault.copies import LocalWriter, content, make
from tests.agent.vault.nodes import MiniNode, nodes
from tests.patience import LONG_S
from tests.worker.model.toy_model import replicas, run

M = 4


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MiniNode]:
    with nodes(tmp_path, "a") as made:
        yield made[0]


def publisher_of(node: MiniNode) -> Publisher:
    publisher = Publisher(node.worker_channel().send, node.directory / "slots", node.name)
    node.on_acked = publisher.on_acked
    return publisher


def message(kind: str, step: int, index: int) -> LoggedMessage:
    tensor = torch.full((3, 2, 5), float(100 * step + index), dtype=torch.bfloat16)
    layer = 2 if kind == ACTIVATION else 1
    return LoggedMessage(kind, layer, step, index, Message.of(tensor))


def log_step(log: ActivationLog, step: int, abandon: AbandonSignal) -> None:
    for index in range(M):
        log.keep(message(ACTIVATION, step, index))
        log.keep(message(COTANGENT, step, index))
        log.flush(abandon)


def settle(node: MiniNode, bundles: int) -> None:
    for _ in range(bundles):
        node.acked.get(timeout=LONG_S)


def found(vault: Vault) -> set[tuple[str, int, int]]:
    logged = [copy for copy in vault.inventory() if copy.kind in LOGS]
    return {(c.kind, c.step, index) for c in logged for index in c.microbatches}


def everything(step: int) -> set[tuple[str, int, int]]:
    return {(kind, step, m) for kind, m in itertools.product(LOGS, range(M))}


def test_all_messages_of_two_steps_are_kept(node: MiniNode) -> None:
    publisher, abandon = publisher_of(node), AbandonSignal()
    log = ActivationLog(publisher, 1)
    log_step(log, 0, abandon)
    settle(node, M)
    assert found(node.vault) == everything(0)
    fetcher = Fetcher("a", {"a": node.server.address})
    for copy in node.vault.inventory():
        tensor = read_message(fetcher.fetch(copy).data).tensor
        assert torch.equal(tensor, message(copy.kind, 0, *copy.microbatches).message.tensor)
    fetcher.close()
    for step in (1, 2, 3):
        log_step(log, step, abandon)
        settle(node, M)
        assert found(node.vault) == everything(step - 1) | everything(step)
    assert publisher._pool.allocated_bytes == sum(
        p.stat().st_size - 64 for p in (node.directory / "slots").iterdir()
    )
    assert len(list((node.directory / "slots").iterdir())) == 2 * 2 * M


def test_the_end_of_an_epoch_announces_pending_messages(node: MiniNode) -> None:
    log, abandon = ActivationLog(publisher_of(node), 1), AbandonSignal()
    log_step(log, 0, abandon)
    settle(node, M)
    abandon.set("epoch 2")
    log.keep(message(ACTIVATION, 1, 0))
    log.flush(None)
    log.flush(None)
    settle(node, 1)
    assert (ACTIVATION, 1, 0) in found(node.vault)


def test_messages_in_memory_are_written_when_the_epoch_ends(node: MiniNode) -> None:
    log, abandon = ActivationLog(publisher_of(node), 1, in_memory=True), AbandonSignal()
    for step in range(4):
        log_step(log, step, abandon)
    assert not found(node.vault) and node.acked.empty()
    log.flush(None)
    settle(node, 2)
    assert found(node.vault) == everything(2) | everything(3)


def test_an_abandoned_flush_is_completed_when_the_epoch_ends(tmp_path: Path) -> None:
    """A flush waits for unacknowledged slots until the epoch ends, and loses no message."""

    class SilentAgent:
        def __init__(self) -> None:
            self.sent: list[Copy] = []

        def send(self, published: object) -> None:
            self.sent += [local.copy for local in published.copies]  # type: ignore[attr-defined]

    channel, abandon = SilentAgent(), AbandonSignal()
    log = ActivationLog(Publisher(channel.send, tmp_path / "slots", "a"), 1)
    log_step(log, 0, abandon)
    log_step(log, 1, abandon)
    abandon.set("epoch 2")
    log.keep(message(ACTIVATION, 2, 0))
    log.keep(message(ACTIVATION, 2, 1))
    with pytest.raises(EpochAbandoned):
        log.flush(abandon)
    log.flush(None)
    assert [(c.step, *c.microbatches) for c in channel.sent[4 * M :]] == [(2, 0), (2, 1)]


def test_training_continues_without_the_log_if_memory_is_short(
    node: MiniNode, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    publisher, abandon = publisher_of(node), AbandonSignal()
    log = ActivationLog(publisher, 1)

    def full(nbytes: int) -> None:
        raise VaultFull("no room")

    monkeypatch.setattr(publisher._pool, "take", full)
    log_step(log, 0, abandon)
    assert not found(node.vault) and caplog.text.count("not logged any more") == 1


def test_logged_messages_make_room_for_gradients(
    node: MiniNode, caplog: pytest.LogCaptureFixture
) -> None:
    """If they fill the memory, the vault drops them for a gradient, and no more are written."""
    publisher, abandon, layers = publisher_of(node), AbandonSignal(), replicas()
    log = ActivationLog(publisher, 1)
    log_step(log, 0, abandon)
    settle(node, M)
    assert found(node.vault)
    run(layers, 0, 0)
    publisher._pool.limit = publisher._pool.allocated_bytes + layers[0].gradient_nbytes - 1
    publisher.wait_acked(publisher.publish_gradients(layers[:1], 0, 1, "", abandon), abandon)
    assert not found(node.vault)
    assert [copy.kind for copy in node.vault.inventory()] == [GRADIENT]
    node.vault.check_integrity()
    log_step(log, 1, abandon)
    assert not found(node.vault) and caplog.text.count("not logged any more") == 1


class SlowAgent:
    """An agent that reads the announcements of one worker only when it is told to."""

    def __init__(self, directory: Path) -> None:
        self._unread: list[Published] = []
        self.problems: list[str] = []
        """Announced copies that are not there; an agent would kill its workers."""
        self.vault = Vault("a", directory / "vault")
        self.publisher = Publisher(self._unread.append, directory / "slots", "a", silence_s=2.0)

    def has_room_for(self, messages: int) -> None:
        """Limit the memory of the worker's slots."""
        nbytes = message(ACTIVATION, 0, 0).nbytes
        self.publisher._pool.limit = messages * slot_capacity(nbytes)

    def read(self) -> None:
        """Index and acknowledge all announced copies, as an agent does."""
        while self._unread:
            published = self._unread.pop(0)
            for local in published.copies:
                try:
                    self.vault.publish(local)
                except VaultError as error:
                    self.problems.append(str(error))
            self.publisher.on_acked(published.bundle)


def a_state() -> PendingCopy:
    """A state with as many bytes as a message."""
    one = message(ACTIVATION, 0, 0)
    return PendingCopy(STATE, 2, 0, one.nbytes, one.write)


def test_messages_that_do_not_fit_take_no_slot_of_their_own_bundle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A step's messages are one bundle. The fourth finds no room, so none is announced, and the
    slots of the others make room for a state."""
    agent = SlowAgent(tmp_path)
    agent.has_room_for(messages=3)
    log = ActivationLog(agent.publisher, 1, in_memory=True)
    for index in range(M):
        log.keep(message(ACTIVATION, 0, index))
    log.flush(None)
    agent.publisher.publish([a_state()], 1, "", None)
    agent.read()
    assert not agent.problems
    assert [copy.kind for copy in agent.vault.inventory()] == [STATE]
    assert caplog.text.count("not logged any more") == 1


@pytest.mark.parametrize("ended", [True, False], ids=["epoch-ended", "in-training"])
def test_announced_messages_make_room_only_when_the_agent_has_read_them(
    tmp_path: Path, ended: bool
) -> None:
    """Else the agent would look for a message in a slot that holds a state."""
    agent, abandon = SlowAgent(tmp_path), None if ended else AbandonSignal()
    agent.has_room_for(messages=3)
    log = ActivationLog(agent.publisher, 1)
    for index in range(3):
        log.keep(message(ACTIVATION, 0, index))
    log.flush(abandon)
    reading = threading.Timer(0.05, agent.read)
    reading.start()
    agent.publisher.publish([a_state()], 1, "", abandon)
    reading.join()
    agent.read()
    assert not agent.problems
    assert [copy.kind for copy in agent.vault.inventory()] == [STATE]


def test_messages_stay_if_the_agent_does_not_read(tmp_path: Path) -> None:
    """The end of an epoch does not wait for ever. The agent finds all that was announced."""
    agent = SlowAgent(tmp_path)
    agent.has_room_for(messages=3)
    log = ActivationLog(agent.publisher, 1)
    for index in range(3):
        log.keep(message(ACTIVATION, 0, index))
    log.flush(None)
    with pytest.raises(VaultFull, match="no room"):
        agent.publisher.publish([a_state()], 1, "", None)
    agent.read()
    assert not agent.problems
    assert found(agent.vault) == {(ACTIVATION, 0, index) for index in range(3)}


@pytest.mark.parametrize("dropped", [True, False], ids=["dropped", "queued"])
def test_messages_behind_a_held_bundle_make_room_at_a_halt(tmp_path: Path, dropped: bool) -> None:
    """A bundle for a dead peer is held, so those of the messages are never acknowledged."""

    def publish(published: Published) -> None:
        for local in published.copies:
            vault.publish(local)
        replicator.submit(0, published)

    def answer(_: int, bundle: int, kept: bool) -> None:
        publisher.on_acked(bundle, kept)

    vault, abandon, one = Vault("a", tmp_path / "vault"), AbandonSignal(), a_state()
    publisher = Publisher(publish, tmp_path / "slots", "a", silence_s=2.0)
    publisher._pool.limit = 4 * slot_capacity(one.nbytes)
    replicator = Replicator(vault, answer, lambda *_: None)
    gradient = PendingCopy(GRADIENT, 2, 0, one.nbytes, one.write, frozenset({0}))
    publisher.publish([gradient], 1, "b", abandon)
    log = ActivationLog(publisher, 1)
    for index in range(3):
        log.keep(message(ACTIVATION, 0, index))
    log.flush(abandon)
    assert replicator.pending == 2
    if dropped:
        replicator.reset(2)
    publisher.publish([a_state()], 1, "", None)
    assert dropped or publisher._acked == 0, "the peer does not have the gradient"
    assert {copy.kind for copy in vault.inventory()} == {GRADIENT, STATE}
    assert vault.check_integrity() == ()
    replicator.close()


def test_the_next_epoch_logs_messages_again(node: MiniNode) -> None:
    publisher, abandon, layers = publisher_of(node), AbandonSignal(), replicas()
    log_step(ActivationLog(publisher, 1), 0, abandon)
    settle(node, M)
    run(layers, 0, 0)
    publisher._pool.limit = publisher._pool.allocated_bytes + layers[0].gradient_nbytes - 1
    publisher.wait_acked(publisher.publish_gradients(layers[:1], 0, 1, "", abandon), abandon)
    settle(node, 1)
    publisher._pool.limit = 0
    log_step(ActivationLog(publisher, 2), 0, abandon)
    settle(node, M)
    assert found(node.vault) == everything(0)


def messages_of(writer: LocalWriter, vault: Vault, step: int, epoch: int) -> None:
    for number, index in enumerate(range(M)):
        data = content(10 * step + index)
        copy = make(
            data, kind=ACTIVATION, layer=2, step=step, epoch=epoch, microbatches=frozenset({index})
        )
        vault.publish(writer.write(100 * epoch + number, copy, data))


def state_of(writer: LocalWriter, vault: Vault, step: int, epoch: int) -> None:
    data = content(step)
    vault.publish(writer.write(1000 + epoch, make(data, kind=STATE, step=step, epoch=epoch), data))


def test_messages_of_the_running_step_survive_trims_until_its_update(tmp_path: Path) -> None:
    vault, writer = Vault("b", tmp_path / "vault"), LocalWriter(tmp_path / "worker")
    messages_of(writer, vault, 7, 1)
    state_of(writer, vault, 7, 1)
    state_of(writer, vault, 7, 2)
    vault.trim(2, 7)
    assert {(c.step, c.epoch) for c in vault.inventory()} == {(7, 1), (7, 2)}
    assert len(found(vault)) == M and vault.check_integrity() == ()
    messages_of(writer, vault, 7, 2)
    vault.trim(3, 7)
    assert len(found(vault)) == M and len(vault.inventory()) == 2 * M
    state_of(writer, vault, 7, 3)
    assert len(found(vault)) == M, "a copy of the same version keeps them"
    state_of(writer, vault, 8, 3)
    assert not found(vault)
    released = [writer.slots[100 * epoch + i].sequence for epoch in (1, 2) for i in range(M)]
    assert not any(released), "the slots are released to their writer"
    messages_of(writer, vault, 8, 3)
    assert len(found(vault)) == M and vault.check_integrity() == ()


@pytest.mark.parametrize("step", [6, 8, -1])
def test_messages_of_other_steps_are_trimmed_with_their_epoch(step: int, tmp_path: Path) -> None:
    vault, writer = Vault("b", tmp_path / "vault"), LocalWriter(tmp_path / "worker")
    messages_of(writer, vault, 7, 1)
    vault.trim(2, step)
    assert not vault.inventory() and not any(slot.sequence for slot in writer.slots.values())


def test_a_trim_after_the_update_leaves_nothing(tmp_path: Path) -> None:
    vault, writer = Vault("b", tmp_path / "vault"), LocalWriter(tmp_path / "worker")
    messages_of(writer, vault, 7, 1)
    state_of(writer, vault, 8, 2)
    vault.trim(2, 7)
    assert not found(vault) and len(vault.inventory()) == 1
