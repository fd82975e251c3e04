"""Property tests try other examples in each run, and so find over time what one run does not."""

from __future__ import annotations

import pytest
from hypothesis import core, given
from hypothesis import strategies as st


def examples() -> list[int]:
    """Examples of one run of a property test with the settings of the suite."""
    found: list[int] = []

    @given(st.integers(0, 2**60))
    def collect(number: int) -> None:
        found.append(number)

    collect()
    return found


@pytest.mark.skipif(core.global_force_seed is not None, reason="--hypothesis-seed is given")
def test_two_runs_have_different_examples() -> None:
    assert examples() != examples()
