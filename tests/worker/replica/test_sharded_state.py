"""Optimizer state shared by the holders of a layer: portions give the bits of the whole update."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from elastic.domain.errors import FieldError, VaultError
from elastic.domain.state_layout import GRAIN, span
from elastic.domain.types import (
    GRADIENT,
    STATE,
    UPDATE,
    Accumulate,
    Assignment,
    Pipeline,
    Plan,
    Portion,
    Recipe,
    Stage,
    StepRecord,
    Unit,
)
from elastic.planning.plan.rank_map import roster
from elastic.worker.model.layers import ListStack
from elastic.worker.model.microbatch import Microbatch
from elastic.worker.model.optimizer import OptimizerSpec, adamw
from elastic.worker.model.state_codec import as_bytes, join_portions, read_state
from elastic.worker.recovery.state_loader import LoadedStage, StateLoader
from elastic.worker.replica.build import build_replica
from elastic.worker.replica.replica import LayerReplica
from tests.worker.model.toy_model import ALONE, CPU, sgd, state_of
from tests.worker.recovery.test_state_loader import FakeFetcher


class Wide(nn.Module):
    """Tensors with divisible and indivisible sizes, a tiny one and a scalar."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.inner = nn.Linear(37, 29, dtype=dtype)
        self.tiny = nn.Parameter(torch.ones(3, dtype=dtype))
        self.scale = nn.Parameter(torch.tensor(2.0, dtype=dtype))

    def forward(self, hidden: Tensor | None, microbatch: Microbatch) -> Tensor:
        raise NotImplementedError


def wide(
    portion: Portion = (0, 1),
    *,
    spec: OptimizerSpec | None = None,
    dtype: torch.dtype = torch.float32,
    empty: bool = False,
) -> LayerReplica:
    stack = ListStack([lambda: Wide(dtype)], 3)
    spec = spec or adamw(0.01)
    return build_replica(
        stack, 0, ALONE, spec, Accumulate.EXACT, 7, CPU, empty=empty, portion=portion
    )


def flat(replica: LayerReplica, step: int) -> Tensor:
    seeded = torch.Generator().manual_seed(step)
    return torch.randint(-(2**40), 2**40, (replica.gradient.numel(),), generator=seeded)


def gather(holders: list[LayerReplica]) -> None:
    """Do the work of `elastic.worker.engine.sharded_update` in one process."""
    for reader in holders:
        for writer in holders:
            for mine, theirs in zip(reader.parameters, writer.parameters, strict=True):
                first, last = span(tuple(mine.shape), writer.portion)
                with torch.no_grad():
                    mine.view(-1)[first:last] = theirs.view(-1)[first:last]
        reader.complete = True


def trained(number: int, steps: int, **more: object) -> tuple[LayerReplica, list[LayerReplica]]:
    """A whole replica, and `number` holders that share one, after `steps` updates."""
    whole = wide(**more)  # type: ignore[arg-type]
    holders = [wide((index, number), **more) for index in range(number)]  # type: ignore[arg-type]
    for step in range(steps):
        for replica in (whole, *holders):
            replica.update(flat(replica, step), 0.5, 0.01)
        gather(holders)
    return whole, holders


@given(st.lists(st.integers(1, 70), max_size=3), st.integers(1, 9))
def test_portions_cover_a_tensor_once_in_whole_grains(shape: list[int], number: int) -> None:
    ends = [span(shape, (index, number)) for index in range(number)]
    if not shape:
        assert set(ends) == {(0, 1)}
        return
    assert ends[0][0] == 0 and ends[-1][1] == torch.zeros(shape).numel()
    assert all(a[1] == b[0] for a, b in itertools.pairwise(ends))
    assert all(first % GRAIN == 0 or first == last for first, last in ends)
    assert max(last - first for first, last in ends) == ends[0][1]


@settings(max_examples=12)
@given(st.integers(2, 5), st.integers(0, 3), st.booleans())
def test_updates_of_portions_equal_the_whole_update(number: int, steps: int, low: bool) -> None:
    more = {"spec": adamw(0.01, master_weights=True), "dtype": torch.bfloat16} if low else {}
    whole, holders = trained(number, steps, **more)
    for holder in holders:
        assert all(
            torch.equal(a, b) for a, b in zip(holder.parameters, whole.parameters, strict=True)
        )
    joined = join_portions([state_of(holder) for holder in reversed(holders)])
    assert bytes(joined.numpy()) == bytes(state_of(whole).numpy())
    assert sum(len(state_of(h)) for h in holders) < len(state_of(whole)) + number * 6000


