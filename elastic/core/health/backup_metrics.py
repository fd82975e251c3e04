"""Measured cost of backups on a node: copy rate, send rate, and the slowdown of computing.

Every step of a node adds at most one sample per figure. Samples outlive changes of plan, so a
figure that the current schemes do not show keeps its value from the schemes before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastic.core.protocol.messages import MicrobatchTiming

KEPT_SAMPLES = 15
"""Samples kept per figure."""
MIN_SAMPLES = 5
"""Samples needed before a figure counts."""
LEAST_BYTES = 1 << 16
"""Smaller transfers measure latency, not bandwidth."""

Samples = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BackupMetrics:
    """One node's samples, newest last."""

    step: int = -1
    epoch: int = -1
    steps: int = 0
    """Steps measured in this epoch."""
    sending: Samples = ()
    """Bytes per second to the peer, all workers together."""
    copying: Samples = ()
    """Bytes per second into shared memory, per worker."""
    slowed: Samples = ()
    """Compute time beside a transfer, divided by compute time without one."""


def record_measurements(
    metrics: BackupMetrics, epoch: int, measured: Sequence[MicrobatchTiming]
) -> BackupMetrics:
    """Add the measurements of a node's workers for one step of `epoch`; a known step adds none."""
    step = min((one.step for one in measured), default=-1)
    if not measured or (metrics.epoch, metrics.step) >= (epoch, step):
        return metrics
    traffic = [one.traffic for one in measured]
    sent = [_rate(t.sent_bytes, t.sent_s) for t in traffic]
    copied = [_rate(t.copied_bytes, t.copied_s) for t in traffic]
    return replace(
        metrics,
        step=step,
        epoch=epoch,
        steps=metrics.steps + 1 if metrics.epoch == epoch else 1,
        sending=_with_median(metrics.sending, [sum(sent)]),
        copying=_with_median(metrics.copying, copied),
        slowed=_with_median(metrics.slowed, [one.slowed for one in measured]),
    )


def _rate(nbytes: int, seconds: float) -> float:
    """Bytes per second; 0 if the transfer is too small to tell."""
    return nbytes / seconds if nbytes >= LEAST_BYTES and seconds > 0 else 0.0


def _with_median(samples: Samples, new: Sequence[float]) -> Samples:
    """Add the median of the positive values of `new`, if there are any."""
    known = [value for value in new if value > 0]
    return (*samples, *((median(known),) if known else ()))[-KEPT_SAMPLES:]


def median_of_nodes(figures: Iterable[Samples]) -> float:
    """Median over nodes of each node's median; 0 if no node has enough samples."""
    known = [median(samples) for samples in figures if len(samples) >= MIN_SAMPLES]
    return median(known) if known else 0.0
