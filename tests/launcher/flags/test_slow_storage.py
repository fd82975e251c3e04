"""Storage that hangs: the user is told, and nobody waits for ever."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from elastic.domain.errors import FieldError
from elastic.launcher.flags import request, slow_storage
from elastic.launcher.flags.slow_storage import ends_in_time


@pytest.fixture
def hanging(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A call that waits for the event hangs; short limits."""
    monkeypatch.setattr(slow_storage, "HANGING_S", 0.05)
    event = threading.Event()
    yield event
    event.set()


def test_a_wait_is_told_and_ends(
    hanging: threading.Event, capsys: pytest.CaptureFixture[str]
) -> None:
    assert not ends_in_time(hanging.wait, 0.2, "s3://bucket/x")
    assert "elastic: waiting up to 0.2 s for s3://bucket/x" in capsys.readouterr().err


def test_a_short_call_is_silent(capsys: pytest.CaptureFixture[str]) -> None:
    assert ends_in_time(lambda: None, 60.0, "s3://bucket/x")
    assert capsys.readouterr().err == ""


def test_an_error_is_raised() -> None:
    with pytest.raises(OSError, match="away"):
        ends_in_time(lambda: (_ for _ in ()).throw(OSError("away")), 60.0, "s3://bucket/x")


def test_resume_from_a_store_that_does_not_answer(
    hanging: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Silent:
        def complete(self, newest: bool) -> None:
            hanging.wait()

    monkeypatch.setattr(request, "open_checkpoints", lambda location, flag: Silent())
    monkeypatch.setattr(request, "OBJECTS_S", 0.2)
    with pytest.raises(FieldError, match=r"--resume: .*does not answer within 0\.2 s; check"):
        request._resume("auto", "s3://bucket/x")
