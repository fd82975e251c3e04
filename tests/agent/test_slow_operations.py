"""Heartbeats and orders go on while an operation that can be slow does not end.

Each test lets one operation wait, and lets it go on only after further heartbeats and obeyed
orders have come.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from elastic.agent.vault.server import VaultServer
from elastic.agent.workers.processes import WorkerGroup
from elastic.config import STDERR, JobConfig
from elastic.console import Console
from elastic.core.protocol import messages as m
from elastic.core.protocol.health_report import JoinRefused
from elastic.core.protocol.messages import NodePhase
from elastic.domain.types import Plan
from elastic.rpc.bulk.transfer import VaultClient
from elastic.store.shared_memory import DATA_OFFSET, private_copy, slot_capacity
from tests.agent.agents import RunningAgent, Slow, running_agent
from tests.agent.vault.checkpoints import N_LAYERS, layer_run
from tests.agent.vault.copies import LocalWriter, content, make, put
from tests.launcher.helpers import wait_until
from tests.patience import LONG_S

MakeConfig = Callable[..., JobConfig]
WAITING = "import time; time.sleep(600)"


@pytest.fixture
def node(make_config: MakeConfig) -> Iterator[RunningAgent]:
    with running_agent(make_config(WAITING)) as node:
        yield node


def worker(node: RunningAgent, other: int = 0) -> int:
    """Wait until a worker that is not process `other` runs; return its process id."""
    found: list[int] = []

    def running() -> bool:
        pids, group = node.agent._launched()[1], node.agent._group
        found[:] = [pids[0]] if group is not None and group.alive() and pids else []
        return bool(found) and found[0] != other

    assert wait_until(running)
    return found[0]


def test_memory_for_a_copy_is_allocated_slowly(
    node: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = Slow(os.posix_fallocate)
    monkeypatch.setattr(os, "posix_fallocate", slow)
    data = content(1)
    client = VaultClient(node.first.info.vault, timeout_s=LONG_S)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.put, [(make(data, epoch=2), memoryview(data))])
        assert slow.begun.wait(LONG_S)
        node.coordinator.heartbeats()
        assert node.obeys(1).inventory == ()
        node.coordinator.order(m.Trim(1, 0))
        assert node.obeys(2).inventory == () and not sending.done()
        slow.go()
        sending.result(LONG_S)
    client.close()
    assert [copy.owner for copy in node.obeys(3).inventory] == ["b"]


def test_memory_for_a_copy_is_mapped_slowly(
    node: RunningAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The system call itself waits here. If it kept the interpreter's lock, nothing would run."""
    pipe, data = tmp_path / "zeros", content(1)
    os.mkfifo(pipe)
    monkeypatch.setattr("elastic.store.shared_memory.ZEROS", str(pipe))
    client = VaultClient(node.first.info.vault, timeout_s=LONG_S)
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.put, [(make(data, epoch=2), memoryview(data))])
        with open_when_read(pipe) as zeros:
            node.coordinator.heartbeats()
            assert node.obeys(1).inventory == () and not sending.done()
            zeros.write(bytes(slot_capacity(len(data)) + DATA_OFFSET))
        sending.result(LONG_S)
    client.close()
    assert [copy.owner for copy in node.obeys(3).inventory] == ["b"]


