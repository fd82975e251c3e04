"""Descriptions of errors: type and message in one line."""

from __future__ import annotations

import pytest

from elastic.domain.errors import MAX_DESCRIPTION_CHARS, VaultError, describe, place_of, with_place


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


def test_the_place_of_an_error_is_in_the_users_code() -> None:
    ours = __file__.removesuffix("tests/domain/test_errors.py") + "elastic/worker/step.py"
    frames = [("train.py", 9, "<module>"), (ours, 1, "run"), ("model.py", 4, "forward")]
    library = ("/venv/lib/python3.12/site-packages/torch/nn/functional.py", 7, "linear")
    assert place_of([*frames, library]) == "model.py:4 in forward"
    assert place_of([library]) == f"{library[0]}:7 in linear"
    assert place_of([]) == ""
    try:
        raise ValueError("bad")
    except ValueError as error:
        text = with_place("ValueError: bad", error)
    assert text.startswith(f"ValueError: bad ({__file__}:")
    assert text.endswith(" in test_the_place_of_an_error_is_in_the_users_code)")
