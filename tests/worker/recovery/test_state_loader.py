"""Layers that the state loader builds from copies."""

from __future__ import annotations

import math
import threading
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from elastic.domain.checksum import copy_checksum
from elastic.domain.errors import VaultError
from elastic.domain.types import (
    GRADIENT,
    STATE,
    UPDATE,
    Assignment,
    Copy,
    Pipeline,
    Plan,
    Recipe,
    Stage,
    StepRecord,
    Unit,
)
from elastic.planning.plan.rank_map import roster
from elastic.store.shared_memory import checksum
from elastic.worker.model.optimizer import adamw
from elastic.worker.recovery.fetch import FetchedCopy, Fetcher
from elastic.worker.recovery.state_loader import LoadedStage, StateLoader
from elastic.worker.replica.replica import SKIPPED, LayerReplica
from tests.patience import LONG_S
from tests.worker.model.toy_model import replicas, run, same, state_of, values

SPEC = adamw(0.01)
PLAN = Plan(1, 3, 4, 1, (Pipeline((Stage(Unit("x"), 0, 3),), (0, 1, 2, 3)),))


class FakeFetcher(Fetcher):
    """A fetcher with the copies in memory."""

    def __init__(self) -> None:
        super().__init__("x", {})
        self.held: dict[str, Tensor] = {}
        self.read: list[str] = []

    def put(self, kind: str, replica: LayerReplica, data: Tensor, **more: object) -> Copy:
        digest = checksum(memoryview(data.numpy().data))
        copy = Copy(
            kind,
            replica.index,
            0,
            replica.version,
            1,
            f"n{replica.index}",
            1,
            len(data),
            "",
            node="k",
        )
        copy = replace(copy, **more)  # type: ignore[arg-type]
        copy = replace(copy, checksum=copy_checksum(copy, digest))
        self.held[copy.key] = data
        return copy

    def fetch(self, copy: Copy) -> FetchedCopy:
        self.read.append(copy.key)
        return FetchedCopy(self.held[copy.key], "peer:k")


def install(fetcher: FakeFetcher, recipe: Recipe, record: StepRecord | None = None) -> LoadedStage:
    loader = StateLoader(
        lambda layer, empty, portion: replicas(optimizer=SPEC, empty=empty)[layer],
        fetcher, SPEC.lr, lambda: None, (),
    )  # fmt: skip
    return loader.install(
        Assignment(PLAN, 1, (("x", recipe),), record=record), roster(PLAN).members[0], {}
    )


@pytest.fixture
def trained() -> list[LayerReplica]:
    layers = replicas(optimizer=SPEC)
    for index in range(4):
        run(layers, 0, index)
    for layer in layers:
        layer.update(layer.gradient.clone(), 1.0, SPEC.lr(0))
        layer.clear()
    return layers


@pytest.mark.parametrize("lost", range(3))
def test_a_lost_layer_is_restored_bit_for_bit(trained: list[LayerReplica], lost: int) -> None:
    fetcher = FakeFetcher()
    installed = install(
        fetcher, Recipe(lost, 0, 1, fetcher.put(STATE, trained[lost], state_of(trained[lost])))
    )
    assert installed.sources[lost] == "peer:k" and installed.replicas[lost].version == 1
    assert same(values([installed.replicas[lost]]), values([trained[lost]]))
    assert bytes(state_of(installed.replicas[lost]).numpy()) == bytes(
        state_of(trained[lost]).numpy()
    )


def test_a_skipped_update_is_skipped_again() -> None:
    """From the gradients, whose record says so, and from the copy of an update."""
    layers, fetcher = replicas(optimizer=SPEC), FakeFetcher()
    lost = layers[1]
    state = fetcher.put(STATE, lost, state_of(lost))
    lost.accumulator.add([torch.full_like(p, torch.nan) for p in lost.parameters])
    lost.ledger |= set(range(4))
    data = torch.empty(lost.gradient_nbytes, dtype=torch.uint8)
    lost.write_gradient(data)
    final = fetcher.put(GRADIENT, lost, data, microbatches=frozenset(range(4)))
    skipped = torch.frombuffer(bytearray(SKIPPED), dtype=torch.uint8)
    update = fetcher.put(UPDATE, lost, skipped)
    lost.skip_update()
    record = StepRecord(0, 1.0, math.nan, 1.0, skipped=True)
    for recipe in (
        Recipe(1, 0, 1, state, replay=(final,)),
        Recipe(1, 0, 1, state, updates=(update,)),
    ):
        (replica,) = [r for r in install(fetcher, recipe, record).replicas if r.index == 1]
        assert replica.version == 1 and not replica.ledger
        assert bytes(state_of(replica).numpy()) == bytes(state_of(lost).numpy())


class StallingFetcher(FakeFetcher):
    """A fetcher whose first copy is gone, and whose other fetches last until it is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.busy, self.closed = threading.Barrier(4), threading.Event()

    def fetch(self, copy: Copy) -> FetchedCopy:
        self.read.append(copy.key)
        if copy.kind == STATE:
            self.busy.wait(LONG_S)
            raise VaultError("the copy is gone")
        if len(self.read) <= 4:
            self.busy.wait(LONG_S)
        assert self.closed.wait(LONG_S)
        return super().fetch(copy)

    def close(self) -> None:
        self.closed.set()


def test_a_failure_is_reported_before_other_fetches_end(trained: list[LayerReplica]) -> None:
    fetcher, layer = StallingFetcher(), trained[0]
    state = fetcher.put(STATE, layer, state_of(layer))
    later = [fetcher.put(GRADIENT, layer, state_of(layer), sequence=n + 2) for n in range(20)]
    with pytest.raises(VaultError, match="the copy is gone"):
        install(fetcher, Recipe(0, 0, 1, state, gradients=tuple(later)))
    assert fetcher.closed.is_set() and len(fetcher.read) < 10, "the rest was cancelled"


def test_a_live_layer_that_diverged_is_not_kept() -> None:
    live = {replica.index: replica for replica in replicas(optimizer=SPEC)}
    member = roster(PLAN).members[0]
    assignment = Assignment(PLAN, 0, reload=(("x", 1, 0), ("y", 2, 0)))
    assert StateLoader.usable(assignment, member, live).keys() == {0, 2}


def test_a_lost_layer_is_restored_and_then_updated() -> None:
    layers, fetcher = replicas(optimizer=SPEC), FakeFetcher()
    state = fetcher.put(STATE, layers[1], state_of(layers[1]))
    for index in range(4):
        run(layers, 0, index)
    lost = layers[1]
    data = torch.empty(lost.gradient_nbytes, dtype=torch.uint8)
    lost.write_gradient(data)
    final = fetcher.put(GRADIENT, lost, data, microbatches=frozenset(range(4)))
    lost.update(lost.gradient.clone(), 0.5, SPEC.lr(0))
    installed = install(fetcher, Recipe(1, 0, 1, state, (final,)), StepRecord(0, 0.5, 2.0, 1.0))
    assert same(values([installed.replicas[1]]), values([lost]))
