"""Pauses between the attempts of a client to open a stream to a coordinator."""

from __future__ import annotations

from elastic.rpc.control.channel_options import RETRY_MAX_S, RETRY_MIN_S


class ReconnectPauses:
    """The pauses double with each attempt that fails, up to a limit.

    They begin anew after an attempt that took longer than RETRY_MAX_S. They also do after the first
    of several short streams: the connection of a healthy node may be reset just after it has found
    a new coordinator, and it has little time to return. If streams stay short, the coordinator may
    be overloaded, and the pauses grow.
    """

    def __init__(self) -> None:
        self._pause_s = RETRY_MIN_S
        self._short = False
        """Whether the last attempt was a short stream."""

    def after(self, lasted_s: float, *, followed: bool, longest_s: float = RETRY_MAX_S) -> float:
        """Return the pause, in seconds, after an attempt that lasted `lasted_s`. `followed`:
        whether it became the client's stream."""
        short = followed and lasted_s <= RETRY_MAX_S
        begins_anew = lasted_s > RETRY_MAX_S or (short and not self._short)
        self._short = short
        self._pause_s = RETRY_MIN_S if begins_anew else min(2 * self._pause_s, longest_s)
        return self._pause_s
