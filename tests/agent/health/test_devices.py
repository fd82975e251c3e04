"""Readings of accelerators, and failures of the driver."""

from __future__ import annotations

import pytest

from elastic.agent.health.devices import Devices
from tests.agent.health.drivers import Driver


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
