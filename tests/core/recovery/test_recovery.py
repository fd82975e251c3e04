"""Recovery: single decisions on hand-made inventories."""

from __future__ import annotations

from dataclasses import replace

import pytest

from elastic.core.protocol.messages import Halted
from elastic.core.recovery.recovery import replayed_microbatches, summarize
from elastic.domain.errors import Unrecoverable
from elastic.domain.types import Assignment, Copy, StepRecord
from tests.core.recovery.copies import (
    ONE,
    RECORD,
    TWO,
    M,
    gradient,
    pipeline,
    plan_of,
    recipes,
    run,
    state,
)
from tests.core.recovery.job_model import make_spec

# ---- the target version


def test_the_highest_common_version_wins_and_others_go_back() -> None:
    result = run(ONE, state(0, 7), state(0, 6), state(1, 6), live={"a": 7})
    assert result.step == 6
    assert [r.state.step for _, r in result.recipes if r.state] == [6, 6]
    assert result.record is None


def test_a_layer_behind_is_replayed_with_the_record() -> None:
    copies = (state(0, 7), state(1, 6), gradient(1, 6, {0, 1, 3}), gradient(1, 6, {2}, "b"))
    result = run(ONE, *copies, records=(RECORD,))
    assert (result.step, result.record) == (7, RECORD)
    recipe = recipes(result)["a", 1, 0]
    assert recipe.state == copies[1]
    assert {c.key for c in recipe.replay} == {copies[2].key, copies[3].key}
    assert run(ONE, *copies[:3], copies[0], state(0, 6), records=(RECORD,)).step == 6, (
        "micro-batch 2 is gone"
    )


def test_without_its_record_a_complete_step_is_committed_again() -> None:
    full = set(range(M))
    copies = [c for layer in (0, 1) for c in (state(layer, 6), gradient(layer, 6, full))]
    result = run(ONE, *copies, state(0, 7))
    assert result.step == 6
    assert dict(result.covered) == {0: frozenset(full), 1: frozenset(full)}
    assert result.todo == ((),)


def test_replay_needs_each_microbatch_exactly_once() -> None:
    overlapping = (gradient(1, 6, {0, 1, 2}), gradient(1, 6, {2, 3}))
    base = (state(0, 7), state(0, 6), state(1, 6))
    assert run(ONE, *base, *overlapping, records=(RECORD,)).step == 6
    result = run(ONE, *base, *overlapping, gradient(1, 6, {0, 1}, "b", epoch=3), records=(RECORD,))
    assert result.step == 7
    assert sorted(len(c.microbatches) for c in recipes(result)["a", 1, 0].replay) == [2, 2]


def test_replay_of_a_tied_layer_takes_the_other_owner_s_gradient_along() -> None:
    spec = make_spec(2, M, 20, tied=True)
    full = set(range(M))
    copies = (state(0, 7), state(0, 6), state(1, 6), gradient(1, 6, full))
    assert run(ONE, *copies, records=(RECORD,), spec=spec).step == 6
    result = run(ONE, *copies, gradient(0, 6, full, "c"), records=(RECORD,), spec=spec)
    assert result.step == 7
    assert [c.layer for c in recipes(result)["a", 1, 0].replay] == [1, 0]


def test_copies_on_nodes_without_a_vault_are_ignored() -> None:
    assert run(ONE, state(0, 7), state(1, 7, "z"), state(0, 6), state(1, 6)).step == 6


# ---- pipelines that fetch their state begin later


def late(fetch_s: float) -> Assignment:
    """Node b fetches the states of both layers, 200 bytes."""
    return run(TWO, *(state(layer, 6, node) for layer in (0, 1) for node in "ac"), fetch_s=fetch_s)


def test_a_pipeline_that_fetches_its_state_gets_fewer_microbatches() -> None:
    microbatch = sum(la.forward_s + la.backward_s for la in make_spec(2, M, 20).layers)
    assert late(0.0).todo == ((0, 1), (2, 3)), "the rate is unknown"
    assert late(0.9 * microbatch / 200).todo == ((0, 1), (2, 3)), "less than a micro-batch"
    assert late(2 * microbatch / 200).todo == ((0, 1, 2), (3,))
    assert late(9 * microbatch / 200).todo == ((0, 1, 2, 3), ())


