"""The recovery solver with parities: what one of a group lost, two, the keeper, and members a version ahead come to."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.recovery.recovery import explain
from elastic.domain.errors import Unrecoverable
from elastic.domain.types import PARITY, Copy, Part
from tests.core.recovery.copies import RECORD, M, gradient, pipeline, plan_of, recipes, run, state

PLAN = plan_of(pipeline(("a", 0, 1), ("b", 1, 2), ("d", 2, 3), microbatches=tuple(range(M))))
"""After c was lost, which held layer 2. Layers 0, 1, 2 are a lane, and d keeps it."""


def copy_of(layer: int, version: int, node: str) -> Copy:
    """A copy with a checksum that says what it is."""
    return replace(state(layer, version, node, nbytes=100 + layer), checksum=f"{layer}.{version}")


def parity(version: int, node: str = "d", layers: tuple[int, ...] = (0, 1, 2), **more: int) -> Copy:
    parts = tuple(Part("abc"[i], i, 0, 100 + i, f"{i}.{version}") for i in layers)
    copy = state(0, version, node, "a+b+c", nbytes=100 + max(layers), **more)
    return replace(copy, kind=PARITY, parts=parts)


BOTH = (copy_of(0, 7, "a"), copy_of(1, 7, "b"))


def test_one_lost_comes_from_the_parity_and_all_others() -> None:
    whole = parity(7)
    result = run(PLAN, *BOTH, whole)
    assert result.step == 7
    recipe = recipes(result)["d", 2, 0]
    assert recipe.rebuild == (whole, *BOTH)
    assert recipe.state is not None and recipe.state.node == ""
    assert (recipe.state.layer, recipe.state.nbytes, recipe.state.checksum) == (2, 102, "2.7")
    outcome = explain(result)
    assert outcome.state_source == "peer" and outcome.network_bytes == 100 + 101
    assert "layers 2 rebuilt from parity" in outcome.text


def test_a_copy_as_it_is_comes_first() -> None:
    kept = copy_of(2, 7, "a")
    recipe = recipes(run(PLAN, *BOTH, kept, parity(7)))["d", 2, 0]
    assert recipe.state == kept and recipe.rebuild == ()


def test_a_member_that_takes_the_layer_fetches_no_copy_of_its_own() -> None:
    plan = plan_of(pipeline(("a", 0, 1), ("b", 1, 3), microbatches=tuple(range(M))))
    result = run(plan, *BOTH, parity(7))
    assert [c.node for c in recipes(result)["b", 2, 0].rebuild] == ["d", "a", "b"]
    assert explain(result).network_bytes == 102 + 100


@pytest.mark.parametrize(
    ("copies", "why"),
    [
        pytest.param((BOTH[0], parity(7)), "no copy of state 6 or 7 is left", id="two-lost"),
        pytest.param(BOTH, "layers 2: no copy of state 6 or 7 is left", id="keeper-lost"),
        pytest.param((*BOTH, parity(7, node="z")), "layers 2", id="keeper-lost-too"),
        pytest.param((*BOTH, parity(6)), "layers 2", id="others-have-moved-on"),
        pytest.param(
            (BOTH[0], replace(BOTH[1], checksum="x"), parity(7)), "its parity lacks layers 1 too", id="other-bytes"
        ),
    ],
)  # fmt: skip
def test_more_lost_falls_back_and_says_why(copies: tuple[Copy, ...], why: str) -> None:
    with pytest.raises(Unrecoverable, match=why):
        run(PLAN, *copies)
    result = run(PLAN, *copies, checkpoint=("/c/4", 4))
    assert result.step == 4 and all(recipe.checkpoint and not recipe.rebuild for _, recipe in result.recipes)


def test_two_lost_say_that_the_parity_lacks_the_other() -> None:
    with pytest.raises(
        Unrecoverable, match=r"layers 1: .*parity lacks layers 2 too; layers 2: .*lacks layers 1 too"
    ):
        run(PLAN, BOTH[0], parity(7))


def test_an_older_version_that_all_have_is_rebuilt() -> None:
    older = (copy_of(0, 6, "a"), copy_of(1, 6, "b"))
    result = run(PLAN, *BOTH, *older, parity(6))
    assert result.step == 6
    assert recipes(result)["d", 2, 0].rebuild[1:] == older


def test_members_a_version_ahead_let_the_lost_one_be_rebuilt_and_updated() -> None:
    older = (copy_of(0, 6, "a"), copy_of(1, 6, "b"))
    final = gradient(2, 6, set(range(M)), "d", "c")
    result = run(PLAN, *BOTH, *older, parity(6), final, records=(RECORD,))
    assert result.step == 7
    recipe = recipes(result)["d", 2, 0]
    assert recipe.replay == (final,) and recipe.rebuild[1:] == older
    assert recipe.state is not None and recipe.state.step == 6


def test_the_bytes_of_a_rebuild_count_when_a_replay_is_weighed_against_it() -> None:
    base = copy_of(2, 6, "b")
    final = gradient(2, 6, set(range(M)), "b", "c")
    recipe = recipes(run(PLAN, *BOTH, base, final, parity(7), records=(RECORD,)))["d", 2, 0]
    assert recipe.replay == (final,) and recipe.rebuild == ()  # 102 + 10 bytes, not 100 + 101


def test_senders_of_what_is_xored_have_the_very_same_bytes() -> None:
    twin = replace(state(0, 7, "b", nbytes=100), checksum="other")
    again = replace(BOTH[0], node="b", owner="a")
    rebuild = recipes(run(PLAN, *BOTH, twin, again, parity(7)))["d", 2, 0].rebuild
    assert {c.checksum for c in rebuild[1:]} == {"0.7", "1.7"}


def test_of_two_parities_the_newest_that_can_be_used() -> None:
    old, new = parity(7, epoch=3), parity(7, epoch=5)
    assert recipes(run(PLAN, *BOTH, old, new))["d", 2, 0].rebuild[0] == new
    useless = replace(
        new, parts=(*new.parts[:2], replace(new.parts[2], checksum="y"), Part("e", 5, 0, 9, "?"))
    )
    assert recipes(run(PLAN, *BOTH, old, useless))["d", 2, 0].rebuild[0] == old


def test_layers_and_ranks_that_the_plan_does_not_have_are_left_out() -> None:
    plan = plan_of(pipeline(("a", 0, 1), ("b", 1, 2), microbatches=tuple(range(M))))
    assert run(plan, *BOTH, parity(7)).step == 7
