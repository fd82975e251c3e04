"""Copies in a vault after a recovery that failed, because another node was lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from elastic.agent.vault.vault import Vault
from elastic.core.protocol.messages import Published
from elastic.domain.errors import VaultError
from elastic.domain.types import (
    GRADIENT,
    STATE,
    Assignment,
    Copy,
    Pipeline,
    Plan,
    Recipe,
    Stage,
    Unit,
)
from elastic.planning.plan.rank_map import roster
from elastic.worker.backup.protection import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.model.optimizer import adamw
from elastic.worker.recovery.fetch import FetchedCopy
from elastic.worker.recovery.state_loader import StateLoader
from elastic.worker.transport.cancellation import AbandonSignal
from tests.worker.model.toy_model import replicas, run
from tests.worker.recovery.test_state_loader import FakeFetcher

SPEC = adamw(0.01)


def plan(epoch: int) -> Plan:
    pipelines = tuple(
        Pipeline((Stage(Unit(node), 0, 3),), microbatches)
        for node, microbatches in (("a", (0, 1)), ("b", (2, 3)))
    )
    return Plan(epoch, 3, 4, 1, pipelines, gradients="reduce", state="replica")


class LostNode(FakeFetcher):
    """A fetcher that does not find the copies of a lost node."""

    def fetch(self, copy: Copy) -> FetchedCopy:
        if copy.key not in self.held:
            raise VaultError(f"{copy.key}: its node is lost")
        return super().fetch(copy)


class Node:
    """The vault of node b, and the layers of its worker in epoch 1 with their backup."""

    def __init__(self, directory: Path) -> None:
        self.vault = Vault("b", directory / "vault")
        self.publisher = Publisher(self._receive, directory, "b")
        self.layers = replicas(optimizer=SPEC)
        for layer in self.layers:
            layer.owner = "b"
        self.protection = Protection(
            self.publisher, plan(1), "b", self.layers, AbandonSignal(), self._receive, ()
        )

    def _receive(self, message: object) -> None:
        if isinstance(message, Published):
            for local in message.copies:
                self.vault.publish(local)
            self.publisher.on_acked(message.bundle)

    def find(self, kind: str, layer: int, *microbatches: int) -> Copy:
        (copy,) = (
            copy
            for copy in self.vault.inventory()
            if (copy.kind, copy.layer, copy.microbatches) == (kind, layer, frozenset(microbatches))
        )
        return copy

    def copies(self, epoch: int, kind: str = GRADIENT) -> list[tuple[int, list[int]]]:
        """(layer, ledger) of the copies of `epoch`."""
        found = [c for c in self.vault.inventory() if (c.epoch, c.kind) == (epoch, kind)]
        return sorted((copy.layer, sorted(copy.microbatches)) for copy in found)

    def recover(self, epoch: int, fetcher: FakeFetcher, *recipes: Recipe) -> None:
        assignment = Assignment(plan(epoch), 0, tuple(("b", recipe) for recipe in recipes))
        member = roster(assignment.plan).members[1]
        live = StateLoader.usable(assignment, member, {r.index: r for r in self.layers})
        self.protection.release(live, epoch)
        loader = StateLoader(
            lambda layer, empty, portion: replicas(optimizer=SPEC, empty=empty)[layer],
            fetcher, SPEC.lr, lambda: None, (),
        )  # fmt: skip
        loader.install(assignment, member, live)


def trained(directory: Path) -> Node:
    """Epoch 1 has ended: micro-batches 0 and 2 are in the common sums, 3 in the own ones."""
    node = Node(directory)
    node.protection.enter()
    run(node.layers, 0, 2)
    theirs = replicas(optimizer=SPEC)
    run(theirs, 0, 0)
    for mine, other in zip(node.layers, theirs, strict=True):
        part = mine.start_round()
        losses = {**part.losses, **other.losses}
        mine.finish_round(part.gradient + other.gradient, {0, 2}, losses)
    run(node.layers, 0, 3)
    node.protection.flush()
    return node


def test_a_failed_recovery_overwrites_no_copies(tmp_path: Path) -> None:
    """Node a keeps the common sum of layer 0, and b gets micro-batch 1 of a former holder. Then the
    node with layer 1 is lost. If it is a, the next recovery needs the common sum of b."""
    node, fetcher = trained(tmp_path), LostNode()
    before = [(layer, ledger) for layer in range(3) for ledger in ([0, 2], [3])]
    assert node.copies(1) == before
    run(others := replicas(optimizer=SPEC), 0, 1)
    foreign = others[0]
    data = torch.empty(foreign.gradient_nbytes, dtype=torch.uint8)
    foreign.write_gradient(data)
    moved = fetcher.put(GRADIENT, foreign, data, microbatches=frozenset({1}), node="f", owner="f")
    gone = fetcher.put(STATE, node.layers[1], torch.zeros(64, dtype=torch.uint8), step=1, node="d")
    del fetcher.held[gone.key]

    own, state = node.find(GRADIENT, 0, 3), node.find(STATE, 0)
    first = Recipe(0, 0, 0, state, gradients=(own, moved))
    with pytest.raises(VaultError, match="its node is lost"):
        node.recover(2, fetcher, first, Recipe(1, 0, 1, gone))
    node.protection.flush()
    assert node.copies(1) == before
    assert node.copies(2) == [(0, [1, 3])], "the former holder may be the next node that is lost"
    assert node.copies(2, STATE) == [], "equal copies are not made again"
