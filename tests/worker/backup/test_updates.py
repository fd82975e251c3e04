"""Copies of update inputs: their retention in vaults, and states rebuilt from them bit for bit."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from elastic.agent.vault.retention import KEPT_UPDATES, dispensable, superseded
from elastic.agent.vault.vault import Vault
from elastic.core.recovery.recovery import solve
from elastic.domain.errors import Unrecoverable, VaultError, VaultFull
from elastic.domain.types import (
    REDUCED,
    STATE,
    UPDATE,
    Accumulate,
    Assignment,
    Copy,
    Pipeline,
    Plan,
    Recipe,
    Stage,
    StepRecord,
    Unit,
)
from elastic.planning.plan.rank_map import RankMember, roster
from elastic.worker.backup.protection import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.backup.snapshot_schedule import SnapshotSchedule
from elastic.worker.model.learning_rate import cosine
from elastic.worker.model.optimizer import OptimizerSpec, adamw
from elastic.worker.model.state_codec import as_bytes
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.recovery.state_loader import StateLoader
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import AbandonSignal
from tests.agent.vault.copies import LocalWriter, content, gradient, make, put
from tests.agent.vault.nodes import MiniNode, nodes
from tests.core.recovery.job_model import make_spec
from tests.worker.model.toy_model import replicas, run, sgd, state_of, toy_stack

MICROBATCHES = (0, 1, 2, 3)


def steps(vault: Vault, kind: str, **wanted: int) -> list[int]:
    found = [c for c in vault.inventory() if c.kind == kind]
    return sorted(c.step for c in found if all(getattr(c, k) == v for k, v in wanted.items()))


def keep(vault: Vault, kind: str, step: int, nbytes: int = 1000, **changes: int) -> Copy:
    data = content(step, nbytes)
    return put(vault, make(data, kind=kind, step=step, **changes), data)


# ---- retention ----


def test_updates_since_the_older_state_are_kept(tmp_path: Path) -> None:
    vault = Vault("n", tmp_path / "v")
    keep(vault, STATE, 3)
    for step in range(3, 14):
        keep(vault, UPDATE, step)
        if step % 4 == 0:
            keep(vault, STATE, step + 1)
        oldest = steps(vault, STATE)[0]
        assert steps(vault, UPDATE) == list(range(oldest, step + 1))
    assert steps(vault, STATE) == [9, 13] and vault.check_integrity() == ()
    vault.close()


def test_retention_is_separate_per_owner_layer_and_epoch(tmp_path: Path) -> None:
    """A state does not affect updates of another layer, TP rank, owner or epoch."""
    vault = Vault("n", tmp_path / "v")
    for changes in ({}, {"layer": 1}, {"shard": 1}, {"epoch": 2}):
        keep(vault, STATE, 0, **changes)
        for step in range(5):
            keep(vault, UPDATE, step, **changes)
    keep(vault, STATE, 3)
    keep(vault, STATE, 4)
    assert steps(vault, UPDATE, layer=0, shard=0, epoch=1) == [3, 4]
    for changes in ({"layer": 1}, {"shard": 1}, {"epoch": 2}):
        assert steps(vault, UPDATE, **changes) == [0, 1, 2, 3, 4]
    vault.trim(2)
    assert {c.epoch for c in vault.inventory()} == {2} and vault.check_integrity() == ()
    vault.close()


def test_updates_without_a_state_are_limited(tmp_path: Path) -> None:
    vault = Vault("n", tmp_path / "v")
    for step in range(5):
        keep(vault, UPDATE, step)
    assert steps(vault, UPDATE) == [3, 4]
    many = [make(b"x", kind=UPDATE, step=step) for step in range(KEPT_UPDATES + 3)]
    assert [c.step for c in superseded(many, [0])] == [0, 1, 2]
    vault.close()


def test_a_corrupt_state_drops_the_updates_that_need_it(tmp_path: Path) -> None:
    vault = Vault("n", tmp_path / "v")
    older = keep(vault, STATE, 0)
    for step in range(6):
        keep(vault, UPDATE, step)
    keep(vault, STATE, 4)
    vault._entries[older.key].data[0] ^= 1
    assert not vault.verify(older.key)
    assert steps(vault, UPDATE) == [4, 5] and vault.check_integrity() == ()
    vault.close()


def test_a_torn_local_state_drops_the_updates_that_need_it(tmp_path: Path) -> None:
    vault, writer = Vault("a", tmp_path / "v"), LocalWriter(tmp_path / "w")
    for slot, (kind, step) in enumerate(((STATE, 0), (UPDATE, 0), (STATE, 1), (UPDATE, 1))):
        vault.publish(writer.write(slot, make(content(slot), kind=kind, step=step), content(slot)))
    writer.slots[0].begin()
    assert steps(vault, STATE) == [1] and steps(vault, UPDATE) == [1]
    assert vault.check_integrity() == ()
    vault.close()


def test_copies_before_the_newest_state_make_room(tmp_path: Path) -> None:
    page = 4000
    vault = Vault("n", tmp_path / "v", limit=7 * 4096)
    for kind, step in ((STATE, 0), (UPDATE, 0), (UPDATE, 1), (STATE, 2), (UPDATE, 2), (UPDATE, 3)):
        keep(vault, kind, step, page)
    keep(vault, UPDATE, 4, page)
    keep(vault, UPDATE, 5, page)  # replaces the older state and its updates
    assert steps(vault, STATE) == [2] and steps(vault, UPDATE) == [2, 3, 4, 5]
    keep(vault, UPDATE, 6, page)
    keep(vault, UPDATE, 7, page)
    with pytest.raises(VaultFull):
        keep(vault, UPDATE, 8, page)
    assert steps(vault, UPDATE) == [2, 3, 4, 5, 6, 7], "needed updates are never dropped"
    with pytest.raises(VaultFull):
        keep(vault, STATE, 9, page)
    with pytest.raises(VaultFull):
        keep(vault, UPDATE, 0, page, layer=5)
    assert steps(vault, STATE) == [2] and vault.check_integrity() == ()
    vault.close()


def test_an_older_epoch_makes_room_for_a_newer_state(tmp_path: Path) -> None:
    page = 4000
    vault = Vault("n", tmp_path / "v", limit=4 * 4096)
    keep(vault, STATE, 5, page)
    keep(vault, UPDATE, 5, page)
    keep(vault, STATE, 4, page, epoch=2)  # training went back
    keep(vault, UPDATE, 4, page, epoch=2)
    keep(vault, UPDATE, 5, page, epoch=2)
    assert steps(vault, STATE) == [4] and steps(vault, UPDATE) == [4, 5]
    assert {c.epoch for c in vault.inventory()} == {2} and vault.check_integrity() == ()
    vault.close()


# ---- repeated updates ----


def bf16() -> OptimizerSpec:
    return adamw(cosine(0.05, warmup=2, steps=20), master_weights=True)


OPTIMIZERS = {"adamw": adamw(0.01), "adamw-bf16-masters": bf16(), "sgd": sgd()}


def made(name: str, accumulate: Accumulate, *, empty: bool = False) -> list[LayerReplica]:
    stack = toy_stack(dtype=torch.bfloat16 if "bf16" in name else torch.float32)
    return replicas(stack, OPTIMIZERS[name], accumulate, empty=empty)


@pytest.mark.parametrize("accumulate", list(Accumulate))
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_repeated_updates_give_the_trained_bits(name: str, accumulate: Accumulate) -> None:
    trained, others = made(name, accumulate), made(name, accumulate, empty=True)
    lr, clip = OPTIMIZERS[name].lr, 0.37
    for one, other in zip(trained, others, strict=True):
        other.read_state(state_of(one))
    for step in range(5):
        for index in MICROBATCHES:
            run(trained, step, index)
        for one, other in zip(trained, others, strict=True):
            data = as_bytes(one.update_input(one.gradient, clip))
            one.update(one.gradient, clip, lr(step))
            one.clear()
            other.apply_update(data, lr(step))
            assert other.version == step + 1
            assert torch.equal(state_of(one), state_of(other))


def test_an_update_of_another_layer_is_refused() -> None:
    layers = replicas()
    with pytest.raises(VaultError, match="layer 0: update of 64 bytes"):
        layers[0].apply_update(torch.zeros(64, dtype=torch.uint8), 0.1)
    assert layers[0].version == 0


# ---- from the peer's vault back to a worker ----

N_STEPS = 6
PLAN = Plan(
    1, 3, 4, 1, (Pipeline((Stage(Unit("a"), 0, 3),), MICROBATCHES),),
    spares=("b",), peers=(("a", "b"),),
    state="replay:8",
)  # fmt: skip
NEXT = dataclasses.replace(
    PLAN,
    epoch=2,
    pipelines=(Pipeline((Stage(Unit("b"), 0, 3),), MICROBATCHES),),
    spares=(),
    peers=(),
)


def trained_on(
    a: MiniNode, name: str, *, limit: int = 0, b: MiniNode | None = None
) -> list[LayerReplica]:
    """Train N_STEPS with replay:8, as `elastic.worker.engine.step` does.

    `limit`: bytes of the vault of b from step 3 on; no gradients are streamed then.
    """
    publisher = Publisher(a.worker_channel().send, a.directory / "slots", "a")
    layers, optimizer = made(name, Accumulate.EXACT), OPTIMIZERS[name]
    plan = dataclasses.replace(PLAN, gradients="recompute") if limit else PLAN
    protection = Protection(publisher, plan, "a", layers, AbandonSignal(), lambda message: None, ())
    a.on_acked = publisher.on_acked
    for step in range(N_STEPS):
        if step == 3 and limit and b is not None:
            protection._publisher.wait_acked(protection._state_bundle, AbandonSignal())
            b.vault._pool.limit = limit
        for index in MICROBATCHES:
            run(layers, step, index)
            protection.after_microbatch(step)
        reduced = {r.index: r.gradient for r in layers}
        protection.before_commit(step, reduced)
        protection.before_update(reduced, 0.5)
        for replica in layers:
            replica.update(reduced[replica.index], 0.5, optimizer.lr(step))
            replica.clear()
        protection.after_update()
    protection.finish()
    return layers


def assigned(b: MiniNode, records: tuple[StepRecord, ...] = ()) -> Assignment:
    """The recovery that the solver finds with b's vault alone."""
    return solve(
        plan=NEXT, spec=make_spec(3, 4, 20), inventory=b.vault.inventory(), records=records,
        vaults=(("b", b.server.address),), checkpoint=None, initial_allowed=False, live={},
    )  # fmt: skip


