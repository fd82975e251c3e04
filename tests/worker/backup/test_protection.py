"""The copies of a worker in an epoch, and the report that its layers are protected."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from elastic.core.protocol import messages as m
from elastic.domain.types import UPDATE, Pipeline, Plan, Stage, Unit
from elastic.worker.backup.protection import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.transport.cancellation import AbandonSignal, EpochAbandoned
from tests.worker.model.toy_model import replicas

PLAN = Plan(
    3, 3, 2, 1, (Pipeline((Stage(Unit("a"), 0, 3),), (0, 1)),), spares=("b",), peers=(("a", "b"),)
)


class Agent:
    """Records the worker's messages; acknowledges bundles on request."""

    def __init__(self, directory: Path, state: str = "snapshot") -> None:
        self.said: list[object] = []
        self.publisher = Publisher(self.send, directory, "a")
        self.layers = replicas()
        plan = replace(PLAN, state=state)
        self.protection = Protection(
            self.publisher, plan, "a", self.layers, AbandonSignal(), self.send, ()
        )

    def send(self, message: object) -> None:
        self.said.append(message)

    def ack(self, *, kept: bool = True) -> None:
        bundle = max(message.bundle for message in self.said if isinstance(message, m.Published))
        self.publisher.on_acked(bundle)
        self.protection.on_acked(bundle, kept)

    @property
    def protected(self) -> bool:
        return m.Protected(PLAN.epoch) in self.said


def test_layers_are_protected_once_the_first_copies_are_whole(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.protection.enter()
    assert not agent.protected
    agent.ack()
    assert agent.protected
    agent.protection.after_update()
    assert agent.said.count(m.Protected(PLAN.epoch)) == 1


def test_refused_first_copies_delay_the_report_by_two_updates(tmp_path: Path) -> None:
    """Survivors keep two versions: after two updates the older copies are useless."""
    agent = Agent(tmp_path)
    agent.protection.enter()
    agent.ack(kept=False)
    assert not agent.protected
    for done in (1, 2):
        for layer in agent.layers:
            layer.version = done
        agent.protection.after_update()
        agent.ack()
        assert agent.protected == (done == 2)


def test_a_later_refusal_does_not_change_the_report(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.protection.enter()
    agent.ack()
    for layer in agent.layers:
        layer.version = 1
    agent.protection.after_update()
    agent.ack(kept=False)
    assert agent.protected


def step(agent: Agent, *, room: bool = True) -> tuple[set[int], set[int]]:
    """Do one update; return the layers whose updates and whose states went to the peer."""
    heard = len(agent.said)
    reduced = {layer.index: layer.gradient for layer in agent.layers}
    agent.protection.before_update(reduced, 1.0)
    agent.ack(kept=room)
    for layer in agent.layers:
        layer.version += 1
    agent.protection.after_update()
    agent.ack()
    away = [msg for msg in agent.said[heard:] if isinstance(msg, m.Published) and msg.peer]
    copies = [local.copy for message in away for local in message.copies]
    updates = {c.layer for c in copies if c.kind == UPDATE}
    return updates, {c.layer for c in copies if c.kind != UPDATE}


def test_replay_sends_all_updates_and_takes_turns_with_states(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "replay:4")
    agent.protection.enter()
    first = [msg for msg in agent.said if isinstance(msg, m.Published)]
    assert [(msg.peer, len(msg.copies)) for msg in first] == [("b", 3)], (
        "an epoch begins with whole states"
    )
    agent.ack()
    assert agent.protected
    found = [step(agent) for _ in range(8)]
    assert all(updates == {0, 1, 2} for updates, _ in found)
    assert [whole for _, whole in found] == 2 * [set(), {2}, {1}, {0}]


def test_local_states_are_whole_after_every_update(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "replay")
    agent.protection.enter()
    agent.ack()
    for version in range(1, 5):
        step(agent)
        published = [msg for msg in agent.said if isinstance(msg, m.Published)]
        states = {c.copy.layer for msg in published for c in msg.copies if c.copy.step == version}
        assert states == {0, 1, 2}


def test_a_refused_update_is_followed_by_whole_states(tmp_path: Path) -> None:
    """A gap ends the chain of updates, so it begins anew, once."""
    agent = Agent(tmp_path, "replay:8")
    agent.protection.enter()
    agent.ack()
    step(agent)
    assert step(agent, room=False)[1] == {0, 1, 2}
    assert step(agent)[1] == set()


def test_a_commit_waits_for_the_updates_of_the_step_before(tmp_path: Path) -> None:
    agent = Agent(tmp_path, "replay:8")
    agent.protection.enter()
    agent.ack()
    agent.protection.before_update({layer.index: layer.gradient for layer in agent.layers}, 1.0)
    for layer in agent.layers:
        layer.version += 1
    agent.protection.after_update()
    abandon = agent.protection._abandon
    abandon.set("epoch 4")
    with pytest.raises(EpochAbandoned):
        agent.protection.before_commit(1, {})
    agent.ack()
    agent.protection.before_commit(1, {})
