"""Published formulas for single figures of torchft, Meta and Gemini."""

from __future__ import annotations


def committed_share(step_s: float, failure_every_s: float) -> float:
    """Share of committed steps if each failure discards the running step (torchft).

    torchft's test on 300 L40S GPUs: one failure per minute, 1,100 failures in 6,249 steps, so
    10.56 s per step; 5,145 steps were committed. Source: pytorch.org/blog/
    fault-tolerant-llama-training-with-2000-synthetic-failures-every-15-seconds, 2025.
    """
    return max(0.0, 1 - step_s / failure_every_s)


def mttf_hours(nodes: float, failures_per_1000_node_days: float) -> float:
    """Mean time to failure of a job whose nodes fail independently (Kokolis et al., HPCA 2025)."""
    return 24 * 1000 / (nodes * failures_per_1000_node_days)


def expected_ettr(
    nodes: float,
    failures_per_node_day: float,
    *,
    restart_days: float,
    interval_days: float,
    write_days: float = 0.0,
) -> float:
    """Expected share of time spent on training (Kokolis et al., HPCA 2025).

    (1 - N r (u0 + dt/2)) / (1 + w/dt), with `restart_days` u0, and checkpoints every
    `interval_days` dt that take `write_days` w each."""
    lost = nodes * failures_per_node_day * (restart_days + interval_days / 2)
    return max(0.0, 1 - lost) / (1 + write_days / interval_days)


def wasted_s_per_failure(checkpoint_s: float, frequency_per_s: float, retrieve_s: float) -> float:
    """Seconds that a failure costs with checkpoints in peers' memory (Wang et al., SOSP 2023).

    t_ckpt + 1/(2 f) + t_rtvl.
    """
    return checkpoint_s + 1 / (2 * frequency_per_s) + retrieve_s
