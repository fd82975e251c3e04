"""What updates take, in vaults: how long it is kept, what makes room, and that states made from it are bit for bit
those that were trained."""

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
from elastic.planning.plan.rank_map import Member, roster
from elastic.worker.backup.policy import Protection
from elastic.worker.backup.publisher import Publisher
from elastic.worker.backup.snapshot_schedule import Rebase
from elastic.worker.model.optimizer import OptimizerSpec, adamw, cosine
from elastic.worker.recovery.fetch import Fetcher
from elastic.worker.recovery.state_loader import Installer
from elastic.worker.replica.replica import LayerReplica
from elastic.worker.transport.cancellation import Abandon
from tests.agent.vault.copies import LocalWriter, content, gradient, make, put
from tests.agent.vault.nodes import MiniNode, nodes
from tests.core.recovery.job_model import make_spec
from tests.worker.model.toys import replicas, run, sgd, state_of, toy_stack

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


def test_lines_do_not_touch_each_other(tmp_path: Path) -> None:
    """A state says nothing of the updates of another layer, TP rank, owner or epoch."""
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


def test_updates_without_a_state_are_few_and_never_too_many(tmp_path: Path) -> None:
    vault = Vault("n", tmp_path / "v")
    for step in range(5):
        keep(vault, UPDATE, step)
    assert steps(vault, UPDATE) == [3, 4]
    many = [make(b"x", kind=UPDATE, step=step) for step in range(KEPT_UPDATES + 3)]
    assert [c.step for c in superseded(many, [0])] == [0, 1, 2]
    vault.close()


def test_a_corrupt_state_takes_along_what_only_it_led_to(tmp_path: Path) -> None:
    vault = Vault("n", tmp_path / "v")
    older = keep(vault, STATE, 0)
    for step in range(6):
        keep(vault, UPDATE, step)
    keep(vault, STATE, 4)
    vault._entries[older.key].data[0] ^= 1
    assert not vault.verify(older.key)
    assert steps(vault, UPDATE) == [4, 5] and vault.check_integrity() == ()
    vault.close()


def test_a_torn_local_state_does_the_same(tmp_path: Path) -> None:
    vault, writer = Vault("a", tmp_path / "v"), LocalWriter(tmp_path / "w")
    for slot, (kind, step) in enumerate(((STATE, 0), (UPDATE, 0), (STATE, 1), (UPDATE, 1))):
        vault.publish(writer.write(slot, make(content(slot), kind=kind, step=step), content(slot)))
    writer.slots[0].begin()
    assert steps(vault, STATE) == [1] and steps(vault, UPDATE) == [1]
    assert vault.check_integrity() == ()
    vault.close()


def test_room_is_made_by_what_the_newest_state_makes_dispensable(tmp_path: Path) -> None:
    page = 4000
    vault = Vault("n", tmp_path / "v", limit=7 * 4096)
    for kind, step in ((STATE, 0), (UPDATE, 0), (UPDATE, 1), (STATE, 2), (UPDATE, 2), (UPDATE, 3)):
        keep(vault, kind, step, page)
    keep(vault, UPDATE, 4, page)
    keep(vault, UPDATE, 5, page)  # the older state and its updates go
    assert steps(vault, STATE) == [2] and steps(vault, UPDATE) == [2, 3, 4, 5]
    keep(vault, UPDATE, 6, page)
    keep(vault, UPDATE, 7, page)
    with pytest.raises(VaultFull):
        keep(vault, UPDATE, 8, page)
    assert steps(vault, UPDATE) == [2, 3, 4, 5, 6, 7], "nothing that leads on is dropped"
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
    keep(vault, STATE, 4, page, epoch=2)  # everybody went back
    keep(vault, UPDATE, 4, page, epoch=2)
    keep(vault, UPDATE, 5, page, epoch=2)
    assert steps(vault, STATE) == [4] and steps(vault, UPDATE) == [4, 5]
    assert {c.epoch for c in vault.inventory()} == {2} and vault.check_integrity() == ()
    vault.close()


