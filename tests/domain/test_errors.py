"""Descriptions of errors: type and message in one line."""

from __future__ import annotations

import pytest

from elastic.domain.errors import MAX_DESCRIPTION_CHARS, VaultError, describe


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (VaultError("vault of node2: reset"), "VaultError: vault of node2: reset"),
        (OSError(28, "No space left on device"), "OSError: [Errno 28] No space left on device"),
        (ValueError("first line\n  second line\n"), "ValueError: first line second line"),
        (KeyError("x"), "KeyError: 'x'"),
        (ValueError(), "ValueError"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_type_and_message_in_one_line(error: Exception, text: str) -> None:
    assert describe(error) == text


def test_a_long_message_is_cut() -> None:
    assert len(describe(ValueError("x" * 99_999))) == MAX_DESCRIPTION_CHARS
