"""What a worker publishes in an epoch, and when it says that its layers are protected."""

from __future__ import annotations

from pathlib import Path

from elastic.core import messages as m
from elastic.core.types import Pipeline, Plan, Stage, Unit
from elastic.worker.abandon import Abandon
from elastic.worker.backup import Publisher
from elastic.worker.protection import Protection
from tests.model.toys import replicas

PLAN = Plan(3, 3, 2, 1, (Pipeline((Stage(Unit("a"), 0, 3),), (0, 1)),), spares=("b",), peers=(("a", "b"),))


class Agent:
    """Hears what the worker says; acknowledges when told to."""

    def __init__(self, directory: Path) -> None:
        self.said: list[object] = []
        self.publisher = Publisher(self, directory, "a")
        self.layers = replicas()
        self.protection = Protection(self.publisher, PLAN, "a", self.layers, Abandon(), self.send, ())

    def send(self, message: object) -> None:
        self.said.append(message)

    def ack(self, *, kept: bool = True) -> None:
        bundle = max(message.bundle for message in self.said if isinstance(message, m.Published))
        self.publisher.on_acked(bundle)
        self.protection.on_acked(bundle, kept)

    @property
    def protected(self) -> bool:
        return m.Protected(PLAN.epoch) in self.said


def test_layers_are_protected_when_the_first_copies_are_whole(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.protection.enter()
    assert not agent.protected
    agent.ack()
    assert agent.protected
    agent.protection.after_update()
    assert agent.said.count(m.Protected(PLAN.epoch)) == 1


def test_older_copies_are_given_away_only_when_useless_if_the_new_ones_found_no_room(tmp_path: Path) -> None:
    """Survivors keep two versions: after two updates the old copies lead nowhere, and may make room."""
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


def test_a_later_copy_without_room_changes_nothing(tmp_path: Path) -> None:
    agent = Agent(tmp_path)
    agent.protection.enter()
    agent.ack()
    for layer in agent.layers:
        layer.version = 1
    agent.protection.after_update()
    agent.ack(kept=False)
    assert agent.protected
