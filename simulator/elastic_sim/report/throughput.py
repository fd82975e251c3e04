"""Throughput of a run over time."""

from __future__ import annotations

from bisect import bisect_right

from elastic_sim.steps.engine import SimulationResult
from elastic_sim.steps.time_accounting import Use


def throughput(outcome: SimulationResult, window_s: float) -> list[float]:
    """Samples a second that counted in the end, by window: useful time, at the pace of the setup of that moment."""
    width = window_s * 1000
    n = max(1, -(-outcome.ended // round(width)))
    found = [0.0] * n
    starts = [decision.at for decision in outcome.decisions]
    for span in outcome.account.spans:
        if span.use is not Use.USEFUL:
            continue
        index = bisect_right(starts, span.began) - 1
        at = span.began
        while at < span.ended:
            until = min(span.ended, starts[index + 1] if index + 1 < len(starts) else span.ended)
            setup = outcome.decisions[index].change.setup if index >= 0 else None
            if setup is not None and until > at:
                _spread(found, at, until, setup.samples / setup.step_ms, width)
            at, index = max(at, until), index + 1
    lengths = [min(width, outcome.ended - i * width) for i in range(n)]
    return [
        samples / length * 1000 if length > 0 else 0.0 for samples, length in zip(found, lengths, strict=True)
    ]


def _spread(found: list[float], at: float, until: float, per_ms: float, width: float) -> None:
    """Add a rate over [at, until) to the windows that it touches."""
    while at < until:
        i = int(at // width)
        edge = min(until, (i + 1) * width)
        found[i] += (edge - at) * per_ms
        at = edge