def test_what_a_sender_sends_to_others_counts_too() -> None:
    """Node a sends to b and c: each fetches 200 bytes, and a sends 400."""
    shares = {"a": (0, 1), "b": (2,), "c": (3,)}
    plan = plan_of(*(pipeline((node, 0, 2), microbatches=m) for node, m in shares.items()))
    microbatch = sum(la.forward_s + la.backward_s for la in make_spec(2, M, 20).layers)
    result = run(plan, state(0, 6), state(1, 6), fetch_s=2.5 * microbatch / 400)
    assert result.todo == ((0, 1, 2), (3,), ())


# ---- checkpoint and initialisation


def test_the_checkpoint_is_the_last_resort_and_says_what_is_lost() -> None:
    result = run(TWO, state(0, 7), gradient(0, 7, {0}), checkpoint=("/c/5", 5))
    assert result.step == 5
    assert {r.checkpoint for _, r in result.recipes} == {"/c/5"} and len(result.recipes) == 4
    assert all(r.state is None and not r.gradients for _, r in result.recipes)
    assert result.todo == ((0, 1), (2, 3))
    assert result.plan.reason == (
        "because; fell back to the checkpoint of step 5: "
        "layers 1: no copy of state 6 or 7 is left; steps 5 to 6 are computed again"
    )
    assert summarize(result).state_source == "checkpoint"


def test_a_checkpoint_of_the_running_version_fills_the_gaps_only() -> None:
    result = run(ONE, state(0, 5), gradient(0, 5, {0, 1}), checkpoint=("/c/5", 5))
    assert (
        recipes(result)["a", 0, 0].checkpoint == ""
        and recipes(result)["a", 1, 0].checkpoint == "/c/5"
    )
    assert dict(result.covered) == {0: {0, 1}, 1: frozenset()}
    assert "no step is lost" in result.plan.reason


def test_memory_is_preferred_to_an_older_checkpoint() -> None:
    result = run(ONE, state(0, 7), state(1, 7), checkpoint=("/c/5", 5))
    assert result.step == 7 and result.plan.reason == "because"


def test_a_fresh_job_initialises() -> None:
    result = run(TWO, initial=True, live={"a": -1})
    assert (result.step, result.recipes, result.record) == (0, (), None)
    assert result.todo == ((0, 1), (2, 3))
    assert dict(result.covered) == {0: frozenset(), 1: frozenset()}
    assert summarize(result).state_source == "initial"


def test_layers_lost_before_the_first_update_are_initialised_again() -> None:
    result = run(ONE, state(0, 0), gradient(0, 0, {1}), initial=True)
    assert [r.layer for _, r in result.recipes] == [0]
    assert dict(result.covered)[0] == {1}
    assert result.todo == ((0, 1, 2, 3),)


def test_initialisation_is_refused_once_anything_was_trained() -> None:
    for copies, records, live in (
        ((state(0, 3),), (), {}),
        ((), (RECORD,), {}),
        ((), (), {"a": 3}),
    ):
        with pytest.raises(Unrecoverable):
            run(ONE, *copies, records=records, live=live, initial=True)


@pytest.mark.parametrize(
    ("copies", "records", "text"),
    [
        ((state(0, 7),), (), "layers 1: no copy of state 6 or 7 is left;"),
        ((state(0, 7), state(1, 3)), (), r"layers 1: no copy of state 6 or 7 is left \(only 3\)"),
        (
            (state(0, 7), state(1, 6)),
            (),
            "layers 1: no copy of state 7 is left, nor the record of step 6",
        ),
        (
            (state(0, 7), state(1, 6), gradient(1, 6, {0, 3})),
            (RECORD,),
            "layers 1: no copy of state 7 is left, and gradients of step 6 lack micro-batches 1-2",
        ),
        ((), (), "layers 0-1: no copy of state 0 is left; there is no durable checkpoint"),
    ],
)
def test_unrecoverable_names_layers_and_the_missing_copies(
    copies: tuple[Copy, ...], records: tuple[StepRecord, ...], text: str
) -> None:
    with pytest.raises(Unrecoverable, match=text):
        run(ONE, *copies, records=records)


# ---- sources


def test_a_local_copy_is_preferred_and_among_them_the_own_one() -> None:
    copies = (
        state(0, 7, "b"),
        state(0, 7, "a", owner="b", epoch=9),
        state(0, 7, "a"),
        state(1, 7, "b"),
    )
    result = run(ONE, *copies)
    assert recipes(result)["a", 0, 0].state == copies[2]
    assert recipes(result)["a", 1, 0].state == copies[3]
    told = summarize(result)
    assert (told.network_bytes, told.state_source) == (100, "peer")


