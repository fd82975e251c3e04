"""The pre-flight: its checks, their severity, and when it is repeated."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from elastic.agent.health import preflight
from elastic.agent.health.disks import disk_of
from elastic.agent.health.preflight import (
    TrialWatch,
    disk_checks,
    local_checks,
    network_checks,
    score_class,
)
from elastic.agent.health.preflight_gate import PreflightGate
from elastic.agent.vault.server import VaultServer
from elastic.agent.vault.vault import Vault
from elastic.core.protocol.health_report import DiskSpace, Preflight, PreflightCheck
from elastic.core.protocol.timeouts import DEFAULT_TIMEOUTS, budget
from elastic.domain.errors import UsageError
from tests.agent.health.drivers import Driver, reader
from tests.patience import LONG_S
from tests.store.objects import s3_server

NONE = reader(Driver(0))


def test_a_sound_machine_passes_in_no_time(tmp_path: Path) -> None:
    """Counts CPU time, because the machine may be busy."""
    began = time.process_time()
    checks, score = local_checks((("run", tmp_path), ("memory", tmp_path / "later")), 0, NONE)
    assert time.process_time() - began < 2.0
    assert [c.name for c in checks] == ["compute", "memory", "disk:run", "disk:memory"]
    assert all(c.ok for c in checks) and score > 0
    assert not list(tmp_path.iterdir()), "the checks leave no file"


def test_a_disk_that_cannot_be_written_is_fatal_but_for_checkpoints() -> None:
    nowhere = Path("/proc/nowhere")
    for check in disk_checks((("run", nowhere), ("checkpoints", nowhere))):
        assert not check.ok and check.fatal is (check.name == "disk:run")
        assert "cannot be written" in check.remedy


def test_an_object_store_that_refuses_is_no_reason_to_refuse_a_node() -> None:
    with s3_server() as (bucket, _):
        sound, absent = (
            local_checks((), checkpoint_url=f"{url}/job")[0][-1] for url in (bucket, "s3://nobody")
        )
        assert sound.ok and sound.name == absent.name == "disk:checkpoints"
    assert not absent.ok and not absent.fatal and "s3://nobody/job" in absent.remedy


def test_disks_that_hang_are_a_reason_after_one_limit_for_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The user is told once which directories have not answered. The other one is checked; on a
    busy machine, it may also answer after the notice."""
    go, told = threading.Event(), list[str]()

    def hung(role: str, path: Path) -> DiskSpace:
        assert role == "memory" or go.wait(LONG_S)
        return disk_of(role, path)

    monkeypatch.setattr(preflight, "disk_of", hung)
    monkeypatch.setattr(preflight, "NOTICE_S", 0.1)
    limits = replace(DEFAULT_TIMEOUTS, preflight_disk_s=0.3)
    places = [(role, tmp_path / role) for role in ("checkpoints", "run", "memory")]
    checkpoints, run, memory = disk_checks(places, limits, told.append)
    go.set()
    assert memory.ok and not run.ok and run.fatal and not checkpoints.ok and not checkpoints.fatal
    assert run.remedy == f"{tmp_path}/run has not answered for 0.3 s"
    (notice,) = told
    hanging = f"no answer yet from {tmp_path}/checkpoints, {tmp_path}/run"
    assert notice.removeprefix(hanging).removeprefix(f", {tmp_path}/memory") == (
        ": the pre-flight waits for up to 0.3 s"
    )


def test_any_error_of_a_disk_is_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(role: str, path: Path) -> None:
        raise RuntimeError("no such mount")

    monkeypatch.setattr(preflight, "disk_of", fail)
    (check,) = disk_checks((("run", Path("/")),))
    assert not check.ok and check.remedy == "/ cannot be used: RuntimeError: no such mount"


def test_less_memory_than_the_plan_may_use_is_a_warning() -> None:
    check = preflight.memory(1 << 60)
    assert not check.ok and not check.fatal and "--node-memory" in check.remedy


def test_wrong_results_are_fatal(monkeypatch: pytest.MonkeyPatch) -> None:
    class Wrong:
        def __eq__(self, other: object) -> Any:
            return np.array([True, False])

    class Matrix:
        def __matmul__(self, other: object) -> Any:
            return Wrong()

        def astype(self, kind: object) -> Any:
            return self

        def reshape(self, *shape: int) -> Any:
            return self

        def __mod__(self, other: int) -> Any:
            return self

        __sub__ = __mod__

    monkeypatch.setattr(np, "arange", lambda *args, **kinds: Matrix())
    check = preflight.compute()
    assert not check.ok and check.fatal and "wrong results" in check.remedy


