"""The checksum of a copy covers its bytes and all that a recovery reads in its description."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from elastic.domain.checksum import checksum_problem, copy_checksum
from elastic.domain.types import GRADIENT, REDUCED, Copy

DIGEST = "0123456789abcdef"
PLAIN = Copy(
    GRADIENT, 2, 1, 5, 3, "a", 9, 64, "", frozenset({0, 1}), ((0, 1.5), (1, math.nan)), "b"
)
COPY = replace(PLAIN, checksum=copy_checksum(PLAIN, DIGEST))


def test_a_copy_matches_its_own_checksum() -> None:
    assert checksum_problem(COPY, DIGEST) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": REDUCED},
        {"layer": 3},
        {"shard": 0},
        {"step": 6},
        {"portion": (0, 2)},
        {"nbytes": 65},
        {"microbatches": frozenset({0, 2})},
        {"microbatches": frozenset({0})},
        {"losses": ((0, 1.5000000000000002), (1, math.nan))},
        {"losses": ()},
    ],
)
def test_an_altered_description_is_refused(changes: dict[str, Any]) -> None:
    assert "not 2:" in checksum_problem(replace(COPY, **changes), DIGEST)


def test_altered_bytes_are_refused() -> None:
    assert checksum_problem(COPY, DIGEST[::-1])


@pytest.mark.parametrize("changes", [{"owner": "c"}, {"epoch": 4}, {"sequence": 1}, {"node": "c"}])
def test_equal_content_of_other_holders_has_the_same_checksum(changes: dict[str, Any]) -> None:
    assert checksum_problem(replace(COPY, **changes), DIGEST) == ""


def test_a_copy_of_an_older_format_is_refused() -> None:
    """Format 1 was the hash of the bytes alone."""
    problem = checksum_problem(replace(COPY, checksum=DIGEST), DIGEST)
    assert "another format" in problem and DIGEST in problem
