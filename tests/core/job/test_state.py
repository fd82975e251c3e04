"""`JobState.of` gives a new state and leaves the former one as it is."""

from __future__ import annotations

from dataclasses import fields

import pytest

from elastic.core.job.state import JobPhase, JobState, Policy
from elastic.domain import codec


def test_a_field_is_replaced_and_the_former_state_stays() -> None:
    former = JobState(Policy(min_nodes=2))
    state = former.of(epoch=3, phase=JobPhase.PAUSED)
    assert (state.epoch, state.phase, state.policy) == (3, JobPhase.PAUSED, former.policy)
    assert (former.epoch, former.phase) == (0, JobPhase.WAITING)
    same = {field.name for field in fields(JobState)} - {"epoch", "phase"}
    assert all(getattr(state, name) is getattr(former, name) for name in same)


def test_a_state_from_the_store_can_be_changed() -> None:
    """Fields that an older coordinator did not save have their defaults."""
    read = codec.decode(JobState, {"policy": {}, "epoch": 4}, newer=True)
    assert read.of(protocol=7) == JobState(Policy(), epoch=4, protocol=7)


def test_an_unknown_field_is_refused() -> None:
    with pytest.raises(TypeError, match="JobState has no field epochs"):
        JobState(Policy()).of(epochs=3)