def test_a_broken_device_is_fatal_and_a_hot_one_a_warning() -> None:
    driver = Driver(2)
    devices = reader(driver)
    driver.messages.append((0, 79))
    driver.mask[1] = 64
    broken, hot = preflight.device_checks(devices)
    assert (broken.ok, broken.fatal) == (False, True) and "XID 79" in broken.remedy
    assert (hot.ok, hot.fatal) == (False, False) and "cooling" in hot.remedy


@pytest.mark.parametrize(
    ("program", "ok", "text"),
    [
        ("print('noise'); print('{\"tflops\": 3.5}')", True, ""),
        (
            'print(\'{"tflops": 0.1, "error": "cuda:0 computes wrong results"}\')',
            False,
            "wrong results",
        ),
        ("raise SystemExit(3)", False, "the trial failed"),
    ],
)
def test_the_trial_of_devices_is_a_child(program: str, ok: bool, text: str) -> None:
    check = preflight.device_trial((sys.executable, "-c", program))
    assert check.ok is ok and check.fatal and text in check.remedy and (check.value == 3.5) is ok


def test_a_trial_that_does_nothing_is_hung() -> None:
    """The child ignores the request to end, and is killed."""
    program = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()"
    limits = replace(DEFAULT_TIMEOUTS, stuck_s=0.3)
    check = preflight.device_trial((sys.executable, "-c", program), limits=limits)
    assert not check.ok and check.fatal and "used no CPU time for 0.3 s" in check.remedy


def test_a_trial_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel does not end a process while a thread of it waits for a device."""
    started: list[Any] = []

    class Unkillable(subprocess.Popen[bytes]):
        def __init__(self, *args: Any, **options: Any) -> None:
            started.append(self)
            super().__init__(*args, **options)

        def kill(self) -> None:
            pass

    monkeypatch.setattr(subprocess, "Popen", Unkillable)
    monkeypatch.setattr(preflight, "KILL_S", 0.1)
    limits = replace(DEFAULT_TIMEOUTS, stuck_s=0.3)
    program = (sys.executable, "-c", "import signal; signal.pause()")
    check = preflight.device_trial(program, limits=limits)
    started[0].send_signal(signal.SIGKILL)
    started[0].wait(LONG_S)
    assert not check.ok and check.fatal and "used no CPU time for 0.3 s" in check.remedy
    assert "it does not end after SIGKILL" in check.remedy


def test_a_slow_trial_on_a_busy_machine_is_not_hung() -> None:
    """Hours pass, but each look shows CPU time or a process that waits for a processor."""
    watch, hour = TrialWatch(DEFAULT_TIMEOUTS, 0.0), 3600.0
    assert not watch.look(0.1, False, hour)
    assert not watch.look(0.1, True, 2 * hour)
    assert not watch.look(0.1, False, 2 * hour + DEFAULT_TIMEOUTS.stuck_s - 1)
    assert not watch.look(0.2, False, 3 * hour)
    assert "no CPU time" in watch.look(0.2, False, 3 * hour + DEFAULT_TIMEOUTS.stuck_s)


def test_a_trial_without_end_is_found_by_its_cpu_time() -> None:
    watch = TrialWatch(DEFAULT_TIMEOUTS, 0.0)
    assert not watch.look(DEFAULT_TIMEOUTS.trial_cpu_s, True, 1.0)
    assert "has no end" in watch.look(DEFAULT_TIMEOUTS.trial_cpu_s + 1, True, 2.0)


def answers(**answer: Any) -> Any:
    return lambda address, kind, body, timeout_s: answer


def test_clock_and_peer(tmp_path: Path) -> None:
    vault = Vault("b", tmp_path / "vault")
    server = VaultServer(vault).start()
    try:
        rows = [
            {"node": "dead", "vault": "127.0.0.1:1"},
            {"node": "b", "vault": server.address},
        ]
        found = network_checks("host:1", "a", ask=answers(peers=rows, now=time.time()))
        assert [c.name for c in found] == ["coordinator", "clock", "peer"] and all(
            c.ok for c in found
        )
        assert found[2].value > 1e6 and abs(found[1].value) < 5.0
    finally:
        server.close()
        vault.close()


def test_a_clock_that_is_minutes_off_is_fatal() -> None:
    _, clock = network_checks("host:1", "a", ask=answers(peers=[], now=time.time() + 600))
    assert not clock.ok and clock.fatal and clock.value == pytest.approx(600, abs=5)


def test_a_node_that_reaches_no_peer_is_refused() -> None:
    rows = [{"node": "b", "vault": "127.0.0.1:1"}]
    *_, peer = network_checks("host:1", "a", ask=answers(peers=rows, now=time.time()))
    assert not peer.ok and peer.fatal and "no vault of 1 peers" in peer.remedy


SOON = replace(DEFAULT_TIMEOUTS, preflight_s=0.5)
"""Limits that a silent peer exceeds soon. What it does is the same at every limit."""


def test_a_busy_peer_is_no_reason_to_refuse_a_node() -> None:
    """A vault whose process gets no processor accepts no connection. Its kernel does."""
    with socket.create_server(("127.0.0.1", 0)) as stalled:
        rows = [
            {"node": "dead", "vault": "127.0.0.1:1"},
            {"node": "b", "vault": address_of(stalled)},
        ]
        ask = answers(peers=rows, now=time.time())
        *_, peer = network_checks("host:1", "a", ask=ask, limits=SOON)
    assert peer.ok and peer.value == 0.0
    assert "network is sound but vault of b" in peer.remedy and "no progress" in peer.remedy
    assert not Preflight("strict", 0.1, (peer,)).failed


def test_a_peer_that_is_behind_a_bad_path_is_a_reason() -> None:
    """The kernel drops connections to a port whose queue is full, like a firewall."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as blocked, ExitStack() as filling:
        for _ in range(8):
            filler = filling.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(blocked.getsockname())
        ask = answers(peers=[{"node": "b", "vault": address_of(blocked)}], now=time.time())
        *_, peer = network_checks("host:1", "a", ask=ask, limits=SOON)
    assert not peer.ok and peer.fatal and "no vault of 1 peers can be used" in peer.remedy