def install(
    b: MiniNode, assignment: Assignment, name: str, live: dict[int, LayerReplica] | None = None
) -> list[LayerReplica]:
    fetcher = Fetcher("b", dict(assignment.vaults))
    empty = made(name, Accumulate.EXACT, empty=True)
    loader = StateLoader(
        lambda layer, *_: empty[layer], fetcher, OPTIMIZERS[name].lr, lambda: None, ()
    )
    member: RankMember = roster(NEXT).members[0]
    try:
        return loader.install(assignment, member, live or {}).replicas
    finally:
        fetcher.close()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_lost_state_is_rebuilt_from_the_peers_vault(name: str, tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        trained = trained_on(a, name)
        assignment = assigned(b)
        recipes = {recipe.layer: recipe for _, recipe in assignment.recipes}
        assert assignment.step == N_STEPS
        assert {layer: len(r.updates) for layer, r in recipes.items()} == {0: 6, 1: 6, 2: 0}, (
            "layer 2 had its whole state sent"
        )
        for one, other in zip(trained, install(b, assignment, name), strict=True):
            assert torch.equal(state_of(one), state_of(other)) and not other.ledger
        assert steps(a.vault, STATE, layer=0) == [5, 6], (
            "the local vault has the state of each update"
        )
        assert b.vault.check_integrity() == a.vault.check_integrity() == ()


def test_a_live_layer_repeats_only_missing_updates(tmp_path: Path) -> None:
    """Updates that the node has already applied to this owner's state are not fetched again."""
    with nodes(tmp_path, "a", "b") as (a, b):
        trained = trained_on(a, "adamw")
        assignment = assigned(b)
        recipe = next(recipe for _, recipe in assignment.recipes if recipe.layer == 0)
        short = dataclasses.replace(recipe, version=4, updates=recipe.updates[:4])
        behind = install(
            b, dataclasses.replace(assignment, step=4, recipes=(("b", short),)), "adamw"
        )[0]
        assert behind.version == 4
        for owner, kept in (("a", True), ("b", False)):
            behind.owner = owner
            found = install(b, assignment, "adamw", {0: behind})[0]
            assert (found is behind) == kept and torch.equal(state_of(found), state_of(trained[0]))
            behind = install(
                b, dataclasses.replace(assignment, step=4, recipes=(("b", short),)), "adamw"
            )[0]


def test_an_update_out_of_order_is_refused(tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        trained_on(a, "adamw")
        assignment = assigned(b)
        recipe = next(recipe for _, recipe in assignment.recipes if recipe.layer == 0)

        def altered(recipe: Recipe) -> Assignment:
            return dataclasses.replace(assignment, recipes=(("b", recipe),))

        skipped = dataclasses.replace(recipe, updates=(*recipe.updates[:2], *recipe.updates[3:]))
        with pytest.raises(VaultError, match="update of step 3 at version 2"):
            install(b, altered(skipped), "adamw")
        with pytest.raises(VaultError, match="version 5 instead of 6"):
            install(b, altered(dataclasses.replace(recipe, updates=recipe.updates[:5])), "adamw")


def test_recovery_stops_at_a_gap_in_the_updates(tmp_path: Path) -> None:
    """The peer refuses copies from step 3 on, so version 3 is the last reachable one."""
    with nodes(tmp_path, "a", "b") as (a, b):
        trained_on(a, "adamw", limit=1, b=b)
        assert steps(b.vault, UPDATE, layer=0) == [0, 1, 2], "no updates after the gap"
        assert a.refused
        found = assigned(b, tuple(StepRecord(step, 0.5, 1.0, 1.0) for step in range(N_STEPS)))
        assert found.step == 3
        lost = next(c for c in b.vault.inventory() if (c.kind, c.layer, c.step) == (UPDATE, 1, 1))
        b.vault._entries[lost.key].data[0] ^= 1
        assert not b.vault.verify(lost.key)
        assert assigned(b).step == 1, "the last version that layer 1 can reach"
        b.vault.flip_bytes()
        b.vault.check_integrity()
        with pytest.raises(Unrecoverable):
            assigned(b)


@pytest.mark.parametrize("kind", [STATE, REDUCED])
def test_copies_of_an_older_epoch_make_room_first(kind: str) -> None:
    """Version 20 of an abandoned epoch makes room, not version 10 of the running one."""
    old = [make(content(v), kind=kind, step=v, epoch=3) for v in (19, 20)]
    here = make(content(10), kind=kind, step=10, epoch=4)
    assert dispensable([*old, here], make(content(11), kind=kind, step=11, epoch=4)) == old


def test_copies_beyond_the_first_version_of_an_epoch_are_dropped(tmp_path: Path) -> None:
    """Only copies of older epochs are dropped; a recovery never reads these."""
    vault = Vault("a", tmp_path)
    sizes = {
        (kind, step, epoch): put(
            vault, make(content(step), kind=kind, step=step, epoch=epoch), content(step)
        )
        for kind in (STATE, REDUCED, UPDATE)
        for step, epoch in ((9, 1), (10, 1), (11, 2))
    }
    ledgers = {
        step: put(vault, gradient(content(step), step, {0}), content(step)) for step in (10, 11)
    }
    vault.enter(2, 10)
    left = set(vault.inventory())
    assert left == {
        sizes[STATE, 9, 1], sizes[STATE, 10, 1], sizes[STATE, 11, 2],
        sizes[REDUCED, 9, 1], sizes[REDUCED, 10, 1], sizes[REDUCED, 11, 2],
        sizes[UPDATE, 9, 1], sizes[UPDATE, 11, 2], ledgers[10],
    }  # fmt: skip
    vault.check_integrity()
    vault.close()


class ScheduledLayer:
    """The fields of a layer that the schedule reads."""

    def __init__(self, index: int, version: int) -> None:
        self.index, self.version = index, version


def due(schedule: SnapshotSchedule, version: int) -> set[int]:
    return schedule.due([ScheduledLayer(index, version) for index in range(4)])  # type: ignore[misc]


def test_refused_states_are_sent_again_once_there_is_room() -> None:
    """Without the retry, layers would wait for their next turn."""
    schedule = SnapshotSchedule(32)
    schedule.sent(1, whole=True)
    schedule.refused(1)
    assert due(schedule, 1) == set() and due(schedule, 2) == set()
    schedule.retry()
    assert due(schedule, 3) == {0, 1, 2, 3}
    schedule.sent(2, whole=True)
    schedule.refused(2)
    assert due(schedule, 4) == {0, 1, 2, 3}, "the peer still had no room"
