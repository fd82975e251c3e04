"""Health reports: their content, times and size."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic import background
from elastic.agent.health import monitor as health
from elastic.agent.health.monitor import MAX_SILENT_SAMPLES, MIN_BYTES, SAMPLE_S, Monitor
from elastic.core.job.reachability import MAX_AGE_S
from elastic.core.protocol.health_report import (
    MAX_ENTRIES,
    MAX_TEXT_LENGTH,
    CertificateEnd,
    HealthReport,
    UnreachablePeer,
)
from elastic.domain import codec
from tests.agent.health.drivers import Driver, reader
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S

MIB = 1 << 20


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def monitor(folder: Path, driver: Driver | None = None) -> tuple[Monitor, Clock]:
    clock = Clock()
    devices = reader(driver if driver else Driver(0))
    made = Monitor("node1", (("checkpoints", folder),), lambda report: None, devices, clock)
    made.enter("a", 3)
    return made, clock


def sampled(made: Monitor) -> HealthReport:
    report = made.sample()
    assert report is not None
    return report


def test_the_first_look_tells_of_everything_and_later_ones_of_news(tmp_path: Path) -> None:
    made, _ = monitor(tmp_path)
    first = sampled(made)
    assert (first.node, first.incarnation, first.epoch) == ("node1", "a", 3)
    assert first.memory_total_bytes > first.memory_free_bytes > 0 and first.load >= 0
    (disk,) = first.disks
    assert disk.path == str(tmp_path) and disk.total_bytes >= disk.free_bytes > 0 and disk.volume
    assert [made.sample() for _ in range(MAX_SILENT_SAMPLES)] == [None] * MAX_SILENT_SAMPLES
    assert sampled(made).failed_operations == ()


def test_what_could_not_be_written_is_told_at_once_and_counted(tmp_path: Path) -> None:
    made, _ = monitor(tmp_path)
    sampled(made)
    for _ in range(3):
        made.checkpoint_failed("No space left on device")
    (mishap,) = sampled(made).failed_operations
    assert (mishap.what, mishap.count) == ("checkpoint", 3) and made.sample() is None


def test_a_bad_path_is_told_again_before_the_coordinator_forgets_it(tmp_path: Path) -> None:
    """Several times, because reports may be lost."""
    made, _ = monitor(tmp_path)
    made.unreachable((UnreachablePeer("node2", "node2:1", 4.0, "timed out"),))
    reports = [made.sample() for _ in range(round(MAX_AGE_S / SAMPLE_S))]
    found = [report.unreachable[0].peer for report in reports if report is not None]
    assert found == ["node2"] * len(found) and len(found) >= 4


def test_links_are_measured_by_copies_of_the_largest_size(tmp_path: Path) -> None:
    made, _clock = monitor(tmp_path)
    sampled(made)
    made.sent("node2", MIN_BYTES - 1, 0.001)
    made.sent("node2", MIN_BYTES, 1.0)
    made.sent("node2", 4 * MIB, 1.0)
    assert made.sample() is None, "one copy is not enough, and small copies do not count"
    made.sent("node2", 4 * MIB, 0.5)
    (link,) = sampled(made).links
    assert (link.peer, link.sends, link.nbytes) == ("node2", 2, 8 * MIB)
    assert link.best_bytes_per_s == 8 * MIB and link.seconds == 1.5


def test_a_steady_link_is_told_of_now_and_then_and_a_change_at_once(tmp_path: Path) -> None:
    made, clock = monitor(tmp_path)
    sampled(made)

    def second(seconds: float) -> bool:
        clock.now += 1.0
        for _ in range(3):
            made.sent("node2", MIB, seconds)
        report = made.sample()
        return report is not None and bool(report.links)

    told = [second(0.1) for _ in range(24)]
    assert told[: health.SHORT_WINDOWS] == [True] * health.SHORT_WINDOWS
    assert sum(told[health.SHORT_WINDOWS :]) == 2
    for _ in range(2):
        second(1.0)
    assert second(1.0) or second(1.0), "a link that is ten times slower is reported at once"


def test_a_new_membership_begins_anew(tmp_path: Path) -> None:
    made, _ = monitor(tmp_path)
    sampled(made)
    made.sent("node2", MIB, 0.1)
    made.enter("b", 0)
    made.sent("node2", MIB, 0.1)
    report = sampled(made)
    assert report.incarnation == "b" and report.links == ()


def test_a_device_that_changes_is_news(tmp_path: Path) -> None:
    driver = Driver(2)
    made, _ = monitor(tmp_path, driver)
    sampled(made)
    driver.heat[1] = 70
    assert made.sample() is None, "a higher temperature alone is not reported at once"
    driver.mask[1] = driver.nvmlClocksThrottleReasonHwThermalSlowdown
    assert sampled(made).devices[1].throttled == "too hot"
    driver.ecc[0] += 2
    assert sampled(made).devices[0].errors == 2
    driver.messages.append((0, 79))
    assert sampled(made).devices[0].fault == "XID 79"


def test_a_report_is_small_whatever_happens(tmp_path: Path) -> None:
    made, _ = monitor(tmp_path / ("x" * 250), Driver(64))
    for number in range(200):
        made.checkpoint_failed("y" * 10_000)
        for _ in range(3):
            made.sent(f"node{number}", MIB, 0.1)
    report = sampled(made)
    assert len(report.links) == len(report.devices) == MAX_ENTRIES
    (mishap,) = report.failed_operations
    assert len(mishap.path) == len(mishap.detail) == MAX_TEXT_LENGTH and mishap.count == 200
    assert len(codec.dumps(report)) < 16_000


def test_certificates_on_a_disk_that_hangs_do_not_hold_back_reports(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "READ_S", 0.05)
    go, end = threading.Event(), CertificateEnd("tls.crt", "CN=a", 1.0, "then")

    def ends() -> tuple[CertificateEnd, ...]:
        assert go.wait(LONG_S)
        return (end,)

    sampled_by = threading.Thread(target=lambda: reports.append(made.sample()), daemon=True)
    reports = list[HealthReport | None]()
    made = Monitor("a", [("run", tmp_path)], print, reader(Driver(0)), certificates=ends)
    sampled_by.start()
    sampled_by.join(LONG_S / 2)
    assert reports and reports[0] is not None and reports[0].certificates == ()
    go.set()
    assert wait_until(lambda: (report := made.sample()) and report.certificates == (end,))
