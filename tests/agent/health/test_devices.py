"""Readings of accelerators, and failures of the driver."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic.agent.health import devices
from elastic.agent.health.devices import HUNG_S, MAX_GAP_S, DeviceReader, Devices
from elastic.agent.health.monitor import Monitor
from elastic.core.protocol.health_report import HealthReport, UnreachablePeer
from tests.agent.health.drivers import Driver, reader
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S


def test_no_driver_is_no_device() -> None:
    assert len(Devices(Driver(0))) == 0 and Devices(Driver(0)).read() == ()


def test_a_machine_without_devices_is_looked_at_without_complaint() -> None:
    assert isinstance(Devices().read(), tuple)


def test_errors_from_before_do_not_count() -> None:
    driver = Driver(1)
    devices = Devices(driver)
    assert devices.read()[0].errors == 0
    driver.ecc[0] += 3
    assert devices.read()[0].errors == 3


@pytest.mark.parametrize(
    ("xid", "fault"), [(79, "XID 79"), (48, "XID 48"), (13, ""), (31, ""), (43, "")]
)
def test_errors_of_the_program_are_no_fault_of_the_device(xid: int, fault: str) -> None:
    driver = Driver(2)
    devices = Devices(driver)
    driver.messages.append((1, xid))
    assert [seen.fault for seen in devices.read()] == ["", fault]


def test_a_device_that_is_lost_is_a_finding() -> None:
    driver = Driver(2)
    devices = Devices(driver)
    driver.gone.add(1)
    seen = devices.read()
    assert seen[0].fault == "" and "GPU is lost" in seen[1].fault


def test_only_visible_devices_are_looked_at() -> None:
    devices = Devices(Driver(4), {"CUDA_VISIBLE_DEVICES": "2,3"})
    assert [seen.index for seen in devices.read()] == [2, 3]
    assert len(Devices(Driver(4), {"CUDA_VISIBLE_DEVICES": "7"})) == 0


def test_heat_and_power_hold_a_device_down() -> None:
    driver = Driver(1)
    devices = Devices(driver)
    driver.mask[0] = 32 | 64 | 128 | 1
    assert devices.read()[0].throttled == "too hot, power brake"
    driver.mask[0] = 1 | 4
    assert devices.read()[0].throttled == "", "idle, or a power limit that the user set"


# ---- a driver that hangs ----


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver of three devices; tests make it hang."""
    monkeypatch.setattr(devices, "READ_S", 0.05)
    driver = Driver(3)
    yield driver
    driver.go.set()


class Clock:
    """A clock that passes a second at each look."""

    def __init__(self, step_s: float = 1.0) -> None:
        self.now, self.step_s = 0.0, step_s

    def __call__(self) -> float:
        self.now += self.step_s
        return self.now


def test_a_driver_that_hangs_does_not_hide_a_bad_path(stuck: Driver, tmp_path: Path) -> None:
    stuck.stuck.add(1)
    came = threading.Event()

    def emit(report: HealthReport) -> None:
        if report.unreachable:
            came.set()

    made = Monitor("a", [("checkpoints", tmp_path)], emit, reader(stuck)).start()
    made.unreachable((UnreachablePeer("b", "127.0.0.1:1", 4.0, "no answer"),))
    assert came.wait(LONG_S), "no report while a driver hangs"
    made.close()


def test_a_device_that_does_not_answer_is_faulty_until_it_does(stuck: Driver) -> None:
    made = DeviceReader(lambda: Devices(stuck), Clock())
    assert [one.fault for one in made.read_patiently()] == ["", "", ""]
    stuck.stuck.add(1)
    assert [one.fault for one in made.read()] == ["", "", ""], "it may be slow"
    found = made.read_patiently()
    assert [one.index for one in found] == [0, 1, 2] and found[1].name == "NVIDIA Toy"
    assert [one.fault for one in found] == ["", f"the driver has not answered for {HUNG_S:g} s", ""]
    assert made.hung
    stuck.go.set()
    assert wait_until(lambda: [one.fault for one in made.read()] == ["", "", ""])
    assert not made.hung


def test_a_driver_that_does_not_start_is_a_faulty_device(stuck: Driver) -> None:
    stuck.stuck.add(-1)
    made = DeviceReader(lambda: Devices(stuck), Clock())
    (found,) = made.read_patiently()
    assert found.index == 0 and "has not answered" in found.fault


def test_the_time_in_which_the_agent_was_stopped_does_not_count(stuck: Driver) -> None:
    stuck.stuck.add(0)
    made = DeviceReader(lambda: Devices(stuck), Clock(step_s=10 * HUNG_S))
    for _ in range(int(HUNG_S / MAX_GAP_S) - 1):
        assert made.read() == ()
    assert "has not answered" in made.read()[0].fault