def open_when_read(pipe: Path) -> BinaryIO:
    """Open a named pipe for writing once another thread has opened it for reading."""
    found: list[int] = []

    def opened() -> bool:
        with contextlib.suppress(OSError):  # ENXIO: nobody reads
            found.append(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        return bool(found)

    assert wait_until(opened), "the memory is not mapped by reading zeros"
    os.set_blocking(found[0], True)
    return os.fdopen(found[0], "wb")


def test_memory_of_a_dead_worker_is_freed_slowly(
    node: RunningAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    vault, writer = node.agent._vault, LocalWriter(tmp_path / "slots", "worker-77-1-")
    local = writer.write(0, make(content(1), epoch=1), content(1))
    vault.publish(local)
    vault.worker_gone(77, tmp_path / "slots")
    slow = Slow(os.unlink, "worker-77")
    monkeypatch.setattr(os, "unlink", slow)
    node.coordinator.order(m.Trim(2, 0))
    assert slow.begun.wait(LONG_S)
    node.coordinator.heartbeats()
    assert node.obeys(1).inventory == () and Path(local.path).exists()
    slow.go()
    assert wait_until(lambda: not Path(local.path).exists())


def test_a_killed_worker_ends_slowly(node: RunningAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next worker starts only after the end of the former one, which has the device."""
    node.launch()
    first = worker(node)
    slow = Slow(WorkerGroup.wait)
    monkeypatch.setattr(WorkerGroup, "wait", slow)
    node.launch(restart=1)
    assert slow.begun.wait(LONG_S)
    node.coordinator.heartbeats()
    assert node.obeys(1).phase is NodePhase.STARTING
    assert node.agent._launched()[1] == {}
    slow.go()
    assert worker(node, first) != first


def test_a_former_vault_closes_slowly(node: RunningAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    """The node joins again meanwhile. The threads of its former life end."""
    node.launch()
    worker(node)
    put(node.agent._vault, make(content(1)), content(1))
    parts = [node.agent._checkpoints._thread, node.agent._replicator._thread]
    slow = Slow(VaultServer.close)
    monkeypatch.setattr(VaultServer, "close", slow)
    node.coordinator.order(m.Released("a test"))
    assert slow.begun.wait(LONG_S)
    former = node.first.info.incarnation
    again = node.coordinator.report(lambda report: report.info.incarnation != former)
    assert node.coordinator.heartbeats().incarnation == again.info.incarnation
    node.launch()
    worker(node)
    slow.go()
    assert wait_until(lambda: not any(part.is_alive() for part in parts))


def test_a_checkpoint_is_written_slowly(node: RunningAgent) -> None:
    """A node that joins again does not wait for the disk either."""
    node.launch()
    worker(node)
    slow, writer = Slow(lambda: None), node.agent._checkpoints
    writer.then(slow)
    assert slow.begun.wait(LONG_S)
    node.coordinator.heartbeats()
    node.coordinator.order(m.Fenced("a test"))
    former = node.first.info.incarnation
    node.coordinator.report(lambda report: report.info.incarnation != former)
    node.coordinator.heartbeats()
    slow.go()
    writer._thread.join(LONG_S)
    assert not writer._thread.is_alive()


def test_a_copy_for_a_checkpoint_is_made_slowly(
    node: RunningAgent, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The states of a lost node are copied in pieces, which keep the interpreter's lock shortly."""
    vault, writer, data = node.agent._vault, node.agent._checkpoints, layer_run(0, 2)
    copy = put(vault, make(data, layer=0, step=2, epoch=9), data)
    slow = Slow(private_copy)
    monkeypatch.setattr("elastic.agent.vault.checkpoints.private_copy", slow)
    writer._rescue(Plan(1, N_LAYERS, 1, 1, ()), copy)
    assert slow.begun.wait(LONG_S)
    node.coordinator.heartbeats()
    assert [c.key for c in node.obeys(1).inventory] == [copy.key]
    slow.go()
    written = threading.Event()
    writer.then(written.set)
    assert written.wait(LONG_S)
    assert list(Path(node.agent._config.checkpoint_dir).rglob("*.s*"))


def test_files_of_the_last_checkpoint_are_signs_of_progress(node: RunningAgent) -> None:
    """Otherwise a slow disk would look like one that hangs."""
    vault, writer, data = node.agent._vault, node.agent._checkpoints, layer_run(0, 2)
    copy = put(vault, make(data, layer=0, step=2, epoch=9), data)
    before, writer.steps, written = node.coordinator.heartbeats().signs, 2, threading.Event()
    writer._rescue(Plan(1, N_LAYERS, 1, 1, ()), copy)
    writer.then(written.set)
    assert written.wait(LONG_S)
    assert node.coordinator.heartbeats().signs == before + 1


def test_a_copy_is_verified_slowly(node: RunningAgent, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = put(node.agent._vault, make(content(1), epoch=9), content(1))
    slow = Slow(lambda data: "0")
    monkeypatch.setattr("elastic.agent.vault.vault.checksum", slow)
    with ThreadPoolExecutor(1) as pool:
        verdict = pool.submit(node.agent._vault.verify, copy.key)
        assert slow.begun.wait(LONG_S)
        node.coordinator.heartbeats()
        assert [c.key for c in node.obeys(1).inventory] == [copy.key]
        slow.go()
        assert not verdict.result(LONG_S)


def test_nobody_reads_the_console(node: RunningAgent) -> None:
    """As with a pager, a stopped launcher, or an ssh session whose cable is pulled."""
    read, write = os.pipe()
    console = node.agent._console = Console((-1, write))
    console.put(STDERR, bytes(1 << 20))  # more than the pipe holds
    for reason in ("a test", "another test"):
        node.coordinator.order(JoinRefused(reason, LONG_S))
    node.coordinator.heartbeats()
    assert node.obeys(1).inventory == () and not console.flush(0.01)
    shown = b""
    while shown.count(b"\n") < 2:
        shown += os.read(read, 1 << 16)
    assert shown.count(b"may not join yet: ") == 2
    os.close(read)


def test_a_prefetch_of_former_members_ends_and_is_reported(node: RunningAgent) -> None:
    """The coordinator removed the holders after it chose the sources."""
    node.coordinator.order(m.Prefetch(7, ((0, 0, "gone"), (1, 0, "away")), ()))
    node.coordinator.report(lambda report: report.prefetched == 7)


def test_an_unexpected_error_of_a_prefetch_is_reported_too(
    node: RunningAgent, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(vault: object, order: object) -> int:
        raise MemoryError("no memory for the layer")

    monkeypatch.setattr("elastic.agent.service.prefetch", fail)
    node.coordinator.order(m.Prefetch(8, (), ()))
    node.coordinator.report(lambda report: report.prefetched == 8)
    assert "no memory for the layer" in caplog.text
