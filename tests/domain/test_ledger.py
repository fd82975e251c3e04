"""Text and bit masks of ledgers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.domain.errors import FieldError
from elastic.domain.ledger import format_indices, from_mask, parse_indices, to_mask


@given(st.frozensets(st.integers(0, 99)))
def test_text_and_mask_round_trip(ledger: frozenset[int]) -> None:
    assert list(parse_indices(format_indices(sorted(ledger)))) == sorted(ledger)
    assert from_mask(to_mask(ledger)) == ledger


def test_text() -> None:
    assert format_indices((0, 1, 2, 3, 5)) == "0-3,5"
    assert format_indices(()) == "-"


@pytest.mark.parametrize("text", ["", "a", "3-1", "0-9999999", "1,,2"])
def test_wrong_text_names_the_field(text: str) -> None:
    with pytest.raises(FieldError, match="spares"):
        parse_indices(text, "spares")
