"""Counts of a worker's backup traffic."""

from __future__ import annotations

from elastic.core.protocol.messages import BackupTraffic
from elastic.worker.backup.metrics import TrafficMeter


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_bundles_are_sent_one_after_the_other() -> None:
    """Sending of the second bundle begins when the first is acknowledged."""
    clock = Clock()
    meter = TrafficMeter(clock)
    for bundle, at in ((1, 0.0), (2, 1.0)):
        clock.now = at
        meter.announced(bundle, 100)
    assert meter.busy
    for bundle, at in ((1, 4.0), (2, 6.0)):
        clock.now = at
        meter.acked(bundle)
    assert not meter.busy
    assert meter.take() == BackupTraffic(sent_bytes=200, sent_s=6.0)
    clock.now = 10.0
    meter.announced(3, 50)
    clock.now = 11.0
    meter.acked(3)
    assert meter.take() == BackupTraffic(sent_bytes=50, sent_s=1.0), "an idle link does not count"


def test_one_acknowledgement_covers_earlier_bundles() -> None:
    clock = Clock()
    meter = TrafficMeter(clock)
    meter.acked(7)
    meter.announced(8, 10)
    clock.now = 1.0
    meter.announced(9, 20)
    clock.now = 3.0
    meter.acked(9)
    assert meter.take() == BackupTraffic(sent_bytes=30, sent_s=3.0)


def test_bundles_of_an_abandoned_epoch_are_dropped() -> None:
    meter = TrafficMeter()
    meter.announced(1, 10)
    meter.forget()
    meter.acked(1)
    meter.copied(5, 0.5)
    meter.waited(0.25)
    assert not meter.busy and meter.take() == BackupTraffic(5, 0.5, 0.25)
    assert meter.take() == BackupTraffic()


def test_a_refused_bundle_does_not_count() -> None:
    clock = Clock()
    meter = TrafficMeter(clock)
    meter.announced(1, 10**9)
    clock.now = 0.001
    meter.acked(1, kept=False)
    assert meter.take() == BackupTraffic() and not meter.busy
