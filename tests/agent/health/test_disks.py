"""Space of disks: directories that do not exist yet, network disks, disks that fail or hang."""

from __future__ import annotations

import threading
from pathlib import Path

import psutil
import pytest

from elastic import background
from elastic.agent.health import disks
from elastic.agent.health.disks import Disks, disk_of
from elastic.agent.health.monitor import Monitor
from elastic.core.protocol.health_report import DiskSpace, HealthReport, UnreachablePeer
from tests.agent.health.drivers import Driver, reader
from tests.patience import LONG_S


class SomeDisks:
    """Stands in for `disk_of`: "bad" fails, "hung" waits until `go` is set."""

    def __init__(self) -> None:
        self.bad, self.hung, self.go = False, False, threading.Event()

    def __call__(self, role: str, path: Path) -> DiskSpace:
        if role == "bad" and self.bad:
            raise OSError(5, "Input/output error")
        if role == "hung" and self.hung:
            assert self.go.wait(LONG_S)
        return DiskSpace(role, str(path), 1, 2, "x")


@pytest.fixture
def some(monkeypatch: pytest.MonkeyPatch) -> SomeDisks:
    found = SomeDisks()
    monkeypatch.setattr(disks, "disk_of", found)
    monkeypatch.setattr(background, "READ_S", 0.05)
    return found


DIRECTORIES = tuple((role, Path("/x")) for role in ("good", "bad", "hung"))


def test_a_disk_that_fails_keeps_its_last_value(some: SomeDisks) -> None:
    made = Disks(DIRECTORIES)
    some.bad = True
    assert [disk.role for disk in made.read()] == ["good", "hung"]
    some.bad = False
    assert len(made.read()) == 3
    some.bad = True
    assert len(made.read()) == 3


def test_a_hung_disk_does_not_keep_the_reports_back(some: SomeDisks) -> None:
    """Evidence about paths does not wait for the disk, which the same network may serve."""
    some.hung = some.bad = True
    reports: list[HealthReport] = []
    came = threading.Event()

    def emit(report: HealthReport) -> None:
        reports.append(report)
        if report.unreachable:
            came.set()

    made = Monitor("node1", DIRECTORIES, emit, reader(Driver(0))).start()
    made.enter("a", 1)
    made.unreachable((UnreachablePeer("node2", "h:1", 5.0, "no answer"),))
    assert came.wait(LONG_S), "no report while a disk hangs"
    assert not some.go.is_set()
    some.go.set()
    made.close()


def test_the_room_of_a_directory_that_is_not_there_yet(tmp_path: Path) -> None:
    there, later = disk_of("run", tmp_path), disk_of("run", tmp_path / "a" / "b")
    assert there is not None and later is not None
    assert later.volume == there.volume and later.path.endswith("/a/b")


@pytest.mark.parametrize("fstype", ["nfs4", "lustre", "fuse.sshfs"])
def test_a_network_disk_is_the_same_from_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fstype: str
) -> None:
    class Mount:
        device, mountpoint = "server:/export", str(tmp_path)

        def __init__(self) -> None:
            self.fstype = fstype

    monkeypatch.setattr(psutil, "disk_partitions", lambda all: [Mount()])
    assert disks.volume(tmp_path) == "server:/export"
