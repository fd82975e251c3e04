"""Recovery from an older state and the updates after it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.recovery.recovery import summarize
from elastic.domain.errors import Unrecoverable
from elastic.domain.types import STATE, UPDATE, Copy, StepRecord
from tests.core.recovery.copies import ONE, RECORD, M, gradient, recipes, run, state, update
from tests.core.recovery.job_model import make_spec

FULL = set(range(M))


def chain(
    layer: int, base: int, last: int, node: str = "b", owner: str = "z", **more: int
) -> list[Copy]:
    """State `base` and the updates of steps `base` to `last`."""
    steps = range(base, last + 1)
    return [
        state(layer, base, node, owner, **more),
        *(update(layer, s, node, owner, **more) for s in steps),
    ]


def test_an_older_state_and_all_updates_since_lead_to_the_newest_version() -> None:
    copies = chain(0, 2, 6)
    result = run(ONE, state(1, 7), *copies)
    recipe = recipes(result)["a", 0, 0]
    assert (result.step, recipe.state, recipe.replay) == (7, copies[0], ())
    assert recipe.updates == tuple(copies[1:])
    told = summarize(result)
    assert (told.state_source, told.network_bytes) == ("peer", 150)
    assert not any(recipe.replay for _, recipe in result.recipes)
    assert "state from peer and up to 5 updates" in told.text


@pytest.mark.parametrize("missing", [2, 4, 6])
def test_a_gap_in_a_chain_is_never_skipped(missing: int) -> None:
    """A copy that a vault refused or dropped is not in the inventory."""
    copies = [copy for copy in chain(0, 2, 6) if copy.kind == STATE or copy.step != missing]
    for version in range(2, missing + 1):
        assert run(ONE, *copies, state(1, version)).step == version
    gap = f"state 2 is left, but not the update of step {missing}"
    with pytest.raises(Unrecoverable, match=gap if missing < 6 else "nor the record of step 6"):
        run(ONE, *copies, state(1, 7))
    assert run(ONE, *copies, state(0, missing + 1, "b", "z"), state(1, 7)).step == 7


def test_a_gap_leads_back_to_a_version_that_all_can_reach() -> None:
    copies = [copy for copy in chain(0, 2, 6) if copy.kind == STATE or copy.step != 6]
    result = run(ONE, *copies, state(1, 6), state(1, 7))
    assert result.step == 6 and len(recipes(result)["a", 0, 0].updates) == 4


def test_the_last_step_may_come_from_gradients() -> None:
    copies = (*chain(0, 3, 5), gradient(0, 6, FULL, "b"), state(1, 7), state(1, 6))
    result = run(ONE, *copies, records=(RECORD,))
    recipe = recipes(result)["a", 0, 0]
    assert (result.step, [c.step for c in recipe.updates], len(recipe.replay)) == (7, [3, 4, 5], 1)
    assert run(ONE, *copies).step == 6, "without the record of step 6"


def test_the_fewest_bytes_win_and_then_the_fewest_updates() -> None:
    older, newer = chain(0, 1, 6), state(0, 5, "b", "z")
    recipe = recipes(run(ONE, *older, newer, state(1, 7)))["a", 0, 0]
    assert recipe.state == newer and [c.step for c in recipe.updates] == [5, 6]
    whole = state(0, 7, "c")
    recipe = recipes(run(ONE, *older, newer, whole, state(1, 7)))["a", 0, 0]
    assert recipe.state == whole and recipe.updates == ()
    here = chain(0, 1, 6, "a")
    recipe = recipes(run(ONE, *older, newer, whole, *here, state(1, 7)))["a", 0, 0]
    assert recipe.state == here[0] and len(recipe.updates) == 6, (
        "its own vault keeps them for a peer"
    )


def test_a_chain_is_one_owner_s_history_of_one_epoch() -> None:
    mixed = [
        state(0, 4, "b", "z"),
        update(0, 4, "b", "y"),
        update(0, 5, "b", "z"),
        update(0, 6, "b", "z"),
    ]
    with pytest.raises(Unrecoverable):
        run(ONE, *mixed, state(1, 7))
    epochs = [state(0, 4, "b", "z"), update(0, 4, "b", "z", epoch=3), *mixed[2:]]
    with pytest.raises(Unrecoverable):
        run(ONE, *epochs, state(1, 7))
    assert run(ONE, *mixed, update(0, 4, "c", "z"), state(1, 7)).step == 7, "in whichever vault"


def test_senders_of_a_chain_are_chosen_within_it() -> None:
    """Equal copies in two vaults share the load; another owner's state is not equal here."""
    copies = [*chain(0, 4, 6), *chain(0, 4, 5, "c"), state(0, 4, "d", "y")]
    recipe = recipes(run(ONE, *copies, state(1, 7)))["a", 0, 0]
    assert recipe.state is not None
    assert {c.owner for c in (recipe.state, *recipe.updates)} == {"z"}
    assert {c.node for c in (recipe.state, *recipe.updates)} == {"b", "c"}
    assert [c.step for c in recipe.updates] == [4, 5, 6]


def test_an_update_proves_that_training_began() -> None:
    with pytest.raises(Unrecoverable):
        run(ONE, update(0, 0), initial=True)
    result = run(ONE, state(0, 0), update(0, 0), state(1, 0), update(1, 0), initial=True)
    assert result.step == 1


pieces = st.lists(
    st.builds(
        lambda kind, layer, step, node, epoch, owner: (state if kind == STATE else update)(
            layer, step, node, owner, epoch=epoch
        ),
        st.sampled_from((STATE, UPDATE, UPDATE)),
        st.integers(0, 1),
        st.integers(1, 4),
        st.sampled_from("abx"),
        st.integers(3, 4),
        st.sampled_from("yz"),
    ),
    max_size=24,
)


@given(pieces, st.booleans())
@settings(max_examples=300, deadline=None)
def test_the_version_matches_brute_force(copies: list[Copy], recorded: bool) -> None:
    """Compares with all chains; x has no vault. Both layers have all gradients of step 4."""
    usable = {(c.kind, c.layer, c.step, c.owner, c.epoch) for c in copies if c.node in "ab"}
    lines = [(owner, epoch) for owner in "yz" for epoch in (3, 4)]

    def made(layer: int, version: int) -> bool:
        return any(
            (STATE, layer, base, *line) in usable
            and all((UPDATE, layer, step, *line) in usable for step in range(base, version))
            for line in lines
            for base in range(1, version + 1)
        )

    def reachable(layer: int, version: int) -> bool:
        return made(layer, version) or (recorded and version == 5 and made(layer, 4))

    versions = [v for v in range(1, 6) if reachable(0, v) and reachable(1, v)]
    records = (StepRecord(4, 1.0, 1.0, 1.0),) if recorded else ()
    arguments = (*copies, gradient(0, 4, FULL, "a"), gradient(1, 4, FULL, "b"))
    spec = make_spec(2, M, 20)
    if not versions:
        with pytest.raises(Unrecoverable):
            run(ONE, *arguments, records=records, nodes="ab", spec=spec)
        return
    result = run(ONE, *arguments, records=records, nodes="ab", spec=spec)
    assert result.step == max(versions)
    for _, recipe in result.recipes:
        assert recipe.state is not None
        ends = result.step - bool(recipe.replay)
        assert [c.step for c in recipe.updates] == list(range(recipe.state.step, ends))
        if recipe.updates:
            assert {(c.owner, c.epoch) for c in (recipe.state, *recipe.updates)} == {
                (recipe.state.owner, recipe.state.epoch)
            }
