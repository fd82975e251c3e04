"""Recovery with a sharded state: a version exists if all its portions do."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest

from elastic.core.recovery.recovery import summarize
from elastic.domain.errors import Unrecoverable
from elastic.domain.types import STATE, UPDATE, Copy, whole_slots
from tests.core.recovery.copies import (
    RECORD,
    M,
    gradient,
    pipeline,
    plan_of,
    recipes,
    run,
    state,
    update,
)

FULL = set(range(M))
TWO = replace(
    plan_of(pipeline(("a", 0, 1), microbatches=(0, 1)), pipeline(("b", 0, 1), microbatches=(2, 3))),
    state="snapshot/sharded",
)
ONE = replace(plan_of(pipeline(("a", 0, 1), microbatches=(0, 1, 2, 3))), state="snapshot/sharded")


def part(index: int, number: int, version: int, node: str, owner: str = "", **more: int) -> Copy:
    copy = replace(state(0, version, node, owner, **more), portion=(index, number))
    return replace(copy, checksum=f"{index}.{number}.{version}")


def test_slots_are_whole_with_all_portions_of_one_division() -> None:
    slots = [(0, 0), (1, 0, 0, 2), (1, 0, 1, 2), (2, 0, 0, 2), (2, 0, 1, 3), (3, 1, 0, 1)]
    assert whole_slots(slots) == {(0, 0), (1, 0), (3, 1)}


def test_all_portions_make_a_version() -> None:
    mine, theirs = part(0, 2, 7, "a"), part(1, 2, 7, "b")
    result = run(TWO, mine, theirs)
    assert result.step == 7
    for node in "ab":
        recipe = recipes(result)[node, 0, 0]
        assert recipe.state is None and [r.state for r in recipe.portions] == [mine, theirs]
    outcome = summarize(result)
    assert (outcome.state_source, outcome.network_bytes) == ("memory", 0), (
        "both have the layer live"
    )


def test_the_loss_of_a_holder_takes_its_portion_from_its_peer() -> None:
    mine, kept = part(0, 2, 7, "a"), part(1, 2, 7, "c", "b")
    result = run(ONE, mine, kept, nodes="ac")
    assert [r.state for r in recipes(result)["a", 0, 0].portions] == [mine, kept]
    outcome = summarize(result, TWO, ("b",))
    assert (outcome.state_source, outcome.network_bytes) == ("peer", 100)
    assert [r.version for r in recipes(result)["a", 0, 0].portions] == [7, 7]


def test_lost_workers_have_no_live_state() -> None:
    result = run(TWO, part(0, 2, 7, "a"), part(1, 2, 7, "b"))
    outcome = summarize(result, TWO, ("a",))
    assert (outcome.state_source, outcome.network_bytes) == ("peer", 100)


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param((part(0, 2, 7, "a"),), id="one-missing"),
        pytest.param(
            (part(0, 2, 7, "a"), part(1, 3, 7, "b"), part(2, 3, 7, "b")), id="of-two-divisions"
        ),
        pytest.param((part(0, 2, 7, "a"), part(1, 2, 6, "b")), id="of-two-versions"),
        pytest.param((part(0, 2, 7, "a"), part(2, 2, 7, "b")), id="no-such-portion"),
    ],
)
def test_an_incomplete_division_gives_no_version(copies: tuple[Copy, ...]) -> None:
    with pytest.raises(Unrecoverable, match="layers 0: no copy of state"):
        run(TWO, *copies)
    assert run(TWO, *copies, checkpoint=("/c/4", 4)).step == 4


def test_missing_portions_are_named() -> None:
    with pytest.raises(Unrecoverable, match=r"portions 1 of 2 of version 7 are gone"):
        run(TWO, part(0, 2, 7, "a"))


def test_the_version_before_and_all_gradients_make_the_version() -> None:
    """One holder was a version ahead when the other was lost, before its peer had its portion."""
    older = part(0, 2, 6, "a"), part(1, 2, 6, "c", "b")
    finals = gradient(0, 6, {0, 1}), gradient(0, 6, {2, 3}, "c", "b")
    result = run(ONE, part(0, 2, 7, "a"), *older, *finals, records=(RECORD,), nodes="ac")
    assert result.step == 7
    recipe = recipes(result)["a", 0, 0]
    assert [r.state for r in recipe.portions] == list(older) and set(recipe.replay) == set(finals)
    assert [r.version for r in recipe.portions] == [6, 6] and recipe.version == 7
    short = run(ONE, part(0, 2, 7, "a"), *older, finals[0], records=(RECORD,), nodes="ac")
    assert short.step == 6, "without the other's gradients everybody goes back"


def test_a_portion_is_made_of_its_own_chain() -> None:
    base = part(1, 2, 5, "c", "b")
    steps = [replace(update(0, step, "c", "b"), portion=(1, 2)) for step in (5, 6)]
    result = run(TWO, part(0, 2, 7, "a"), base, *steps, nodes="abc")
    assert result.step == 7
    recipe = recipes(result)["b", 0, 0].portions[1]
    assert recipe.state == base and list(recipe.updates) == steps
    foreign = [replace(step, portion=(0, 2)) for step in steps]
    with pytest.raises(Unrecoverable):
        run(TWO, part(0, 2, 7, "a"), base, *foreign, nodes="abc")


def test_whole_state_or_portions_by_fewer_bytes() -> None:
    whole, mine, theirs = (
        state(0, 7, "c"),
        part(0, 2, 7, "a", nbytes=50),
        part(1, 2, 7, "b", nbytes=50),
    )
    recipe = recipes(run(TWO, whole, mine, theirs))["a", 0, 0]
    assert [r.state for r in recipe.portions] == [mine, theirs]
    near = replace(whole, node="a")
    assert recipes(run(TWO, near, mine, theirs))["a", 0, 0].state == near


def test_random_inventories_match_brute_force() -> None:
    """Compares with brute force: versions 5 to 8 in one to three portions, with chains."""
    seeded = random.Random(5)
    for _ in range(400):
        inventory: list[Copy] = []
        for version, number in itertools.product(range(5, 9), (1, 2, 3)):
            for index in range(number):
                if seeded.random() < 0.45:
                    inventory.append(
                        part(index, number, version, seeded.choice("ab"), f"o{index}{number}")
                    )
                if seeded.random() < 0.3:
                    step = update(0, version, seeded.choice("ab"), f"o{index}{number}")
                    inventory.append(replace(step, portion=(index, number)))
        best = max((v for v in range(5, 10) if _reachable(inventory, v)), default=None)
        if best is None:
            with pytest.raises(Unrecoverable):
                run(TWO, *inventory)
            continue
        result = run(TWO, *inventory)
        assert result.step == best
        for _, recipe in result.recipes:
            lines = recipe.portions or (recipe,)
            assert [r.state.portion for r in lines if r.state] == [
                (i, len(lines)) for i in range(len(lines))
            ]
            for line in lines:
                assert line.state is not None
                assert [u.step for u in line.updates] == list(range(line.state.step, best))
                assert {u.portion for u in line.updates} <= {line.state.portion}


def _reachable(inventory: list[Copy], version: int) -> bool:
    def line(portion: tuple[int, int], at: int) -> bool:
        mine = [c for c in inventory if c.portion == portion]
        if any(c.kind == STATE and c.step == at for c in mine):
            return True
        return any(c.kind == UPDATE and c.step == at - 1 for c in mine) and line(portion, at - 1)

    return any(all(line((i, number), version) for i in range(number)) for number in (1, 2, 3))