def test_the_limits_are_those_of_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two questions to the coordinator, and the measurement of a peer."""
    given: list[float] = []

    def ask(address: str, kind: str, body: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        given.append(timeout_s)
        return {"peers": [{"node": "b", "vault": "127.0.0.1:1"}], "now": time.time()}

    def connect(address: str, *, timeout_s: float, **more: Any) -> None:
        given.append(timeout_s)
        raise UsageError("not measured here")

    monkeypatch.setattr(preflight, "VaultClient", connect)
    network_checks("host:1", "a", ask=ask, limits=budget(30.0))
    assert given == [budget(30.0).preflight_s] * 3 == [100.0] * 3


def address_of(server: socket.socket) -> str:
    return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_coordinator_that_does_not_answer_is_no_reason_to_stay_away() -> None:
    def ask(*args: Any, **more: Any) -> dict[str, Any]:
        raise UsageError("host:1 cannot be reached")

    (check,) = network_checks("host:1", "a", ask=ask)
    assert not check.ok and not check.fatal


def test_standing_is_in_steps_of_a_quarter() -> None:
    assert score_class(0.0) == 0
    assert score_class(125.0) - score_class(100.0) == 1
    assert score_class(100.0) == score_class(104.0), "small differences do not change the class"


# ---- the gate ----------------------------------------------------------------------------------


def sound() -> tuple[list[PreflightCheck], float]:
    return [PreflightCheck("compute", 1.0, "GFLOP/s", True)], 1.0


def test_the_gate_holds_the_first_report_back_until_the_checks_are_made() -> None:
    flown = threading.Event()
    found: list[Preflight] = []

    def receive(flight: Preflight) -> None:
        found.append(flight)
        flown.set()

    gate = PreflightGate("on", sound, receive)
    assert not gate.open
    gate.start()
    gate.start()
    assert flown.wait(LONG_S)
    gate.finished(found[0])
    assert gate.open and gate.result is not None and not gate.result.failed
    gate.start()
    assert len(found) == 1
    gate.shut()
    assert not gate.open, "each membership needs its own pre-flight"


def test_a_refused_node_looks_again_after_the_pause() -> None:
    flown = threading.Event()
    gate = PreflightGate("on", sound, lambda flight: flown.set())
    gate.finished(Preflight("on", 0.1))
    gate.refused(0.01)
    assert not gate.open and flown.wait(LONG_S)


def test_checks_that_break_off_are_a_failure() -> None:
    flown = threading.Event()
    found: list[Preflight] = []

    def broken() -> tuple[list[PreflightCheck], float]:
        raise ZeroDivisionError("oops")

    def receive(flight: Preflight) -> None:
        found.append(flight)
        flown.set()

    gate = PreflightGate("on", broken, receive)
    gate.start()
    assert flown.wait(LONG_S)
    (check,) = found[0].failed
    assert "oops" in check.remedy


def test_without_preflight_the_gate_is_open() -> None:
    gate = PreflightGate("off", sound, lambda flight: None)
    assert gate.open and gate.result is None
