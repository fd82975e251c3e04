"""Copies of a worker under `reduce`: the common sum of all holders, and its own sum."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from elastic.core.protocol.messages import Protected
from elastic.domain.types import (
    GRADIENT,
    REDUCED,
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
from elastic.worker.model.layers import Tied
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.recovery.state_loader import StateLoader
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal
from tests.agent.vault.nodes import MiniNode, nodes
from tests.worker.model.toy_model import replicas, run, toy_stack

M = 4


@pytest.fixture
def node(tmp_path: Path) -> Iterator[MiniNode]:
    with nodes(tmp_path, "a") as made:
        yield made[0]


def plan(epoch: int = 1) -> Plan:
    pipelines = tuple(Pipeline((Stage(Unit(name), 0, 3),), ()) for name in ("a", "b"))
    return Plan(
        epoch,
        3,
        M,
        1,
        pipelines,
        peers=(("a", "b"), ("b", "a")),
        gradients="reduce",
        state="replica",
    )


class Worker:
    """Layers of node a with their backup, in one epoch."""

    def __init__(self, node: MiniNode, tied: Tied = ()) -> None:
        self.layers = replicas(toy_stack(tied=bool(tied)))
        for layer in self.layers:
            layer.owner = "a"
        self.publisher = Publisher(node.worker_channel().send, node.directory / "slots", "a")
        self.sent: list[object] = []
        self.abandon = AbandonSignal()
        self.protection = self._protection(1, tied)
        node.on_acked = self._on_acked

    def _protection(self, epoch: int, tied: Tied = ()) -> Protection:
        return Protection(
            self.publisher, plan(epoch), "a", self.layers, self.abandon, self.sent.append, tied
        )

    def _on_acked(self, bundle: int) -> None:
        self.publisher.on_acked(bundle)
        self.protection.on_acked(bundle)

    def finish_round(self, *theirs: int) -> None:
        """A round with all micro-batches of this holder, and with `theirs` of the other one."""
        for layer in self.layers:
            sent = layer.start_round()
            total, losses = sent.gradient.clone(), dict(sent.losses)
            for index in theirs:
                other = alone(layer.index, index)
                total += other.gradient
                losses |= other.losses
            layer.finish_round(total, sent.ledger | set(theirs), losses)

    def flush(self) -> None:
        self.protection.flush()
        self.publisher.wait_acked(self.publisher._bundle, self.abandon)

    def next_epoch(self, epoch: int) -> None:
        self.protection = self._protection(epoch)


def alone(layer: int, index: int, step: int = 0) -> LayerReplica:
    layers = replicas()
    run(layers, step, index)
    return layers[layer]


def gradients(node: MiniNode, layer: int = 2) -> list[tuple[int, list[int]]]:
    found = [c for c in node.vault.inventory() if (c.kind, c.layer) == (GRADIENT, layer)]
    return sorted((c.step, sorted(c.microbatches)) for c in found)


def fetched(node: MiniNode, copy: Copy) -> LayerReplica:
    fetcher, fresh = Fetcher("a", {"a": node.server.address}), replicas(empty=True)[copy.layer]
    fresh.add_gradient(fetcher.fetch(copy).data, copy.microbatches, copy.losses)
    fetcher.close()
    return fresh


def test_both_sums_are_copied_with_their_losses(node: MiniNode) -> None:
    worker = Worker(node)
    run(worker.layers, 0, 0)
    worker.finish_round(2)
    run(worker.layers, 0, 1)
    for layer in worker.layers:
        layer.start_round()  # The epoch ends during this round.
    run(worker.layers, 0, 3)
    worker.flush()
    assert gradients(node, 0) == gradients(node) == [(0, [0, 2]), (0, [1, 3])]
    for copy in (c for c in node.vault.inventory() if c.kind == GRADIENT):
        single = [alone(copy.layer, index) for index in sorted(copy.microbatches)]
        found = fetched(node, copy)
        total = torch.stack([one.gradient for one in single]).sum(0)
        assert torch.equal(found.gradient, total)
        assert found.losses == {index: loss for one in single for index, loss in one.losses.items()}
    before = node.vault.inventory()
    worker.flush()
    assert node.vault.inventory() == before


def test_a_fault_between_two_layers_updates_keeps_both_versions(node: MiniNode) -> None:
    """Layers that are not updated yet keep the whole sum of their step."""
    worker = Worker(node)
    run(worker.layers, 0, 0)
    worker.finish_round(1, 2, 3)
    first = worker.layers[0]
    assert first.common is not None
    first.update(first.common.gradient, 1.0, 0.1)
    first.clear()
    worker.flush()
    assert gradients(node, 0) == [] and gradients(node, 1) == gradients(node) == [(0, [0, 1, 2, 3])]
    states = {(c.layer, c.step) for c in node.vault.inventory() if c.kind == STATE}
    assert states == {(0, 1), (1, 0), (2, 0)}


def test_reduced_gradients_of_tied_tensors_stay_in_the_local_vault(node: MiniNode) -> None:
    worker = Worker(node, (((0, "inner.weight"), (2, "inner.weight")),))
    run(worker.layers, 0, 0)
    worker.finish_round(1, 2, 3)
    sums = {la.index: la.common.gradient for la in worker.layers if la.common is not None}
    worker.protection.settle()
    worker.protection.before_commit(0, sums)
    kept = [(c.layer, sorted(c.microbatches)) for c in node.vault.inventory() if c.kind == REDUCED]
    assert kept == [(0, [0, 1, 2, 3]), (2, [0, 1, 2, 3])]


def test_the_report_waits_until_all_holders_have_recovered_microbatches(node: MiniNode) -> None:
    worker = Worker(node)
    worker.protection.after_microbatch(0)
    worker.publisher.wait_acked(worker.publisher._bundle, worker.abandon)
    assert worker.sent == []
    worker.protection.settle()
    assert worker.sent == [Protected(1)]
    worker.protection.settle()
    assert worker.sent == [Protected(1)]


@pytest.mark.parametrize("taken", [((0, 2), (1,)), ((0, 2),), ((1,),), ()])
def test_the_next_epoch_keeps_the_sums_that_its_recipe_names(
    node: MiniNode, taken: tuple[tuple[int, ...], ...]
) -> None:
    worker = Worker(node)
    run(worker.layers, 0, 0)
    worker.finish_round(2)
    run(worker.layers, 0, 1)
    worker.flush()
    inventory = node.vault.inventory()
    recipes = []
    for layer in worker.layers:
        copies = [c for c in inventory if c.kind == GRADIENT and c.layer == layer.index]
        mine = tuple(c for c in copies if tuple(sorted(c.microbatches)) in taken)
        recipes.append(("a", Recipe(layer.index, 0, 0, gradients=mine)))
    member = roster(plan(2)).members[0]
    fetcher = Fetcher("a", {})  # A fetch would fail: all sums are live.
    loader = StateLoader(
        lambda layer, empty, portion: replicas()[layer],
        fetcher,
        lambda step: 0.1,
        lambda: None,
        (),
    )
    live = {layer.index: layer for layer in worker.layers}
    loaded = loader.install(Assignment(plan(2), 0, recipes=tuple(recipes)), member, live)
    held = {index for part in taken for index in part}
    for layer in loaded.replicas:
        assert layer is live[layer.index] and layer.ledger == held and layer.common is None
        expected = sum(
            (alone(layer.index, i).gradient for i in held), torch.zeros_like(layer.gradient)
        )
        assert torch.equal(layer.gradient, expected)
