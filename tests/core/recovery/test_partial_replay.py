"""Partial replay: the chosen micro-batches, layers, pipelines and copies."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.core.recovery import partial_replay as partial
from elastic.core.recovery.recovery import summarize
from elastic.domain import codec
from elastic.domain.types import ACTIVATION, COTANGENT, Assignment, Copy, Plan
from tests.core.recovery.copies import M, gradient, pipeline, plan_of, run, sequences, state
from tests.core.recovery.job_model import make_spec

N = 6
FULL = set(range(M))
AFTER = plan_of(pipeline(("a", 0, 3), ("c", 3, 5), ("d", 5, 6), microbatches=(0, 1, 2, 3)))
"""The plan after a[0:2] b[2:4] c[4:5] d[5:6] lost b."""


def message(
    kind: str, layer: int, index: int, node: str, shard: int = 0, epoch: int = 4, step: int = 7
) -> Copy:
    held = frozenset({index})
    return Copy(kind, layer, shard, step, epoch, node, next(sequences), 50, "", held, node=node)


def messages(cuts: dict[int, tuple[str, str]], indices: set[int] = FULL) -> list[Copy]:
    """Messages across boundaries; `cuts`: boundary: (node before it, node after it; "": lost)."""
    found = []
    for (layer, (before, behind)), index in itertools.product(cuts.items(), indices):
        found += [message(ACTIVATION, layer, index, before)] if before else []
        found += [message(COTANGENT, layer, index, behind)] if behind else []
    return found


B_LOST = messages({2: ("a", ""), 4: ("", "c"), 5: ("c", "d")})


def held(layers: dict[int, set[int]], node: str = "a") -> list[Copy]:
    """States of version 7 of all layers, and gradients of step 7 of `layers`."""
    states = [state(layer, 7, node) for layer in range(N)]
    return states + [
        gradient(layer, 7, indices, node) for layer, indices in layers.items() if indices
    ]


def spans(result: Assignment) -> list[tuple[int, int, int]]:
    return [(r.microbatch, r.first, r.last) for r in result.partial]


def has(*layers: int, indices: set[int] = FULL) -> dict[int, set[int]]:
    return dict.fromkeys(layers, indices)


def test_only_the_lost_layers_run_again() -> None:
    result = run(AFTER, *held(has(0, 1, 4, 5)), *B_LOST)
    assert spans(result) == [(m, 2, 4) for m in range(M)]
    assert result.todo == ((),)
    for each in result.partial:
        assert [
            (c.kind, c.layer, c.node, c.microbatches) for c in (*each.inputs, *each.gradients)
        ] == [
            (ACTIVATION, 2, "a", frozenset({each.microbatch})),
            (COTANGENT, 4, "c", frozenset({each.microbatch})),
        ]
    told = summarize(result)
    assert told.partial == FULL and not told.todo
    assert "in part: 0-3 (layers 2-3)" in told.text
    assert codec.loads(Assignment, codec.dumps(result)) == result


@pytest.mark.parametrize(
    ("layers", "copies", "expected"),
    [
        pytest.param(has(2, 3, 4, 5), messages({2: ("", "b")}), [(0, 2)], id="first stage"),
        pytest.param(has(0, 1, 2, 3), messages({4: ("b", "")}), [(4, 6)], id="last stage"),
        pytest.param(
            has(0, 5), messages({1: ("a", ""), 5: ("", "d")}), [(1, 5)], id="two adjacent"
        ),
        pytest.param(
            has(0, 3),
            messages({1: ("a", ""), 3: ("", "c"), 4: ("c", "")}),
            [(1, 3), (4, 6)],
            id="two apart",
        ),
    ],
)
def test_each_micro_batch_runs_through_the_expected_layers(
    layers: dict[int, set[int]], copies: list[Copy], expected: list[tuple[int, int]]
) -> None:
    result = run(AFTER, *held(layers), *copies)
    assert spans(result) == [(m, *span) for span in expected for m in range(M)]
    assert result.todo == ((),)


def test_a_lost_message_extends_the_run_to_the_next_logged_one() -> None:
    b_and_c_vaults = messages({1: ("a", "")}) + messages({5: ("", "d")})
    result = run(AFTER, *held(has(0, 1, 4, 5)), *b_and_c_vaults)
    assert spans(result) == [(m, 1, 5) for m in range(M)]
    only_inputs = messages({2: ("a", "")})
    assert spans(run(AFTER, *held(has(0, 1, 4, 5)), *only_inputs)) == [(m, 2, 6) for m in range(M)]


@pytest.mark.parametrize(
    "copies",
    [
        pytest.param([], id="nothing"),
        pytest.param([message(ACTIVATION, 2, m, "z") for m in FULL], id="vault lost"),
        pytest.param([replace(c, step=6) for c in B_LOST], id="another step"),
    ],
)
def test_without_messages_all_layers_run(copies: list[Copy]) -> None:
    result = run(AFTER, *held(has(0, 1, 4, 5)), *copies)
    assert not result.partial and result.todo == ((0, 1, 2, 3),)


def test_ranges_that_grow_into_each_other_run_once() -> None:
    """No message between the ranges was logged, so the layers between them run too, once."""
    logged = messages({1: ("a", ""), 5: ("", "d")})
    assert spans(run(AFTER, *held(has(0, 2, 3, 5)), *logged)) == [(m, 1, 5) for m in range(M)]


def test_micro_batches_in_flight_run_in_the_layers_that_lack_them() -> None:
    """b is lost. The backward pass of 3 had reached c and that of 2 had reached b: a lacks both."""
    layers = {**has(0, 1, indices={0, 1}), **has(4, 5)}
    result = run(AFTER, *held(layers), *B_LOST)
    assert sorted(spans(result)) == [(0, 2, 4), (1, 2, 4), (2, 0, 4), (3, 0, 4)]
    assert partial.runs_beyond(result.partial, frozenset({2, 3})) == {2, 3}


def test_some_run_whole_and_some_in_part() -> None:
    layers = has(0, 1, 4, 5, indices={0, 1})
    result = run(AFTER, *held(layers), *messages({2: ("a", ""), 4: ("", "c")}, {0}))
    assert spans(result) == [(0, 2, 4)]
    assert result.todo == ((1, 2, 3),)


def test_every_tp_rank_needs_its_message() -> None:
    plan = replace(AFTER, tp=2)
    copies = [
        replace(c, shard=s, sequence=next(sequences)) for c in held(has(0, 1, 4, 5)) for s in (0, 1)
    ]
    one_rank = [c for c in B_LOST if c.layer in (2, 4)]
    spec = make_spec(N, M, 20, 2)
    assert not run(plan, *copies, *one_rank, spec=spec).partial
    both = [*one_rank, *(replace(c, shard=1, sequence=next(sequences)) for c in one_rank)]
    result = run(plan, *copies, *both, spec=spec)
    assert spans(result) == [(m, 2, 4) for m in range(M)]
    assert [c.shard for c in result.partial[0].inputs] == [0, 1]


def two_pipelines() -> Plan:
    return plan_of(
        pipeline(("a", 0, 3), ("c", 3, 6), microbatches=(0, 1)),
        pipeline(("b", 0, 6), microbatches=(2, 3)),
    )


def test_pipelines_share_the_work() -> None:
    result = run(two_pipelines(), *held(has(0, 1, 4, 5)), *messages({2: ("a", ""), 4: ("", "c")}))
    assert sorted(spans(result)) == [(m, 2, 4) for m in range(M)]
    shares = [[r.microbatch for r in result.partial if r.pipeline == p] for p in (0, 1)]
    assert [len(share) for share in shares] == [3, 1], "a and c run a layer each, b both"


def test_whole_runs_go_to_the_pipeline_with_fewer_partial_runs() -> None:
    layers = has(0, 1, 4, 5, indices={0, 1, 2})
    copies = (*held(layers), *messages({2: ("a", ""), 4: ("", "c")}, {0, 1, 2}))
    result = run(two_pipelines(), *copies)
    assert len(result.partial) == 3 and sorted(m for share in result.todo for m in share) == [3]


def test_a_copy_on_the_node_itself_is_preferred_then_the_newest() -> None:
    extra = [message(ACTIVATION, 2, 0, "c", epoch=5), message(COTANGENT, 4, 0, "d", epoch=5)]
    result = run(AFTER, *held(has(0, 1, 4, 5)), *B_LOST, *extra)
    first = next(r for r in result.partial if r.microbatch == 0)
    assert (first.inputs[0].node, first.gradients[0].node) == ("a", "c"), (
        "stages a and c hold layers 2 and 3"
    )
    older = [c for c in B_LOST if c.microbatches != {0} or c.kind == ACTIVATION]
    spare = [message(COTANGENT, 4, 0, "b", epoch=3), message(COTANGENT, 4, 0, "d", epoch=5)]
    result = run(AFTER, *held(has(0, 1, 4, 5)), *older, *spare)
    assert next(r for r in result.partial if r.microbatch == 0).gradients[0].node == "d"


def test_nothing_runs_after_the_last_step() -> None:
    copies = (*held(has(0, 1, 4, 5)), *B_LOST)
    result = run(AFTER, *copies, spec=make_spec(N, M, 7))
    assert not result.partial and result.todo == ((),)


@pytest.mark.parametrize(("fetched", "pipelines"), [(0.0, [0, 0, 1, 1]), (40.0, [0] * M)])
def test_a_pipeline_that_fetches_its_state_gets_fewer_partial_runs(
    fetched: float, pipelines: list[int]
) -> None:
    """The second pipeline begins after `fetched` units of time. Layer 5 lacks all micro-batches."""
    copies = [message(ACTIVATION, 5, index, "a") for index in FULL]
    copies += [state(layer, 7, "c") for layer in (3, 4, 5)]
    result = run(two_pipelines(), *held(has(0, 1, 2, 3, 4)), *copies, fetch_s=fetched / 600)
    assert sorted(r.pipeline for r in result.partial) == pipelines


ledgers = st.lists(st.sets(st.integers(0, M - 1)), min_size=N, max_size=N)
logged = st.lists(
    st.builds(
        message,
        st.sampled_from((ACTIVATION, COTANGENT)),
        st.integers(1, N - 1),
        st.integers(0, M - 1),
        st.sampled_from("abz"),
    ),
    max_size=40,
)


@given(ledgers, logged)
@settings(max_examples=200, deadline=None)
def test_missing_micro_batches_run_once_and_start_from_existing_copies(
    found: list[set[int]], copies: list[Copy]
) -> None:
    result = run(two_pipelines(), *held(dict(enumerate(found))), *copies)
    whole = {m for share in result.todo for m in share}
    assert not whole & {r.microbatch for r in result.partial}
    living = {(c.kind, c.layer, *c.microbatches) for c in copies if c.node != "z"}
    for each in result.partial:
        assert (each.first, each.last) != (0, N)
        assert each.first == 0 or (ACTIVATION, each.first, each.microbatch) in living
        assert each.last == N or (COTANGENT, each.last, each.microbatch) in living
        assert bool(each.inputs) == (each.first > 0) and bool(each.gradients) == (each.last < N)
    for m, layer in itertools.product(range(M), range(N)):
        runs = sum(r.microbatch == m and r.first <= layer < r.last for r in result.partial) + (
            m in whole
        )
        assert runs == 1 if m not in found[layer] else runs <= 1
