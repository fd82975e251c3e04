"""Published formulas for single figures: per-step discard (torchft), effective training time (Meta), checkpoints in
peer memory (Gemini), and the checkpoint interval of Young and Daly."""

from __future__ import annotations


def committed_share(step_s: float, failure_every_s: float) -> float:
    """The part of steps that is committed when each failure discards the step that it falls into.

    torchft's test on 300 L40S: a failure a minute, 1,100 failures in 6,249 steps, so 10.56 s a step; 5,145 were
    committed (pytorch.org/blog/fault-tolerant-llama-training-with-2000-synthetic-failures-every-15-seconds, 2025).
    """
    return max(0.0, 1 - step_s / failure_every_s)


def mttf_hours(nodes: float, failures_per_1000_node_days: float) -> float:
    """Mean time to failure of a job on `nodes` nodes that fail independently (Kokolis et al., HPCA 2025)."""
    return 24 * 1000 / (nodes * failures_per_1000_node_days)


def expected_ettr(
    nodes: float,
    failures_per_node_day: float,
    *,
    restart_days: float,
    interval_days: float,
    write_days: float = 0.0,
) -> float:
    """Expected share of time that trains: (1 - N r (u0 + dt/2)) / (1 + w/dt), with `restart_days` u0, checkpoints every
    `interval_days` dt that take `write_days` w each (Kokolis et al., HPCA 2025)."""
    lost = nodes * failures_per_node_day * (restart_days + interval_days / 2)
    return max(0.0, 1 - lost) / (1 + write_days / interval_days)


def wasted_s_per_failure(checkpoint_s: float, frequency_per_s: float, retrieve_s: float) -> float:
    """Seconds a failure costs with checkpoints in peers' memory: t_ckpt + 1/(2 f) + t_rtvl (Wang et al., SOSP 2023)."""
    return checkpoint_s + 1 / (2 * frequency_per_s) + retrieve_s