def test_fetches_spread_over_vaults() -> None:
    plan = plan_of(pipeline(("x", 0, 6), microbatches=(0, 1, 2, 3)))
    copies = [state(layer, 7, node) for layer in range(6) for node in "abc"]
    sources = [r.state.node for _, r in run(plan, *copies, nodes="abcx").recipes if r.state]
    assert sorted(sources) == ["a", "a", "b", "b", "c", "c"]


def test_layers_with_fewer_sources_choose_their_sender_first() -> None:
    """Layer 2 is only on a, so layer 0 comes from b and layer 1 from c."""
    plan = plan_of(pipeline(("x", 0, 3), microbatches=(0, 1, 2, 3)))
    copies = [
        state(layer, 7, node) for layer, nodes in enumerate(("ab", "bc", "a")) for node in nodes
    ]
    sources = [r.state.node for _, r in run(plan, *copies, nodes="abcx").recipes if r.state]
    assert sources == ["b", "c", "a"]


def test_replay_replaces_a_large_fetch_when_it_moves_fewer_bytes() -> None:
    copies = (
        state(0, 7, "b"),
        state(0, 6, "a"),
        gradient(0, 6, {0, 1}, "a"),
        gradient(0, 6, {2, 3}, "b"),
    )
    others = (state(1, 7),)
    result = run(ONE, *copies, *others, records=(RECORD,))
    assert recipes(result)["a", 0, 0].replay == copies[2:]
    assert summarize(result).network_bytes == 10
    assert sum(bool(recipe.replay) for _, recipe in result.recipes) == 1
    cheap = (replace(copies[0], nbytes=5), *copies[1:])
    assert recipes(run(ONE, *cheap, *others, records=(RECORD,)))["a", 0, 0].state == cheap[0]


# ---- gradients of the running step


def states(*nodes: str) -> tuple[Copy, ...]:
    return tuple(state(layer, 7, node) for node in nodes for layer in (0, 1))


def test_finished_microbatches_are_kept_by_one_holder_each() -> None:
    mine, other = gradient(0, 7, {0, 1}, "a"), gradient(0, 7, {2}, "b")
    last = (gradient(1, 7, {0, 1}, "a"), gradient(1, 7, {2}, "b"))
    result = run(TWO, *states("a", "b"), mine, other, *last)
    assert recipes(result)["a", 0, 0].gradients == (mine,)
    assert recipes(result)["b", 0, 0].gradients == (other,)
    assert dict(result.covered) == {0: {0, 1, 2}, 1: {0, 1, 2}}
    assert sorted(i for share in result.todo for i in share) == [3]
    assert summarize(result).state_source == "memory"


def test_a_copy_in_two_vaults_is_added_once() -> None:
    one = gradient(0, 7, {0}, "a", owner="z")
    result = run(TWO, *states("a", "b"), one, replace(one, node="b"), replace(one, node="c"))
    assert sum(len(r.gradients) for _, r in result.recipes) == 1


def test_merged_copies_of_a_later_epoch_are_not_added_to_their_parts() -> None:
    parts = gradient(0, 7, {0, 1}, "b", epoch=3), gradient(0, 7, {2}, "c", epoch=3)
    merged = gradient(0, 7, {0, 1, 2, 3}, "a", epoch=4)
    result = run(ONE, *states("a"), *parts, merged)
    assert recipes(result)["a", 0, 0].gradients == (merged,)


def test_common_sums_are_taken_once_with_what_fits_beside_them() -> None:
    """c is lost. The common sum on a has one round more than on b, which still has its own part."""
    three = plan_of(
        pipeline(("a", 0, 2), microbatches=(0,)),
        pipeline(("b", 0, 2), microbatches=(1, 2)),
    )
    ahead = [gradient(n, 7, {0, 1, 3}, "a") for n in range(2)]
    behind = [gradient(n, 7, held, "b") for n in range(2) for held in ({0, 3}, {1})]
    result = run(three, *states("a", "b"), *ahead, *behind)
    assert dict(result.covered) == {0: frozenset((0, 1, 3)), 1: frozenset((0, 1, 3))}
    taken = [(node, c.node) for node, recipe in result.recipes for c in recipe.gradients]
    assert taken == [("a", "a")] * 2
    own = [gradient(n, 7, {2}, "b") for n in range(2)]
    both = run(three, *states("a", "b"), *ahead, *behind, *own)
    assert dict(both.covered) == {0: frozenset(range(4)), 1: frozenset(range(4))}
    alike = [gradient(n, 7, {0, 1}, node) for n in range(2) for node in "ab"]
    once = run(three, *states("a", "b"), *alike, *own)
    ledgers = [sorted(c.microbatches) for _, recipe in once.recipes for c in recipe.gradients]
    assert sorted(ledgers) == [[0, 1], [0, 1], [2], [2]]


