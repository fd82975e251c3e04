"""Delays with which Kubernetes starts pods and containers again."""

from __future__ import annotations

FIRST_S, LONGEST_JOB_S, LONGEST_CONTAINER_S = 10.0, 600.0, 300.0


class JobBackoff:
    """Delay of the Job controller: for the whole Job, and reset only by a pod that succeeds.

    Disruptions count, too (kubernetes issue 130881). Times are in seconds of one clock.
    """

    def __init__(self) -> None:
        self._failures, self.until = 0, 0.0

    def failed(self, now: float) -> None:
        """A pod failed or was lost: none is started before `until`."""
        self._failures += 1
        self.until = now + min(LONGEST_JOB_S, FIRST_S * 2 ** (self._failures - 1))

    def succeeded(self) -> None:
        """A pod ended with exit code 0."""
        self._failures, self.until = 0, 0.0


def container_delay_s(restarts: int) -> float:
    """Delay of the kubelet before it starts the container of a pod again, after this many starts
    again of the same pod."""
    return min(LONGEST_CONTAINER_S, FIRST_S * 2 ** (restarts - 1)) if restarts else 0.0