# ---- the same bits ----


def bf16() -> OptimizerSpec:
    return adamw(cosine(0.05, warmup=2, steps=20), master_weights=True)


OPTIMIZERS = {"adamw": adamw(0.01), "adamw-bf16-masters": bf16(), "sgd": sgd()}


def made(name: str, accumulate: Accumulate, *, empty: bool = False) -> list[LayerReplica]:
    stack = toy_stack(dtype=torch.bfloat16 if "bf16" in name else torch.float32)
    return replicas(stack, OPTIMIZERS[name], accumulate, empty=empty)


@pytest.mark.parametrize("accumulate", list(Accumulate))
@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_applied_updates_end_in_the_trained_bits(name: str, accumulate: Accumulate) -> None:
    trained, others = made(name, accumulate), made(name, accumulate, empty=True)
    lr, clip = OPTIMIZERS[name].lr, 0.37
    for one, other in zip(trained, others, strict=True):
        other.read_state(state_of(one))
    for step in range(5):
        for index in MICROBATCHES:
            run(trained, step, index)
        for one, other in zip(trained, others, strict=True):
            data = torch.empty(one.update_nbytes, dtype=torch.uint8)
            one.write_update(one.gradient, clip, data)
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
    1, 3, 4, 1, (Pipeline((Stage(Unit("a"), 0, 3),), MICROBATCHES),), spares=("b",), peers=(("a", "b"),),
    state="replay:8",
)  # fmt: skip
NEXT = dataclasses.replace(
    PLAN, epoch=2, pipelines=(Pipeline((Stage(Unit("b"), 0, 3),), MICROBATCHES),), spares=(), peers=()
)


def trained_on(a: MiniNode, name: str, *, limit: int = 0, b: MiniNode | None = None) -> list[LayerReplica]:
    """Train N_STEPS with replay:8, as `elastic.worker.engine.step` does; with `limit` nothing is streamed, and from
    step 3 on that bounds the vault of b."""
    publisher = Publisher(a.worker_channel(), a.directory / "slots", "a")
    layers, optimizer = made(name, Accumulate.EXACT), OPTIMIZERS[name]
    plan = dataclasses.replace(PLAN, gradients="recompute") if limit else PLAN
    protection = Protection(publisher, plan, "a", layers, Abandon(), lambda message: None, ())
    a.on_acked = publisher.on_acked
    for step in range(N_STEPS):
        if step == 3 and limit and b is not None:
            protection._publisher.wait_acked(protection._state_bundle, Abandon())
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
    """What the solver makes of b's vault alone."""
    return solve(
        plan=NEXT, spec=make_spec(3, 4, 20), inventory=b.vault.inventory(), records=records,
        vaults=(("b", b.server.address),), checkpoint=None, initial_allowed=False, live={},
    )  # fmt: skip


def install(
    b: MiniNode, assignment: Assignment, name: str, live: dict[int, LayerReplica] | None = None
) -> list[LayerReplica]:
    fetcher = Fetcher("b", dict(assignment.vaults))
    empty = made(name, Accumulate.EXACT, empty=True)
    installer = Installer(
        lambda layer, *_: empty[layer], fetcher, OPTIMIZERS[name].lr, lambda: None, lambda: None, ()
    )
    member: Member = roster(NEXT).members[0]
    try:
        return installer.install(assignment, member, live or {}).replicas
    finally:
        fetcher.close()


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_a_lost_node_s_state_is_made_again_from_its_peer_s_vault(name: str, tmp_path: Path) -> None:
    with nodes(tmp_path, "a", "b") as (a, b):
        trained = trained_on(a, name)
        assignment = assigned(b)
        recipes = {recipe.layer: recipe for _, recipe in assignment.recipes}
        assert assignment.step == N_STEPS
        assert {layer: len(r.updates) for layer, r in recipes.items()} == {0: 6, 1: 6, 2: 0}, "2 had its turn"
        for one, other in zip(trained, install(b, assignment, name), strict=True):
            assert torch.equal(state_of(one), state_of(other)) and not other.ledger
        assert steps(a.vault, STATE, layer=0) == [5, 6], "whole after every update, without the network"
        assert b.vault.check_integrity() == a.vault.check_integrity() == ()


