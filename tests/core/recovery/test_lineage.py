"""Copies of nodes that were cut off: which of them belong to the history of training."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from elastic.core.recovery.lineage import MAX_STARTS, Starts, proven, with_start
from elastic.domain.types import ACTIVATION, GRADIENT, STATE, UPDATE, Copy

KINDS = (STATE, GRADIENT, UPDATE, ACTIVATION)
STARTS = st.lists(st.integers(0, 6), min_size=1, max_size=8)
"""First step of epoch 1, 2, ..."""


def copy(kind: str, epoch: int, step: int) -> Copy:
    return Copy(kind, 0, 0, step, epoch, "a", 1, 8, "00")


def starts_of(steps: list[int]) -> Starts:
    starts: Starts = ()
    for epoch, step in enumerate(steps, 1):
        starts = with_start(starts, epoch, step)
    return starts


def is_proven(one: Copy, starts: Starts, newest_epoch: int = 99, trimmed: int = 0) -> bool:
    return bool(proven([one], starts, newest_epoch=newest_epoch, trimmed=trimmed))


def test_a_node_that_was_ahead_of_the_others() -> None:
    """It finished step 7 when it was cut off. The others ran step 7 again in epoch 2."""
    starts = starts_of([0, 7])
    assert is_proven(copy(STATE, 1, 7), starts) and not is_proven(copy(STATE, 1, 8), starts)
    assert is_proven(copy(GRADIENT, 1, 7), starts) and not is_proven(copy(GRADIENT, 1, 8), starts)
    assert is_proven(copy(UPDATE, 1, 6), starts) and not is_proven(copy(UPDATE, 1, 7), starts)
    assert is_proven(copy(STATE, 2, 8), starts)


def test_a_return_to_a_checkpoint_undoes_all_later_copies() -> None:
    """Epoch 3 began at step 4, and epoch 4 is beyond the undone versions."""
    starts = starts_of([0, 9, 4, 12])
    for epoch in (1, 2):
        assert is_proven(copy(STATE, epoch, 4), starts)
        assert not is_proven(copy(STATE, epoch, 5), starts)
    assert is_proven(copy(STATE, 3, 12), starts) and not is_proven(copy(STATE, 3, 13), starts)


def test_copies_of_trimmed_epochs_are_of_no_use_but_for_logged_messages() -> None:
    starts = starts_of([0, 3])
    assert not is_proven(copy(STATE, 1, 3), starts, trimmed=2)
    assert is_proven(copy(STATE, 2, 3), starts, trimmed=2)
    assert is_proven(copy(ACTIVATION, 1, 3), starts, trimmed=2)
    assert not is_proven(copy(ACTIVATION, 1, 4), starts, trimmed=2)


def test_copies_of_a_later_epoch_are_of_another_history() -> None:
    assert not is_proven(copy(STATE, 3, 1), starts_of([0, 1]), newest_epoch=2)


@given(STARTS, st.sampled_from(KINDS), st.integers(0, 8), st.integers(0, 9))
def test_equals_the_rule_over_all_epochs(steps: list[int], kind: str, epoch: int, at: int) -> None:
    """A copy is undone if any later epoch undoes it. The kept starts give the same answer."""
    one = copy(kind, epoch, at)
    undone = any(one.undone_by(e, step) for e, step in enumerate(steps, 1))
    assert is_proven(one, starts_of(steps)) == (not undone)


@given(STARTS)
def test_kept_starts_ascend(steps: list[int]) -> None:
    starts = starts_of(steps)
    assert list(starts) == sorted(starts) and len({step for _, step in starts}) == len(starts)
    assert starts[-1] == (len(steps), steps[-1])


def test_forgotten_epochs_refuse_their_copies() -> None:
    """Thousands of epochs without a return keep the list short, and old copies prove nothing."""
    count = 3 * MAX_STARTS
    starts = starts_of(list(range(count)))
    assert len(starts) == MAX_STARTS
    assert is_proven(copy(STATE, count - 1, count - 1), starts, newest_epoch=count)
    for old in (copy(STATE, 5, 2), copy(STATE, 5, 0)):
        assert not is_proven(old, starts, newest_epoch=count)
