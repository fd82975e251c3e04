"""Measured cost of backups on a node: rates of copying and sending, and the effect on computing.

Every step of a node adds at most one sample per figure. Samples stay when the plan changes, so a
figure that the present backup schemes do not measure keeps its value from earlier schemes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastic.core.protocol.messages import MicrobatchTiming

KEPT_SAMPLES = 15
"""Number of samples kept per figure."""
MIN_SAMPLES = 5
"""Least number of samples for which a figure counts."""
LEAST_BYTES = 1 << 16
"""Smaller transfers are not measured, because latency determines their time."""

Samples = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BackupMetrics:
    """One node's samples, newest last."""

    step: int = -1
    epoch: int = -1
    steps: int = 0
    """Number of steps measured in `epoch`."""
    sending: Samples = ()
    """Bytes per second to the peer, summed over the node's workers."""
    copying: Samples = ()
    """Bytes per second into shared memory, per worker."""
    slowed: Samples = ()
    """Compute time during a transfer of copies, divided by compute time without a transfer."""


def record_measurements(
    metrics: BackupMetrics, epoch: int, measured: Sequence[MicrobatchTiming]
) -> BackupMetrics:
    """Add the measurements of a node's workers for one step of `epoch`; ignore a known step."""
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
    """Return bytes per second; 0 if the transfer is too small to measure."""
    return nbytes / seconds if nbytes >= LEAST_BYTES and seconds > 0 else 0.0


def _with_median(samples: Samples, new: Sequence[float]) -> Samples:
    """Add the median of the positive values in `new`; nothing if no value is positive."""
    known = [value for value in new if value > 0]
    return (*samples, *((median(known),) if known else ()))[-KEPT_SAMPLES:]


def median_of_nodes(figures: Iterable[Samples]) -> float:
    """Return the median of the nodes' medians; 0 if no node has enough samples."""
    known = [median(samples) for samples in figures if len(samples) >= MIN_SAMPLES]
    return median(known) if known else 0.0