def test_microbatches_that_other_layers_lack_are_worth_less() -> None:
    # Layer 1 has only {0}, so in layer 0 the choice with micro-batch 0 saves a pass.
    wide, useful = gradient(0, 7, {1, 2, 3}), gradient(0, 7, {0, 1})
    result = run(ONE, *states("a"), wide, useful, gradient(1, 7, {0}))
    assert recipes(result)["a", 0, 0].gradients == (useful,)
    assert result.todo == ((1, 2, 3),)


def test_the_last_layer_counts_only_with_its_losses() -> None:
    silent = replace(gradient(1, 7, {0}), losses=())
    assert dict(run(ONE, *states("a"), gradient(0, 7, {0}), silent).covered) == {
        0: {0},
        1: frozenset(),
    }


def test_tp_ranks_take_the_same_ledgers() -> None:
    plan = plan_of(pipeline(("a", 0, 1), microbatches=(0, 1, 2, 3)), tp=2)
    both = [state(0, 7, shard=shard) for shard in (0, 1)]
    older = [gradient(0, 7, {0, 1}, "b", shard=shard, epoch=3) for shard in (0, 1)]
    result = run(plan, *both, *older, gradient(0, 7, {0, 1, 2}, shard=0))
    assert dict(result.covered) == {0: {0, 1}}
    assert [r.gradients for _, r in result.recipes] == [(older[0],), (older[1],)]


def test_missing_microbatches_are_distributed_by_pipeline_speed() -> None:
    slow = plan_of(
        pipeline(("a", 0, 1), ("b", 1, 2), microbatches=(0, 1, 2)),
        pipeline(("c", 0, 2), microbatches=(3,)),
    )
    held = [state(layer, 7, node) for layer in (0, 1) for node in "abc"]
    full = [gradient(layer, 7, {0}, "ab"[layer]) for layer in (0, 1)]
    result = run(slow, *held, *full)
    assert result.todo == ((1, 2), (3,))


def test_after_the_last_step_nothing_is_left_to_run() -> None:
    assert run(TWO, *states("a"), spec=make_spec(2, M, 7)).todo == ((), ())


def test_moved_layers_are_counted_against_the_plan_before() -> None:
    before = plan_of(pipeline(("a", 0, 1), ("z", 1, 2), microbatches=(0, 1, 2, 3)))
    told = summarize(run(ONE, *states("a"), live={"a": 7}), before, ("z",))
    assert told.text.startswith("layers 1 were on z; step 7, state from memory, 1 of 2 layers move")


# ---- replayed micro-batches


LINE = plan_of(
    pipeline(("a", 0, 1), ("b", 1, 2), ("c", 2, 3), ("d", 3, 4), microbatches=(0, 1, 2, 3))
)
ALL = frozenset(range(M))


def halted_at(
    step: int = 7, started: set[int] | None = None, sent: set[int] | None = None
) -> Halted:
    return Halted(5, step, frozenset(started or ()), frozenset(sent or ()))


@pytest.mark.parametrize(
    ("lost", "expected"),
    [
        ({"b"}, {0, 1, 2}),
        ({"c"}, {0, 1}),
        ({"d"}, {0}),
        ({"a"}, {0, 1}),
        ({"a", "b"}, {0}),
        ({"b", "c"}, {0, 1, 2}),
        ({"a", "b", "c", "d"}, set()),
        (set(), set()),
    ],
)
def test_replayed_microbatches_follow_the_nearest_living_neighbour(
    lost: set[str], expected: set[int]
) -> None:
    halted = {
        "a": halted_at(started={0, 1, 2, 3}, sent={0, 1, 2}),
        "b": halted_at(started={0, 1}, sent={0, 1}),
        "c": halted_at(started={0}, sent={0}),
        "d": halted_at(started={0}),
    }

    def replayed(todo: frozenset[int], step: int) -> frozenset[int]:
        orders, saved = [sorted(ALL)], dict.fromkeys(range(4), ALL)
        return replayed_microbatches(LINE, frozenset(lost), todo, halted, step, orders, saved)

    assert replayed(ALL, 7) == expected
    assert replayed(frozenset({0}), 7) == expected & {0}
    assert replayed(ALL, 8) == set()
