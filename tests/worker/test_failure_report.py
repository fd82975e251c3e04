"""The text with which a worker reports an error that ends the job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from elastic.domain.errors import (
    EXIT_FAILURE,
    EXIT_USAGE,
    MAX_DESCRIPTION_CHARS,
    ElasticError,
    FieldError,
    LedgerError,
)
from elastic.worker.epoch_session import EpochSession


def report(error: Exception) -> tuple[str, int]:
    """Return text and exit code in the report of `error`."""
    sent: list[Any] = []
    context = SimpleNamespace(settings=SimpleNamespace(local_rank=0), replicas={})
    session: Any = SimpleNamespace(_context=context, _send=sent.append)
    try:
        raise error
    except Exception as raised:  # noqa: BLE001 - with its traceback
        expected = SystemExit if isinstance(error, ElasticError) else type(error)
        with pytest.raises(expected):
            EpochSession._fail(cast(EpochSession, session), raised)
    return sent[0].message, sent[0].exit_code


def test_an_error_of_the_script_has_its_place() -> None:
    text, code = report(ValueError("no\nfile"))
    assert text.startswith(f"ValueError: no file ({__file__}:") and text.endswith(" in report)")
    assert code == EXIT_FAILURE


def test_an_error_that_the_runtime_raises_has_no_place_in_the_runtime() -> None:
    wrong = FieldError("data(0, 0)", 3, "return a Microbatch")
    assert report(wrong) == (str(wrong), EXIT_USAGE)
    assert report(LedgerError("layer 1")) == ("LedgerError: layer 1", EXIT_FAILURE)
    assert len(report(FieldError("x", "y" * 5000, "shorten it"))[0]) == MAX_DESCRIPTION_CHARS
