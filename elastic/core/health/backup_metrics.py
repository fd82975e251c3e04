"""What backups were seen to do on a node: how fast copies are made and sent, how much that slows computing.

Every step of every worker gives at most one sample of each figure. They stay over changes of plan: what is not seen
under one pair of schemes was seen under the last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from elastic.core.protocol.messages import MicrobatchTiming

KEPT_SAMPLES = 15
"""Samples of a figure that are kept."""
MIN_SAMPLES = 5
"""Samples without which a figure is not believed."""
LEAST_BYTES = 1 << 16
"""Smaller transfers tell of latency, not of bandwidth."""

Samples = tuple[float, ...]


@dataclass(frozen=True, slots=True)
class BackupMetrics:
    """One node's samples, newest last."""

    step: int = -1
    epoch: int = -1
    steps: int = 0
    """Seen in this epoch."""
    sending: Samples = ()
    """Bytes a second."""
    copying: Samples = ()
    """Bytes a second."""
    slowed: Samples = ()
    """Computing beside a transfer, over computing without one."""


def record_measurements(gauge: BackupMetrics, epoch: int, measured: Sequence[MicrobatchTiming]) -> BackupMetrics:
    """Take note of what a node's workers measured of one step of `epoch`; of a step that is known already nothing."""
    step = min((one.step for one in measured), default=-1)
    if not measured or (gauge.epoch, gauge.step) >= (epoch, step):
        return gauge
    steps = gauge.steps + 1 if gauge.epoch == epoch else 1
    told = [one.traffic for one in measured]
    sent = [t.sent_bytes / t.sent_s for t in told if t.sent_bytes >= LEAST_BYTES and t.sent_s > 0]
    copied = [t.copied_bytes / t.copied_s for t in told if t.copied_bytes >= LEAST_BYTES and t.copied_s > 0]
    slowed = [one.slowed for one in measured if one.slowed > 0]
    return replace(
        gauge,
        step=step,
        epoch=epoch,
        steps=steps,
        sending=_grown(gauge.sending, [sum(sent)] if sent else []),
        copying=_grown(gauge.copying, copied),
        slowed=_grown(gauge.slowed, slowed),
    )


def _grown(samples: Samples, new: Sequence[float]) -> Samples:
    return (*samples, *((median(new),) if new else ()))[-KEPT_SAMPLES:]


def median_of_nodes(figures: Iterable[Samples]) -> float:
    """Median over nodes of the median of each; 0: none has enough samples."""
    known = [median(samples) for samples in figures if len(samples) >= MIN_SAMPLES]
    return median(known) if known else 0.0
