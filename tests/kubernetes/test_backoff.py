"""The stand-in's delays are those of Kubernetes."""

from __future__ import annotations

from tests.kubernetes.backoff import JobBackoff, container_delay_s


def test_a_job_waits_longer_after_each_lost_pod() -> None:
    backoff, delays = JobBackoff(), []
    for _ in range(9):
        backoff.failed(1000.0)
        delays.append(backoff.until - 1000.0)
    assert delays == [10, 20, 40, 80, 160, 320, 600, 600, 600]
    backoff.succeeded()
    backoff.failed(1000.0)
    assert backoff.until == 1010.0


def test_a_container_starts_again_at_once_and_then_later_and_later() -> None:
    assert [container_delay_s(n) for n in range(8)] == [0, 10, 20, 40, 80, 160, 300, 300]
