"""Leader election: lease expiry, accepted terms, saved state, retries."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.core.protocol.election import (
    RETRY_FIRST_S,
    RETRY_LAST_S,
    LeaseObservation,
    accepts_term,
    observe_lease,
    owns_saved_state,
    retry_s,
    seconds_to_expiry,
)

TTL = 2.0


def observed(*answers: tuple[int, float]) -> LeaseObservation:
    """Observe each (mark, time); the store answers immediately."""
    seen = None
    for mark, at in answers:
        seen = observe_lease(seen, mark, at, at, TTL)
    assert seen is not None
    return seen


def test_a_lease_without_renewal_expires() -> None:
    seen = observed((1, 0.0), (1, 0.9), (1, 1.8))
    assert seconds_to_expiry(seen, TTL) == pytest.approx(0.2)
    assert seconds_to_expiry(observe_lease(seen, 1, 2.0, 2.0, TTL), TTL) == 0


def test_a_renewal_restarts_the_lease() -> None:
    assert seconds_to_expiry(
        observed((1, 0.0), (1, 1.0), (2, 1.9), (2, 2.0)), TTL
    ) == pytest.approx(1.9)


@pytest.mark.parametrize(("asked", "answered"), [(2.9, 2.9), (1.0, 2.9)])
def test_time_without_an_answer_does_not_count(asked: float, answered: float) -> None:
    """The candidate slept or the store was slow, so the holder may have been delayed too."""
    seen = observe_lease(observed((1, 0.0), (1, 0.9), (1, 1.8)), 1, asked, answered, TTL)
    assert seconds_to_expiry(seen, TTL) == TTL


@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0.001, 3.0)), min_size=1, max_size=30))
def test_no_lease_expires_early(answers: list[tuple[int, float]]) -> None:
    """A lease expires only after its whole duration with one mark."""
    seen, now, since, mark = None, 0.0, 0.0, -1
    for found, pause in answers:
        now += pause
        if found != mark:
            mark, since = found, now
        seen = observe_lease(seen, found, now, now, TTL)
        assert seconds_to_expiry(seen, TTL) > 0 or now - since >= TTL - 1e-9


@pytest.mark.parametrize(
    ("term", "highest", "active", "follow"),
    [
        (1, 0, None, True),
        (5, 5, None, True),
        (4, 5, None, False),
        (6, 5, 5, True),
        (5, 5, 5, False),
        (4, 5, 5, False),
        (0, 0, None, True),
    ],
)
def test_which_coordinator_a_node_follows(
    term: int, highest: int, active: int | None, follow: bool
) -> None:
    assert accepts_term(term, highest, active) is follow


@pytest.mark.parametrize(
    ("mine", "run", "over", "continues"),
    [
        ("", "", "", False),
        ("", "a", "", True),
        ("a", "a", "", True),
        ("", "b", "a", True),
        ("", "a", "a", False),
        ("a", "a", "a", True),
        ("a", "b", "b", False),
    ],
)
def test_saved_state_is_continued_only_by_its_run(
    mine: str, run: str, over: str, continues: bool
) -> None:
    assert owns_saved_state(mine, run, over) is continues


def test_pauses_grow_and_are_bounded() -> None:
    waits = [retry_s(failures) for failures in range(1, 100)]
    assert waits[0] == RETRY_FIRST_S and waits[-1] == RETRY_LAST_S
    assert waits == sorted(waits)
