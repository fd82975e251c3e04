"""Action lists: their text form, 1F1B of any size, and the errors that the validator finds."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.errors import FieldError
from elastic.planning.schedule.schedule import Action, Kind
from tests.planning.schedule.action_text import format_actions, one_f_one_b, parse_actions
from tests.planning.schedule.deadlock_check import validate


def pipeline(n_stages: int, microbatches: tuple[int, ...]) -> list[tuple[Action, ...]]:
    return [one_f_one_b(s, n_stages, microbatches) for s in range(n_stages)]


def test_1f1b_of_two_stages() -> None:
    assert [format_actions(actions) for actions in pipeline(2, (0, 1, 2))] == [
        "F0 SF0 F1 SF1 RB0 B0 F2 SF2 RB1 B1 RB2 B2",
        "RF0 F0 B0 SB0 RF1 F1 B1 SB1 RF2 F2 B2 SB2",
    ]


def test_one_stage_needs_no_neighbour() -> None:
    assert format_actions(one_f_one_b(0, 1, (4, 7))) == "F4 B4 F7 B7"


@given(kind=st.sampled_from(list(Kind)), microbatch=st.integers(0, 10**6))
def test_actions_print_and_parse(kind: Kind, microbatch: int) -> None:
    action = Action(kind, microbatch)
    assert parse_actions(format_actions([action, action])) == (action, action)


@given(
    n_stages=st.integers(1, 8), microbatches=st.lists(st.integers(0, 99), unique=True, max_size=20)
)
def test_any_1f1b_is_valid_and_bounds_the_microbatches_in_flight(
    n_stages: int, microbatches: list[int]
) -> None:
    in_flight = validate(pipeline(n_stages, tuple(microbatches)), unreceived=2)
    assert in_flight == tuple(min(n_stages - s, len(microbatches)) for s in range(n_stages))


@given(n_stages=st.integers(2, 5), n=st.integers(1, 6), data=st.data())
def test_a_missing_action_is_found(n_stages: int, n: int, data: st.DataObject) -> None:
    stages = pipeline(n_stages, tuple(range(n)))
    s = data.draw(st.integers(0, n_stages - 1))
    i = data.draw(st.integers(0, len(stages[s]) - 1))
    stages[s] = stages[s][:i] + stages[s][i + 1 :]
    with pytest.raises(FieldError):
        validate(stages)


@given(n_stages=st.integers(2, 5), n=st.integers(1, 6), data=st.data())
def test_a_doubled_action_is_found(n_stages: int, n: int, data: st.DataObject) -> None:
    stages = pipeline(n_stages, tuple(range(n)))
    s = data.draw(st.integers(0, n_stages - 1))
    i = data.draw(st.integers(0, len(stages[s]) - 1))
    stages[s] = (*stages[s], stages[s][i])
    with pytest.raises(FieldError, match="it is a duplicate"):
        validate(stages)


def test_every_order_of_a_small_schedule_is_accepted_or_explained() -> None:
    first, second = pipeline(2, (0,))
    orders = [(a, b) for a in itertools.permutations(first) for b in itertools.permutations(second)]
    good = 0
    for a, b in orders:
        try:
            validate([a, b])
            good += 1
        except FieldError as error:
            assert "unit" in str(error) or "stage" in str(error)
    assert good == 1


def test_gpipe_is_valid_and_holds_everything() -> None:
    first = "F0 SF0 F1 SF1 F2 SF2 RB0 B0 RB1 B1 RB2 B2"
    second = "RF0 F0 RF1 F1 RF2 F2 B0 SB0 B1 SB1 B2 SB2"
    assert validate([parse_actions(first), parse_actions(second)]) == (3, 3)


def test_a_deadlock_is_named() -> None:
    first = "F0 SF0 RB0 B0 F1 SF1 RB1 B1"
    second = "RF0 F0 RF1 F1 B0 SB0 B1 SB1"
    with pytest.raises(FieldError, match="unit 0 at RB0; unit 1 at RF1"):
        validate([parse_actions(first), parse_actions(second)])


def test_receiving_out_of_order_is_named() -> None:
    first = "F0 SF0 F1 SF1 RB0 B0 RB1 B1"
    second = "RF1 F1 RF0 F0 B0 SB0 B1 SB1"
    with pytest.raises(FieldError, match="unit 0 sends the message of RF0 first"):
        validate([parse_actions(first), parse_actions(second)])


def test_a_send_waits_when_too_many_messages_are_in_flight() -> None:
    first = "F0 SF0 F1 SF1 F2 SF2 RB0 B0 RB1 B1 RB2 B2"
    second = "RF0 F0 B0 SB0 RF1 F1 B1 SB1 RF2 F2 B2 SB2"
    stages = [parse_actions(first), parse_actions(second)]
    validate(stages, unreceived=1)
    with pytest.raises(FieldError, match="deadlock"):
        validate(stages, unreceived=0)


def test_stages_must_run_the_same_microbatches() -> None:
    with pytest.raises(FieldError, match="stage 1"):
        validate([one_f_one_b(0, 2, (0, 1)), one_f_one_b(1, 2, (0,))])


def test_a_last_stage_sends_nothing_forward() -> None:
    with pytest.raises(FieldError, match="no neighbour"):
        validate([parse_actions("F0 SF0 B0")])