def test_a_portion_has_only_its_share_of_the_optimizer_state() -> None:
    whole, holders = trained(2, 1)
    mine, all_of_it = (sum(r.optimizer_bytes().values()) for r in (holders[1], whole))
    assert mine < 0.5 * all_of_it


@pytest.mark.parametrize("number", [1, 2, 3])
def test_holders_of_another_plan_continue_from_the_joined_state(number: int) -> None:
    whole, holders = trained(2, 2)
    run = join_portions([state_of(holder) for holder in holders])
    others = [wide((index, number), empty=True) for index in range(number)]
    for other in others:
        other.read_state(run)
        assert other.complete and other.version == 2
    for replica in (whole, *others):
        replica.update(flat(replica, 2), 0.5, 0.01)
    gather(others)
    assert bytes(join_portions([state_of(o) for o in others]).numpy()) == bytes(
        state_of(whole).numpy()
    )


def test_a_replica_is_incomplete_with_its_portion_alone() -> None:
    _, holders = trained(2, 1)
    mine = wide((1, 2), empty=True)
    mine.read_state(state_of(holders[1]))
    assert not mine.complete and mine.version == 1
    assert bytes(state_of(mine).numpy()) == bytes(state_of(holders[1]).numpy())
    with pytest.raises(VaultError, match=r"portion \(0, 2\) of a state, not \(1, 2\)"):
        mine.read_state(state_of(holders[0]))


def test_a_repeated_update_gives_the_same_portion() -> None:
    _, holders = trained(3, 1)
    for holder in holders:
        before, reduced = state_of(holder), flat(holder, 1)
        taken = as_bytes(holder.update_input(reduced, 0.25))
        holder.update(reduced, 0.25, 0.01)
        other = wide(holder.portion, empty=True)
        other.read_state(before)
        other.apply_update(taken, 0.01)
        assert bytes(state_of(other).numpy()) == bytes(state_of(holder).numpy())


