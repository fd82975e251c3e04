"""Pauses between the attempts to open a stream."""

from __future__ import annotations

from elastic.rpc.control.channel_options import RETRY_MAX_S, RETRY_MIN_S
from elastic.rpc.control.reconnect_pauses import ReconnectPauses


def failed(pauses: ReconnectPauses, number: int) -> list[float]:
    """Pauses after attempts that fail at once."""
    return [pauses.after(0.01, followed=False) for _ in range(number)]


def test_pauses_double_while_attempts_fail() -> None:
    assert failed(ReconnectPauses(), 5) == [0.1, 0.2, 0.4, RETRY_MAX_S, RETRY_MAX_S]
    assert ReconnectPauses().after(RETRY_MAX_S + 0.1, followed=False) == RETRY_MIN_S


def test_a_stream_that_a_reset_ends_soon_is_opened_again_at_once() -> None:
    """After a takeover the pauses have grown. A node whose neighbours also lost contact with it has
    little time to return."""
    pauses = ReconnectPauses()
    failed(pauses, 5)
    assert pauses.after(0.2, followed=True) == RETRY_MIN_S


def test_pauses_grow_while_all_streams_are_short() -> None:
    pauses = ReconnectPauses()
    short = [pauses.after(0.01, followed=True) for _ in range(6)]
    assert short == [RETRY_MIN_S, 0.1, 0.2, 0.4, RETRY_MAX_S, RETRY_MAX_S]
    assert pauses.after(60.0, followed=True) == RETRY_MIN_S
