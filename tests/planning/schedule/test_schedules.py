"""Every schedule for every size: complete, free of deadlock, within its memory; and its text."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.errors import FieldError
from elastic.domain.types import Pipeline, Stage, Unit
from elastic.planning.schedule.schedule import (
    Action,
    Kind,
    actions_of,
    lists,
    peak,
    units_of,
)
from tests.planning.schedule.action_text import format_actions, parse_actions
from tests.planning.schedule.deadlock_check import most_in_flight, validate

counts = st.integers(0, 24)


def indices(n: int) -> tuple[int, ...]:
    """Not consecutive: what a recovery runs again."""
    return tuple(3 * i + 1 for i in range(n))


@given(depth=st.integers(1, 8), n=counts)
def test_zero_bubble_never_holds_more_than_the_first_stage_of_1f1b(depth: int, n: int) -> None:
    found = lists("zero-bubble", depth, depth, indices(n))
    assert max(validate(found, unreceived=2)) <= min(depth, n)


@given(units=st.integers(2, 6), chunks=st.integers(2, 4), n=counts)
def test_interleaved_runs_any_number_of_microbatches(units: int, chunks: int, n: int) -> None:
    found = lists("interleaved", units, units * chunks, indices(n))
    held = validate(found, unreceived=8)
    largest = -(-n // max(1, n // units))
    for unit, most in enumerate(held):
        assert most <= min((chunks - 1) * largest + 2 * (units - unit - 1) + 1, n * chunks)


@pytest.mark.parametrize(("units", "n"), [(8, 23), (16, 47), (32, 63), (32, 64), (32, 95)])
def test_messages_under_way_are_few(units: int, n: int) -> None:
    """Most where groups are half as large again as there are units; `elastic.worker.engine.step`
    allows for them."""
    validate(lists("interleaved", units, 2 * units, tuple(range(n))), unreceived=units + 2)


def test_compute_order_of_zb_h1() -> None:
    """As in figure 2 of the paper, but for the first stage, whose parts run in a row and so stay
    whole."""
    compute = [
        format_actions(action for action in actions if action.kind.computes)
        for actions in lists("zero-bubble", 4, 4, tuple(range(6)))
    ]
    assert compute == [
        "F0 F1 F2 F3 B0 F4 B1 F5 B2 B3 B4 B5",
        "F0 F1 F2 I0 F3 I1 W0 F4 I2 W1 F5 I3 W2 I4 W3 I5 W4 W5",
        "F0 F1 I0 F2 I1 F3 I2 W0 F4 I3 W1 F5 I4 W2 I5 W3 W4 W5",
        "F0 I0 F1 I1 F2 I2 F3 I3 W0 F4 I4 W1 F5 I5 W2 W3 W4 W5",
    ]


def test_interleaved_goes_through_its_stages_by_groups() -> None:
    first, second = lists("interleaved", 2, 4, (0, 1, 2, 3))
    assert format_actions(a for a in first if a.kind.computes) == (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    )
    assert format_actions(second).startswith(
        "1RF0 1F0 1SF0 1RF1 1F1 1SF1 3RF0 3F0 3B0 3SB0 3RF1 3F1"
    )
    assert parse_actions(format_actions(first)) == first


def test_messages_are_received_in_the_order_of_sending() -> None:
    """With two units everything goes over one pair: what was sent before is taken along."""
    found = lists("interleaved", 2, 8, (0, 1, 2))
    assert validate(found) == validate(found, unreceived=2)
    swapped = list(found[1])
    i = next(i for i, a in enumerate(swapped) if a.kind.receives)
    j = next(j for j, a in enumerate(swapped) if a.kind.receives and j > i)
    swapped[i], swapped[j] = swapped[j], swapped[i]
    with pytest.raises(FieldError):
        validate([found[0], swapped])


def test_weight_parts_come_after_their_input_part() -> None:
    validate([parse_actions("F0 I0 W0 F1 B1")])
    with pytest.raises(FieldError, match="after I0"):
        validate([parse_actions("F0 W0 I0")])
    with pytest.raises(FieldError, match="W0"):
        validate([parse_actions("F0 I0")])
    with pytest.raises(FieldError, match="missing or redundant"):
        validate([parse_actions("F0 B0 I0 W0")])


def test_stages_belong_to_their_unit() -> None:
    first, second = lists("interleaved", 2, 4, (0,))
    with pytest.raises(FieldError, match="not on this unit"):
        validate([second, first])


def test_peak_counts_bytes_where_stages_differ() -> None:
    first, _ = lists("interleaved", 2, 4, (0, 1))
    assert peak(first) == 4
    assert peak(first, {0: 10.0, 2: 1.0}) == 22.0
    assert peak(lists("zero-bubble", 3, 3, tuple(range(9)))[2]) == 3


@given(st.sampled_from(["1f1b", "zero-bubble", "interleaved"]), st.integers(2, 5), counts)
def test_peak_equals_the_micro_batches_in_flight(schedule: str, units: int, n: int) -> None:
    stages = 2 * units if schedule == "interleaved" else units
    for actions in lists(schedule, units, stages, indices(n)):
        weights = {action.stage: 3.0 + action.stage for action in actions}
        assert peak(actions) == most_in_flight(actions)
        assert peak(actions, weights) == most_in_flight(actions, weights)


def test_a_pipeline_has_one_list_a_unit() -> None:
    a, b = Unit("a"), Unit("b", 1)
    stages = (Stage(a, 0, 1), Stage(b, 1, 2), Stage(a, 2, 3), Stage(b, 3, 4))
    pipeline = Pipeline(stages, (4, 5), "interleaved")
    assert units_of(pipeline) == (a, b)
    assert actions_of(pipeline) == lists("interleaved", 2, 4, (4, 5))
    assert actions_of(pipeline, ()) == ((), ())
    assert actions_of(Pipeline(stages[:2], (1,)))[1] == parse_actions("RF1 F1 B1 SB1")


@pytest.mark.parametrize(
    ("schedule", "units", "stages"),
    [("gpipe", 2, 2), ("1f1b", 2, 4), ("zero-bubble", 1, 2), ("interleaved", 1, 2),
     ("interleaved", 2, 5),
     ("interleaved", 3, 3)],
)  # fmt: skip
def test_what_does_not_fit_is_refused(schedule: str, units: int, stages: int) -> None:
    with pytest.raises(FieldError, match="schedule"):
        lists(schedule, units, stages, (0,))


def test_kinds() -> None:
    assert [kind.value for kind in Kind if kind.finishes] == ["B", "W"]
    assert str(Action(Kind.RECV_B, 7, 12)) == "12RB7"