class Norm(nn.Module):
    """A layer whose elements are all in the first portion."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(GRAIN))


def test_a_portion_may_be_empty() -> None:
    stack = ListStack([Norm], 3)
    holders = [
        build_replica(stack, 0, ALONE, adamw(0.01), Accumulate.EXACT, 7, CPU, portion=(index, 2))
        for index in range(2)
    ]
    for holder in holders:
        before, reduced = state_of(holder), flat(holder, 1)
        taken = as_bytes(holder.update_input(reduced, 0.25))
        assert taken.numel() > 0
        holder.update(reduced, 0.25, 0.01)
        other = build_replica(
            stack, 0, ALONE, adamw(0.01), Accumulate.EXACT, 7, CPU, portion=holder.portion
        )
        other.read_state(before)
        other.apply_update(taken, 0.01)
        assert bytes(state_of(other).numpy()) == bytes(state_of(holder).numpy())
    whole = join_portions([state_of(holder) for holder in holders])
    assert read_state(whole)[0].version == 1


def test_incomplete_portions_are_refused() -> None:
    _, holders = trained(3, 1)
    runs = [state_of(holder) for holder in holders]
    for wrong in (runs[:2], [runs[0], runs[0], runs[2]], [state_of(wide((0, 2))), runs[1]]):
        with pytest.raises(VaultError, match="do not make a whole"):
            join_portions(wrong)
    holders[1].update(flat(holders[1], 1), 1.0, 0.01)
    with pytest.raises(VaultError, match="do not make a whole"):
        join_portions([runs[0], state_of(holders[1]), runs[2]])


def test_optimizers_that_are_not_elementwise_are_refused() -> None:
    with pytest.raises(FieldError, match=r"elementwise.*leave /sharded out"):
        wide((0, 2), spec=sgd())
    assert wide((0, 1), spec=sgd()).portion == (0, 1)


# ---- loading ----

TWO = Plan(
    1,
    1,
    2,
    1,
    (
        Pipeline((Stage(Unit("x"), 0, 1),), (0,)),
        Pipeline((Stage(Unit("y"), 0, 1),), (1,)),
    ),
    state="snapshot/sharded",
)
ONE = replace(TWO, pipelines=(Pipeline((Stage(Unit("x"), 0, 1),), (0, 1)),))


def install(
    fetcher: FakeFetcher,
    plan: Plan,
    recipe: Recipe,
    live: LayerReplica | None = None,
    record: StepRecord | None = None,
) -> LoadedStage:
    spec = adamw(0.01)
    loader = StateLoader(
        lambda layer, empty, portion: wide(portion, empty=empty),
        fetcher, spec.lr, lambda: None, (),
    )  # fmt: skip
    assignment = Assignment(plan, recipe.version, (("x", recipe),), record=record)
    member = roster(plan).members[0]
    usable = loader.usable(assignment, member, {0: live} if live else {})
    return loader.install(assignment, member, usable)


def recipe_for(fetcher: FakeFetcher, holders: list[LayerReplica], version: int) -> Recipe:
    parts = []
    for holder in holders:
        copy = fetcher.put(
            STATE, holder, state_of(holder), portion=holder.portion, owner=f"n{holder.portion[0]}"
        )
        parts.append(Recipe(0, 0, version, copy))
    return Recipe(0, 0, version, portions=tuple(parts))


@pytest.mark.parametrize("plan", [ONE, TWO])
def test_a_new_holder_gets_its_portion_of_the_joined_state(plan: Plan) -> None:
    whole, holders = trained(3, 2)
    fetcher = FakeFetcher()
    installed = install(fetcher, plan, recipe_for(fetcher, holders, 2))
    (replica,) = installed.replicas
    assert replica.complete and replica.portion == (0, len(plan.pipelines))
    assert all(torch.equal(a, b) for a, b in zip(replica.parameters, whole.parameters, strict=True))
    reference = wide(replica.portion, empty=True)
    reference.read_state(state_of(whole))
    assert bytes(state_of(replica).numpy()) == bytes(state_of(reference).numpy())
    assert installed.sources == ["peer:k"]


def test_only_an_incomplete_live_layer_is_read_again() -> None:
    whole, holders = trained(2, 1)
    fetcher = FakeFetcher()
    recipe = recipe_for(fetcher, holders, 1)
    mine = holders[0]
    assert install(fetcher, TWO, recipe, mine).replicas == [mine] and not fetcher.read
    assert (
        install(fetcher, ONE, recipe, mine).replicas[0].portion == (0, 1) and len(fetcher.read) == 2
    )
    fetcher.read.clear()
    mine.complete = False
    again = install(fetcher, TWO, recipe, mine).replicas[0]
    assert again is mine and mine.complete and len(fetcher.read) == 2
    assert all(torch.equal(a, b) for a, b in zip(again.parameters, whole.parameters, strict=True))


def test_the_last_update_is_repeated_from_gradients() -> None:
    """One holder is a version ahead; another was lost before its portion was safe."""
    whole, holders = trained(2, 1)
    fetcher = FakeFetcher()
    recipe = recipe_for(fetcher, holders, 1)
    data = torch.empty(whole.gradient_nbytes, dtype=torch.uint8)
    whole.add_gradient(flat(whole, 5).view(torch.uint8), {0, 1}, {})
    whole.write_gradient(data)
    final = fetcher.put(GRADIENT, holders[0], data, microbatches=frozenset((0, 1)))
    whole.update(whole.gradient.clone(), 0.5, 0.01)
    record = StepRecord(1, 0.5, 2.0, 1.0)
    replica = install(
        fetcher, TWO, replace(recipe, version=2, replay=(final,)), record=record
    ).replicas[0]
    assert replica.version == 2 and replica.complete
    assert all(torch.equal(a, b) for a, b in zip(replica.parameters, whole.parameters, strict=True))


def test_a_portion_is_rebuilt_from_an_older_one_and_updates() -> None:
    whole, holders = trained(2, 1)
    fetcher = FakeFetcher()
    recipe = recipe_for(fetcher, holders, 1)
    for replica in (whole, *holders):
        if replica is holders[1]:
            taken = as_bytes(replica.update_input(flat(replica, 1), 1.0))
            update = fetcher.put(UPDATE, replica, taken, portion=(1, 2), owner="n1")
        replica.update(flat(replica, 1), 1.0, 0.01)
    newer = recipe_for(fetcher, holders[:1], 2).portions[0]
    parts = newer, replace(recipe.portions[1], version=2, updates=(update,))
    replica = install(fetcher, TWO, Recipe(0, 0, 2, portions=parts)).replicas[0]
    assert all(torch.equal(a, b) for a, b in zip(replica.parameters, whole.parameters, strict=True))
    assert read_state(state_of(replica))[0].portion == (0, 2)