def test_a_live_layer_goes_on_from_where_it_is(tmp_path: Path) -> None:
    """What the node has made before of this owner's history is not fetched and not made again."""
    with nodes(tmp_path, "a", "b") as (a, b):
        trained = trained_on(a, "adamw")
        assignment = assigned(b)
        recipe = next(recipe for _, recipe in assignment.recipes if recipe.layer == 0)
        short = dataclasses.replace(recipe, version=4, updates=recipe.updates[:4])
        behind = install(b, dataclasses.replace(assignment, step=4, recipes=(("b", short),)), "adamw")[0]
        assert behind.version == 4
        for owner, kept in (("a", True), ("b", False)):
            behind.owner = owner
            found = install(b, assignment, "adamw", {0: behind})[0]
            assert (found is behind) == kept and torch.equal(state_of(found), state_of(trained[0]))
            behind = install(b, dataclasses.replace(assignment, step=4, recipes=(("b", short),)), "adamw")[0]


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


def test_a_full_vault_leaves_a_gap_that_nobody_steps_over(tmp_path: Path) -> None:
    """From step 3 on the peer refuses: what it has leads to version 3, and no further."""
    with nodes(tmp_path, "a", "b") as (a, b):
        trained_on(a, "adamw", limit=1, b=b)
        assert steps(b.vault, UPDATE, layer=0) == [0, 1, 2], (
            "whole, and nothing after the gap that could mislead"
        )
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
def test_after_training_went_back_the_newest_is_of_the_newest_epoch(kind: str) -> None:
    """Version 20 of an abandoned epoch makes room, not version 10 of the running one."""
    old = [make(content(v), kind=kind, step=v, epoch=3) for v in (19, 20)]
    here = make(content(10), kind=kind, step=10, epoch=4)
    assert dispensable([*old, here], make(content(11), kind=kind, step=11, epoch=4)) == old


def test_what_lies_beyond_the_version_an_epoch_begins_with_is_dropped(tmp_path: Path) -> None:
    """Of older epochs alone; what the recovery reads is not beyond it."""
    vault = Vault("a", tmp_path)
    sizes = {
        (kind, step, epoch): put(vault, make(content(step), kind=kind, step=step, epoch=epoch), content(step))
        for kind in (STATE, REDUCED, UPDATE)
        for step, epoch in ((9, 1), (10, 1), (11, 2))
    }
    ledgers = {step: put(vault, gradient(content(step), step, {0}), content(step)) for step in (10, 11)}
    vault.enter(2, 10)
    left = set(vault.inventory())
    assert left == {
        sizes[STATE, 9, 1], sizes[STATE, 10, 1], sizes[STATE, 11, 2],
        sizes[REDUCED, 9, 1], sizes[REDUCED, 10, 1], sizes[REDUCED, 11, 2],
        sizes[UPDATE, 9, 1], sizes[UPDATE, 11, 2], ledgers[10],
    }  # fmt: skip
    vault.check_integrity()
    vault.close()


class Layer:
    """As much of a layer as its turn depends on."""

    def __init__(self, index: int, version: int) -> None:
        self.index, self.version = index, version


def due(rebase: Rebase, version: int) -> set[int]:
    return rebase.due([Layer(index, version) for index in range(4)])  # type: ignore[misc]


def test_whole_states_that_found_no_room_are_tried_again_when_there_will_be_some() -> None:
    """Else layers would go without for as many updates as lie between two turns."""
    rebase = Rebase(32)
    rebase.sent(1, whole=True)
    rebase.given_up(1)
    assert due(rebase, 1) == set() and due(rebase, 2) == set()
    rebase.again()
    assert due(rebase, 3) == {0, 1, 2, 3}
    rebase.sent(2, whole=True)
    rebase.given_up(2)
    assert due(rebase, 4) == {0, 1, 2, 3}, "the room was not there yet"
